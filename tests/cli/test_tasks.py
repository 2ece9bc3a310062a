"""Commands that are divided into tasks."""

import chex
import pytest

import offmarl as library
from offmarl import vault
from offmarl.cli import tasks

RECORD = ["record", "--policy", "random", "--env", "classic/xor", "--steps", 64, "--num-envs", 4]
BLOCKS = ["--block-steps", 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "0"], "tasks must be at least 1, not 0."),
        (
            ["--tasks", "inf"],
            "Error parsing --tasks: a whole number is needed, such as 100000 or 1e5: got inf",
        ),
        (["--tasks"], "Missing value for argument '--tasks'."),
        (["--task=3/3"], "--task must be I/N"),
        (["--launcher", "pbs"], "--launcher must be one of local, slurm, ray, or MODULE:CLASS"),
        (["--launcher-option", "gpu"], "--launcher-option must be KEY=VALUE"),
        (["--tasks", "2", "--coordinator", "auto"], "--coordinator joins the processes of one"),
        (["--task=0/2", "--process=1"], "--process joins the processes of one program"),
        (["--tasks", "2", "--devices", "2"], "--devices divides the environments of one program"),
        (["--tasks", "2", "--join"], "give only one of --tasks, --task and --join."),
        (["--task", "0/2", "--launcher=ray"], "launch no tasks: leave out --launcher."),
        (["--join", "--launcher-option", "a=b"], "launch no tasks: leave out --launcher-"),
    ],
)
def test_wrong_options_of_tasks(arguments, message, offmarl):
    offmarl.refuses(message, *RECORD, *arguments)


@pytest.mark.parametrize("verb", ["record", "train", "tune", "cat"])
def test_options_of_tasks_alone(verb, offmarl):
    offmarl.refuses(f"see `offmarl {verb} --help`", verb, "--tasks", 2)


def test_options_of_tasks_are_taken_out():
    words = ["bc", "--tasks", "100", "--vault=V", "--launcher-option", "time=60", "--join-x"]
    words += ["--launcher-option=qos=low"]
    options, rest = tasks.split(words)
    assert rest == ["bc", "--vault=V", "--join-x"]
    assert options.tasks == 100 and options.of_launcher == {"time": 60, "qos": "low"}
    texts = ("null", "NaN", "[1]", '"x"', "007x", "1e999")
    for text, value in {
        "true": True,
        "007": 7,
        ".5": 0.5,
        **dict(zip(texts, texts, strict=True)),
    }.items():
        assert tasks.split([f"--launcher-option=a={text}"])[0].of_launcher == {"a": value}
    assert tasks.split(["bc", "--vault=V"]) == (None, ["bc", "--vault=V"])
    assert tasks.split([*words, "--help"])[0] is None


def test_all_help_lists_the_options_of_tasks(offmarl):
    for command in (["record", "random"], ["record", "--policy"]):
        text = offmarl(*command, "--help-all").out
        for option in ("--tasks", "--launcher", "--task", "--join", "--dry-run"):
            assert option in text
        assert "--launcher" not in offmarl(*command, "--help").out


@pytest.mark.slow
@pytest.mark.filterwarnings("default:blocks of 4 steps")
def test_a_recording_by_tasks_of_another_scheduler(offmarl, tmp_path):
    first = offmarl(*RECORD, *BLOCKS, "--task", "0/3", "--json").json
    assert (first["blocks"], first["ran"], first["missing"]) == (2, 2, 2)
    early = offmarl(*RECORD, *BLOCKS, "--join")
    assert early.code == 1 and "2 of the 4 blocks" in early.err
    for index in (1, 2):
        assert offmarl(*RECORD, *BLOCKS, "--task", f"{index}/3").code == 0
    result = offmarl(*RECORD, *BLOCKS, "--join", "--json").json
    data = vault.open_vault(tmp_path / "vaults" / "classic" / "xor.vlt" / "random-0")
    assert result["vaults"][0]["steps"] == data.num_steps == 64
    assert "complete already" in offmarl(*RECORD, *BLOCKS, "--join").out


