"""Continuing from another run: what is carried over, what starts anew, and what does not fit."""

import shutil
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from baselines import bc, cfcql, iql_cql, maicq, qmix_bcq, qmix_cql
from offmarl import envs, load_policy, tracking, vault
from offmarl.checkpoint import Checkpoints
from offmarl.errors import OptionError, RunError, ShapeError
from offmarl.networks import PolicyConfig, QParams, make_policy
from offmarl.programs import hyperparameters, record_policy
from offmarl.programs.program import Program, structure
from offmarl.programs.recording import online
from offmarl.programs.runs import training
from offmarl.programs.runs.continuing import (
    InitialRun,
    TrainingStart,
    begin_states,
    carry_over,
    learned_fields,
    start_of,
    start_of_baseline,
)
from offmarl.programs.runs.dataset import DatasetStatistics, is_scale, read
from offmarl.programs.runs.normalisation import normalise_as_asked
from offmarl.programs.runs.trained import stack_seeds
from recorders import isac, maddpg, mappo, masac, qmix, vdn
from tests.runs import least_record
from tests.vault.experience import make, written

ENV = envs.make("probe/observation")
ONLINE = {"num_envs": 4, "num_steps": 8}
BUFFER = {"length": 4, "batch_size": 4, "capacity": 64}
REPLAY = ONLINE | {"updates": 1, "batch_size": 4, "capacity": 64}
STATISTICS = {"returns": np.ones(2), "return_scale": np.ones(()), "scored": np.ones(2, bool)}
SIZES = {
    maddpg: REPLAY,
    masac: REPLAY,
    isac: REPLAY,
    mappo: ONLINE,
    vdn: ONLINE | BUFFER,
    qmix: ONLINE | BUFFER,
}


@cache
def built(program, **options):
    """Return a program and a fresh state."""
    offline = program not in SIZES
    sizes = SIZES.get(program, {"vault": "a.vlt"})
    args = program.Args(**sizes | {"hidden": 8} | options)
    data = DatasetStatistics(None, STATISTICS) if offline else ENV
    instance = normalise_as_asked(args, program.make(ENV.spec, structure(args), data), data)
    state = jax.jit(instance.init)(jax.random.key(0 if offline else 1), hyperparameters(args))
    return instance, state


def trained(program, **options):
    """Return a program and a state after training, of which every leaf has values of its own."""
    instance, state = built(program, **options)
    numbers = iter(range(1, 1000))
    parts = jax.tree.map(
        lambda leaf: jnp.full_like(leaf, next(numbers)), learned_fields(state, instance.given)
    )
    return instance, state._replace(**parts, **dict.fromkeys(instance.given, jnp.float32(-1)))


same = chex.assert_trees_all_equal


def adam_of(state):
    """Return the moments of Adam in a state, wherever the optimiser keeps them."""
    nodes = jax.tree.leaves(state.optimiser, is_leaf=lambda node: hasattr(node, "mu"))
    (adam,) = (node for node in nodes if hasattr(node, "mu"))
    return adam


@pytest.mark.slow
@pytest.mark.parametrize("offline", [qmix_cql, qmix_bcq])
def test_qmix_continues_with_all_networks_and_the_optimiser(offline):
    (source, run), (program, fresh) = trained(offline), built(qmix)
    state = carry_over(source, run, program, fresh, "run")
    for name in ("params", "target"):
        same(getattr(state, name)._asdict(), getattr(run, name)._asdict())
    if offline is qmix_cql:  # and the other has moments of its behaviour beside them
        same(adam_of(state).count, adam_of(run).count)
        for moment in ("mu", "nu"):
            moments = getattr(adam_of(state), moment), getattr(adam_of(run), moment)
            same(*(tree._asdict() for tree in moments))
    same(state.epsilon, fresh.epsilon)
    same(state.capture, fresh.capture)


