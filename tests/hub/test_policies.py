"""Publishing trained policies, and pulling them again."""

import hashlib
import json
import shutil
import sys
import tomllib
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import chex
import pytest
import tomli_w
import yaml

import offmarl as offmarl_library
from baselines import iql_cql
from offmarl import envs, records, tracking
from offmarl import hub as library
from offmarl.benchmark.plan import read_plan
from offmarl.cli import policies as cli_policies
from offmarl.cli.programs import PolicyOptions
from offmarl.errors import (
    CardError,
    HubChecksumError,
    HubError,
    HubUnreachableError,
    OffmarlError,
    OptionError,
    RunError,
    UnknownNameError,
)
from offmarl.hub import install, policies
from offmarl.hub.card import File
from offmarl.hub.readme import model_readme
from offmarl.programs import registry
from offmarl.programs.recording import online
from offmarl.programs.runs.configs import read_config
from offmarl.settings import tables
from tests.runs import write_run, write_side

NAME = "org/clone"


@pytest.fixture(scope="module")
def run(random_data, tmp_path_factory):
    sizes = {"updates": 4, "eval_episodes": 2, "final_episodes": 4, "hidden": 4, "length": 2}
    out = tmp_path_factory.mktemp("policy") / "run"
    options = {"batch_size": 4, "seeds": 2, "normalise": ("observation",)}
    return iql_cql.main(iql_cql.Args(random_data("probe/two-step"), out=out, **sizes | options))


@pytest.mark.slow
def test_a_pulled_policy_acts_as_the_run_does_and_is_fetched_once(hub, run, tmp_path):
    pushed = library.push_policy(run, NAME, "mit")
    assert pushed.card["licence"] == "MIT" and pushed.card["seeds"] == [0, 1]
    pulled = library.pull_policy(NAME)
    assert pulled.commit == pushed.commit and pulled.fetched > 0
    for load in (offmarl_library.load_policy, offmarl_library.load_critic):
        for seed in (0, 1):
            chex.assert_trees_all_equal(*(load(path, seed).params for path in (run, pulled.path)))
    again = library.pull_policy(NAME)
    assert again.fetched == 0 and again.path == pulled.path
    mine = library.pull_policy(f"{NAME}@{pushed.commit}", tmp_path / "mine")
    assert mine.path == tmp_path / "mine"
    with pytest.raises(OptionError, match="holds something else"):
        library.pull_policy(NAME, run)


@pytest.mark.slow
def test_the_model_card_says_what_the_hub_and_its_readers_need(hub, run):
    library.push_policy(run, NAME, "MIT", summary="A test.")
    text = hub.files(NAME, "main")[1]["README.md"].decode()
    metadata = yaml.safe_load(text.split("---")[1])
    assert metadata["license"] == "mit" and metadata["library_name"] == "offmarl"
    assert metadata["pipeline_tag"] == "reinforcement-learning"
    (index,) = metadata["model-index"]
    (result,) = index["results"]
    assert result["metrics"][0]["type"] == "mean_reward"
    for words in ("A test.", "2 agents in `probe/two-step`", "| `hidden` | 4 |"):
        assert words in text
    assert "actions greedy, over 2 seeds of 4 episodes each" in text
    files = hub.files(NAME, "main")[1]
    for name, content in files.items():  # none names a directory of this machine
        assert str(run.parent).encode() not in content and b"/pytest-" not in content, name
    assert json.loads(files["run.json"])["args"]["vault"] == "probe-two-step.vlt/random"


