"""A zoo of environments that nearly keep the protocol: each works, or one line says what is wrong.

What shapes and types show is found by `envs.make`; what values show, by the first steps recorded.
"""

from dataclasses import dataclass

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs, vault
from offmarl.envs import conformance, registry, restart, transition
from offmarl.envs.conformance import EnvironmentConformance
from offmarl.envs.outside import faults
from offmarl.errors import InvalidValueError, OptionError, ShapeError
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import record_policy
from offmarl.types import ArraySpec, Discrete, EnvSpec, View

SPEC = EnvSpec("", 2, 3, 1, Discrete(4), 5)


def view(**fields):
    arrays = {
        "observation": jnp.full((2, 3), 7.0),
        "state": jnp.ones(1),
        "legal_actions": jnp.array([[True, False, True, True]] * 2),
        "alive": jnp.ones(2, bool),
    }
    return View(**{**arrays, **fields})


def begin(**fields):
    return lambda _self, _key: (jnp.zeros((), jnp.int32), restart(view(**fields)))


def step(_self, _key, time, action):
    over = jnp.full(2, time + 1 >= 5)
    reward = jnp.full(2, action.sum().astype(jnp.float32))
    return time + 1, transition(view(), reward, ~over & over, over)


def stepping(**changes):
    """Return a step whose timestep differs: in arrays, or by functions of the timestep."""

    def changed(*arguments):
        time, timestep = step(*arguments)
        new = {name: x(timestep) if callable(x) else x for name, x in changes.items()}
        return time, timestep._replace(**new)

    return changed


def seeing(**fields):
    """Return what makes an environment of other views."""
    steps = stepping(view=view(**fields), next_view=view(**fields))
    return {"reset": begin(**fields), "step": steps}


def near(spec=SPEC, reset=begin(), step=step, **more):  # noqa: B008 - a constant
    members = {"spec": spec, "reset": reset, "step": step, **more}
    return dataclass(frozen=True)(type("Near", (), members))()


@pytest.fixture
def made(monkeypatch):
    """Make environments that are registered for a test only."""
    monkeypatch.setattr(registry, "_registered", {})

    def make(env):
        envs.register("zoo/near", lambda: env)
        return envs.make("zoo/near")

    return make


def recorded(env, path, num_envs=2):
    policy = make_policy(PolicyConfig("random"), env.spec)
    record_policy(env, policy, (), path / "zoo.vlt" / "near", 12, num_envs)
    return vault.open_vault(path / "zoo.vlt" / "near")


TYPED = EnvSpec("", 2, 0, 1, Discrete(4), 5, observation={"image": ArraySpec((3,), "uint8")})
EXTRAS = EnvSpec("", 2, 3, 1, Discrete(4), 5, extras={"cost": ArraySpec(())})


OTHER_TYPES = {
    "integers": {
        **seeing(
            observation=jnp.full((2, 3), 7),
            legal_actions=jnp.array([[1, 0, 1, 1]] * 2),
            alive=jnp.ones(2, jnp.uint8),
        ),
        "step": stepping(
            reward=lambda t: t.reward.astype(jnp.int32),
            terminated=lambda t: t.terminated.astype(float),
            truncated=lambda t: t.truncated.astype(jnp.int32),
            last=lambda t: t.last.astype(jnp.int32),
        ),
        "spec": EXTRAS,
        "extras": lambda _self, _key, time: {"cost": time},
    },
    "NumPy arrays, and floats": {
        **seeing(
            observation=np.full((2, 3), 7.0),
            state=np.array([True]),
            alive=np.ones(2, bool),
            legal_actions=jnp.array([[1.0, 0, 1, 1]] * 2),
        ),
        "step": stepping(
            view=view(observation=np.full((2, 3), 7), state=np.ones(1)),
            next_view=view(legal_actions=np.array([[1, 0, 1, 1]] * 2)),
            reward=lambda t: t.reward.astype(jnp.bfloat16),
        ),
    },
    "a leaf of smaller integers": {
        "spec": EnvSpec(
            "", 2, 0, 1, Discrete(4), 5, observation={"image": ArraySpec((3,), "int32")}
        ),
        **seeing(observation={"image": jnp.full((2, 3), 7, jnp.uint8)}),
    },
}


@pytest.mark.parametrize("changes", OTHER_TYPES.values(), ids=OTHER_TYPES)
def test_numbers_of_other_types_are_cast(changes, made, tmp_path):
    env = made(near(**changes))
    data = recorded(env, tmp_path)
    steps, spec = data.episode(0).transition, data.spec
    leaf = steps.view.observation["image"] if spec.observation else steps.view.observation
    assert leaf.shape == (5, 2, 3) and (leaf == 7).all()
    np.testing.assert_array_equal(steps.view.state, np.ones((5, 1)))
    assert (steps.view.legal_actions == [True, False, True, True]).all()
    assert steps.view.alive.all() and steps.reward.dtype == np.float32
    np.testing.assert_array_equal(steps.reward, np.tile(steps.action.sum(1)[:, None], 2))
    assert steps.last.tolist() == [False] * 4 + [True] and not steps.terminated.any()
    assert steps.extras is None or steps.extras["cost"].tolist() == [0, 1, 2, 3, 4]
    _, first = env.reset(jax.random.key(0))
    _, later = env.step(jax.random.key(0), jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.int32))
    chex.assert_trees_all_equal_shapes_and_dtypes(
        first._replace(extras=None), later._replace(extras=None)
    )


