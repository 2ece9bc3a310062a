"""``pull``, ``push``, ``cache`` and ``ls --remote``."""

import io
from pathlib import Path

import pytest

from tests.children import run
from tests.hub.conftest import NAME, UIDS, hub, write_card  # noqa: F401  (a fixture)
from tests.runs import write_run
from tests.vault.experience import SPEC, make, written

pytestmark = pytest.mark.usefixtures("hub")


def test_pull_look_verify_remove(offmarl):
    planned = offmarl("pull", NAME, "--dry-run")
    assert planned.code == 0 and "601.0 kB" in planned.out
    pulled = offmarl("pull", f"{NAME}/Good")
    assert pulled.code == 0 and "data CC0-1.0" in pulled.out and "nobody" in pulled.out
    again = offmarl("pull", f"{NAME}/Good", "--json").json
    (path,) = again["paths"].values()
    assert again["fetched"] == 0 and str(Path(path).relative_to(Path.cwd())) in pulled.out
    entries = offmarl("cache", "ls", "--json").json["datasets"]
    (name,) = entries
    assert name.startswith(f"{NAME}@") and list(entries[name]["uids"]) == ["Good"]
    for verify in (["cache", "verify", NAME], ["verify", NAME], ["verify", name]):
        assert "4 files match what was published" in offmarl(*verify).out
    (Path(entries[name]["uids"]["Good"]) / "d" / "0").write_bytes(b"other")
    damaged = offmarl("verify", NAME)
    assert damaged.code == 1 and "1 of 4 files" in damaged.err and "(Good/d/0)" in damaged.err
    assert "1 removed" in offmarl("cache", "rm", name, "--yes").out
    assert "no dataset was pulled" in offmarl("cache", "ls").out
    assert "no dataset was pulled" in offmarl("cache", "verify", "--all").out
    assert f"run `offmarl pull {NAME}`" in offmarl("verify", NAME).err


def test_a_policy_is_pushed_and_pulled(offmarl, hub, tmp_path):  # noqa: F811
    run = write_run(tmp_path / "run", "x", "data", [[1.0]])
    (run / "checkpoints" / "1").mkdir(parents=True)
    (run / "checkpoints" / "1" / "array").write_text("numbers")
    to = "--to", "org/policy", "--licence", "mit"
    for more in (["run"], ["--name", "a"], ["--citation", "a"]):
        offmarl.refuses("publishes one policy at a time, without", "push", "run", *more, *to)
    pushed = " ".join(offmarl("push", "run", *to).out.split())
    about = "summary x, trained on data, to act in swarm/coverage-3. licence MIT Next: offmarl pull"
    assert pushed.startswith(f"repository {hub.url}/org/policy commit ")
    assert pushed.endswith(f" {about} org/policy --policy")
    pulled = offmarl("pull", "org/policy", "--policy").out
    assert "policy   x, trained on data" in pulled and "could not be reached" not in pulled
    again = offmarl("pull", "org/policy", "--policy", "--json").json
    assert (again["fetched"], again["asked"], again["card"]["licence"]) == (0, True, "MIT")
    hub.close()
    assert "it could not be reached" in offmarl("pull", "org/policy", "--policy").out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pull"], 2, "Missing"),
        (["pull", "lab/suite/smalll"], 2, "did you mean lab/suite/small"),
        (["pull", f"{NAME}@v9"], 1, "no revision 'v9'"),
        (["cache", "rm", "lab"], 2, "no pulled dataset or policy named 'lab'"),
        (["cache", "rm"], 2, "give names of datasets or --all"),
        (["cache", "rm", "lab", "--all"], 2, "give names (lab) or --all, not both"),
        (["cache", "verify", "lab", "--all"], 2, "give names (lab) or --all, not both"),
        (["pull", "a/b", "--policy", "--dry-run"], 2, "--policy pulls all: leave out --dry-run."),
        (["pull", "a/b", "--policy", "--time-limit", "9"], 2, "leave out --time-limit."),
        (["cache", "rm", "lab", "--all", "--streamed"], 2, "without names and --all:"),
        (["pull", NAME, "--time-limit", "0"], 2, "a positive number of steps: got 0"),
        (["push", "nothing.vlt", "--to", "org/x", "--licence", "mit"], 1, "there is no vault at"),
        (["push", "--to", "org/x", "--license", "mit"], 1, "no vaults to push"),
    ],
)
def test_mistakes(offmarl, arguments, code, message):
    outcome = offmarl(*arguments)
    assert outcome.code == code and message in outcome.err and "Traceback" not in outcome.err
    assert code == 2 or outcome.err.count("\n") == 1


@pytest.fixture
def two_pulled(offmarl, tmp_path):
    """Two datasets that were pulled."""
    write_card(tmp_path / "cards", name="lab/suite/other")
    for name in (NAME, "lab/suite/other"):
        assert offmarl("pull", f"{name}/Good").code == 0
    return lambda: len(offmarl("cache", "ls", "--json").json["datasets"])