@pytest.mark.slow
def test_the_repository_is_a_run_of_the_last_checkpoint(hub, run, tmp_path):
    library.push_policy(run, NAME, "MIT")
    hub.commit(NAME, {"checkpoints/1/policy/old": b"an earlier push", "notes.md": b"mine"})
    card = library.push_policy(run, NAME, "MIT").card
    files = hub.files(NAME, "main")[1]
    paths = {entry["path"] for entry in card["files"]}
    assert files.keys() == paths | {policies.CARD, "README.md", "notes.md"}
    for name, content in files.items():
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    ours, theirs = (offmarl_library.load_policy(at, 0).params for at in (run, tmp_path / "copy"))
    chex.assert_trees_all_equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("baseline", ["trained on `data` (digest `abc`)", "trained offline", "were not used"]),
        ("recorder", ["trained online in `swarm/coverage-3`"]),
    ],
)
def test_the_card_says_how_the_policy_was_trained(tmp_path, kind, words):
    vault = "data" if kind == "baseline" else None
    options = {"vault_digest": "abc", "kind": kind}
    run = write_run(tmp_path / "run", "x", vault, [[1.0, 2.0]] * 3, **options)
    card = policies._card(run, tracking.plain(tracking.read_run(run)), NAME, "MIT", "")
    text = model_readme(card, None).partition("---\n\n")[2]
    assert all(word in text for word in words)
    assert ("offline" in text.replace("-offline", "")) == (kind == "baseline")


@pytest.mark.slow
def test_a_side_is_pulled_with_the_opponents_that_it_learned_against(hub, tmp_path, offmarl):
    """They are copies in the run. Their own run is not needed, and not named by its place."""
    partner, env = tmp_path / "at home" / "partner", "classic/xor"
    write_side(partner, env, "agent_1")
    run = write_side(tmp_path / "side", env, "agent_0", (f"{partner}@*/greedy+random:2",))
    library.push_policy(run, NAME, "MIT")
    shutil.rmtree(partner)
    files = hub.files(NAME, "main")[1]
    assert not [name for name, text in files.items() if str(tmp_path).encode() in text]
    assert json.loads(files["run.json"])["args"]["opponents"] == [
        "at home/partner@*/greedy+random:2"
    ]
    pulled = library.pull_policy(NAME).path
    ours, theirs = (cli_policies.load(x, PolicyOptions(), [0], [])[0] for x in (run, pulled))
    chex.assert_trees_all_equal(ours.others, theirs.others)
    results = [offmarl("evaluate", x, "--eval-episodes", 3, "--json").json for x in (run, NAME)]
    chex.assert_trees_all_equal(*({**result, "run": None} for result in results))

    copy = next(name for name in files if name.startswith("opponents/") and "run.json" in name)
    record = json.loads(files[copy])
    for wrong, error, message in (
        ({}, RunError, r"opponents/1-0/run\.json is not valid"),
        (record | {"program": "evil:f"}, UnknownNameError, "no recorder named 'evil:f'"),
    ):
        forged = {name: x for name, x in files.items() if "/" in name or name == "run.json"}
        publish(hub, forged | {copy: json.dumps(wrong)})
        with pytest.raises(error, match=message):
            cli_policies.load(library.pull_policy(NAME).path, PolicyOptions(), [0], [])


@pytest.mark.slow
def test_a_push_that_does_not_arrive_whole_is_an_error(hub, run):
    hub.faults.spoiled = "run.json"
    with pytest.raises(HubError, match=r"does not hold run\.json as it was sent"):
        library.push_policy(run, NAME, "MIT")


@pytest.mark.slow
def test_without_the_hub_the_policy_on_this_machine_is_used(hub, run, monkeypatch):
    pushed = library.push_policy(run, NAME, "MIT")
    path = library.pull_policy(NAME).path
    hub.commit(NAME, {"another": b"file"})
    files = hub.files
    branches = {"dev": "main", "main": pushed.commit}
    monkeypatch.setattr(hub, "files", lambda name, x: files(name, branches.get(x, x)))
    on_branch = library.pull_policy(f"{NAME}@dev").path
    assert on_branch != path
    hub.close()
    assert library.pull_policy(f"{NAME}@dev").path == on_branch
    with pytest.raises(HubUnreachableError):
        library.pull_policy(f"{NAME}@other")
    assert library.pull_policy(NAME).path == path
    assert not library.pull_policy(NAME).asked
    assert policies.run_named(NAME) == on_branch  # pulled last
    with pytest.raises(RunError, match=r"no run at org/other.*`offmarl pull org/other --policy`"):
        policies.run_named("org/other")
    assert policies.run_named("absent") == Path("absent")
    assert policies.run_named(path) == path
    assert library.pull_policy(f"{NAME}@{pushed.commit[:8]}").path == path
    for name in ("org/other", f"{NAME}@{pushed.commit[:1]}"):  # the latter may name a branch
        with pytest.raises(HubUnreachableError):
            library.pull_policy(name)