WRONG = {
    "reward of one entry": (
        {"step": stepping(reward=jnp.ones(1))},
        r"step returns reward as float32 \(1,\), and its spec says float32 \(2,\)\.",
    ),
    "no reward": ({"step": stepping(reward=None)}, r"reward as nothing, and its spec says float32"),
    "no mask": (
        seeing(legal_actions=None),
        r"reset returns view.legal_actions as nothing, and its spec says bool \(2, 4\)",
    ),
    "keys as observations": (
        seeing(observation=jax.random.split(jax.random.key(0), (2, 3))),
        r"observation as key",
    ),
    "wider integers for bytes": (
        {"spec": TYPED, **seeing(observation={"image": jnp.ones((2, 3), int)})},
        r"image as int32",
    ),
    "a leaf too many": (
        {
            "spec": TYPED,
            **seeing(observation={"image": jnp.ones((2, 3), jnp.uint8), "map": jnp.ones((2, 3))}),
        },
        r"observation.map as float32 \(2, 3\), and its spec says nothing",
    ),
    "a state of another type": (
        {"step": lambda *a: (a[2] + 0.5, step(*a)[1])},
        r"step and reset return differs in state \(float32 \(\), not int32 \(\)",
    ),
    "a state of another structure": (
        {"step": lambda *a: ((step(*a)[0],), step(*a)[1])},
        r"step and reset return differs in state.0 \(int32 \(\), not absent",
    ),
    "dictionaries as views": (
        {"step": stepping(view=lambda t: t.view._asdict())},
        r"step returns array, Timestep, dict, View: return",
    ),
    "nothing": ({"reset": lambda *_: None}, r"reset returns NoneType: return"),
    "a reset without a key": (
        {"reset": lambda self: None},
        r"reset cannot run: TypeError: .*takes 1 positional",
    ),
    "a step that fails": (
        {"step": lambda *_: 1 / 0},
        r"step cannot run: ZeroDivisionError: division by zero \(test_near.py",
    ),
    "a condition of Python": (
        {"step": lambda *a: step(*a) if a[2] > 1 else None},
        r"step cannot run: TracerBoolConversionError: [^\n]*\(test_near.py, line \d+\)",
    ),
    "no step": ({"step": None}, r"step cannot run|not an environment"),
    "no spec": ({"spec": None}, r"not an environment.*offmarl.EnvSpec"),
    "a spec that fails": (
        {"spec": property(lambda self: self.size)},
        r"not an environment \(AttributeError: .*'size'",
    ),
    "a spec of other sizes": (
        {"spec": property(lambda self: EnvSpec("", 2, 3, 1, Discrete(4), extras=3))},
        r"ShapeError: extras are 3",
    ),
    "a spec with a list": (
        {"spec": property(lambda self: EnvSpec("", 2, 3, 1, Discrete(4), agents=["a", "b"]))},
        r"unhashable type: 'list'.*frozen dataclass",
    ),
    "a spec of a text": (
        {"spec": property(lambda self: EnvSpec("", "2", 3, 1, Discrete(4)))},
        r"num_agents '2'",
    ),
    "a spec without a kind of action": (
        {"spec": property(lambda self: EnvSpec("", 2, 3, 1, 4))},
        r"action_size None.*Discrete",
    ),
    "a spec with one name": (
        {"spec": EnvSpec("", 2, 3, 1, Discrete(4), agents=("a",))},
        r"agents \('a',\)",
    ),
    "extras that are missing": (
        {"spec": EXTRAS},
        r"returns no cost, which its spec has as an extra",
    ),
    "an environment without a hash": ({"__hash__": None}, "frozen dataclass"),
}


class Passing:
    """An environment that has nothing of its own, as a wrapper may be."""

    def __getattr__(self, name):
        return getattr(near(), name)


def test_what_an_environment_passes_on_is_its_own(made):
    assert made(Passing()).spec.num_agents == 2


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=WRONG)
def test_what_types_show_is_one_line_of_make(changes, message, made):
    hashes = {"__hash__": changes.pop("__hash__")} if "__hash__" in changes else {}
    env = near(**changes)
    if hashes:
        env = type("Unhashable", (type(env),), hashes)()
    with pytest.raises((OptionError, ShapeError), match=message) as caught:
        made(env)
    assert "\n" not in str(caught.value) and "zoo/near" in str(caught.value)


NAN = view(observation=jnp.full((2, 3), jnp.nan))

