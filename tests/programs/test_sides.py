"""Recorders in environments of several teams: one side learns, or all do, or none."""

import copy
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from offmarl import envs, tracking, vault
from offmarl.cli.policies import load
from offmarl.cli.programs import PolicyOptions
from offmarl.errors import OptionError, RunError, ShapeError, UnknownNameError
from offmarl.networks import PolicyConfig
from offmarl.programs import hyperparameters, load_policy, record_from_run, registry
from offmarl.programs.recording import fixed, online, tiers
from offmarl.programs.recording.recorder import LEARNED, OnlineRecorder, Version, run_directory
from offmarl.programs.recording.sides import (
    joint_policy,
    keep_opponents,
    opponents_of,
    players_of,
    policies_by_side,
    side_of,
)
from offmarl.programs.runs.continuing import start_of
from offmarl.teams import teams_of
from tests.children import stopped
from tests.runs import least_record, write_policy

RIVALS = f"{Path(__file__).parents[1] / 'envs' / 'rivals.py'}:Rivals"
ENV = envs.make(RIVALS)
CATS, MICE = teams_of(ENV.spec)
XOR = "classic/xor:time_limit=4"
STEPS = "/1", "/16", "/32"
SMALL = {"num_envs": 2, "total_steps": 32, "steps": 16, "evaluations": 2, "eval_episodes": 4}


def mappo(out, **options):
    program = registry.load("recorder", "mappo")
    sizes = {"env": RIVALS, "num_steps": 8, "minibatches": 1, "epochs": 1, "hidden": 4, "out": out}
    return program, program.Args(**sizes | SMALL | options)


def record(out, **options):
    program, args = mappo(out, **options)
    return program.main(args)


def recorder(out):
    """Return the recorder of a training in which both teams learn, and its first policy."""
    program, args = mappo(out)
    origin = registry.origin_of(program.make)
    (run,) = online._recorders(program.make, args, ENV, origin, out / "run", {})
    state = run.program.init(jax.random.key(0), hyperparameters(args))
    return run, (LEARNED, run.program.policy_params(state))


@pytest.mark.slow
def test_one_side_learns_and_the_data_hold_all(tmp_path):
    report = record(tmp_path, side="cats", opponents=("scripted",), tiers="random,replay")
    paths = {row["tier"]: Path(row["path"]) for row in report.data["vaults"]}
    assert paths["replay"].name == "mappo-cats-0-replay"
    assert set(report.data["vaults"][0]["mean_return"]) == {"cats", "mice"}
    for path in paths.values():
        data = vault.open_vault(path)
        assert vault.verify(path, deep=True).sound
        assert data.spec == replace(ENV.spec, name=data.spec.name)
        steps = data.transitions()
        assert (np.asarray(steps.action)[..., 1] == 1).all()  # the scripted mouse
        last = np.asarray(steps.policy_id)[..., 1]
        assert (last == last[0, 0]).all() and last[0, 0] not in steps.policy_id[..., ::2]
    assert sorted(set(np.asarray(steps.policy_id)[..., 0].ravel().tolist())) == [0, 1]

    run = tmp_path / "rivals.py:Rivals.run" / "mappo-cats-0"
    loaded = load_policy(run)
    assert loaded.spec.num_agents == 2 and not loaded.spec.extras
    # Other runs continue from it, wherever the code of its environment is now.
    learner, args = mappo(tmp_path, side="cats", init=run)
    side = side_of(ENV, "cats", ("random",))
    begin, program = start_of(args, side).begin, learner.make(side.spec, args, side)
    fresh = program.init(jax.random.key(5), hyperparameters(args))
    initial = program.policy_params(begin(program, fresh, 0))
    chex.assert_trees_all_equal(initial, loaded.params)

    players = policies_by_side(["cats=" + str(run), "mice=random"], ENV, range(3))
    assert players["cats"].agents == CATS.agents
    policy, params = joint_policy(ENV, players)
    view = ENV.reset(jax.random.key(0))[1].view
    action, log_prob, _ = policy.act(
        params, policy.initial_carry(), view.observation, view.legal_actions, jax.random.key(0)
    )
    assert action.shape == log_prob.shape == (3,) and (log_prob < 0).all()


