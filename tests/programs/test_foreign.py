"""Policies of other programs: a Python function, and a network with parameters."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs, vault
from offmarl.errors import InvalidValueError, RunError, ShapeError
from offmarl.programs import function_policy, network_policy, record_policy
from offmarl.programs.recording.foreign import code_checksum, errors_of_functions
from offmarl.types import Continuous, empty_view
from tests.rollouts import random_view

ENV = envs.make("probe/observation")


@pytest.mark.slow
def test_a_python_function_is_recorded(tmp_path):
    """It sees what is recorded beside its actions, in NumPy."""

    def choose(observation, legal_actions):
        assert isinstance(observation, np.ndarray) and legal_actions.dtype == bool
        return (observation.sum(-1) > 1).astype(int)

    record_policy(ENV, function_policy(ENV.spec, choose), (), tmp_path / "a.vlt", 24, num_envs=2)
    data = vault.open_vault(tmp_path / "a.vlt").transitions()
    np.testing.assert_array_equal(data.action, data.view.observation.sum(-1) > 1)
    np.testing.assert_array_equal(data.behaviour_log_prob, 0)


@pytest.mark.slow
def test_a_recording_does_not_go_on_with_another_function(tmp_path):
    def record(action):
        policy = function_policy(ENV.spec, lambda *_: np.full(2, action))
        return record_policy(ENV, policy, (), tmp_path / "a.vlt", 24, num_envs=2)

    assert record(0) and not record(0)
    with pytest.raises(RunError, match="started with other code of the Python function"):
        record(1)


class Constant:
    def __init__(self, action):
        self.action = action

    def __call__(self, _observation, _legal_actions):
        return self.action

    def other(self, observation, _legal_actions):
        return observation + self.action


def test_the_code_and_the_values_of_a_function_count():
    def closed(value):
        return lambda observation, _legal: observation + value

    pairs = [(closed({"a": 1, "b": 2}), closed({"b": 2, "a": 1})), (Constant(1), Constant(2))]
    pairs += [(closed(1), closed(1)), (Constant(1).other, Constant(2).other)]
    assert all(code_checksum(x) == code_checksum(y) for x, y in pairs)  # attributes do not count
    same = [closed(1), partial(closed(1))]
    unlike = [closed(2), closed(np.ones(2)), closed(np.zeros(2)), partial(closed(1), 3), np.argmax]
    unlike += [lambda observation, _legal: observation - 1, lambda o, _, value=1: o + value]
    unlike += [lambda o, _, *, eps=0.1: o + eps, lambda o, _, *, eps=0.2: o + eps]
    unlike += [lambda o, _: o.size in {2, 3}, lambda o, _: o.size in {2, 4}]
    unlike += [closed({5, 6}), closed({5, 7}), closed({"a": 1}), closed({"a": 2}), closed("1")]
    unlike += [closed(1.0), closed(np.ones(2, np.float32)), closed(np.ones((1, 2)))]
    unlike += [partial(closed(1), key=1), partial(closed(1), key=2), closed(np.ones(2, int))]
    unlike += [lambda o, _: o.min(), lambda o, _: o.max(), Constant(1), Constant(1).other]
    unlike += [closed([1, [2]]), closed([[1, 2]]), lambda o, _: o + later]  # a cell without value
    sums = [code_checksum(f) for f in same + unlike]
    assert sums[0] == sums[1]
    assert len({*sums}) == len(sums) - 1
    later = 1


@pytest.mark.slow
def test_a_network_is_recorded_with_the_probabilities_of_its_actions(tmp_path):
    spec = ENV.spec
    weights = jax.random.normal(jax.random.key(0), (spec.observation_size, spec.num_actions))
    policy = network_policy(lambda params, observation: observation @ params)
    record_policy(ENV, policy, weights, tmp_path / "a.vlt", 24, num_envs=2)
    data = vault.open_vault(tmp_path / "a.vlt").transitions()
    log_probs = jax.nn.log_softmax(jnp.asarray(data.view.observation) @ weights)
    expected = np.take_along_axis(np.asarray(log_probs), data.action[..., None], -1)[..., 0]
    np.testing.assert_allclose(data.behaviour_log_prob, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda _o, _l: np.array([0.0, 1.5]), InvalidValueError, "returned the action 1.5"),
        (lambda _o, _l: np.array([1, 2]), InvalidValueError, "the action 2: .* from 0 to 1,"),
        (
            lambda _o, _l: np.zeros(3),
            ShapeError,
            r"shape \(3,\): return \(2,\), the actions of all",
        ),
        (lambda _o: np.zeros(2), TypeError, "positional argument"),
    ],
)
def test_what_a_function_gets_wrong_is_said(function, error, message):
    """Also in a recording: see `test_a_wrong_function_can_be_put_right`."""
    act, view = jax.jit(function_policy(ENV.spec, function).act), empty_view(ENV.spec)
    with pytest.raises(error, match=message), errors_of_functions():
        jax.block_until_ready(act((), (), view.observation, view.legal_actions, jax.random.key(0)))


def test_a_function_of_continuous_actions():
    spec = replace(ENV.spec, action=Continuous(3))
    policy, view = function_policy(spec, lambda o, _: 0.25 * o[:, :3]), random_view(spec)
    inputs = (), (), view.observation, view.legal_actions, jax.random.key(0)
    action, log_prob, carry = jax.jit(policy.act)(*inputs)
    np.testing.assert_array_equal(action, 0.25 * view.observation[:, :3])
    assert action.dtype == np.float32 and carry == () and log_prob.tolist() == [0, 0]


@pytest.mark.slow
def test_each_of_two_recordings_at_once_raises_the_error_of_its_own_function(tmp_path):
    both = threading.Barrier(2)

    def record(number):
        def choose(_observation, _legal_actions):
            both.wait(60)
            raise ZeroDivisionError(number)

        try:
            path = tmp_path / f"{number}.vlt"
            record_policy(ENV, function_policy(ENV.spec, choose), (), path, 8, 2)
        except ZeroDivisionError as error:
            return error.args

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(record, range(2))] == [(0,), (1,)]


def test_a_wrong_function_can_be_put_right(tmp_path):
    path = tmp_path / "a.vlt" / "mine"
    wrong, right = (function_policy(ENV.spec, lambda _o, _l, n=n: np.full(2, n)) for n in (1.5, 1))
    with pytest.raises(InvalidValueError):
        record_policy(ENV, wrong, (), path, steps=8, num_envs=2)
    assert record_policy(ENV, right, (), path, steps=8, num_envs=2)
    killed = tmp_path / "a.vlt" / "killed"
    vault.create(killed, ENV.spec, rows=2, provenance={"recipe": {}}).close()
    with pytest.raises(
        RunError, match="holds no steps yet: if no process is writing it, remove it"
    ):
        record_policy(ENV, right, (), killed, steps=8, num_envs=2)
