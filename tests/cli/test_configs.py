"""Configuration files: every argument of a run in one file, or a run that is repeated."""

import json
import sys
from pathlib import Path

import pytest

from offmarl import tracking
from offmarl.cli import parse_script
from offmarl.errors import OptionError, UnknownNameError
from offmarl.programs import registry
from offmarl.programs.program import recorded_args
from offmarl.programs.runs.configs import Config, read_config
from tests.runs import write_run

bc = registry.load("baseline", "bc")

FILE = """
program = "bc"
vault = {vault}
updates = 2
eval_every = 2
eval_episodes = 2
final_episodes = 2
batch_size = 4
length = 2
hidden = 8
blind = true
normalise = ["observation"]
learning_rate = 1
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(FILE.format(vault='"a.vlt"'))
    return path


def parsed(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["bc.py", *map(str, arguments)])
    return parse_script(bc.Args, bc.__doc__)


def test_options_take_precedence_over_the_file_and_it_over_the_defaults(file, monkeypatch):
    args = parsed(monkeypatch, "--config", file, "--hidden", "16", "--normalise", "state")
    assert (args.hidden, args.normalise, str(args.vault)) == (16, ("state",), "a.vlt")
    assert (args.blind, args.updates, args.batch_size) == (True, 2, 4)
    assert args.learning_rate == 1.0 and isinstance(args.learning_rate, float)
    assert args.tanh is False and args.seeds == 1
    assert parsed(monkeypatch, f"--config={file}", "--no-blind").blind is False
    assert parsed(monkeypatch, f"--config={file}", "--updates", "2e3").updates == 2_000


def test_fractions_may_be_percentages(monkeypatch):
    args = parsed(monkeypatch, "--vault", "a.vlt", "--top", "10%", "--held-out", ".25")
    assert (args.top, args.held_out) == (0.1, 0.25)
    for wrong in ("much", "0%", "101%"):
        with pytest.raises(OptionError, match="top"):
            parsed(monkeypatch, "--vault", "a.vlt", "--top", wrong)


@pytest.mark.parametrize("vault", ['["a=0.7", "b=0.3"]', "{ a = 0.7, b = 0.3 }"])
def test_a_file_may_name_several_vaults(file, monkeypatch, vault):
    file.write_text(FILE.format(vault=vault))
    vaults = parsed(monkeypatch, "--config", file).vault
    assert vaults in (("a=0.7", "b=0.3"), {"a": 0.7, "b": 0.3})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hiden = 3", "hiden.*did you mean hidden"),
        ('hidden = "x"', "hidden cannot be 'x': Expected `int`, got `str`; it must be"),
        ("hidden = 0", "hidden must be at least 1"),
        ("hidden = ", "is not valid TOML"),
        ('program = "mine.py"', "give the path of a program of your own on the command line"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, message):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(OptionError, match=f"wrong.toml.*{message}"):
        read_config(path).arguments(bc.Args)


def test_the_program_is_that_of_the_file_unless_it_is_named(file):
    config = read_config(file)
    assert config.program_for(None) == "bc" == config.program_for("bc")
    assert config.program_for("path/to/mine.py") == "path/to/mine.py"
    with pytest.raises(OptionError, match="is for bc, not for maicq"):
        config.program_for("maicq")
    with pytest.raises(OptionError, match="names no program"):
        config._replace(program=None).program_for(None)
    with pytest.raises(OptionError, match="give the path of its file"):
        config._replace(program=None, is_record=True).program_for(None)


def test_a_record_does_not_say_where_to_write_or_whom_to_tell(tmp_path):
    run = write_run(tmp_path / "bc", "bc", "a/x", [[1]])
    record = json.loads((run / "run.json").read_text())
    forged = {"out": "/elsewhere", "track": ["mlflow=http://evil:1"], "take_over": True}
    forged |= {"coordinator": "evil:1", "vault": ["x"]}
    (run / "run.json").write_text(json.dumps(record | {"args": forged}))
    assert read_config(run).arguments(bc.Args) == {"vault": ("x",)}


def test_a_record_has_no_passwords():
    args = bc.Args(vault=("https://me:secret@host/a", "b"), init=Path("https://me:secret@host/c"))
    recorded = recorded_args(args)
    assert recorded["vault"] == ("https://***@host/a", "b")
    assert recorded["init"] == "https://***@host/c"
    with pytest.raises(OptionError, match="a lacks the password of vault"):
        Config("a", "bc", recorded, is_record=True).arguments(bc.Args)


def test_a_record_names_no_file_of_a_program(tmp_path):
    run = write_run(tmp_path / "bc", "bc", "a/x", [[1]])
    (run / "helper.py").write_text("raise SystemExit")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"program": str(run / "helper.py")}))
    with pytest.raises(UnknownNameError, match="offmarl does not run code that data names"):
        registry.load("baseline", read_config(run).program_for(None))


def test_a_record_repeats_all_that_changes_the_result(tmp_path):
    qmix = registry.load("recorder", "qmix")
    paths = {"init": tmp_path / "run", "prefill": tmp_path / "a.vlt"}
    args = recorded_args(qmix.Args(**paths)) | {"seeds": 5}  # which a run adds, and no vault
    run = write_run(tmp_path / "qmix", "qmix", None, [[1]], args=tracking.plain(args))
    again = read_config(run).arguments(qmix.Args)
    assert again | paths == again and again["seeds"] == 5


def test_batches_by_blocks_are_repeated_although_the_data_has_come_here(tmp_path):
    run = write_run(tmp_path / "bc", "bc", "a/x", [[1]], shuffle_buffer=100)
    assert read_config(run).arguments(bc.Args)["replay"] == "blocks"


def test_defaults_that_depend_on_the_data_are_not_given_when_a_run_is_repeated(tmp_path):
    args = {"vault": "a", "held_out": 0.0, "eval_every": 5}
    run = write_run(tmp_path / "bc", "bc", "a/x", [[1]], args=args, resolved=["held_out"])
    assert read_config(run).arguments(bc.Args).keys() == {"vault", "eval_every"}


@pytest.mark.slow
def test_a_run_from_a_file_and_again_from_what_it_wrote(offmarl, file, random_data, tmp_path):
    file.write_text(FILE.format(vault=f'"{random_data("probe/one-step")}"'))
    runs = [tmp_path / "one", tmp_path / "two"]
    for source, run in zip((file, runs[0]), runs, strict=True):
        offmarl.succeeds("train", "--config", source, "--out", run)
    records = [json.loads((run / "run.json").read_text()) for run in runs]
    assert records[0]["args"] == records[1]["args"]
    assert records[0]["args"]["normalise"] == ["observation"] and records[0]["args"]["blind"]
    offmarl.refuses("is for bc, not for maicq", "train", "maicq", "--config", file)


def test_the_name_of_a_program_comes_first(offmarl):
    outcome = offmarl("train", "--vault", "x.vlt", "bc")
    assert outcome.code != 0 and "give the name of a baseline before its options" in outcome.err