VALUES = {
    "team": (
        {"step": stepping(reward=lambda t: t.reward + jnp.arange(2.0))},
        r"agent 1 has another reward than agent 0, .*environment 0, step 0",
    ),
    "mask": (
        seeing(legal_actions=jnp.zeros((2, 4), bool).at[0].set(True)),
        "agent 1 lives without a legal action",
    ),
    "mask after the step": (
        {"step": stepping(next_view=view(legal_actions=jnp.zeros((2, 4), bool)))},
        r"agent 0 lives without a legal action \(after an episode",
    ),
    "both flags": (
        {"step": stepping(terminated=lambda t: t.truncated)},
        "agent 0 is terminated and truncated .*step 4",
    ),
    "last without flags": (
        {"step": stepping(last=jnp.ones((), bool))},
        "`last` must be true exactly where",
    ),
    "no end": (
        {"step": stepping(truncated=jnp.zeros(2, bool), last=jnp.zeros((), bool))},
        r"acts after the time limit of 5 steps \(in environment 0, step 5",
    ),
    "NaN": (  # and not that it differs from the team's reward, which is also NaN
        {
            **seeing(observation=jnp.full((2, 3), jnp.nan)),
            "step": stepping(view=NAN, next_view=NAN, reward=jnp.full(2, jnp.nan)),
        },
        "observation of agent 0.*nan",
    ),
    "padding": (
        {"spec": EnvSpec("", 2, 3, 1, Discrete(4), 5, observation_sizes=(3, 2))},
        "agent 1 observes numbers beyond",
    ),
    "actions": (
        {"spec": EnvSpec("", 2, 3, 1, Discrete(4), 5, action_sizes=(4, 3))},
        "agent 1 has actions beyond action_sizes",
    ),
}


@pytest.mark.parametrize(("changes", "message"), VALUES.values(), ids=VALUES)
def test_what_values_show_is_one_line_of_the_recording(changes, message, made, tmp_path):
    with pytest.raises((InvalidValueError, ShapeError), match=message) as caught:
        recorded(made(near(**changes)), tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "zoo.vlt").exists()  # so that a mended environment can be recorded


@pytest.mark.parametrize(
    ("state", "count"),
    [(jnp.full(6, 7.0), 0), (jnp.full(6, 7.0).at[5].set(8.0), 2), (jnp.full(6, jnp.nan), 0)],
    ids=["all", "other", "NaN"],
)
def test_a_state_is_compared_with_the_observations_that_it_should_be(state, count):
    """By conformance tests: recordings make such a state of the observations themselves."""
    spec = EnvSpec("", 2, 3, 6, Discrete(4), 5, state="concatenated")
    steps = jax.tree.map(lambda leaf: np.asarray(leaf)[None, None], restart(view(state=state)))
    found = [*faults(spec, steps, steps.next_view)]
    assert len(found) == count and all("state that is not all observations" in x for x in found)


@jax.custom_batching.custom_vmap
def other_in_batches(x):
    return x


@other_in_batches.def_vmap
def _(_size, _batched, x):
    return x + 1, True


def weak(self, key):
    return jnp.asarray(0), begin()(self, key)[1]  # of a weak type, which that after a step is not


def strong(self, key, time, action):
    return jnp.int32(time + 1), step(self, key, time, action)[1]


def earning(self, key):
    time, first = begin()(self, key)
    return time, first._replace(reward=first.reward + 1)


CHECKS = [name for name in dir(EnvironmentConformance) if name.startswith("_check_")]
BROKEN = {
    "nothing": ({}, []),
    "integers": (
        {"step": stepping(reward=lambda t: t.reward.astype(jnp.int32))},
        ["shapes_and_types"],
    ),
    "another state": ({"reset": weak, "step": strong}, ["a_step_changes_no_type"]),
    "a first reward": ({"reset": earning}, ["an_episode_begins_with_nothing_earned"]),
    "a batch": (
        {"step": stepping(reward=lambda t: other_in_batches(t.reward))},
        ["a_batch_equals_its_members"],
    ),
    "a fresh view": (
        {
            "reset": lambda _, key: begin(state=other_in_batches(jax.random.uniform(key, (1,))))(
                _, key
            )
        },
        ["another_episode_begins_where_one_ends"],
    ),
    "NaN": ({"step": stepping(reward=jnp.full(2, jnp.nan))}, ["everything_is_finite"]),
    "the team": (
        {"step": stepping(reward=lambda t: t.reward + jnp.arange(2.0))},
        ["values_that_shapes_do_not_show"],
    ),
    "an early end": (
        {"spec": EnvSpec("", 2, 3, 1, Discrete(4), 6)},
        ["only_the_time_limit_truncates"],
    ),
    "an end for nobody": (
        {"step": stepping(truncated=jnp.zeros(2, bool))},
        ["only_the_time_limit_truncates"],
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(("changes", "failing"), BROKEN.values(), ids=BROKEN)
def test_conformance_tests_find_what_is_broken_and_nothing_else(changes, failing, monkeypatch):
    monkeypatch.setattr(conformance, "NUM_STEPS", 12)
    env, found = near(**changes), []
    recording = conformance.record(env)
    for name in CHECKS:
        try:
            getattr(EnvironmentConformance(), name)(env, recording)
        except AssertionError:
            found.append(name)
    assert [x for x in CHECKS if x.removeprefix("_check_").startswith(tuple(failing))] == found