@pytest.mark.slow
def test_what_the_run_lacks_starts_anew():
    (source, run), (program, fresh) = trained(iql_cql), built(qmix)
    state = carry_over(source, run, program, fresh, "run")
    same(state.params.agent, run.params)
    same(state.target.agent, run.target)
    same(state.params.mixer, fresh.params.mixer)
    same(adam_of(state), adam_of(fresh))  # its moments belong to all parameters together
    (program, fresh) = built(vdn)
    state = carry_over(source, run, program, fresh, "run")
    same(state.params.agent, run.params)
    same(adam_of(state).mu.agent, adam_of(run).mu)


@pytest.mark.slow
def test_actor_critics_continue_from_a_run_of_their_own_with_everything():
    (source, run), (ours, fresh) = trained(maddpg), built(maddpg)
    state = carry_over(source, run, ours, fresh, "run")
    for name in ("params", "target", "optimiser"):
        same(getattr(state, name), getattr(run, name))


@pytest.mark.slow
@pytest.mark.parametrize("program", [cfcql, maicq, qmix_bcq])
def test_counters_and_what_the_arguments_give_are_those_of_the_new_run(program):
    (source, run), (ours, fresh) = trained(program), built(program)
    state = carry_over(source, run, ours, fresh, "run")
    for name in ("updates", *ours.given):
        same(getattr(state, name), getattr(fresh, name))
    for name in state._fields:
        if name not in ("updates", *ours.given):
            same(getattr(state, name), getattr(run, name))
            assert all(leaf.ndim for leaf in jax.tree.leaves(getattr(state, name))) or (
                "optimiser" in name
            )


def test_scales_of_the_networks_are_kept_and_facts_of_the_data_are_not():
    names = "observation_moments", "return_scale", "returns", "scored"
    assert [is_scale(name) for name in names] == [True, True, False, False]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "options", "program", "part"),
    [(isac, {}, masac, "critics"), (qmix_cql, {"mixer_embed": 16}, qmix, "mixer")],
)
def test_critics_and_mixers_of_other_sizes_start_anew(source, options, program, part, notices):
    (theirs, run), (ours, fresh) = trained(source, **options), built(program)
    state = carry_over(theirs, run, ours, fresh, "run")
    same(getattr(state.params, part), getattr(fresh.params, part))
    same(getattr(state.target, part), getattr(fresh.target, part))
    acting = "actor" if part == "critics" else "agent"
    same(getattr(state.params, acting), getattr(run.params, acting))
    (line,) = notices
    assert f"{part} (of other sizes there)" in line and f"target {part} (of other" in line


@pytest.mark.slow
@pytest.mark.parametrize(("recorder", "others"), [(mappo, "critic"), (masac, "critics")])
def test_actor_critics_continue_from_a_clone_with_its_actor(recorder, others):
    (source, run), (program, fresh) = trained(bc), built(recorder, network="recurrent")
    state = carry_over(source, run, program, fresh, "run")
    same(state.params.actor, run.params)
    same(getattr(state.params, others), getattr(fresh.params, others))
    if recorder is mappo:
        same(state.moments, fresh.moments)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (qmix_cql, {"hidden": 16}, r"policy/network/params/\S+ is \(16,\) there, and \(8,\)"),
        (bc, {}, r"policy/\S+ is absent there"),
    ],
)
@pytest.mark.slow
def test_networks_that_differ_are_named(source, options, message):
    with pytest.raises(ShapeError, match=message):
        carry_over(*trained(source, **options), *built(qmix), "run")


def test_a_number_is_not_absent():
    program = Program(lambda *_: None, (), lambda _: None, lambda state: state["params"])
    trained, fresh = ({"params": {"scale": x}} for x in (np.float32(0), np.zeros(2)))
    with pytest.raises(ShapeError, match=r"scale is \(\) there, and \(2,\) here.*\(hidden=3\)"):
        carry_over(program, trained, program, fresh, "run", "hidden=3")