@pytest.mark.slow
def test_each_of_several_teams_that_learn_has_returns_of_its_own(tmp_path):
    report = record(tmp_path, tiers="replay")
    (row,) = report.data["vaults"]
    assert set(row["mean_return"]) == {"cats", "mice"}
    policies = vault.open_vault(row["path"]).provenance["policies"]
    assert all(set(policy["return"]) == {"cats", "mice"} for policy in policies)
    lines = (tmp_path / "rivals.py:Rivals.run/mappo-0/metrics.jsonl").read_text()
    assert "episode_return_cats" in lines and '"episode_return"' not in lines


class Given(tiers.Ladder):
    """A ladder with one policy, whatever the tier."""

    def __init__(self, params):
        self.given = params

    def player(self, tier):
        return self.given, {"return": 1.0, "was": tier}


@pytest.mark.slow
def test_each_team_plays_a_tier_with_its_own_skill(tmp_path):
    run, params = recorder(tmp_path)
    ladders = [Given(params), Given(run.uniform())]
    tier = tiers.parse_tiers("expert-vs-random")[0]
    tiers._record_played(run, ladders, tier)
    data = vault.open_vault(run.vault("expert-vs-random"))
    steps = data.transitions()
    log_probs = np.asarray(steps.behaviour_log_prob)
    assert np.ptp(log_probs[..., 1]) < 1e-6 < np.ptp(log_probs[..., ::2])
    assert (np.asarray(steps.policy_id) == [0, 1, 0]).all()
    policies = data.provenance["policies"]
    assert [(policy["team"], policy["tier"], policy["was"]) for policy in policies] == [
        ("cats", "expert", "expert"),
        ("mice", "random", "random"),
    ]
    mice = run.by_team()[1]
    assert mice.about(Version(1, (1.0, 3.0)).of_team(1))["return"] == 3.0


@pytest.mark.parametrize(
    ("given", "checked"),
    [
        ("expert-vs-random", [["expert"], ["random"]]),
        ("random-vs-medium", [["random"], ["medium"]]),
        ("replay", [[], []]),
        ("expert", [["expert"], ["expert"]]),
        ("medium-replay", [["medium"], ["medium"]]),
    ],
)
def test_the_tiers_of_each_team_that_a_tier_depends_on_are_checked(given, checked):
    run = OnlineRecorder(*[None] * 8)._replace(env=ENV)
    (tier,) = tiers.parse_tiers(given)
    assert tiers._names(run, tier) == checked


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ("expert-vs-random-vs-poor", {}, r"names 3 tiers, and there are 2 teams \(cats, mice\)"),
        ("mixed=medium:0.5+expert:0.5", {}, "mixes policies, and 2 teams learn"),
        ("expert-vs-random", {"side": "cats"}, "is for several teams that learn at once"),
        ("random", {"opponents": ("random",)}, "give --side with its team or agents, or leave out"),
        ("random", {"side": "cats", "prefill": Path("a.vlt")}, "Leave out --prefill, or --side"),
    ],
)
def test_tiers_fit_the_teams_that_learn(tmp_path, given, options, message):
    with pytest.raises(OptionError, match=message):
        record(tmp_path, tiers=given, **options)
    assert not list(tmp_path.iterdir())


def test_a_team_s_skill_is_measured_against_a_reference(tmp_path):
    """The scripted agents do 0, 1 and 2; so the cats meet a mouse that does 1."""
    run, _ = recorder(tmp_path)
    cats, mice = run._replace(policy=ENV.scripted()).by_team()
    # Each cat earns its action plus 1, in 4 steps; the mouse loses what the cats do.
    assert cats.returns_in(cats.play((), jax.random.key(0))).tolist() == [4 * (1 + 3) / 2] * 4
    assert mice.returns_in(mice.play((), jax.random.key(0))).tolist() == [-8] * 4


