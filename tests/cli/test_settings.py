"""Settings files and the command line: what programs use, print and keep."""

import json

import pytest

from offmarl import settings

SMALL = ["--updates", "2", "--eval-every", "2", "--eval-episodes", "2"]
SMALL += ["--final-episodes", "2", "--batch-size", "4", "--length", "2"]


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    path = tmp_path / "package" / "probe.toml"
    path.parent.mkdir()
    path.write_text("[bc]\nhidden = 8\nlearning_rate = 0.5\n")
    monkeypatch.setattr(settings, "__file__", str(path.with_name("__init__.py")))
    monkeypatch.delenv("OFFMARL_QUIET", raising=False)
    return path


@pytest.mark.slow
def test_a_baseline_takes_settings_prints_and_keeps_them(offmarl, packaged, random_data, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("[bc]\nlayers = 2\n")
    vault, run = str(random_data("probe/one-step")), tmp_path / "run"
    command = ["train", "bc", "--vault", vault, "--out", str(run), *SMALL]
    outcome = offmarl.succeeds(*command, "--learning_rate=0.25", "--settings", str(mine))
    assert "settings: hidden 8 (from offmarl/settings/probe.toml [bc])" in outcome.err
    assert "settings: learning_rate 0.25 in place of 0.5 (given)" in outcome.err
    record = json.loads((run / "run.json").read_text())
    assert [record["args"][name] for name in ("hidden", "learning_rate", "layers")] == [
        8,
        0.25,
        2,
    ]
    assert record["settings"] == {
        "hidden": "offmarl/settings/probe.toml [bc]",
        "layers": f"{mine} [bc]",
    }
    packaged.write_text("[bc]\nhidden = 16\n")
    before = (run / "metrics.jsonl").read_bytes()
    offmarl.succeeds(*command, "--learning-rate", "0.25", "--settings", str(mine))
    assert (run / "metrics.jsonl").read_bytes() == before
    assert json.loads((run / "run.json").read_text()) == record
    packaged.write_text("[bc]\nlearning_rate = 0.5\n")
    omitted = offmarl(*command, "--settings", str(mine))
    assert omitted.code != 0
    assert "holds a run with args.learning_rate 0.25, not 0.5" in omitted.err


@pytest.mark.slow
def test_a_wrong_name_in_a_file_is_one_line(offmarl, packaged, random_data, tmp_path):
    packaged.write_text("[bc]\nhiden = 8\n")
    outcome = offmarl("train", "bc", "--vault", str(random_data("probe/one-step")))
    assert outcome.code == 2 and outcome.err.count("\n") == 1
    assert "probe.toml [bc]: no argument named 'hiden': did you mean hidden?" in outcome.err