@pytest.mark.slow
@pytest.mark.bits
def test_a_training_by_tasks_is_that_of_one_process(offmarl, random_data):
    train = ["train", "bc", "--vault", random_data("probe/observation"), "--updates", 4]
    train += ["--eval-every", 2, "--eval-episodes", 2, "--final-episodes", 4, "--hidden", 8]
    two = [*train, "--seeds", 2, "--batching", "map", "--out"]
    assert offmarl(*two, "one").code == 0
    assert offmarl(*two, "shared", "--task", "1/2", "--json").json["missing"] == 1
    assert "1 of the 2 blocks" in offmarl(*two, "shared", "--join").err
    assert offmarl(*two, "shared", "--task", "0/2").code == 0
    assert "episode return" in offmarl(*two, "shared", "--join").out
    # One seed is one block, which is the command itself, and which repeats nothing.
    for _ in range(2):
        assert offmarl(*train, "--out", "alone", "--task", "0/1", "--json").json["blocks"] == 1

    def params(run, seed):
        return library.load_policy(run, seed=seed).params

    chex.assert_trees_all_equal(params("one", 0), params("shared", 0), params("alone", 0))
    chex.assert_trees_all_equal(params("one", 1), params("shared", 1))


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_missing_vault_is_found_before_tasks_are_launched(seeds, offmarl, tmp_path):
    train = "train", "bc", "--vault", "missing", "--seeds", seeds, "--out", "run", "--tasks", 2
    offmarl.refuses("there is no vault at", *train, code=1)
    assert not [*tmp_path.iterdir()]


@pytest.mark.filterwarnings("default:blocks of 4 steps")
def test_a_plan_is_printed_and_nothing_is_run(offmarl, tmp_path):
    outcome = offmarl(*RECORD, *BLOCKS, "--tasks", 3, "--dry-run", "--json")
    assert "blocks of 4 steps of each environment end before the time limit" in outcome.err
    plan = outcome.json
    assert (plan["blocks"], plan["tasks"], plan["steps"]) == (4, 3, 64)
    assert plan["bytes"] > 0 and plan["memory of a task"] > 1e8
    assert not (tmp_path / "vaults").exists()


@pytest.mark.parametrize(
    "verb",
    [
        ["filter", "return > p50"],
        ["map", "--reward", "reward / 2"],
    ],
)
def test_transforms_of_several_vaults_by_tasks(verb, offmarl, pair):
    name, *options = verb
    command = [name, "a.vlt", "b.vlt", *options, "-o"]
    alone = offmarl(*command, "one.vlt", "--json").json["vaults"][0]
    for index in range(2):
        share = offmarl(*command, "c.vlt", "--block-steps", 30, f"--task={index}/2", "--json").json
        assert share["ran"] == share["blocks"] > 0
    result = offmarl(*command, "c.vlt", "--block-steps", 30, "--join", "--json").json["vaults"][0]
    for key in ("steps", "episodes", "return"):
        assert result[key] == alone[key]
    digests = [offmarl("show", path, "--json").json["digest"] for path in ("one.vlt", "c.vlt")]
    assert digests[0] == digests[1]


def test_plans_of_transforms(offmarl, pair):
    plan = offmarl("filter", "a.vlt", "b.vlt", "return > 0", "-o", "c.vlt", "--dry-run")
    assert "memory of a task" in plan.out and not (pair / "c.vlt").exists()
    assert " MB\n" in plan.out and "e-0" not in plan.out
    wrong = offmarl("recode", "a.vlt", "-o", "c.vlt", "--tasks", "2", "--layout", "rows")
    assert wrong.code == 2 and "--layout stream" in wrong.err
    offmarl.refuses("give a vault and a condition", "filter", "return > 0", "-o", "c.vlt")