@pytest.mark.parametrize(
    ("sources", "agents", "expected"),
    [
        (["random"], (0, 1, 2), {"cats": "random", "mice": "random"}),
        (["cats=scripted", "mice=random"], (0, 1, 2), {"cats": "scripted", "mice": "random"}),
        (["mice=scripted"], (1,), {"mice": "scripted"}),
        (["random"], (1, 2), {"agent_2": "random", "mice": "random"}),
        (
            ["agent_2=random", "mice=random+scripted:2", "agent_0=scripted"],
            (0, 1, 2),
            {"agent_0": "scripted", "agent_2": "random", "mice": "random+scripted"},
        ),
    ],
)
def test_policies_are_given_to_all_teams_or_to_each_side(sources, agents, expected):
    players = policies_by_side(sources, ENV, agents)
    assert {name: player.name for name, player in players.items()} == expected


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        (["cats=random"], OptionError, r"mice has no policy: add mice=POLICY"),
        (["cats=random", "cats=scripted", "mice=random"], OptionError, "cats was given two"),
        (["cats=random", "mice"], OptionError, "'mice' is not a policy of a side"),
        (["clever"], UnknownNameError, "policy for cats of .* no run.* named 'clever': known: ran"),
        (["cats=a/b:c.run/mappo-0", "mice=random"], UnknownNameError, "named 'a/b:c.run/mappo-0'"),
        (["cats=random", "dogs=random"], UnknownNameError, "team or agent of .* named 'dogs'"),
    ],
)
def test_mistakes_in_policies_are_named(sources, error, message):
    with pytest.raises(error, match=message):
        policies_by_side(sources, ENV, range(3))


@pytest.fixture
def learned(tmp_path):
    """A run of three seeds on the XOR game, and how a response to its policies is trained."""
    run, spec = tmp_path / "partners", envs.make(XOR).spec
    write_policy(run, PolicyConfig("feedforward"), spec, [0, 1, 2], later={16: 2.0, 32: -1.0})
    members = f"{run}@*+random:2+{run}@1/*"
    options = {"env": XOR, "side": "agent_0", "opponents": (members,), "tiers": "replay"}
    return run, options | {"total_steps": 160, "checkpoint_seconds": 0.0}


@pytest.mark.slow
def test_a_killed_response_ends_with_the_same_bits_without_the_runs_of_its_opponents(
    learned, tmp_path
):
    partners, options = learned
    (expected,) = record(tmp_path / "whole", **options).data["vaults"]
    code = (
        "from tests.programs.test_sides import *; from tests import plain; "
        "registry.origin_of(plain.make); "
        f"record(Path({str(tmp_path / 'killed')!r}), **{options!r})"
    )
    run = tmp_path / "killed" / f"{XOR}.run" / "mappo-agent_0-0"
    checkpoints = run / "checkpoints"
    stopped([sys.executable, "-c", code], lambda: len([*checkpoints.glob("[0-9]*")]) > 1)
    assert not tracking.read_run(run)["complete"]
    shutil.rmtree(partners)
    (resumed,) = record(tmp_path / "killed", **options).data["vaults"]
    steps = [vault.open_vault(row["path"]).transitions() for row in (expected, resumed)]
    chex.assert_trees_all_equal(*steps)
    assert len(np.unique(np.asarray(steps[0].policy_id)[..., 1])) == 7  # 3 seeds, random, 3 steps
    described = [
        vault.open_vault(row["path"]).provenance["policies"] for row in (expected, resumed)
    ]
    assert described[0] == described[1]
    assert [p["name"] for p in described[1][-3:]] == [f"partners@1{x}" for x in STEPS]

    # Its tiers and evaluations need no other run, wherever it is.
    target = run.rename(tmp_path / "moved")
    (more,) = record_from_run(target, "random", steps=16, out=tmp_path).data["vaults"]
    again = vault.open_vault(more["path"]).provenance["policies"]
    assert [p["name"] for p in again[-7:]] == [p["name"] for p in described[0][-7:]]
    environment, _ = load(target, PolicyOptions(act="greedy"), [0], [])
    side = side_of(
        envs.make(XOR), "agent_0", run=tmp_path / "whole" / run.relative_to(tmp_path / "killed")
    )
    chex.assert_trees_all_equal(environment.others, side.others)


