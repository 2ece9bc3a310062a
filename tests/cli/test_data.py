"""``ls``, ``show`` and ``convert``."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from offmarl import vault
from offmarl.cli.data import _ids, _source
from offmarl.cli.transform import convert
from offmarl.vault.storage import files
from offmarl.vault.write import creation
from tests.vault.experience import recorded


def test_the_licence_of_a_source_is_kept(offmarl, xor_file):
    terms = ("--licence", "cc-by-4.0", "--citation", "@misc{them}")
    result = offmarl("convert", xor_file, "a.vlt", "--env", "classic/xor", *terms, "--json").json
    source = result["provenance"]["source"]
    assert (source["licence"], source["citation"]) == ("CC-BY-4.0", "@misc{them}")
    assert (source["format"], source["file"]) == ("pymarl", "xor.npz")
    for wrong in (["mine"], ["other"], [""]):
        outcome = offmarl("convert", xor_file, "b.vlt", "--licence", *wrong)
        assert outcome.code == 2 and "Traceback" not in outcome.err
    assert not Path("b.vlt").exists()


def test_a_kill_after_publication_leaves_the_terms(xor_file, tmp_path, monkeypatch):
    def publish_and_die(part, final):
        files.publish(part, final)
        if final.name == "main":  # the whole vault, not the empty one to write to
            raise KeyboardInterrupt

    monkeypatch.setattr(creation, "publish", publish_and_die)
    with pytest.raises(KeyboardInterrupt):
        convert(str(xor_file), tmp_path / "a.vlt", licence="mit or 0bsd", citation="@misc{them}")
    source = vault.open_vault(tmp_path / "a.vlt").provenance["source"]
    assert (source["licence"], source["citation"]) == ("MIT OR 0BSD", "@misc{them}")


def test_convert_then_show_then_list(offmarl, xor_file, tmp_path):
    command = "convert", xor_file, "data/xor.vlt/mixed", "--from", "pymarl"
    converted = offmarl(*command, "--env", "classic/xor", "--json").json
    assert converted["env"] == "classic/xor"
    assert (converted["episodes"], converted["steps"]) == (3, 150)
    assert converted["ends"] == {"truncated": 3}
    assert converted["return"]["mean"] == converted["return"]["max"] / 2 == 25.0
    assert converted["length"] == {"mean": 50.0, "std": 0.0, "min": 50.0, "max": 50.0}
    assert converted["provenance"]["source"]["file"] == "xor.npz"

    assert offmarl("show", "data/xor.vlt", "--json").json == converted
    text = offmarl("show", "data/xor.vlt").out
    words = "classic/xor", "3 truncated", "mean 25", "█▁▅", converted["digest"], "infos.legals"
    assert all(part in text for part in words)
    assert "(--provenance)\n\nNext: offmarl train bc --vault " in text and "xor.npz" not in text
    assert "xor.npz" in offmarl("show", "data/xor.vlt", "--provenance").out

    (entry,) = offmarl("ls", "data", "--json").json["vaults"]
    assert entry["path"] == str(tmp_path / "data/xor.vlt/mixed")
    assert (entry["num_agents"], entry["episodes"], entry["mean_return"]) == (2, 3, 25.0)
    assert "data/xor.vlt/mixed" in offmarl("ls").out


def test_large_returns_that_are_all_alike_are_shown(offmarl, tmp_path):
    columns = {"observations": np.zeros((4, 1), np.float32), "actions": np.zeros(4, int)}
    ends = {"rewards": np.full(4, 1e20, np.float32), "terminals": np.ones(4, bool)}
    vault.from_arrays(tmp_path / "a.vlt", **columns, **ends, num_actions=2)
    outcome = offmarl("show", "a.vlt")
    assert outcome.code == 0 and "distribution" in outcome.out


SOURCE = {"taken": {"episodes": 1}, "episodes": 2, "native": True, "vault": "v", "digest": "0" * 64}
WHOLE = {"operation": "filter", "arguments": {"where": "x"}, "sources": []}


@pytest.mark.parametrize(
    ("lineage", "origins"),
    [
        ({"step": 1}, None),
        ("word", None),
        ([1], {"a": 1}),
        ({**WHOLE, "sources": [SOURCE]}, None),
        ({**WHOLE, "sources": [{**SOURCE, "provenance": {}, "episodes": "many"}]}, None),
        ({**WHOLE, "arguments": "x"}, None),
        ({**WHOLE, "operation": 3}, None),
        (WHOLE, [{"vault": "v"}]),
        (WHOLE, 3),
    ],
)
def test_a_lineage_that_another_program_wrote_is_shown_as_it_is(
    offmarl, tmp_path, lineage, origins
):
    about = {"lineage": lineage} | ({} if origins is None else {"origins": origins})
    recorded(tmp_path / "a.vlt" / "x", provenance=about)
    outcome = offmarl("show", "a.vlt")
    assert outcome.code == 0
    for name, value in about.items():
        text = value if isinstance(value, str) else json.dumps(value)
        assert f"{name} {text}" in " ".join(outcome.out.split())
    assert offmarl("show", "a.vlt", "--json").json["provenance"] == about


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "v  1 of 2 episodes  000000000000"),
        (
            {"native": False, "quirks": ["a", "b"], "unverified": [[0, 2]]},
            "v  1 of 2 episodes, by another program, a, b, unverified steps [[0, 2]]  000000000000",
        ),
    ],
)
def test_a_source_is_told_with_what_is_odd_about_it(changes, text):
    assert _source(SOURCE | changes).plain == text


@pytest.mark.parametrize(
    ("first", "count", "unknown", "origins", "text"),
    [
        (2, 3, False, 2, "2 to 4"),
        (2, 1, False, 2, "2"),
        (2, 1, True, 2, "2 to 3"),  # the last one stands for all that are not known
        (2, 1, True, 1, "2"),
        (0, 0, True, 2, "0"),
        (0, 0, True, 1, "unknown"),
    ],
)
def test_the_policies_of_a_recording_are_told_by_number(first, count, unknown, origins, text):
    origin = {"first": first, "num_policies": count, "unknown": unknown}
    assert _ids(origin, origins) == text


def test_time_limit_tells_truncation_from_termination(offmarl, xor_file):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        unlimited = offmarl("convert", xor_file, "a.vlt", "--json")
    assert unlimited.json["ends"] == {"terminated": 3}
    assert "if that is a time limit, give it (--time-limit" in unlimited.err
    limited = offmarl("convert", xor_file, "b.vlt", "--time-limit", 50, "--json").json
    assert limited["ends"] == {"truncated": 3}


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "missing.vlt"],
        ["ls", "missing"],
        ["convert", "missing.npz", "out.vlt"],
        ["train", "bc", "--vault", "missing.vlt"],
        ["evaluate", "missing"],
        ["record", "--policy", "missing", "--steps", "10"],
    ],
)
def test_what_does_not_exist_is_named(offmarl, arguments):
    offmarl.refuses("missing", *arguments, code=1)


def test_ls_remote_has_a_line_for_each_source_until_some_are_selected(offmarl):
    listing = offmarl("ls", "--remote").out, offmarl("ls", "--remote", "og_marl/smac").out
    full, part = (text.partition("Next:")[0] for text in listing)
    assert len(full.splitlines()) <= 24 and max(map(len, full.splitlines())) < 80
    names = [x["name"] for x in offmarl("ls", "--remote", "--json").json["datasets"]]
    assert all(name.rpartition("/")[0] in full and name not in full for name in names)
    subset = [name for name in names if name in part]
    assert subset == [name for name in names if name.startswith("og_marl/smac")] != []


def test_a_directory_without_vaults_is_no_error(offmarl):
    outcome = offmarl("ls")
    assert outcome.code == 0 and "no vaults" in outcome.out
    assert offmarl("ls", "--json").json == {"vaults": []}
    assert "no such vaults" in offmarl("ls", "--agents", 2).out


def test_a_vault_that_cannot_be_read_is_listed_with_its_error(offmarl, xor_file, tmp_path):
    offmarl("convert", xor_file, "a.vlt", "--time-limit", 50)
    (tmp_path / "a.vlt" / "main" / "manifest.ocdbt").write_bytes(b"damaged")
    outcome = offmarl("ls")
    assert outcome.code == 0 and "a.vlt" in outcome.out
    (entry,) = offmarl("ls", "--json").json["vaults"]
    assert entry["error"]
