"""Licences of published datasets, and the statements of a vault's sources about them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from offmarl.errors import CardError, OptionError, unknown_name
from offmarl.terminal import interval
from offmarl.vault.read.manifest import PUBLISHED
from offmarl.vault.transform.lineage import sources_of

if TYPE_CHECKING:
    from offmarl.vault import Dataset

UNKNOWN = "unknown"
"""Stands for a source that states no licence."""
OTHER = "other"
"""Stands for a licence that is given by a link to its text."""

SPDX = "https://spdx.org/licenses/"
"""SPDX's list of licences, which has a page for each licence."""

_SAME = """
    Apache-2.0 MIT AFL-3.0 Artistic-2.0 BSL-1.0 BSD-2-Clause BSD-3-Clause BSD-3-Clause-Clear CC0-1.0
    CC-BY-2.0 CC-BY-2.5 CC-BY-3.0 CC-BY-4.0 CC-BY-SA-3.0 CC-BY-SA-4.0
    CC-BY-NC-2.0 CC-BY-NC-3.0 CC-BY-NC-4.0 CC-BY-ND-4.0 CC-BY-NC-ND-3.0 CC-BY-NC-ND-4.0
    CC-BY-NC-SA-2.0 CC-BY-NC-SA-3.0 CC-BY-NC-SA-4.0
    CDLA-Sharing-1.0 CDLA-Permissive-1.0 CDLA-Permissive-2.0 WTFPL ECL-2.0 EPL-1.0 EPL-2.0
    etalab-2.0 EUPL-1.1 AGPL-3.0 GPL-2.0 GPL-3.0 LGPL-2.1 LGPL-3.0 ISC LPPL-1.3c MS-PL MPL-2.0
    OSL-3.0 PostgreSQL OFL-1.1 NCSA Unlicense Zlib
"""
"""SPDX identifiers that Hugging Face uses in lower case."""
_RENAMED = {
    "C-UDA-1.0": "c-uda",
    "ODC-By-1.0": "odc-by",
    "ODbL-1.0": "odbl",
    "PDDL-1.0": "pddl",
    "LGPLLR": "lgpl-lr",
    **{
        f"{name}-{kind}": name.lower()
        for name in ("AGPL-3.0", "GPL-2.0", "GPL-3.0", "LGPL-2.1", "LGPL-3.0")
        for kind in ("only", "or-later")
    },
}

HUGGING_FACE = {
    **{name: name.lower() for name in _SAME.split()},
    **_RENAMED,
    UNKNOWN: UNKNOWN,
    OTHER: OTHER,
}
"""Hugging Face's name for each SPDX identifier; all versions of a licence may share a name.

From huggingface.co/docs/hub/repositories-licenses, without the names that SPDX does not have.
"""


@dataclass(frozen=True)
class Licence:
    """The licences of a dataset, as SPDX identifiers."""

    data: str
    """Licence of the data; "unknown" if the source states none, or "other"."""
    code: str | None = None
    """Licence of the code that made it."""
    link: str | None = None
    """Address of the text of a licence that is "other"."""
    note: str | None = None
    """Who states the licence, if it is not the source."""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.data, self.link)))


def licence_named(name: str) -> str:
    """Return a licence in its canonical spelling."""
    if name.lower() in (UNKNOWN, OTHER):
        return name.lower()
    try:
        proper = canonicalize_license_expression(name)
    except InvalidLicenseExpression:
        proper = None
    if not proper or "LicenseRef-" in proper:
        raise unknown_name("licence", name, HUGGING_FACE, see=SPDX)
    return proper


def page_of(licence: str) -> str:
    """Return the address of a licence's SPDX page; for an expression, that of SPDX's list."""
    if re.fullmatch(r"[\w.+-]+", licence):
        return f"{SPDX}{licence.removesuffix('+')}.html"
    return SPDX


