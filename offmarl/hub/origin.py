"""Where the data of a vault comes from, and what its sources say may be done with it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from offmarl.errors import CardError, OptionError
from offmarl.hub.catalogue import Licence
from offmarl.hub.licences import OTHER, UNKNOWN, check_link, licence_named
from offmarl.vault import Dataset
from offmarl.vault.published import PUBLISHED
from offmarl.vault.transform.policy_ids import sources_of

_RECORDED = ("recipe", "recorded", "program")
"""Any of these in a provenance says that a recorder of ours wrote it."""


class Statement(NamedTuple):
    """What is said of one source of a vault's data.

    Attributes
    ----------
    ours
        Whether it was recorded here: its licence is for whoever publishes it to choose.
    words
        Where it comes from, in a sentence without its full stop.
    licence
        As its source states it; None where it states none.
    link
        The text of a licence that is "other".
    citation
        What its source asks to cite.
    """

    ours: bool
    words: str
    licence: str | None = None
    link: str | None = None
    citation: str = ""


def statements(vault: Dataset) -> list[Statement]:
    """Return what is said of every source of a vault's data, down to recordings and imports."""
    return list(_statements(vault.provenance, vault.native))


def _statements(told: Mapping[str, Any], native: bool) -> Iterator[Statement]:
    published, source = told.get(PUBLISHED), told.get("source")
    if isinstance(published, Mapping):
        yield _of_published(published)
    elif sources := sources_of(told):
        for one in sources:
            below = one.get("provenance")
            yield from _statements(
                below if isinstance(below, Mapping) else {}, bool(one.get("native"))
            )
    elif isinstance(source, Mapping) and isinstance(source.get("provenance"), Mapping):
        yield from _of_export(source, native)
    elif isinstance(source, Mapping):
        yield _of_converted(source)
    elif any(key in told for key in _RECORDED):
        yield Statement(True, _recording(told))
    elif native:
        yield Statement(False, "Written with offmarl; where the data comes from is not stated")
    else:
        yield Statement(False, "Written by a program other than offmarl")


def _of_published(told: Mapping[str, Any]) -> Statement:
    where = f"{_text(told, 'dataset')} of {_text(told, 'repository')}"
    commit = _text(told, "commit")
    words = f"Published as {where}" + (f" at commit {commit[:12]}" if commit else "")
    return Statement(False, words, *_terms(told))


def _of_converted(told: Mapping[str, Any]) -> Statement:
    file = _text(told, "file") or _text(told, "dataset")
    sha256 = _text(told, "sha256")
    words = f"Converted with offmarl from {_text(told, 'format') or 'another format'}"
    words += (f", {file}" if file else "") + (f" (SHA-256 {sha256})" if sha256 else "")
    return Statement(False, words, *_terms(told))


def _of_export(told: Mapping[str, Any], native: bool) -> Iterator[Statement]:
    """Yield what is said of a vault that was exported and converted back.

    What the conversion states holds for the sources that state nothing themselves.
    """
    licence, link, citation = _terms(told)
    stated: dict[str, Any] = {"ours": False, "licence": licence, "link": link} if licence else {}
    for one in _statements(told["provenance"], native):
        known = {} if one.licence else stated
        yield one._replace(citation=one.citation or citation, **known)


def _terms(told: Mapping[str, Any]) -> tuple[str | None, str | None, str]:
    licence = _text(told, "licence")
    stated = None if licence.lower() in ("", UNKNOWN) else licence
    return stated, _text(told, "licence_link") or None, _text(told, "citation")


def _recording(told: Mapping[str, Any]) -> str:
    recipe = told.get("recipe")
    seed = recipe.get("seed") if isinstance(recipe, Mapping) else None
    facts = {
        "program": _text(told, "program"),
        "tier": _text(told, "tier"),
        "seed": "" if seed is None else str(seed),
    }
    about = ", ".join(f"{name} {fact}" for name, fact in facts.items() if fact)
    return "Recorded with offmarl" + (f" ({about})" if about else "")


def _text(told: Mapping[str, Any], name: str) -> str:
    value = told.get(name)
    return value if isinstance(value, str) else ""


def in_words(vault: Dataset) -> str:
    """Return where a vault's data comes from, in sentences."""
    parts = list(dict.fromkeys(one.words for one in statements(vault)))
    if sources_of(vault.provenance):
        operation = vault.provenance["lineage"].get("operation", "transformed")
        return f"Made with `offmarl {operation}`. Its sources: {'; '.join(parts)}."
    return f"{'; '.join(parts)}."


def citation_of(vaults: Sequence[Dataset]) -> str:
    """Return what the sources of vaults ask to cite, each once."""
    asked = (one.citation for vault in vaults for one in statements(vault))
    return "\n\n".join(dict.fromkeys(citation for citation in asked if citation))


def licence_of(vaults: Sequence[Dataset], name: str | None, link: str | None) -> Licence:
    """Return the licence to publish vaults under.

    Parameters
    ----------
    vaults
        What is published together.
    name, link
        As the publisher says; None takes over the one that all sources state.

    Raises
    ------
    OptionError
        It must be said and is not; or the sources state another one.
    UnknownNameError
        There is no such licence.
    CardError
        The sources state different ones, which no single identifier stands for.
    """
    found = [one for vault in vaults for one in statements(vault)]
    stated: set[tuple[str | None, str | None]] = {
        (one.licence, one.link) for one in found if one.licence
    }
    if name is None:
        return _taken_over(found, stated)
    licence = licence_named(name)
    check_link(licence, link)
    others = {known for known, _ in stated if known and known.lower() != licence.lower()}
    if others and licence != OTHER:
        raise OptionError(
            f"the data was published under {', '.join(sorted(others))}, not {licence}: give that "
            "licence, or --licence other with a --licence-link to terms that its owners agreed to."
        )
    return Licence(licence, link=link)


def _taken_over(found: list[Statement], stated: set[tuple[str | None, str | None]]) -> Licence:
    """Return the licence that all sources agree on; recordings of ours need a choice."""
    unstated = sorted({one.words for one in found if not (one.licence or one.ours)})
    if unstated:
        raise OptionError(
            f"no licence is stated for this data ({'; '.join(unstated)}): give --licence and its "
            "SPDX identifier, such as CC-BY-4.0, or --licence unknown if you do not know it."
        )
    if len(stated) > 1:
        names = ", ".join(sorted({str(licence) for licence, _ in stated}))
        raise CardError(
            f"the sources of this data have different licences ({names}): push them to "
            "repositories of their own, or give --licence other with a --licence-link that names "
            "them all."
        )
    if recorded := sorted({one.words for one in found if one.ours}):
        raise OptionError(_choice(recorded, stated))
    ((licence, link),) = stated
    proper = licence_named(str(licence))
    check_link(proper, link)
    return Licence(proper, link=link)


def _choice(recorded: list[str], stated: set[tuple[str | None, str | None]]) -> str:
    """Ask for the licence of recordings of ours, which must be that of what they are beside."""
    asked = f"choose a licence for your own recordings ({'; '.join(recorded)})"
    if not stated:
        return f"{asked}: give --licence and its SPDX identifier, such as CC-BY-4.0."
    ((licence, link),) = stated
    terms = f"--licence {licence}" + (f" --licence-link {link}" if link else "")
    return (
        f"{asked}: give {terms}, under which the other sources of this data were published, or "
        "push your own recordings to another repository."
    )
