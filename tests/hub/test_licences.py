"""The origin and the licence on the card of a pushed dataset."""

import json

import pytest
import yaml

from offmarl import hub as library
from offmarl import vault
from offmarl.cli import hub as commands
from offmarl.errors import CardError, OptionError, UnknownNameError
from offmarl.hub import card as catalogue
from offmarl.hub import licences
from offmarl.hub.card import Licence
from offmarl.hub.readme import croissant, readme
from offmarl.report.contents import _limit_was_unknown
from offmarl.vault.transform import lineage
from tests.vault import experience
from tests.vault.test_convert import batch, save

RECORDED = {"program": "mappo", "tier": "expert", "recipe": {"seed": 3}}
PUBLISHED = {
    "dataset": "lab/env/x",
    "repository": "org/data",
    "commit": "c" * 40,
    "licence": "CC-BY-4.0",
    "citation": "@misc{them}",
}
EXPERT = {"training_steps": 5000, "return": 1.5, "return_interval": [1.0, 2.0]}
EXPERT |= {"share_of_best_known": 0.5}
SOURCE = {"format": "pymarl", "file": "data.npz", "sha256": "0" * 64}


@pytest.fixture
def recorded(tmp_path):
    """Make a vault of some provenance."""

    def record(name="a", **provenance):
        path = tmp_path / f"{name}.vlt" / name
        return experience.recorded(path, rows=1, steps=10, seed=len(name), provenance=provenance)

    return record


@pytest.mark.parametrize(
    ("provenance", "words"),
    [
        (RECORDED, "Recorded with offmarl (program mappo, tier expert, seed 3)."),
        (
            RECORDED | {"training_seed": 7, "policies": [EXPERT], "recorded": {"return": 2}},
            "Recorded with offmarl (program mappo, tier expert, seed 7, after 5,000 training "
            "steps, return on fresh seeds 1.500 [1.000, 2.000] (50.0% of the way to the best "
            "known), recorded return 2).",
        ),
        (
            RECORDED | {"policies": [{"training_steps": "x"}, EXPERT]},  # of a population
            "Recorded with offmarl (program mappo, tier expert, seed 3).",
        ),
        ({"recorded": "in Python"}, "Recorded with offmarl."),
        (
            {"source": SOURCE},
            f"Converted with offmarl from pymarl, data.npz (SHA-256 {'0' * 64}).",
        ),
        ({"published": PUBLISHED}, "Published as lab/env/x of org/data at commit cccccccccccc."),
        ({"source": {"format": "zarr", "provenance": RECORDED}}, "Recorded with offmarl (program"),
        ({}, "Written with offmarl; where the data comes from is not stated."),
        ({"source": "x", "published": 1, "lineage": []}, "Written with offmarl; where the data"),
    ],
)
def test_where_data_comes_from_is_told_truly(recorded, provenance, words):
    assert licences.in_words(recorded(**provenance)).startswith(words)


def test_a_transform_tells_of_all_its_sources(recorded, tmp_path):
    parts = [recorded("a", **RECORDED), recorded("bb", published=PUBLISHED)]
    union = vault.cat(parts, tmp_path / "c.vlt")
    part = vault.filter(union, "length > 0", tmp_path / "d.vlt")
    assert licences.in_words(part) == (
        "Made with `offmarl filter`. Its sources: Recorded with offmarl (program mappo, tier "
        "expert, seed 3); Published as lab/env/x of org/data at commit cccccccccccc."
    )
    assert licences.citation_of([part]) == "@misc{them}"
    with pytest.raises(OptionError, match=r"published under CC-BY-4\.0, not MIT"):
        licences.licence_of([part], "MIT", None)
    assert licences.licence_of([part], "cc-by-4.0", None) == Licence("CC-BY-4.0")
    with pytest.raises(OptionError, match=r"your own recordings .*: give --licence CC-BY-4\.0, un"):
        licences.licence_of([part], None, None)