def hub_metadata(licence: str, link: str | None) -> dict[str, str]:
    """Return a licence as metadata of a dataset's page on the hub."""
    if licence != OTHER and licence in HUGGING_FACE:
        return {"license": HUGGING_FACE[licence]}
    name = re.sub(r"[^a-z0-9.]+", "-", licence.lower()).strip("-")
    return {"license": OTHER, "license_name": name, "license_link": link or page_of(licence)}


def check_link(licence: str, link: str | None) -> None:
    """Raise `OptionError` unless "other", and only "other", comes with a web address."""
    is_address = (link or "").startswith(("https://", "http://"))
    is_right = is_address if licence == OTHER else not link
    if not is_right:
        raise OptionError(
            "--licence-link is the address of the text of --licence other: give both, or neither."
        )


# ---------------------------------------------------------------------------------- sources

_RECORDED = ("recipe", "recorded", "program")
"""Keys of a provenance that only offmarl's recorders write."""


class Statement(NamedTuple):
    """The statements of one source of a vault's data."""

    recorded: bool
    """Whether offmarl recorded it, so that its publisher chooses the licence."""
    words: str
    """Where it comes from, in a sentence without its full stop."""
    licence: str | None = None
    """The licence that the source states; None if it states none."""
    link: str | None = None
    """Address of the text of a licence that is "other"."""
    citation: str = ""
    """The citation that the source asks for."""


def statements(vault: "Dataset") -> list[Statement]:
    """Return a statement for each source of a vault's data, down to recordings and imports."""
    return list(_statements(vault.provenance, vault.native))


def _statements(provenance: Mapping[str, Any], native: bool) -> Iterator[Statement]:
    published, source = provenance.get(PUBLISHED), provenance.get("source")
    exported = source.get("provenance") if isinstance(source, Mapping) else None
    if isinstance(published, Mapping):
        commit = f" at commit {text[:12]}" if (text := _text(published, "commit")) else ""
        origin = f"{_text(published, 'dataset')} of {_text(published, 'repository')}"
        yield Statement(False, f"Published as {origin}{commit}", *_terms(published))
    elif sources := sources_of(provenance):
        for entry in sources:
            below = entry.get("provenance")
            inside = below if isinstance(below, Mapping) else {}
            yield from _statements(inside, bool(entry.get("native")))
    elif isinstance(source, Mapping) and isinstance(exported, Mapping):
        licence, link, citation = _terms(source)  # for statements without a licence
        for inner in _statements(exported, native):
            if licence and not inner.licence:
                inner = Statement(False, inner.words, licence, link, inner.citation)  # noqa: PLW2901
            yield inner._replace(citation=inner.citation or citation)
    elif isinstance(source, Mapping):
        words = f"Converted with offmarl from {_text(source, 'format') or 'another format'}"
        if file := _text(source, "file") or _text(source, "dataset"):
            words += f", {file}"
        if sha256 := _text(source, "sha256"):
            words += f" (SHA-256 {sha256})"
        yield Statement(False, words, *_terms(source))
    elif any(key in provenance for key in _RECORDED):
        about = f" ({text})" if (text := recorded_as(provenance)) else ""
        yield Statement(True, f"Recorded with offmarl{about}")
    elif native:
        yield Statement(False, "Written with offmarl; where the data comes from is not stated")
    else:
        yield Statement(False, "Written by a program other than offmarl")


def _terms(facts: Mapping[str, Any]) -> tuple[str | None, str | None, str]:
    licence = _text(facts, "licence")
    stated = None if licence.lower() in ("", UNKNOWN) else licence
    return stated, _text(facts, "licence_link") or None, _text(facts, "citation")