@pytest.mark.slow
def test_copies_of_opponents_are_checked(learned, tmp_path):
    partners, options = learned
    record(tmp_path, **options | {"total_steps": 16, "tiers": ""})
    run = tmp_path / f"{XOR}.run" / "mappo-agent_0-0"
    shutil.rmtree(partners)
    with pytest.raises(UnknownNameError, match="no run's directory"):
        record(tmp_path / "new", **options)
    entry = json.loads((run / "run.json").read_text())
    shutil.rmtree(run / "checkpoints")  # as if it had stopped before the first
    (run / "run.json").write_text(json.dumps(entry | {"complete": False}))
    record(tmp_path, **options | {"total_steps": 16, "tiers": ""})
    for change, error, message in (
        ({"parameters": "0" * 64}, RunError, "no copy of the policy partners@0 that it learn"),
        ({"run": None}, RunError, "run.json is not valid: .*run: Expected str"),
        (None, UnknownNameError, "no run's directory, named ''"),
    ):
        broken = copy.deepcopy(entry)
        members = broken["opponents"]["agent_1"]["members"]
        members[0] = {} if change is None else members[0] | change
        (run / "run.json").write_text(json.dumps(broken))
        with pytest.raises(error, match=message):
            load(run, PolicyOptions(act="greedy"), [0], [])
    (run / "run.json").write_text(json.dumps(entry))
    shutil.rmtree(run / "opponents")
    with pytest.raises(RunError, match=r"name the opponents with --opponents"):
        load(run, PolicyOptions(act="greedy"), [0], [])
    assert load(run, PolicyOptions(act="greedy"), [0], ("random",))


def test_sides_whose_opponents_are_files_of_one_name_keep_their_own(tmp_path):
    """They are named again because the run of a third one is gone."""
    code = "from offmarl.envs.scripted import scripted_policies\n\n\ndef play(env):\n"
    code += "    return scripted_policies(env)['scripted']\n"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rule.py").write_text(f"{code}\n\nNAME = {name!r}\n")
    names = [f"{tmp_path}/{name}/rule.py:play" for name in ("a", "b")]
    side = side_of(ENV, "agent_0", [f"agent_2={names[0]}", f"mice={names[1]}"])
    opponents = opponents_of(side)["opponents"]
    sums = {name: about["sha256"] for name, about in opponents.items()}
    assert sums["agent_2"] != sums["mice"]
    record = least_record(kind="recorder", opponents=opponents)
    tracking.write_json(tmp_path / "run" / tracking.RUN_FILE, record)
    (tmp_path / "run" / tracking.OPPONENTS).mkdir()
    gone = [f"agent_2={names[0]}", f"mice={names[1]}+gone"]
    again = side_of(ENV, "agent_0", gone, tmp_path / "run")
    assert opponents_of(again)["opponents"] == opponents


def test_a_run_of_other_sizes_cannot_act(tmp_path):
    spec = envs.make("probe/match").spec
    write_policy(tmp_path / "run", PolicyConfig("feedforward"), spec, [0])
    with pytest.raises(ShapeError, match=r"cannot act for cats of .*: give a run that was trained"):
        side_of(ENV, "mice", [str(tmp_path / "run")])


