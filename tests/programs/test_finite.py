"""Training that is not finite stops, and what it learned is no result."""

import json
from dataclasses import fields
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import offmarl
from offmarl import report, tracking
from offmarl.checkpoint import Checkpoints
from offmarl.errors import NotFiniteError
from offmarl.networks import PolicyConfig
from offmarl.programs import offline, registry
from offmarl.programs.program import Stage
from offmarl.programs.recording import online
from offmarl.programs.runs.finite import faults, infinities
from offmarl.programs.runs.loop import build
from offmarl.programs.runs.run import best_of
from offmarl.types import Discrete, EnvSpec
from recorders import mappo
from tests import plain
from tests.runs import write_policy, write_run

CONTINUOUS = {"maddpg_cql", "matd3_bc", "omar"}
LEARN_NOTHING = {"random", "psro"}
"""psro learns by other recorders."""
DAILY = {"bc", "mappo", "iql"}
"""Programs that CI covers every time: what notices the fault is shared. The others run nightly."""


def programs_of(kind):
    """Return the programs that learn, as parameters of tests."""
    names = sorted({*registry.find(kind)} - LEARN_NOTHING)
    return [pytest.param(x, marks=[] if x in DAILY else pytest.mark.nightly) for x in names]


def growing(*args):
    """Build a program whose parameters are multiplied until they are infinite."""
    program = build(*args)

    def grown(tree):
        floats = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
        return jax.tree.map(lambda x: x * 1e13 if floats(x) else x, tree)

    def update(state, _batch, _key, _hyper):
        online = hasattr(state, "capture")
        state = state._replace(params=grown(state.params)) if online else grown(state)
        return state, {"loss": jnp.float32(0)}

    return program._replace(stages=(Stage(update),), td_errors=False)


def arguments(module, **values):
    names = {field.name for field in fields(module.Args)}
    return module.Args(**{name: value for name, value in values.items() if name in names})


def check_stopped(refused, run):
    assert "seed 0, 1: " in str(refused.value) and "another --out" in str(refused.value)
    assert json.loads((run / tracking.RUN_FILE).read_text())["complete"] is False
    last = Checkpoints(run / tracking.CHECKPOINTS).latest()
    assert f"keeps its checkpoint of update {last}" in str(refused.value)
    rows = tracking.read(run / tracking.METRICS_FILE)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(offmarl.load_policy(run).params))
    evaluated = [row for row in rows if any(name.startswith(tracking.EVALUATED) for name in row)]
    assert all(row["step"] == 0 for row in evaluated)  # the untrained policy
    return last, rows


@pytest.mark.parametrize("name", programs_of("baseline"))
def test_every_baseline_stops_when_it_is_not_finite(name, random_data, tmp_path, monkeypatch):
    monkeypatch.setattr(offline, "build", growing)
    monkeypatch.setattr(offline, "evaluate", lambda *_: {})
    module = registry.load("baseline", name)
    env = "swarm/coverage-3:action=continuous" if name in CONTINUOUS else "probe/observation"
    sizes = {"updates": 40, "batch_size": 4, "length": 2, "hidden": 4}
    options = {"seeds": 2, "checkpoint_seconds": 0.0, "out": tmp_path / "run"}
    args = arguments(module, vault=random_data(env), **sizes, **options)
    with pytest.raises(NotFiniteError, match="training is not finite") as error:
        module.main(args)
    last, rows = check_stopped(error, tmp_path / "run")
    assert max(row["step"] for row in rows) <= last


@pytest.mark.parametrize("name", programs_of("recorder"))
def test_every_recorder_stops_when_it_is_not_finite(name, tmp_path, monkeypatch):
    monkeypatch.setattr(online, "build", growing)
    module = registry.load("recorder", name)
    sizes = {"total_steps": 10**5, "num_envs": 4, "hidden": 4, "num_steps": 4, "buffer_size": 64}
    options = {"env": "probe/observation", "seeds": 2, "checkpoint_seconds": 0.0, "out": tmp_path}
    args = arguments(module, evaluations=1, tiers="expert", **sizes, **options)
    with pytest.raises(NotFiniteError, match="training is not finite") as error:
        module.main(args)
    check_stopped(error, tmp_path / f"probe/observation.run/{name}-0-to-1")