def test_windows_longer_than_the_data_are_refused(random_data, tmp_path):
    data = random_data("probe/observation")
    args = iql_cql.Args(vault=data, out=tmp_path / "new", updates=2, env="none", length=10_000)
    with pytest.raises(
        OptionError, match=r"--length 10000 is more than the data has \([\d,]+ steps"
    ):
        iql_cql.main(args)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_refused_start_leaves_no_run_behind(before, tmp_path):
    data, run = before
    args = iql_cql.Args(vault=data, out=tmp_path / "new", updates=2, hidden=4, init=run, env="none")
    with pytest.raises(ShapeError, match=r"another network.*\(.*hidden=8"):
        iql_cql.main(args)
    shutil.copytree(run, tmp_path / "none", ignore=shutil.ignore_patterns(tracking.CHECKPOINTS))
    with pytest.raises(RunError, match="none/checkpoints has no checkpoint: give the directory"):
        iql_cql.main(replace(args, init=tmp_path / "none"))
    assert not (tmp_path / "new").exists()
    online_args = qmix.Args(env="probe/observation", out=tmp_path / "online", hidden=4, init=run)
    with pytest.raises(ShapeError, match="another network"):
        qmix.main(online_args)
    assert not any((tmp_path / "online").rglob("run.json"))


def save(path, recorder, program, state, **options):
    """Save a run of a recorder that continued from another one, and return its arguments."""
    args = {"hidden": 8, "env": "probe/observation", **SIZES[recorder], **options}
    name, spec = recorder.__name__.removeprefix("recorders."), ENV.spec.to_json()
    record = least_record(kind="recorder", program=name, args=args, spec=spec, init={"run": "a"})
    tracking.write_json(path / tracking.RUN_FILE, record)
    tree = {"state": [state], "policy": stack_seeds([program.policy_params(state)])}
    Checkpoints(path / tracking.CHECKPOINTS).save(1, tree, {})
    return args


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """Return random data, and a run of qmix_cql on it."""
    root = tmp_path_factory.mktemp("before")
    policy, data = make_policy(PolicyConfig("random"), ENV.spec), root / "data.vlt" / "random"
    record_policy(ENV, policy, (), data, steps=256, num_envs=4)
    shared = {"vault": data, "out": root / "run", "updates": 2, "batch_size": 4, "length": 4}
    return data, qmix_cql.main(qmix_cql.Args(**shared, hidden=8, env="none"))


@pytest.mark.slow
def test_a_recorder_takes_over_what_the_values_of_a_run_depend_on(before, notices):
    data, run = before
    scale = 20 / float(read(run / "dataset.npz")["return_scale"])
    args = masac.Args(env="probe/observation", hidden=8, init=run, prefill=data)
    expected = {"gamma": 0.99, "reward_scale": pytest.approx(scale)}
    assert start_of(args, ENV).scale == expected
    assert "gamma 0.99, and not 0.95: this run has gamma 0.99, too" in notices[0]
    assert len(notices) == 2
    assert not start_of(replace(args, reward_scale=scale, gamma=0.99), ENV).scale
    assert not start_of(qmix.Args(env="probe/observation", init=run), ENV).scale  # starts anew
    assert not start_of(mappo.Args(env="probe/observation"), ENV).scale


@pytest.mark.parametrize(("largest", "factor"), [(0.0, {}), (4.0, {"reward_scale": 5})])
def test_the_factor_of_a_run_is_that_of_its_largest_return_if_it_saw_rewards(
    largest, factor, tmp_path
):
    ours, state = built(masac)
    state = state._replace(largest_return=jnp.float32(largest))
    save(tmp_path, masac, ours, state, gamma=0.9, reward_scale=0.0)
    run = InitialRun.of(tmp_path, ENV.spec)
    assert run.scale == {"gamma": 0.9} | factor


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"gamma": 0.9}, {"gamma": 0.9905}, {"reward_scale": 7.0}])
def test_values_of_another_unit_are_refused(before, given):
    args = masac.Args(env="probe/observation", hidden=8, init=before[1], **given)
    with pytest.raises(OptionError, match=rf"leave out --{next(iter(given))[:6]}"):
        start_of(args, ENV)


