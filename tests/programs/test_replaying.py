"""Environment states are recorded, and episodes are played again from them to the same bits."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import offmarl
from offmarl import envs, vault
from offmarl.envs import states
from offmarl.errors import OptionError, RunError, ShapeError
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import record_policy, registry, replay_episode
from offmarl.programs.recording import replaying
from offmarl.programs.recording.recorder import tier_key
from offmarl.report import render

SWARM = "swarm/coverage-2:time_limit=6"
PURSUIT = "swarm/pursuit-2-1:evaders=learned,randomise=noise,time_limit=6"


def record(name, path, steps=96, num_envs=4, **options):
    env = envs.record_states(envs.make(name))
    policy = make_policy(PolicyConfig("random"), env.spec)
    record_policy(env, policy, (), path, steps, num_envs, **options)
    return offmarl.open(path)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    return record(SWARM, tmp_path_factory.mktemp("states") / "a.vlt", 400)


@pytest.mark.bits
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(SWARM, marks=pytest.mark.slow),
        pytest.param("classic/bridge", marks=pytest.mark.nightly),
        pytest.param("probe/match", marks=pytest.mark.nightly),
        pytest.param("jaxmarl/mpe/simple_spread_v3", marks=pytest.mark.nightly),
        pytest.param("jaxmarl/smax/3m", marks=pytest.mark.nightly),
    ],
)
def test_episodes_are_played_again_bit_for_bit(name, swarm, tmp_path):
    if name.startswith("jaxmarl"):
        pytest.importorskip("jaxmarl")
    steps = 96 if name.startswith("probe") else 200
    data = swarm if name == SWARM else record(name, tmp_path / "a.vlt", steps)
    plain = vault.map(data, tmp_path / "b.vlt", lambda _: {})
    assert plain.digest() == data.digest()
    for number in (0, len(data) // 2, len(data) - 1):
        episode, replay = data.episode(number), replay_episode(data, number)
        steps, count = episode.transition, len(episode.transition.last)
        assert replay.exact
        assert {len(leaf) for leaf in jax.tree.leaves(replay.states)} == {count + 1}
        np.testing.assert_array_equal(replay.reward, steps.reward)
        observations = np.asarray(replay.next_view.observation)
        np.testing.assert_array_equal(observations[:-1], steps.view.observation[1:])
        np.testing.assert_array_equal(observations[-1], episode.final.observation)
        ends = slice(count - (data.episodes.cause[number] == "cut"))
        np.testing.assert_array_equal(replay.last[ends], steps.last[ends])
        np.testing.assert_array_equal(replay.terminated[ends], steps.terminated[ends])
        np.testing.assert_array_equal(replay.truncated[ends], steps.truncated[ends])


@pytest.mark.slow
@pytest.mark.bits
def test_recordings_are_otherwise_the_same(swarm, tmp_path):
    env = envs.make(swarm.spec.name)
    policy = make_policy(PolicyConfig("random"), env.spec)
    record_policy(env, policy, (), tmp_path / "plain.vlt", 400, 4)
    plain = offmarl.open(tmp_path / "plain.vlt")
    assert set(swarm.spec.extras) == {"env_state", "env_key"} and not plain.spec.extras
    ours, theirs = (data.transitions()._replace(extras=None) for data in (swarm, plain))
    chex.assert_trees_all_equal(ours, theirs)
    with pytest.raises(RunError, match="started with extras="):
        record_policy(env, policy, (), swarm.path, 400, 4)
    replay = replay_episode(plain, 3)  # with the keys of the recording
    np.testing.assert_allclose(replay.reward, plain.episode(3).transition.reward, atol=1e-5)


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize(
    ("env", "side"), [("swarm/coverage-2:randomise=noise,time_limit=6", ""), (PURSUIT, "pursuers")]
)
def test_a_tier_is_played_again_with_the_keys_of_its_recording(tmp_path, env, side):
    program = registry.load("recorder", "ippo")
    sizes = {"num_envs": 4, "num_steps": 8, "total_steps": 32, "steps": 96, "evaluations": 1}
    sizes |= {"hidden": 4, "epochs": 1, "minibatches": 1, "eval_episodes": 2, "seed": 3}
    program.main(program.Args(env=env, out=tmp_path, tiers="random", side=side, **sizes))
    (path,) = (tmp_path / f"{env}.vlt").glob("ippo-*3-random")
    data = offmarl.open(path)
    for number in (0, len(data) - 1):
        assert replay_episode(data, number).exact


@pytest.mark.bits
@pytest.mark.nightly
def test_scenes_are_those_of_the_states(swarm, tmp_path):
    """Also in a vault made from another one, which has no other record of the random keys."""
    later = vault.filter(swarm, "index > 5", tmp_path / "later.vlt")
    env = envs.make(swarm.spec.name)
    clip = render.replay(env, later, 0)
    states = replay_episode(later, 0).states
    assert len(clip.scenes) == len(clip.score["return"]) == len(jax.tree.leaves(states)[0])
    for t in (0, 3):
        scene = env.scene(jax.tree.map(lambda leaf, t=t: leaf[t], states))
        np.testing.assert_array_equal(scene.drones, clip.scenes[t].drones)


@pytest.mark.slow
def test_changed_environments_are_named(swarm):
    other = envs.make("swarm/coverage-2:time_limit=6,sensing_range=1.0")
    with pytest.raises(OptionError, match=r"episode 0, played again, differs .* in observation"):
        replay_episode(swarm, 0, other)
    with pytest.raises(ShapeError, match="differ in num_agents"):
        replay_episode(swarm, 0, envs.make("swarm/coverage-3"))


@pytest.mark.parametrize(
    ("ours", "exact"),
    [([1.0, np.nan], True), ([1.0009, np.nan], False), ([1.0021, np.nan], None), ([1.0, 0], None)],
)
def test_an_outcome_is_compared_up_to_rounding(ours, exact):
    steps = [np.array([[0.0, 0.0], numbers]) for numbers in (ours, [1.0, np.nan])]
    pairs = [("reward", np.zeros(1), np.zeros(1)), ("observation", *steps)]
    if exact is not None:
        assert replaying._compare("episode 3", pairs) is exact
        return
    with pytest.raises(OptionError, match=r"episode 3, .* differs .* observation at step 1"):
        replaying._compare("episode 3", pairs)


SIZES = {"num_envs": 4, "chunks": [2, 8]}


@pytest.mark.parametrize(
    ("recipe", "key"),
    [
        (SIZES | {"seed": 3}, (jax.random.key(3), False, 8)),
        (SIZES | {"seed": 3, "opponents": {}}, (jax.random.key(3), True, 8)),
        (
            SIZES | {"tier": "random", "training": {"seed": 3, "side": "cats"}},
            (tier_key(3, "random"), True, 8),
        ),
        (
            SIZES | {"tier": "random", "training": {"seed": 3, "side": ""}},
            (tier_key(3, "random"), False, 8),
        ),
        (SIZES | {"seed": 3, "block": [0, 2]}, None),
        (SIZES | {"seed": "3"}, None),
        (SIZES | {"seed": 3, "chunks": [2]}, None),
        (SIZES | {"seed": 3, "chunks": [2, 16]}, (jax.random.key(3), False, 16)),
        (SIZES | {"seed": 3, "chunks": [2, 17]}, None),
        (SIZES | {"seed": 3, "chunks": [2, 0]}, None),
        (SIZES | {"seed": 3, "num_envs": 10**12}, None),
        (SIZES | {"seed": 10**30}, None),
        (SIZES | {"tier": "random", "training": {"seed": -(10**30), "side": ""}}, None),
        (None, None),
    ],
)
def test_the_keys_of_a_recording_follow_from_its_recipe(recipe, key):
    chex.assert_trees_all_equal(replaying._recording_key(recipe, rows=4, length=16), key)


def test_bytes_of_any_state():
    state = {
        "key": jax.random.key(3),
        "flag": jnp.array([True, False]),
        "number": jnp.float32(-0.0),
        "small": jnp.arange(3, dtype=jnp.int8),
        "half": jnp.array([[1.5, jnp.nan]], jnp.bfloat16),
        "none": jnp.zeros((0, 2)),
    }
    rows = np.stack([jax.jit(states.to_bytes)(state)] * 2)
    back = states.from_bytes(rows, jax.eval_shape(lambda: state))
    for name, leaf in state.items():
        plain = jax.random.key_data if name == "key" else jnp.asarray
        ours, theirs = plain(back[name][1]), plain(leaf)
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    with pytest.raises(ShapeError, match="give the environment that was recorded"):
        states.from_bytes(rows[:, 1:], jax.eval_shape(lambda: state))


def test_wrapped_environments_keep_what_they_have():
    env = envs.make("swarm/coverage-2")
    wrapped = envs.record_states(env)
    assert hash(wrapped) == hash(envs.record_states(env)) and wrapped == envs.record_states(env)
    assert wrapped.scene and dataclasses.replace(wrapped.spec, extras={}) == env.spec
    assert not wrapped.spec.difference(env.spec, extras=False)
    assert wrapped.spec.difference(env.spec).startswith("extras.env_")


@pytest.mark.nightly
@pytest.mark.parametrize("recorder", ["mappo", "qmix"])
def test_recorders_record_states(recorder, tmp_path):
    program = registry.load("recorder", recorder)
    sizes = {"total_steps": 512, "steps": 64, "num_envs": 4, "evaluations": 2, "eval_episodes": 2}
    args = program.Args(
        env="probe/match", out=tmp_path, env_states=True, **sizes, tiers="random,replay"
    )
    program.main(args)
    for tier in ("random", "replay"):
        data = offmarl.open(tmp_path / "probe" / "match.vlt" / f"{recorder}-0-{tier}")
        assert replay_episode(data, 0).exact
    run = tmp_path / "probe" / "match.run" / f"{recorder}-0"
    assert offmarl.load_policy(run).spec.extras