@pytest.mark.slow
def test_fixed_policies_are_recorded_by_team(tmp_path):
    policy = ("cats=scripted", "mice=random")
    args = fixed.PolicyArgs(env=RIVALS, policy=policy, out=tmp_path, steps=16, num_envs=2)
    report = fixed.record_fixed(args)
    (row,) = report.data["vaults"]
    assert Path(row["path"]).name == "scripted-vs-random-0"
    data = vault.open_vault(row["path"])
    assert vault.verify(data.path, deep=True).sound
    steps = data.transitions()
    assert (np.asarray(steps.policy_id) == [0, 1, 0]).all()
    assert (np.asarray(steps.action)[..., ::2] == [0, 2]).all()
    assert (np.asarray(steps.behaviour_log_prob)[..., ::2] == 0).all()
    chance = np.asarray(steps.behaviour_log_prob)[..., 1]
    np.testing.assert_allclose(chance, -np.log(3), rtol=1e-6)
    policies = data.provenance["policies"]
    assert [(entry["team"], entry["policy_id"]) for entry in policies] == [("cats", 0), ("mice", 1)]
    assert data.policy_ids == (0, 1)
    assert fixed.record_fixed(args).data["outcome"].startswith("complete already")


LAZY = """
import jax.numpy as jnp
from offmarl.types import Policy

def lazy(env):
    n = env.spec.num_agents
    return Policy(tuple, lambda p, c, *_: (jnp.zeros(n, jnp.int32), jnp.zeros(n), c))
"""


def test_a_recording_is_that_of_who_acts(tmp_path, monkeypatch):
    def record(policy, **changed):
        defaults = {"env": "classic/xor", "steps": 4, "num_envs": 2, "name": "a", "out": tmp_path}
        args = fixed.PolicyArgs(policy=(policy,), **defaults | changed)
        return fixed.record_fixed(args).data["outcome"]

    (tmp_path / "mine.py").write_text(LAZY)
    mine = f"{tmp_path / 'mine.py'}:lazy"
    assert record(mine) == "recorded" and record(mine).startswith("complete already")
    monkeypatch.chdir(tmp_path)
    for spelling in ("mine.py:lazy", "./mine.py:lazy"):
        assert record(spelling).startswith("complete already")
    (about,) = vault.open_vault(tmp_path / "classic/xor.vlt/a").provenance["policies"]
    assert about["policy"] == "mine.py:lazy"  # without the directories of this machine
    with pytest.raises(RunError, match=r"with policies.all.policy='mine.py:lazy', not 'random'"):
        record("random")
    with pytest.raises(RunError, match="with extras=None"):
        record(mine, env_states=True)
    before = opponents_of(side_of(ENV, "cats", [mine]))
    (tmp_path / "mine.py").write_text(LAZY.replace("zeros(n, jnp.int32)", "ones(n, jnp.int32)"))
    with pytest.raises(RunError, match=r"with policies.all.sha256="):
        record(mine)
    assert opponents_of(side_of(ENV, "cats", [mine])) != before


@pytest.mark.slow
def test_random_play_is_recorded_for_one_team(tmp_path):
    program = registry.load("recorder", "random")
    args = program.Args(env="probe/match", out=tmp_path, steps=8, num_envs=2, seed=3)
    (row,) = program.main(args).data["vaults"]
    data = vault.open_vault(row["path"])
    assert (Path(row["path"]).name, row["mean_return"]) == ("random-3", data.episodes.mean_return)
    (policy,) = data.provenance["policies"]
    assert "team" not in policy and isinstance(policy["return"], float)


def test_fixed_policies_are_evaluated_with_another_key_than_those_they_are_recorded_with():
    key = jax.random.key(3)
    evaluation = jax.random.fold_in(key, fixed._EVALUATE)
    for recording in jax.random.split(key):
        assert (jax.random.key_data(evaluation) != jax.random.key_data(recording)).any()