@pytest.mark.slow
def test_the_cache_lists_verifies_and_removes_policies(hub, run, offmarl):
    library.push_policy(run, "org/agent", "MIT")
    path = library.pull_policy("org/agent").path
    ((name, entry),) = offmarl("cache", "ls", "--json").json["policies"].items()
    assert name.startswith("org/agent@") and entry["path"] == str(path)
    count = offmarl("cache", "verify", "org/agent", "--json").json["verified"][name]
    assert count == len(tomllib.loads((path / "offmarl-policy.toml").read_text())["files"])
    (path / "metrics.jsonl").write_text("")
    assert "differ from what was published (metrics.jsonl)" in offmarl("cache", "verify", name).err
    assert list(offmarl("cache", "rm", name, "--yes", "--json").json["removed"]) == [name]
    assert offmarl("cache", "ls", "--json").json["policies"] == {}
    assert not (policies._root() / "org").exists()


def test_a_name_of_a_dataset_and_a_policy_is_not_removed_without_a_commit(hub, pushed, offmarl):
    library.pull("org/made-up")
    root = policies._root()
    for name in ("org/made-up", "pulled/agent"):
        (root / name / ("c" * 40) / "run").mkdir(parents=True)
    (root / name / ("c" * 40) / "run" / policies.CARD).write_bytes(b"\xff")
    outcome = offmarl("cache", "rm", "org/made-up", "--yes")
    assert outcome.code == 2 and "org/made-up is a dataset and a policy" in outcome.err
    names = [f"{name}@{'c' * 12}" for name in ("org/made-up", "pulled/agent")]
    assert f"{names[0]} (policy)" in outcome.err
    assert f"removing {names[0]} (policy) needs" in offmarl("cache", "rm", names[0]).err
    every = offmarl("cache", "verify", "--all").err
    assert every.count("not pulled completely: pull it again") == 2
    for name in names:
        assert offmarl("cache", "rm", name, "--yes").code == 0
    assert [*root.iterdir()] == []
    assert list(offmarl("cache", "ls", "--json").json["datasets"])
    assert offmarl("cache", "rm", "org/made-up", "--yes").code == 0


@pytest.mark.slow
def test_damaged_data_is_not_installed_and_the_next_pull_is_whole(hub, run):
    library.push_policy(run, NAME, "MIT")
    record = hub.files(NAME, "main")[1]["run.json"]
    hub.commit(NAME, {"run.json": record.replace(b"0", b"1")})
    with pytest.raises(HubChecksumError, match=r"run\.json arrived with SHA-256"):
        library.pull_policy(NAME)
    hub.commit(NAME, {"run.json": record})
    assert library.pull_policy(NAME).path.is_dir()


def publish(hub, files, **card):
    """Publish files, with right checksums."""
    data = {name: x if isinstance(x, bytes) else x.encode() for name, x in files.items()}
    entries = [
        {"path": name, "size": len(x), "sha256": hashlib.sha256(x).hexdigest()}
        for name, x in data.items()
    ]
    facts = {"name": NAME, "summary": "s", "program": "mappo", "licence": "MIT"} | card
    fields = {name: x for name, x in facts.items() if x is not None}
    text = tomli_w.dumps(fields | {"files": entries})
    hub.commit(NAME, {**data, policies.CARD: text.encode()})


EVIL = ["../evil", "/evil", "checkpoints/../../evil", "checkpoints/1/a\\..\\evil", "evil.py"]
EVIL += ["checkpoints/1/.evil", "checkpoints/evil", "run.json/evil", policies.CARD]
EVIL += ["opponents/evil/run.json", "opponents/1-0/evil.py", "opponents/1-0/../run.json"]


