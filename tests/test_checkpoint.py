import signal
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from offmarl.checkpoint import Checkpoints
from offmarl.errors import RunError


class State(NamedTuple):
    params: dict
    optimiser: tuple
    keys: jax.Array
    count: jax.Array
    nothing: tuple


OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def make_state(value: float) -> State:
    params = {"w": jnp.full((3, 2), value), "b": jnp.zeros(2)}
    keys = jax.random.split(jax.random.key(int(value)), 4)
    return State(params, OPTIMISER.init(params), keys, jnp.array(7), ())


def data(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(data(left), data(right))


def test_what_is_saved_comes_back_with_its_structure(tmp_path):
    state = make_state(2.0)
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(3, {"policy": state.params, "state": state}, {"note": "é", "x": [1.5]})
    like = {"policy": state.params, "state": jax.eval_shape(lambda: make_state(0.0))}
    tree, info = Checkpoints(tmp_path / "c").restore(like)
    assert_equal(tree["state"], state)
    assert_equal(tree["policy"], state.params)
    assert info == {"note": "é", "x": [1.5]}
    checkpoints.close()


def test_states_of_several_seeds_and_empty_trees(tmp_path):
    states = jax.vmap(lambda value: make_state(2.0)._replace(count=value))(jnp.arange(5))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, {"policy": (), "state": states}, {})
    tree, _ = checkpoints.restore({"policy": (), "state": jax.eval_shape(lambda: states)})
    assert_equal(tree["state"], states)
    assert tree["policy"] == ()
    checkpoints.close()


def test_one_part_is_restored_without_the_others(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"policy": jnp.ones(3), "state": make_state(1.0)}, {})
    tree, _ = checkpoints.restore({"policy": jnp.zeros(3)})
    assert list(tree) == ["policy"]
    np.testing.assert_array_equal(tree["policy"], np.ones(3))
    checkpoints.close()


def test_only_the_newest_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() is None
    for step in (1, 5, 9, 10):
        checkpoints.save(step, {"policy": jnp.full(2, step)}, {"step": step})
    assert checkpoints.steps() == [9, 10]
    assert checkpoints.latest() == 10
    tree, info = checkpoints.restore({"policy": jnp.zeros(2, int)}, step=9)
    assert info == {"step": 9}
    assert tree["policy"].tolist() == [9, 9]
    checkpoints.close()


def test_a_directory_without_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.steps() == []
    with pytest.raises(RunError, match="has no checkpoint"):
        checkpoints.restore({"policy": jnp.zeros(2)})
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("like", "says"),
    [
        ({"policy": {"w": jnp.zeros((2, 2))}}, r"policy\['w'\] is float32\[3, 2\]"),
        ({"policy": {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}}, r"policy\['b'\] is absent"),
        ({"policy": {"w": jnp.zeros((3, 2), int)}}, "float32"),
        ({"other": jnp.zeros(2)}, "other is absent"),
    ],
)
def test_a_checkpoint_of_another_program_is_refused(tmp_path, like, says):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, {"policy": {"w": jnp.zeros((3, 2))}}, {})
    with pytest.raises(RunError, match=says):
        checkpoints.restore(like)
    checkpoints.close()


SAVE_FOREVER = """
import sys
import numpy as np
from offmarl.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=2)
for step in range(checkpoints.latest() or 0, 10**6):
    state = {"x": np.full((200, 200), step + 1.0)}
    checkpoints.save(step + 1, {"state": state}, {"step": step + 1})
    print(step + 1, flush=True)
"""


@pytest.mark.slow
def test_killed_while_saving_the_last_saved_one_is_there(tmp_path):
    command = [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)]
    for instant in (0.003, 0.02, 0.035, 0.05):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            saved = [int(process.stdout.readline()) for _ in range(3)]
            time.sleep(instant)
            process.send_signal(signal.SIGKILL)
            saved = max([*saved, *map(int, process.stdout.read().split())])
        checkpoints = Checkpoints(tmp_path)
        assert checkpoints.latest() in (saved, saved + 1)
        like = {"state": {"x": np.zeros((200, 200), np.float64)}}
        tree, info = checkpoints.restore(like)
        assert info["step"] == checkpoints.latest()
        np.testing.assert_array_equal(tree["state"]["x"], np.full((200, 200), info["step"]))
        checkpoints.close()