@pytest.mark.parametrize(
    ("metrics", "arrays", "wanted"),
    [
        ({"loss": [[1, 2, 3], [4, 5, 6]]}, [[0, 0], [0, 0]], {}),
        ({"a": [[1, 2, np.inf], [4, 5, 6]]}, [[0, 0], [0, 0]], {3: "a is inf at update 10"}),
        (
            {"b": [[0, np.nan, np.inf], [0, 0, 0]], "a": [[0, 0, np.nan], [0, 0, -np.inf]]},
            [[0, 0], [0, 0]],
            {3: "b is nan at update 9", 4: "a is -inf at update 10"},
        ),
        ({"a": [[1], [1]]}, [[0, 0], [0, np.nan]], {4: "w (1 of 1 arrays) after update 10"}),
    ],
)
def test_faults_name_the_first_update_and_the_seed(metrics, arrays, wanted):
    metrics = {name: np.array(values, float) for name, values in metrics.items()}
    params = {"w": jnp.array(arrays, jnp.bfloat16), "n": jnp.arange(2), "key": jax.random.key(0)}
    assert faults(10, [3, 4], metrics, params) == wanted


def test_what_was_infinite_before_is_no_fault():
    """Such as the best value so far of an optimiser."""
    params = {"best": jnp.array([np.inf]), "w": jnp.zeros(1)}
    before = infinities([params])
    assert before == ["best"]
    assert not faults(1, [0], {}, params, by_design=before)
    assert faults(1, [0], {}, params | {"w": jnp.array([np.nan])}, by_design=before)


def test_a_recording_that_saved_nothing_leaves_nothing(tmp_path):
    args = {"env": "probe/observation", "total_steps": 512, "num_envs": 4, "num_steps": 16}
    args |= {"hidden": 4, "steps": 64, "tiers": "replay", "out": tmp_path}
    with pytest.raises(NotFiniteError, match="has saved nothing"):
        mappo.main(mappo.Args(learning_rate=1e30, **args))
    assert not [*tmp_path.rglob("*.json"), *tmp_path.rglob("mappo-0*")]
    mappo.main(mappo.Args(evaluations=2, **args))


SPEC = EnvSpec("two", 2, 3, 1, Discrete(2))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_policy_that_is_not_finite_is_not_loaded(tmp_path, monkeypatch, value):
    fresh = Checkpoints.save

    def save(self, step, tree, info):
        policy = jax.tree.map(lambda leaf: leaf.at[1].set(value), tree["policy"])
        fresh(self, step, tree | {"policy": policy}, info)

    monkeypatch.setattr(Checkpoints, "save", save)
    write_policy(tmp_path / "run", PolicyConfig("feedforward", hidden=4), SPEC, [5, 6])
    load = partial(offmarl.load_policy, tmp_path / "run", program=plain.__file__)
    assert load(seed=5)
    with pytest.raises(NotFiniteError, match=r"the policy of seed 6 in .*run is not finite"):
        load(seed=6)


def test_a_run_with_a_loss_that_is_not_finite_has_no_score(tmp_path):
    run = write_run(tmp_path / "run", "bc", "data", [[1.0, 2.0], [3.0, 4.0]])
    tracking.append(run / tracking.METRICS_FILE, {"seed": 1, "step": 8, "loss": float("nan")})
    with pytest.raises(NotFiniteError, match="loss of seed 1 is not finite in"):
        report.read_runs([run])


def test_an_evaluation_that_is_not_finite_or_empty_is_not_the_best():
    returns = [1, 2], [9, None], [], 9, None
    rows = [{"seed": 0, "step": at, tracking.RETURN: x} for at, x in enumerate(returns, 1)]
    assert best_of(rows, 0) == 1 and best_of(rows[1:], 0) is None