@pytest.mark.slow
def test_a_baseline_keeps_the_unit_of_the_values_of_a_run(before, tmp_path):
    data, run = before
    args = qmix_cql.Args(vault=data, init=run, hidden=8, env="none", updates=1, length=4)
    start = start_of_baseline(args, ENV.spec)
    assert start.scale == {} and start.statistics["return_scale"] == pytest.approx(
        float(read(run / "dataset.npz")["return_scale"])
    )
    with pytest.raises(OptionError, match="leave out --no-scale-rewards"):
        start_of_baseline(replace(args, scale_rewards=False), ENV.spec)
    unscaled = qmix_cql.main(
        replace(args, init=None, out=tmp_path / "run", scale_rewards=False, gamma=0.9)
    )
    start = start_of_baseline(replace(args, init=unscaled), ENV.spec)
    assert start.scale == {"gamma": 0.9} and start.statistics["return_scale"] == 20


def test_a_seed_continues_from_the_same_one_alone_and_beside_others():
    ours, fresh = built(iql_cql)
    runs = [jax.tree.map(lambda leaf, i=i: jnp.full_like(leaf, i), fresh) for i in range(3)]
    start = TrainingStart({}, InitialRun("run", ours, runs, {"seeds": [4, 5, 6]}, "", {}))
    for seeds in ([5], [4, 5, 6, 7], [3]):
        states = stack_seeds([fresh] * len(seeds))
        began = begin_states(start, ours, states, seeds)
        assert [float(x.ravel()[0]) for x in jax.tree.leaves(began.params)[0]] == [
            (seed - 4) % 3 for seed in seeds
        ]


@pytest.mark.slow
@pytest.mark.parametrize("source", [qmix_cql, iql_cql, qmix_bcq])
def test_the_policy_of_a_run_is_the_guide_of_a_learner_that_starts_anew(source):
    (theirs, run), (ours, fresh) = trained(source), built(qmix)
    state = InitialRun("run", theirs, [run], {"seeds": [0]}, "", {}).begin(ours, fresh, 0)
    same(state._replace(rollout=None, guide=None), fresh._replace(rollout=None))
    same(ours.policy_params(state).network, theirs.policy_params(run).network)
    same(state.guide.agent, theirs.policy_params(run).network)


@pytest.mark.slow
@pytest.mark.parametrize("worse", [False, True])
def test_a_run_continues_with_its_policy_although_that_is_its_guide(worse, tmp_path):
    ours, state = trained(qmix)
    guide = QParams(jax.tree.map(jnp.ones_like, state.params.agent), jnp.zeros(()))
    state = ours.guided(state, guide)
    scores = jnp.array([[100.0 if worse else 1.0, 100], [50.0, 100]])
    state = state._replace(guide=state.guide._replace(scores=scores))
    args = save(tmp_path, qmix, ours, state)
    run, acts = tmp_path, load_policy(tmp_path).params.network
    same(acts, state.params.agent if worse else guide.network)
    start = start_of(qmix.Args(**args, init=run), ENV)
    same(ours.policy_params(start.begin(ours, built(qmix)[1], 0)).network, acts)
    offline = qmix_cql.Args("a.vlt", hidden=8, gamma=0.95, init=run)
    initial = start_of_baseline(offline, ENV.spec).begin(*built(qmix_cql), 0)
    same(initial.params.agent, acts)
    same(initial.target.agent, acts)
    same(initial.params.mixer, state.params.mixer)