@pytest.mark.parametrize("name", EVIL)
def test_files_that_are_not_those_of_a_policy_are_refused(hub, tmp_path, name):
    publish(hub, {"run.json": "{}", name: "{}"})
    with pytest.raises(CardError, match="the card of org/clone"):
        library.pull_policy(NAME)
    assert not [*tmp_path.rglob("run.json")]


@pytest.mark.parametrize("path", ["a/" * 16 + "a", "a" * 1025])
def test_long_paths_are_refused(path):
    file = {"path": path, "size": 1, "sha256": "0" * 64}
    with pytest.raises(CardError, match="the card is not valid: path: "):
        records.as_type(file, File, "the card", CardError)
    short = file | {"path": path.removeprefix("a").removeprefix("/")}
    assert records.as_type(short, File, "the card", CardError).path == short["path"]


def test_a_policy_of_too_many_bytes_is_refused(hub):
    publish(hub, {"run.json": "{}", "metrics.jsonl": "{}"})
    card = hub.files(NAME, "main")[1][policies.CARD]
    hub.commit(NAME, {policies.CARD: card.replace(b"size = 2", b"size = 5368709121")})
    with pytest.raises(CardError, match=r"org/clone lists more than 10,737,418,240 bytes"):
        library.pull_policy(NAME)


def test_a_deep_card_is_kept_as_it_is(hub, side):
    publish(hub, side)
    card = hub.files(NAME, "main")[1][policies.CARD]
    deep = b"x = " + b"[" * 300 + b"]" * 300 + b"\n" + card
    hub.commit(NAME, {policies.CARD: deep})
    assert (library.pull_policy(NAME).path / policies.CARD).read_bytes().endswith(deep)
    hub.commit(NAME, {policies.CARD: b'commit = "x"\n' + card})
    with pytest.raises(CardError, match="is not valid TOML"):
        library.pull_policy(NAME)


@pytest.mark.slow
def test_a_policy_of_too_many_bytes_is_not_pushed(hub, run, monkeypatch):
    monkeypatch.setattr(policies, "_MOST_BYTES", 1000)
    with pytest.raises(CardError, match="more than 1,000 bytes, the most that a pull downloads"):
        library.push_policy(run, NAME, "MIT")
    assert NAME not in hub.repositories


def test_a_full_disk_and_one_that_cannot_be_written_are_errors(hub, side, monkeypatch):
    publish(hub, side)
    for number, message in ((28, "is full: nothing was installed"), (13, "cannot be written")):
        with monkeypatch.context() as patch:
            patch.setattr(install, "download", Mock(side_effect=OSError(number, "refused")))
            with pytest.raises(HubError, match=message):
                library.pull_policy(NAME)
    assert library.pull_policy(NAME).fetched > 0


def test_the_files_of_a_policy_are_fetched_several_at_a_time(hub, side, monkeypatch):
    publish(hub, side)
    calls, second, download = count(), Event(), install.download

    def together(*arguments):
        if next(calls):
            second.set()
        assert second.wait(60), "the first download ends before the second one begins"
        return download(*arguments)

    monkeypatch.setattr(install, "download", together)
    assert library.pull_policy(NAME).fetched > 0


def test_a_policy_under_another_name_than_its_cards_is_fetched_once(hub, side, tmp_path):
    publish(hub, side, name="org/original")
    assert library.pull_policy(NAME).fetched > 0
    assert library.pull_policy(NAME).fetched == 0
    run = library.pull_policy(NAME, tmp_path / "mine").path
    assert library.pull_policy(NAME, run).fetched == 0
    with pytest.raises(OptionError, match="holds something else"):
        policies._installed(run, "org/original", library.pull_policy(NAME).commit)


def test_a_policy_without_a_run_is_refused(hub):
    publish(hub, {"metrics.jsonl": "{}"})
    with pytest.raises(RunError, match=r"it has no run\.json"):
        library.pull_policy(NAME)


@pytest.mark.parametrize("text", ["", "[[files]]", "files = 3", "= 3", "name = 3\nfiles = []"])
def test_a_card_that_is_not_valid_is_refused(hub, text):
    hub.commit(NAME, {policies.CARD: text.encode() or b"#"})
    with pytest.raises(CardError, match="the card of org/clone is not"):
        library.pull_policy(NAME)