def recorded_as(provenance: Mapping[str, Any]) -> str:
    """Describe what was recorded: program, tier, training seed, and returns with their intervals.

    Empty if the provenance says nothing of it.
    """
    recipe = provenance.get("recipe")
    seed = recipe.get("seed") if isinstance(recipe, Mapping) else None
    seed = provenance.get("training_seed", seed)
    parts = [f"{name} {text}" for name in ("program", "tier") if (text := _text(provenance, name))]
    parts += [] if seed is None else [f"seed {seed}"]
    match provenance.get("policies"):
        case [Mapping() as policy, *others] if not any(
            isinstance(x, Mapping) and "return" in x for x in others
        ):
            steps, share = policy.get("training_steps"), policy.get("share_of_best_known")
            parts += [f"after {steps:,} training steps"] if isinstance(steps, int) else []
            percentage = f"{share:.1%}" if isinstance(share, float) else ""
            suffix = percentage and f" ({percentage} of the way to the best known)"
            if returns := _return(policy):
                parts.append(f"return on fresh seeds {returns}{suffix}")
    if returns := _return(provenance.get("recorded")):
        parts.append(f"recorded return {returns}")
    return ", ".join(parts)


def _return(facts: object) -> str:
    """Format a mean return and its interval; empty without one."""
    match facts:
        case {
            "return": int() | float() as mean,
            "return_interval": [int() | float() as low, int() | float() as high],
        }:
            return interval(mean, low, high)
        case {"return": int() | float() as mean}:
            return interval(mean, None, None)
    return ""


def _text(facts: Mapping[str, Any], name: str) -> str:
    value = facts.get(name)
    return value if isinstance(value, str) else ""


def in_words(vault: "Dataset") -> str:
    """Return the origin of a vault's data in sentences."""
    parts = list(dict.fromkeys(statement.words for statement in statements(vault)))
    if sources_of(vault.provenance):
        operation = vault.provenance["lineage"].get("operation", "transformed")
        return f"Made with `offmarl {operation}`. Its sources: {'; '.join(parts)}."
    return f"{'; '.join(parts)}."


def citation_of(vaults: Sequence["Dataset"]) -> str:
    """Return the citations that the sources of vaults ask for, without repetitions."""
    citations = (statement.citation for vault in vaults for statement in statements(vault))
    return "\n\n".join(dict.fromkeys(citation for citation in citations if citation))


def licence_of(vaults: Sequence["Dataset"], name: str | None, link: str | None) -> Licence:
    """Return the licence to publish vaults under."""
    sources = [source for vault in vaults for source in statements(vault)]
    stated: set[tuple[str | None, str | None]] = {
        (source.licence, source.link) for source in sources if source.licence
    }
    if name is None:
        name, link = _common_licence(sources, stated)
    licence = licence_named(name)
    check_link(licence, link)
    conflicts = {text for text, _ in stated if text and text.lower() != licence.lower()}
    if conflicts and licence != OTHER:
        raise OptionError(
            f"the data was published under {', '.join(sorted(conflicts))}, not {licence}: give it, "
            "or --licence other with a --licence-link to terms that the data's owners agreed to."
        )
    return Licence(licence, link=link)


def _common_licence(
    sources: list[Statement], stated: set[tuple[str | None, str | None]]
) -> tuple[str, str | None]:
    """Return the licence that all sources state, and its link; own recordings need a choice."""
    if unstated := sorted({x.words for x in sources if not (x.licence or x.recorded)}):
        raise OptionError(
            f"the sources of this data state no licence ({'; '.join(unstated)}): give --licence "
            "and its SPDX identifier, such as CC-BY-4.0, or --licence unknown if you do not know "
            "it."
        )
    if len(stated) > 1:
        names = ", ".join(sorted({str(licence) for licence, _ in stated}))
        raise CardError(
            f"the sources of this data have different licences ({names}): push them to "
            "repositories of their own, or give --licence other with a --licence-link that names "
            "them all."
        )
    (licence, link), *_ = [*stated, (None, None)]
    if recorded := sorted({source.words for source in sources if source.recorded}):
        options = f"--licence {licence}" + (f" --licence-link {link}" if link else "")
        raise OptionError(
            f"choose a licence for your own recordings ({'; '.join(recorded)}): give "
            + (
                f"{options}, under which the other sources of this data were published, or push "
                "your own recordings to another repository."
                if licence
                else "--licence and its SPDX identifier, such as CC-BY-4.0."
            )
        )
    return str(licence), link