@pytest.mark.nightly
def test_a_recorder_continues_from_a_run_and_its_data_and_resumes(before, tmp_path, monkeypatch):
    data, run = before
    sizes = {"env": "probe/observation", "total_steps": 128, "evaluations": 2, "eval_episodes": 4}
    args = qmix.Args(
        **SIZES[qmix] | sizes, hidden=8, tiers="replay", init=run, prefill=data, updates=1
    )

    def main(out, **options):
        qmix.main(replace(args, out=tmp_path / out, **options))
        return load_policy(tmp_path / out / "probe" / "observation.run" / "qmix-0").params

    expected = main("whole")
    save, saved = training._Journal._save, []

    def stop(self, *args):
        save(self, *args)
        saved.append(args)
        if len(saved) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training._Journal, "_save", stop)
        main("stopped", checkpoint_seconds=0.0)
    same(main("stopped"), expected)
    record = tracking.read_run(tmp_path / "whole" / "probe" / "observation.run" / "qmix-0")
    assert record["init"]["program"] == "qmix_cql"
    assert record["args"]["init"] == str(run) and record["args"]["prefill"] == str(data)
    assert record["replay"]["digest"] == vault.open_vault(data).digest()
    path = tmp_path / "whole" / "probe" / "observation.vlt" / "qmix-0-replay"
    assert vault.open_vault(path).num_steps == 128  # its own steps alone
    assert vault.open_vault(path).provenance["recipe"]["init"] == record["init"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "given", "count", "length"),
    [
        (qmix, {"batch_size": 8, "length": 4}, 4, 4),
        (masac, {"batch_size": 8}, 4, 1),
        (maddpg, {"batch_size": 8}, 4, 1),
        (maddpg, {"batch_size": 30, "network": "recurrent"}, 1, 20),
        (maddpg, {"batch_size": 30, "length": 5}, 3, 5),
        (isac, {"batch_size": 32, "network": "recurrent", "length": 5, "burn_in": 2}, 3, 7),
    ],
)
def test_half_of_the_windows_are_drawn_from_the_data(before, program, given, count, length):
    args = program.Args(env="probe/observation", prefill=before[0], **given)
    batch = start_of(args, ENV).prior().sample(jax.random.key(0))
    assert batch.mask.shape == (count, length)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_finished_run_with_a_buffer_records_tiers_without_training_again(tmp_path):
    sizes = {"env": "probe/observation", "total_steps": 128, "evaluations": 2, "eval_episodes": 4}
    args = qmix.Args(**SIZES[qmix] | sizes, hidden=8, tiers="", steps=16, out=tmp_path)
    qmix.main(args)
    run = tmp_path / "probe" / "observation.run" / "qmix-0"
    checkpoints, metrics = (
        sorted(run.glob("checkpoints/*")),
        (run / tracking.METRICS_FILE).read_bytes(),
    )
    assert len(checkpoints) == 1  # and no buffer
    report = qmix.main(replace(args, tiers="random"))
    assert [vault["tier"] for vault in report.data["vaults"]] == ["random"]
    assert sorted(run.glob("checkpoints/*")) == checkpoints
    assert (run / tracking.METRICS_FILE).read_bytes() == metrics


def test_data_of_another_environment_is_refused_before_a_run_begins(tmp_path):
    written(tmp_path / "a.vlt", make(rows=2, steps=4))
    args = qmix.Args(env="probe/observation", prefill=tmp_path / "a.vlt", out=tmp_path / "out")
    with pytest.raises(ShapeError, match=r"a\.vlt.* and probe/observation differ in action"):
        qmix.main(args)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_each_seed_has_prior_data_of_its_own_if_there_is_room(before, monkeypatch):
    args = qmix.Args(env=ENV.spec.name, prefill=before[0])
    stub = SimpleNamespace(_start=start_of(args, ENV), args=args)
    states = [built(qmix)[1]] * 3
    room = 2 * stub._start.prior().nbytes
    monkeypatch.setattr("offmarl.replay.device.room_on", lambda _devices: room)
    priors = [state.capture.prior for state in online._Training._beside_prior(stub, states)]
    same(*(prior.rows for prior in priors[:2]))
    places = {leaf.unsafe_buffer_pointer() for p in priors for leaf in jax.tree.leaves(p.rows)}
    assert len(places) == len(jax.tree.leaves([p.rows for p in priors]))
    with pytest.raises(OptionError, match="3 more copies of"):
        online._Training._beside_prior(stub, [*states, states[0]])


@pytest.mark.slow
def test_one_window_has_no_half(before):
    args = masac.Args(env=ENV.spec.name, prefill=before[0], batch_size=20, network="recurrent")
    with pytest.raises(OptionError, match="give a larger --batch-size"):
        start_of(args, ENV).check(*built(masac))


@pytest.mark.slow
def test_a_program_without_replay_takes_none(before, tmp_path):
    args = mappo.Args(env="probe/observation", out=tmp_path, num_envs=4, num_steps=8)
    with pytest.raises(OptionError, match=r"has no replay .*: leave out --prefill"):
        mappo.main(replace(args, prefill=before[0], tiers="random"))