def test_a_push_without_name_or_licence_is_refused():
    with pytest.raises(OptionError, match="named org/name"):
        library.push_policy("run", "clone", "MIT")
    with pytest.raises(OptionError, match="no licence until you choose one"):
        library.push_policy("run", NAME)


@pytest.mark.slow
def test_a_return_that_is_not_finite_leaves_out_the_mean_of_the_card(hub, run, tmp_path):
    directory = shutil.copytree(run, tmp_path / "run")
    file = directory / tracking.METRICS_FILE
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if tracking.RETURN in row:
            row[tracking.RETURN][0] = None
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert library.push_policy(directory, NAME, "MIT").card["returns"] == {}
    assert library.push_policy(run, NAME, "MIT").card["returns"]["mean"] > 0


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/1", "checkpoints/1/about"])
def test_links_out_of_a_run_are_not_published(hub, tmp_path, place):
    run = write_run(tmp_path / "run", "x", None, [[1.0]], kind="recorder")
    (tmp_path / "out" / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "out" / "checkpoints" / "1" / "about").write_text("private")
    (run / place).parent.mkdir(parents=True, exist_ok=True)
    (run / place).symlink_to(tmp_path / "out" / place)
    with pytest.raises(RunError, match="about is a link that leads out of"):
        library.push_policy(run, NAME, "MIT")


def test_a_run_that_is_not_finished_is_refused(tmp_path):
    run = write_run(tmp_path / "run", "bc", None, [[1.0]])
    record = tracking.read_run(run) | {"complete": False}
    tracking.write_json(run / tracking.RUN_FILE, record)
    with pytest.raises(RunError, match="is not finished"):
        library.push_policy(run, NAME, "MIT")