@pytest.mark.parametrize(
    ("name", "link", "wanted"),
    [
        ("apache-2.0", None, Licence("Apache-2.0")),
        ("OTHER", "https://here/terms", Licence("other", link="https://here/terms")),
        ("other", None, "give both, or neither"),
        ("other", "terms.txt", "give both, or neither"),
        ("MIT", "https://here/terms", "give both, or neither"),
        ("MIT", "terms.txt", "give both, or neither"),
        ("mine", None, "no licence named 'mine'"),
        ("gfdl-1.3-ONLY", None, Licence("GFDL-1.3-only")),
        ("mit or (apache-2.0)", None, Licence("MIT OR (Apache-2.0)")),
        ("apache-2.0 with llvm-exception", None, Licence("Apache-2.0 WITH LLVM-exception")),
        ("CC-BY", None, "did you mean CC-BY-"),
        ("MIT OR", None, "no licence named 'MIT OR'"),
        ("MIT OR mine", None, "no licence named 'MIT OR mine'"),
        ("LicenseRef-mine", None, "no licence named 'LicenseRef-mine'"),
        (None, None, "choose a licence for your own recordings .*such as CC-BY-4.0"),
    ],
)
def test_licences_are_those_of_spdx_or_have_a_link(recorded, name, link, wanted):
    vaults = [recorded(**RECORDED)]
    if isinstance(wanted, Licence):
        assert licences.licence_of(vaults, name, link) == wanted
    else:
        with pytest.raises((OptionError, UnknownNameError), match=wanted):
            licences.licence_of(vaults, name, link)


def test_what_the_sources_state_is_taken_over(recorded):
    first = recorded("a", published=PUBLISHED)
    other = recorded("bb", published={**PUBLISHED, "licence": "MIT"})
    linked = {"licence": "other", "licence_link": "https://theirs/terms"}
    far = recorded("ccc", published={**PUBLISHED, **linked})
    unknown = recorded("dddd", published={**PUBLISHED, "licence": "unknown"})
    forged = recorded("eeeee", published={**PUBLISHED, "licence": ["MIT"], "citation": {}})
    assert licences.licence_of([first, first], None, None) == Licence("CC-BY-4.0")
    assert licences.licence_of([far], None, None) == Licence("other", link="https://theirs/terms")
    with pytest.raises(CardError, match=r"different licences \(CC-BY-4\.0, MIT\)"):
        licences.licence_of([first, other], None, None)
    terms = Licence("other", link="https://both")
    assert licences.licence_of([first, other], "other", "https://both") == terms
    for untold in (unknown, forged):
        with pytest.raises(OptionError, match="state no licence"):
            licences.licence_of([first, untold], None, None)
        assert licences.licence_of([untold], "unknown", None) == Licence("unknown")
    assert licences.citation_of([forged]) == ""
    with pytest.raises(OptionError, match=r"published under CC-BY-4\.0, not unknown"):
        licences.licence_of([first], "unknown", None)


def test_the_licence_of_a_pulled_dataset_goes_with_what_is_made_of_it(hub, recorded, tmp_path):
    first = recorded(**RECORDED)
    library.push([first.path], "org/first", "cc-by-nc-4.0", citation="@misc{first}")
    pulled = library.pull("org/first").paths["a"]
    part = vault.filter(pulled, "length > 0", tmp_path / "part.vlt")
    again = library.push([part.path], "org/second").card
    assert again.licence.data == "CC-BY-NC-4.0" and again.citation == "@misc{first}"
    assert again.summary.startswith("Made with `offmarl filter`. Its sources: Published as org/")
    assert "of org/first at commit" in again.uids["main"].origin
    with pytest.raises(OptionError, match="not MIT"):
        library.push([part.path], "org/third", "MIT")
    assert "org/third" not in hub.repositories, "nothing is made before the licence is known"


def test_converted_data_is_not_called_recorded(hub, tmp_path):
    path = vault.import_dataset(save(tmp_path / "data.npz", batch()), tmp_path / "out.vlt").path
    with pytest.raises(OptionError, match=r"state no licence .*from pymarl, data\.npz"):
        library.push([path], "org/converted")
    card = library.push([path], "org/converted", "unknown").card
    assert card.summary.startswith("Converted with offmarl from pymarl, data.npz (SHA-256")
    page = hub.files("org/converted", "main")[1]["README.md"].decode()
    assert "states no licence" in page and "Recorded with offmarl" not in page
    assert "- main: Converted with offmarl from pymarl" in page
    written = catalogue.parse(hub.files("org/converted", "main")[1]["offmarl.toml"].decode(), "x")
    assert written == card


def test_what_a_conversion_of_an_export_states_is_kept(recorded):
    terms = {"licence": "CC0-1.0", "citation": "@misc{export}"}
    back = {"format": "zarr", "file": "a.zarr", **terms}
    plain = recorded("a", source={**back, "provenance": RECORDED})
    assert licences.licence_of([plain], None, None) == Licence("CC0-1.0")
    assert licences.citation_of([plain]) == "@misc{export}"
    stated = recorded("bb", source={**back, "provenance": {"published": PUBLISHED}})
    assert licences.licence_of([stated], None, None) == Licence("CC-BY-4.0")
    assert licences.citation_of([stated]) == "@misc{them}"


