"""``cat``, ``filter``, ``sample``, ``split``, ``slice``, ``dedup``, ``recode`` and ``map``."""

import inspect
import sys
from types import ModuleType

import pytest

from offmarl import vault
from offmarl.cli import output
from offmarl.cli.verbs import VERBS, function_of


def paths_in(directory):
    return {path for path in directory.rglob("*") if "__pycache__" not in str(path)}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["map", "a.vlt/poor", "--reward", "reward / 0"], "must be finite"),
        (["map", "a.vlt/poor", "--with", "mine.py:fail"], "mine.py:fail failed"),
        (["filter", "a.vlt/poor", "return > 1e9"], "an empty vault is not written"),
        (["cat", "a.vlt/poor", "--tasks", "2", "--launcher", "slurm"], "not on the PATH"),
        (["cat", "a.vlt/poor", "--tasks", "2", "--launcher-option", "a=1"], "no --launcher-option"),
    ],
)
def test_a_command_that_fails_leaves_no_directory(offmarl, pair, monkeypatch, command, words):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "submitit", ModuleType("submitit"))
    pair.joinpath("mine.py").write_text("def fail(steps):\n    raise ValueError\n")
    (pair / "there").mkdir()
    before = paths_in(pair)
    for out in ("new/deep/b.vlt", "there/b.vlt", "there/c.vlt/uid"):
        outcome = offmarl(*command, "-o", out)
        assert outcome.code in (1, 2) and words in outcome.err
        assert paths_in(pair) == before


def test_a_journey(offmarl, pair):
    (union,) = offmarl("cat", "a.vlt", "b.vlt", "-o", "c.vlt", "--json").json["vaults"]
    assert (union["path"], union["steps"]) == (str(pair / "c.vlt" / "main"), 160)
    text = offmarl("filter", "c.vlt", "tier == 'good' and length > 1", "-o", "d.vlt").out
    assert "\nd.vlt/main " in text and "mean return" in text
    assert f"\n{pair}/d2.vlt/main " in offmarl("recode", "d.vlt", "-o", pair / "d2.vlt").out
    (sample,) = offmarl("sample", "c.vlt", "--steps", "1e2", "-o", "e.vlt", "--json").json["vaults"]
    assert sample["steps"] == 100
    (best,) = offmarl("sample", "c.vlt", "--top", "10%", "-o", "f.vlt", "--json").json["vaults"]
    assert best["episodes"] == round(0.1 * union["episodes"])
    like = offmarl("sample", "c.vlt", "--like", "f.vlt", "-o", "g.vlt", "--json").json
    assert like["vaults"][0]["return"]["min"] >= best["return"]["min"]
    parts = offmarl("split", "c.vlt", "--validation", ".25", "-o", "s.vlt", "--json").json["vaults"]
    assert [part["path"] for part in parts] == [
        str(pair / "s.vlt" / name) for name in ("train", "validation")
    ]
    assert sum(part["episodes"] for part in parts) == union["episodes"]
    (late,) = offmarl("slice", "c.vlt", "--start", "-2", "-o", "h.vlt", "--json").json["vaults"]
    assert late["episodes"] == 2
    offmarl("cat", "h.vlt", "h.vlt", "-o", "i.vlt")
    (once,) = offmarl("dedup", "i.vlt", "-o", "j.vlt", "--json").json["vaults"]
    assert once["episodes"] == 2
    pair.joinpath("mine.py").write_text("def none(steps):\n    return {}\n")
    for number, change in enumerate((["--reward", "reward * 2"], ["--with", "mine.py:none"])):
        out = f"m{number}.vlt"
        (mapped,) = offmarl("map", "a.vlt", *change, "-o", out, "--json").json["vaults"]
        assert mapped["episodes"] > 2
    coded = offmarl("recode", "a.vlt", "--codec", "zstd", "--chunk-steps", "8", "-o", "k.vlt")
    assert coded.code == 0
    digests = [
        offmarl("show", name, "--json").json["digest"] for name in ("a.vlt", "k.vlt", "m1.vlt")
    ]
    assert len(set(digests)) == 1


def test_show_tells_the_lineage(offmarl, pair, monkeypatch):
    offmarl("cat", "a.vlt", "b.vlt", "-o", "c.vlt")
    offmarl("filter", "c.vlt", "return > p20", "-o", "d.vlt")
    text = offmarl("show", "d.vlt").out
    assert "filter condition=return > p20 by=episodes" in text
    monkeypatch.setattr(output._out, "width", 30)
    (source,) = vault.open_vault("d.vlt").provenance["lineage"]["sources"]
    assert {"by=episodes", source["digest"][:12]} <= {*offmarl("show", "d.vlt").out.split()}
    assert "c.vlt/main" in text and "from  cat" in text
    for name in ("a.vlt/poor", "b.vlt/good"):
        assert text.count(name) == 2  # among the sources, and among the recordings


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("cat", "a.vlt", "-o", "a.vlt"), 1, "a.vlt holds poor already"),
        (("sample", "a.vlt", "-o", "c.vlt"), 2, "give --steps, --episodes or --top"),
        (("sample", "a.vlt", "--steps", "1.5", "-o", "c.vlt"), 2, "whole number"),
        (("sample", "a.vlt", "--top", "10", "-o", "c.vlt"), 2, "in (0, 1]"),
        (("sample", "a.vlt", "--top", "much", "-o", "c.vlt"), 2, "percentage"),
        (("split", "a.vlt", "--fractions", ".5", ".6", "-o", "c.vlt"), 2, "sum to 1"),
        (("split", "a.vlt", "-o", "c.vlt/x"), 1, "must end in .vlt"),
        (("filter", "a.vlt", "retrun > 1", "-o", "c.vlt"), 2, "there is no 'retrun'"),
        (("recode", "a.vlt", "--chunk-steps", 0, "-o", "c.vlt"), 2, "--chunk-steps must be at"),
        (("slice", "a.vlt", "--start", "999", "-o", "c.vlt"), 2, "empty range: 999 to "),
    ],
)
def test_mistakes_are_told_and_leave_nothing(offmarl, pair, arguments, code, message):
    outcome = offmarl(*arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert message in outcome.err
    assert sorted(path.name for path in pair.iterdir()) == ["a.vlt", "b.vlt"]


@pytest.mark.parametrize(
    "name",
    [name for name, verb in VERBS.items() if verb.module == "transform" and name != "convert"],
)
def test_a_verb_has_the_options_of_the_function(offmarl, name):
    parameters = {*inspect.signature(getattr(vault, name)).parameters}
    parameters -= {"condition", "progress", "provenance"}
    assert {*inspect.signature(function_of(name, VERBS[name])).parameters} == parameters
    text = offmarl(name, "--help").out
    hidden = {"sources", "source"}  # which are arguments
    options = {"--" + x.replace("_", "-") for x in parameters - hidden - {"path"}} | {"--out"}
    options = {"--with" if x == "--function" else x for x in options}
    assert options <= {word.strip(",") for word in text.split()}
    assert "As for" not in text and "`" not in text.split("Example")[1].split("\n", 1)[1]


@pytest.mark.parametrize("fractions", [(".5", ".5"), ("50%", "25%", "25%")])
def test_fractions_may_be_percentages(offmarl, pair, fractions):
    count = len(vault.open_vault(pair / "a.vlt").episodes.row)
    outcome = offmarl("split", "a.vlt", "-o", "c.vlt", "--json", "--fractions", *fractions)
    assert outcome.json["vaults"][0]["episodes"] == round(0.5 * count)
    assert len(outcome.json["vaults"]) == len(fractions)
