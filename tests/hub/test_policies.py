"""Publishing trained policies, and pulling them again."""

import hashlib
import io
import json
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

import offmarl
from baselines import iql_cql
from offmarl import hub as library
from offmarl import tracking
from offmarl.errors import (
    CardError,
    HubChecksumError,
    HubError,
    HubUnreachableError,
    OptionError,
    RunError,
)
from offmarl.hub import policies
from tests.runs import write_run

NAME = "org/clone"

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def run(random_data, tmp_path_factory):
    sizes = {"updates": 4, "evaluate_episodes": 2, "final_episodes": 4, "hidden": 4, "length": 2}
    out = tmp_path_factory.mktemp("policy") / "run"
    options = {"batch_size": 4, "seeds": 2, "normalise": ("observation",)}
    return iql_cql.main(iql_cql.Args(random_data("probe/two-step"), out=out, **sizes | options))


@pytest.mark.slow
def test_a_pulled_policy_acts_as_the_run_does_and_is_fetched_once(hub, run, tmp_path):
    pushed = library.push_policy(run, NAME, "mit")
    assert pushed.card["licence"] == "MIT" and pushed.card["seeds"] == [0, 1]
    pulled = library.pull_policy(NAME)
    assert pulled.commit == pushed.commit and pulled.fetched > 0
    for seed in (0, 1):
        ours, theirs = (offmarl.load_policy(one, seed).params for one in (run, pulled.path))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        values = [offmarl.load_critic(one, seed).params for one in (run, pulled.path)]
        jax.tree.map(np.testing.assert_array_equal, *values)
    again = library.pull_policy(NAME)
    assert again.fetched == 0 and again.path == pulled.path
    chosen = library.pull_policy(f"{NAME}@{pushed.commit}", tmp_path / "mine")
    assert chosen.path == tmp_path / "mine"
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


@pytest.mark.slow
def test_nothing_published_names_a_directory_of_this_machine(hub, run):
    library.push_policy(run, NAME, "MIT")
    files = hub.files(NAME, "main")[1]
    archive = zipfile.ZipFile(io.BytesIO(files[policies.ARCHIVE]))
    texts = [archive.read(name) for name in archive.namelist() if name.endswith((".json", "jsonl"))]
    for text in (*texts, files["README.md"], files[policies.CARD]):
        assert str(run.parent).encode() not in text and b"/pytest-" not in text
    assert json.loads(archive.read("run.json"))["args"]["vault"] == "probe-two-step.vlt/random"


@pytest.mark.parametrize(
    ("kind", "stop_on", "words"),
    [
        ("baseline", None, ["trained on `data` (digest `abc`)", "were not used to choose"]),
        ("baseline", "agreement", ["trained offline", "agreement with held-out actions chose"]),
        ("baseline", "return", ["Returns in the environment chose the update"]),
        ("recorder", None, ["trained online in `swarm/coverage-3`"]),
    ],
)
def test_the_card_says_how_the_policy_was_trained(tmp_path, kind, stop_on, words):
    vault = "data" if kind == "baseline" else None
    options = {"args": {"stop_on": stop_on}, "vault_digest": "abc", "kind": kind}
    run = write_run(tmp_path / "run", "x", vault, [[1.0, 2.0]] * 3, **options)
    card = policies._card(run, tracking.read_run(run), NAME, "MIT", "")
    text = policies._text(card | {"file": {}})
    assert all(one in text for one in words)
    assert ("offline" in text.replace("-offline", "")) == (kind == "baseline")


@pytest.mark.slow
def test_a_push_that_does_not_arrive_whole_is_an_error(hub, run):
    hub.commit(NAME, {".gitignore": b"*.zip"})
    with pytest.raises(HubError, match=r"the \.gitignore of org/clone leaves out .* run\.zip"):
        library.push_policy(run, NAME, "MIT")
    hub.commit(NAME, {".gitignore": b""})
    hub.faults.spoiled = "run.zip"
    with pytest.raises(HubError, match=r"does not hold run\.zip as it was sent"):
        library.push_policy(run, NAME, "MIT")


@pytest.mark.slow
def test_without_the_hub_the_policy_on_this_machine_is_used(hub, run, monkeypatch):
    pushed = library.push_policy(run, NAME, "MIT")
    path = library.pull_policy(NAME).path
    hub.close()
    assert library.pull_policy(NAME).path == path
    assert not library.pull_policy(NAME).asked
    assert policies.run_named(NAME) == path
    with pytest.raises(RunError, match=r"no run at org/other.*`offmarl pull org/other --policy`"):
        policies.run_named("org/other")
    assert policies.run_named("absent") == Path("absent")
    assert policies.run_named(path) == path
    assert library.pull_policy(f"{NAME}@{pushed.commit[:8]}").path == path
    with pytest.raises(HubUnreachableError):
        library.pull_policy("org/other")


@pytest.mark.slow
def test_damaged_data_is_not_installed_and_the_next_pull_is_whole(hub, run):
    library.push_policy(run, NAME, "MIT")
    hub.faults.flip = True
    with pytest.raises(HubChecksumError, match=r"run\.zip of org/clone arrived with SHA-256"):
        library.pull_policy(NAME)
    hub.faults.flip = False
    assert library.pull_policy(NAME).path.is_dir()


def publish(hub, names):
    """Publish an archive that holds files of these names, with a right checksum."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, "{}")
    data = buffer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    text = f'name = "{NAME}"\n[file]\npath = "run.zip"\nsize = {len(data)}\nsha256 = "{digest}"\n'
    hub.commit(NAME, {"run.zip": data, policies.CARD: text.encode()})


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a\\..\\evil"])
def test_names_that_leave_the_directory_are_refused(hub, name):
    publish(hub, ["run.json", name])
    with pytest.raises(HubError, match="unsafe file name"):
        library.pull_policy(NAME)


def test_an_archive_without_a_run_is_refused(hub):
    publish(hub, ["other.json"])
    with pytest.raises(RunError, match=r"it has no run\.json"):
        library.pull_policy(NAME)


@pytest.mark.parametrize("text", ["", "[file]", "file = 3", "= 3", 'name = 3\n[file]\npath = "x"'])
def test_a_card_that_is_not_valid_is_refused(hub, text):
    hub.commit(NAME, {policies.CARD: text.encode() or b"#"})
    with pytest.raises(CardError, match="the card of org/clone is not valid"):
        library.pull_policy(NAME)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "licence", "message"),
    [("clone", "MIT", "named org/name"), (NAME, None, "no licence until you choose one")],
)
def test_a_push_without_name_or_licence_is_refused(run, name, licence, message):
    with pytest.raises(OptionError, match=message):
        library.push_policy(run, name, licence)


def test_a_run_that_is_not_finished_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"complete": false}')
    with pytest.raises(RunError, match="is not finished"):
        library.push_policy(tmp_path, NAME, "MIT")