@pytest.mark.parametrize(
    ("arguments", "answer", "code", "left"),
    [
        ([NAME, "--all", "--yes"], None, 2, 2),
        ([NAME], None, 2, 2),
        (["--all"], None, 2, 2),
        ([NAME], "n", 2, 2),
        ([NAME], "", 2, 2),
        ([NAME], "y", 0, 1),
        (["--all"], "yes", 0, 0),
        ([NAME, "--yes"], None, 0, 1),
        (["--all", "--yes"], None, 0, 0),
    ],
)
def test_nothing_is_removed_without_a_yes(
    offmarl, two_pulled, monkeypatch, arguments, answer, code, left
):
    terminal = io.StringIO(f"{answer}\n" if answer else "")
    terminal.isatty = lambda: answer is not None
    monkeypatch.setattr("sys.stdin", terminal)
    outcome = offmarl("cache", "rm", *arguments)
    assert (outcome.code, two_pulled()) == (code, left)
    assert ("Remove? [y/N]" in outcome.err) == (answer is not None)
    if answer is not None:
        assert f"{NAME}@" in outcome.err


def test_a_damaged_record_is_listed_and_can_be_removed(offmarl, two_pulled):
    (path,) = {x["path"] for x in offmarl("cache", "ls", NAME, "--json").json["datasets"].values()}
    (Path(path) / "pulled.json").write_text("{")
    assert two_pulled() == 2
    assert "not pulled completely" in offmarl("cache", "verify", NAME).err
    assert offmarl("cache", "rm", NAME, "--yes").code == 0 and two_pulled() == 1


HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\u202e[bold]"


def test_hostile_text_of_a_card_is_shown_and_not_obeyed(offmarl, hub):  # noqa: F811
    card = hub.cards / f"{NAME}.toml"
    text = "".join(f"\\u{ord(c):04x}" if c < " " or c > "~" else c for c in HOSTILE)
    card.write_text(card.read_text().replace("Made up.", text).replace("nobody", text))
    for command in (["pull", f"{NAME}/Good"], ["pull", NAME, "--dry-run"], ["ls", "--remote"]):
        outcome = offmarl(*command)
        assert outcome.code == 0 and not {*"\x1b\x07\r\u202e"} & {*outcome.out}
        assert command[0] == "ls" or r"\x1b[2J\x1b]0;owned\x07\r\u202e[bold]" in outcome.out
        assert offmarl(*command, "--json").code == 0


def test_hostile_names_are_shown_and_not_obeyed(offmarl, tmp_path):
    name = f"{HOSTILE}.vlt"
    path = tmp_path / "found" / name / "a"
    written(path, make(SPEC, rows=1), provenance={HOSTILE: HOSTILE})
    commands = (
        ["ls", "found"],
        ["ls", str(path)],
        ["show", path],
        ["show", path.with_name("b")],
        ["report", path],
        ["verify", path],
        ["cat", path, "-o", "other.vlt"],
        ["show", "other.vlt"],
        ["pull", HOSTILE],
        ["cache", "rm", HOSTILE],
        ["push", path, "--to", HOSTILE],
    )
    for command in commands:
        outcome = offmarl(*command)
        for stream in (outcome.out, outcome.err):
            assert not {*"\x1b\x07\r\u202e\x9b"} & {*stream}, command
        assert "Traceback" not in outcome.err


def test_ls_remote(offmarl):
    result = offmarl("ls", "--remote", "--env", "suite/small", "--agents", 2, "--json").json[
        "datasets"
    ]
    assert [entry["name"] for entry in result] == [NAME] and tuple(result[0]["uids"]) == UIDS
    assert "no dataset matches" in offmarl("ls", "--remote", "--agents", 3).out


def test_doctor(offmarl, hub):  # noqa: F811
    facts = offmarl("doctor", "--json").json
    assert facts["hub"] == {hub.url: "answers"}
    assert facts["devices"] == ["cpu (cpu)"] and facts["jax"] != "missing"
    assert "python" in offmarl("doctor").out


def test_a_home_that_cannot_be_written(offmarl, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_ASSETS_CACHE", "/proc/none/assets")
    assert "no dataset was pulled" in offmarl("cache", "ls").out
    assert "no vault at" in offmarl("show", "og_marl/smac_v1/3m/Good").err


@pytest.mark.slow
def test_completion(offmarl, tmp_path):
    script = tmp_path / "offmarl.bash"
    script.write_text(offmarl("completion", "bash").out)

    def complete(*words):
        line = f"source {script}; COMP_WORDS=(offmarl {' '.join(words)}); "
        line += f"COMP_CWORD={len(words)}; _tyro_offmarl; printf '%s\\n' ${{#COMPREPLY[*]}} "
        line += '"${COMPREPLY[@]}"; complete -p offmarl | grep -q "o default"'
        count, *words_after = run(["bash", "-c", line]).split()
        assert int(count) == len(words_after)
        return words_after

    assert complete("pu") == ["pull", "push"]
    assert "--vault" in complete("train", "maicq", "--va")
    assert sorted(complete("recode", "A.vlt", "--codec", "''")) == ["raw", "zstd"]
    assert complete("show", "vau") == complete("cat", "A.vlt", "-o", "vau") == []  # bash's own
    zsh = offmarl("completion", "zsh").out
    assert zsh.startswith("#compdef offmarl") and '[[ -z "$completions" ||' in zsh