@pytest.mark.slow
def test_an_agent_learns_beside_all_seeds_of_a_run(tmp_path):
    """All pairs of them are recorded, and each step has the ids of the drawn members."""
    run = tmp_path / "run"
    write_policy(run, PolicyConfig("feedforward"), envs.make(XOR).spec, [3, 4, 5])
    options = {"env": XOR, "side": "agent_0", "opponents": (f"{run}@*",), "tiers": "random,replay"}
    for first, row in zip((1, 3), record(tmp_path, **options).data["vaults"], strict=True):
        data = vault.open_vault(row["path"])
        assert str(tmp_path) not in str(data.provenance)  # nor other paths of this machine
        by_id = {p["policy_id"]: p["name"] for p in data.provenance["policies"][-3:]}
        assert by_id == {first: "run@3", first + 1: "run@4", first + 2: "run@5"}
        ids = np.asarray(data.transitions().policy_id)
        assert set(ids[..., 1].ravel().tolist()) <= set(by_id)
        assert ids[..., 0].max() < first
        assert vault.verify(data.path, deep=True).sound

    policy = f"agent_0={run}@*", f"agent_1={run}@4+random:3"
    args = fixed.PolicyArgs(env=XOR, policy=policy, out=tmp_path, steps=800, num_envs=4)
    (row,) = fixed.record_fixed(args).data["vaults"]
    data = vault.open_vault(row["path"])
    assert data.path.name == "run-all-vs-run-4+random-0"
    assert data.provenance["tier"] == "run@all-vs-run@4+random"
    ids = np.asarray(data.transitions().policy_id).reshape(-1, 2)
    assert {*map(tuple, ids.tolist())} == {(a, b) for a in (0, 1, 2) for b in (3, 4)}
    assert 0.55 < (ids[:, 1] == 4).mean() < 0.95
    names = [p["name"] for p in data.provenance["policies"]]
    assert names == ["run@3", "run@4", "run@5", "run@4", "random"]


def test_the_name_of_several_agents_can_be_published(tmp_path):
    _, args = mappo(tmp_path, side="agent_0,agent_1")
    assert run_directory(args, "mappo").name == "mappo-agent_0-agent_1-0"


def test_the_path_of_a_run_may_have_a_plus(tmp_path):
    run = tmp_path / "c++" / "run"
    write_policy(run, PolicyConfig("feedforward"), ENV.spec, [3, 4])
    for source, names in ((run, ["run"]), (f"random+{run}@4:2", ["random", "run@4"])):
        (player,) = policies_by_side([str(source)], ENV, MICE.agents).values()
        assert [member.name for member in player.members or [player]] == names


def test_a_game_without_a_scripted_policy_says_to_name_opponents():
    with pytest.raises(UnknownNameError, match=r"has no scripted policy .*--opponents"):
        side_of(envs.make("classic/rps"), "first", ("scripted",))


@pytest.mark.parametrize(
    ("which", "draws"), [("@3", False), ("@3/sampled", True), ("@3/1/greedy", False)]
)
def test_the_name_of_a_member_says_how_it_acts(tmp_path, which, draws):
    run, copies = tmp_path / "run", tmp_path / "copies"
    write_policy(run, PolicyConfig("feedforward"), ENV.spec, [3, 4])
    side = side_of(ENV, "cats", [f"mice={run}{which}"])
    write_policy(copies, PolicyConfig("feedforward"), ENV.spec, [0], **opponents_of(side))
    keep_opponents(side, copies)
    shutil.rmtree(run)
    for variant in (side, side_of(ENV, "cats", (), copies)):
        member = players_of(variant)["mice"]
        assert member.name == f"run{which}"
        assert member.policy.draws(member.params) == draws


@pytest.mark.parametrize(
    ("which", "error", "message"),
    [
        ("@7", RunError, r"has no seed 7: its seeds are \[3, 4\]"),
        ("@x", OptionError, r"run@x names no seed: write RUN@SEED, RUN@SEED/STEP or RUN@\*"),
        ("@", OptionError, "run@ names no seed"),
        ("@3/drawn", OptionError, "step is .drawn."),
        ("@3/9", RunError, "no checkpoint of step 9, but of \\[1\\]"),
        ("@*:-1", OptionError, r"cannot have the weights \[-1.0, -1.0\]"),
    ],
)
def test_mistakes_in_members_are_named(tmp_path, which, error, message):
    write_policy(tmp_path / "run", PolicyConfig("feedforward"), ENV.spec, [3, 4])
    with pytest.raises(error, match=message):
        side_of(ENV, "agent_0", [f"{tmp_path}/run{which}"])