def test_recordings_beside_converted_data_need_a_choice(hub, recorded, tmp_path):
    source, terms = save(tmp_path / "data.npz", batch()), {"licence": "mit", "citation": "@misc{a}"}
    converted = vault.import_dataset(source, tmp_path / "c.vlt", terms=terms)
    experience.recorded(tmp_path / "o.vlt", converted.spec, rows=1, provenance=RECORDED)
    both = [converted.path, tmp_path / "o.vlt"]
    union = vault.cat([vault.open_vault(path) for path in both], tmp_path / "both.vlt/all")
    with pytest.raises(OptionError, match=r"choose a licence for your own .*--licence mit, under"):
        library.push([union.path], "org/both")
    with pytest.raises(OptionError, match=r"published under mit, not CC-BY-4\.0"):
        library.push([union.path], "org/both", "CC-BY-4.0")
    assert "org/both" not in hub.repositories
    card = library.push([union.path], "org/both", "MIT").card
    assert (card.licence, card.citation) == (Licence("MIT"), "@misc{a}")
    linked = recorded("x", published={**PUBLISHED, "licence": "other", "licence_link": "https://t"})
    with pytest.raises(OptionError, match="give --licence other --licence-link https://t, under"):
        licences.licence_of([linked, recorded("yy", **RECORDED)], None, None)


@pytest.mark.parametrize(
    ("steps", "category"),
    [
        (999, "n<1K"),
        (1000, "1K<n<10K"),
        (10**9 - 1, "100M<n<1B"),
        (10**9, "1B<n<10B"),
        (10**12 - 1, "100B<n<1T"),
        (10**12, "n>1T"),
    ],
)
def test_a_page_states_how_many_steps_there_are(steps, category):
    half = catalogue.Uid(steps // 2, 1)
    uids = {"a": half, "b": catalogue.Uid(), "c": catalogue.Uid(steps - steps // 2)}
    card = catalogue.Card("a/b/c", "s", 2, "", Licence("MIT"), uids)
    page = readme(card, "org/x")
    assert yaml.safe_load(page.split("---")[1])["size_categories"] == [category]
    assert "| b |  |  |  |  |" in page  # another program may have written that part of the card


@pytest.mark.parametrize(
    ("licence", "front", "url"),
    [
        (Licence("CC0-1.0"), {"license": "cc0-1.0"}, "https://spdx.org/licenses/CC0-1.0.html"),
        (Licence("ODbL-1.0"), {"license": "odbl"}, "https://spdx.org/licenses/ODbL-1.0.html"),
        (Licence("unknown"), {"license": "unknown"}, "unknown"),
        (
            Licence("other", link="https://x/y"),
            {"license": "other", "license_name": "other", "license_link": "https://x/y"},
            "https://x/y",
        ),
        (
            Licence("EUPL-1.2"),
            {
                "license": "other",
                "license_name": "eupl-1.2",
                "license_link": "https://spdx.org/licenses/EUPL-1.2.html",
            },
            "https://spdx.org/licenses/EUPL-1.2.html",
        ),
        (
            Licence("MIT OR Apache-2.0+"),
            {
                "license": "other",
                "license_name": "mit-or-apache-2.0",
                "license_link": "https://spdx.org/licenses/",
            },
            "MIT OR Apache-2.0+",
        ),
    ],
)
def test_pages_state_the_licence(licence, front, url):
    uids = {"a": catalogue.Uid(1, 1, digest="d")}
    card = catalogue.Card("a/b/c", "s", 2, "", licence, uids)
    metadata = yaml.safe_load(readme(card, "org/x").split("---")[1])
    assert {key: metadata[key] for key in front} == front
    assert json.loads(croissant(card, "org/x", "https://hub", "2026-01-31"))["license"] == url


def test_a_licence_is_told_with_its_link_its_code_and_who_states_it():
    for licence, words in (
        (Licence("MIT"), "data MIT"),
        (Licence("other", "MIT", "https://x", "So"), "data other (https://x); code MIT. So"),
    ):
        assert commands._licence(catalogue.Card("a/b/c", "s", 2, "", licence)) == words


def test_every_licence_has_a_name_that_hugging_face_knows():
    assert all(name == name.lower() for name in licences.HUGGING_FACE.values())
    for name in licences.HUGGING_FACE:
        assert licences.licence_named(name.upper()) == licences.licence_named(name) == name


@pytest.mark.parametrize("source", ["x", None, {}, {"quirks": 5, "provenance": 5}])
def test_sources_that_are_forged(source):
    provenance = {"lineage": {"sources": [source]}}
    assert all(statement.words for statement in licences._statements(provenance, True))
    assert not _limit_was_unknown(provenance)
    assert len(str(lineage._bounded(provenance | {"x": "y" * 10_000}, 5000))) < 5000