@pytest.mark.parametrize("missing", ["summary", "program", "licence", "name"])
def test_a_card_that_lacks_what_is_shown_is_refused_before_anything_is_placed(
    hub, tmp_path, missing
):
    publish(hub, {"run.json": "{}"}, **{missing: None})
    with pytest.raises(CardError, match=missing):
        library.pull_policy(NAME, tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


# ---------------------------------------------------------------------------------- code


@pytest.fixture(scope="module")
def side(tmp_path_factory):
    """The files of the run of one side, whose record has fields for all that a run can name."""
    run = write_side(tmp_path_factory.mktemp("side") / "run")
    files = (path for path in run.rglob("*") if path.is_file())
    return {path.relative_to(run).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def forged(hub, side, tmp_path, monkeypatch):
    """Publish and pull the run with a changed record, beside code that leaves a marker."""
    monkeypatch.chdir(tmp_path)
    marker = tmp_path / "the code ran"
    code = f"open({str(marker)!r}, 'w').close()\nArgs = make = main = f = lambda *_, **__: None\n"
    (tmp_path / "evil.py").write_text(code)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    settings = 'weight = "evil:f"\nenv = "evil.py:f"\nprogram = "bc"\n'

    def pull(record, out=None):
        publish(hub, {**side, "run.json": json.dumps(record)})
        run = library.pull_policy(NAME, out).path
        (run / "evil").mkdir()
        for name in ("evil.py", "evil/__init__.py"):  # files that a pull refuses
            (run / name).write_text(code)
        (run / "args.toml").write_text(settings)
        return run

    yield pull
    assert not marker.exists()


def strings(record, *path):
    """Yield the places in a record that hold a text, or null in place of one."""
    if isinstance(record, dict | list):
        items = record.items() if isinstance(record, dict) else enumerate(record)
        for key, value in items:
            yield from strings(value, *path, key)
    elif record is None or isinstance(record, str):
        yield path


def changed(record, path, value):
    """Return a record with another value at a place."""
    result = json.loads(json.dumps(record))
    inside = result
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return result


CODE = ("evil.py:f", "evil:f", "{run}/evil.py:f", "evaders=evil.py:f", "evaders=evil:f")
OPPONENT = "opponents", "evaders", "policy"
NAMED = [OPPONENT, ("spec", "name"), ("args", "env"), ("program",), ("file",)]


@pytest.mark.parametrize("path", NAMED)
@pytest.mark.parametrize("code", CODE)
def test_no_name_in_a_pulled_record_runs_code(forged, side, code, path, tmp_path):
    run = tmp_path / "pulled"
    forged(changed(json.loads(side["run.json"]), path, code.format(run=run)), run)
    for place in (run, Path("pulled")):
        if path in NAMED[:2]:
            with pytest.raises(UnknownNameError):
                cli_policies.load(place, PolicyOptions(), [0], [])
        if path[0] in ("args", "opponents"):  # `offmarl record --from-run`
            with pytest.raises(UnknownNameError):
                online.record_from_run(place, "random", steps=2, out=tmp_path)


def test_the_error_says_which_field_of_which_file_names_code(forged, side, offmarl):
    record = changed(json.loads(side["run.json"]), OPPONENT, "evil.py:f")
    run = forged(record)
    for command in (["evaluate", NAME], ["record", "--policy", NAME, "--steps", 2]):
        outcome = offmarl(*command)
        assert outcome.code == 2 and len(outcome.err.strip().splitlines()) == 1
        assert f"{run}/run.json (opponents.evaders.policy)" in outcome.err
        assert "'evil.py:f'" in outcome.err and "--opponents path/to/" in outcome.err
    # The user names other opponents, or trusts the code.
    environment, _ = cli_policies.load(run, PolicyOptions(), [0], ["random"])
    assert dict(environment.opponents)["evaders"].about == {"policy": "random"}
    with pytest.raises(OptionError, match=r"evil\.py is not a Python file"):
        cli_policies.load(run, PolicyOptions(), [0], [f"{run}/no/evil.py:f"])


def test_of_two_revisions_in_the_cache_none_runs_code(forged, side):
    """The recorded path is found from the directories above the run: here, in the other one."""
    record = json.loads(side["run.json"])
    commit = forged(record).parent.name
    for code in (f"{commit}/run/evil.py:f", f"../{commit}/run/evil.py:f", f"{commit}/run/evil:f"):
        with pytest.raises(UnknownNameError):
            cli_policies.load(forged(changed(record, OPPONENT, code)), PolicyOptions(), [0], [])


def test_no_file_in_a_pulled_directory_is_the_users_own_text(forged, side):
    run = forged(json.loads(side["run.json"]))
    for parse in (read_config, read_plan, tables):
        with pytest.raises(OptionError, match="is in a directory that was pulled"):
            parse(run / "args.toml")
    config = read_config(forged(changed(json.loads(side["run.json"]), ("args", "env"), "evil:f")))
    args = config.arguments(registry.load("recorder", "mappo").Args)
    with pytest.raises(UnknownNameError, match=r"args\.env"):
        envs.make(args["env"])


@pytest.mark.slow
@pytest.mark.parametrize("code", CODE)
def test_code_in_every_field_of_a_pulled_record_runs_nowhere(
    forged, side, offmarl, tmp_path, monkeypatch, code
):
    """Each field on its own, and then all together that are not refused."""
    record = json.loads(side["run.json"])
    run = forged(record, tmp_path / "pulled")
    record["args"] |= {"weight": None, "policy": None, "validation": None, "vault": None}
    record |= {"environment_source": {"file": "a", "module": "b"}, "init": {"run": "c"}}
    harmless = record
    for path in strings(record):
        tracking.write_json(run / tracking.RUN_FILE, changed(record, path, code.format(run=run)))
        with suppress(OffmarlError):
            cli_policies.load(run, PolicyOptions(), [0], [])
            harmless = changed(harmless, path, code.format(run=run))
    tracking.write_json(run / tracking.RUN_FILE, harmless)
    assert offmarl("evaluate", run, "--eval-episodes", 1).code == 0
    record_it = ("record", "--policy", run, "--steps", 2, "--num-envs", 1, "--out", run / "x")
    assert offmarl(*record_it).code == 0
