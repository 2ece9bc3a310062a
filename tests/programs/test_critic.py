"""Critics loaded from runs, in the unit of the data and on windows of either form."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import offmarl
from offmarl import programs
from offmarl.errors import RunError, ShapeError
from offmarl.networks import PolicyConfig
from offmarl.programs.runs.dataset import DatasetStatistics
from offmarl.programs.runs.normalisation import normalise_as_asked
from offmarl.types import View
from tests import plain
from tests.programs import two_stage
from tests.runs import write_policy

ENV = "probe/two-step"


@pytest.fixture(scope="module")
def data(random_data):
    return offmarl.open(random_data(ENV))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("critic") / "toy"
    options: dict[str, Any] = {"eval_every": 6, "batch_size": 4, "length": 3, "env": "none"}
    args = two_stage.Args(vault=data.path, out=out, updates=12, pretrain=3, seeds=2, **options)
    return two_stage.main(args)


@pytest.fixture(scope="module")
def batch(data):
    return data.whole_episodes(np.arange(3))


def expected(run, seed, data, batch):
    """Return the scores of the actions by the policy's weights, and 100 for each step before."""
    weights = np.asarray(offmarl.load_policy(run, seed).params)
    moments = DatasetStatistics(data).observation_moments()
    view = batch.view_tm1
    inputs = (np.asarray(view.observation) - moments.mean) / moments.std
    scores = np.concatenate([inputs, np.ones((*inputs.shape[:-1], 1))], -1) @ weights
    values = np.take_along_axis(scores, np.asarray(batch.action)[..., None], -1)[..., 0]
    return values + 100 * np.arange(values.shape[1])[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_critic_gives_the_values_of_its_seed(run, data, batch, seed):
    critic = offmarl.load_critic(run, seed)
    values, reference = critic.of(batch), expected(run, seed, data, batch)
    inside = np.asarray(batch.mask)  # whole episodes are padded to one length
    np.testing.assert_allclose(values[inside], reference[inside], rtol=1e-4, atol=1e-4)
    assert critic.name == "two_stage" and values.shape == batch.action.shape


@pytest.mark.slow
def test_a_single_window_is_one_of_a_batch(run, batch):
    critic = offmarl.load_critic(run)
    view = View(*(np.asarray(leaf)[1] for leaf in batch.view_tm1))
    single = critic(view, np.asarray(batch.action)[1])
    np.testing.assert_allclose(single, critic.of(batch)[1], rtol=1e-6)
    twice = critic(view, np.asarray(batch.action)[1], np.ones(len(single), bool))
    np.testing.assert_allclose(twice[1] + 100, single[1], rtol=1e-4)


@pytest.mark.slow
def test_arrays_that_are_no_windows_are_refused(run, batch):
    critic = offmarl.load_critic(run)
    with pytest.raises(ShapeError, match="two_stage takes views and actions of windows"):
        critic(batch.view, batch.action)  # the view has a slot more
    with pytest.raises(ShapeError, match="got actions"):
        critic(batch.view_tm1, batch.action[..., 0])


def test_a_normalised_critic_takes_recorded_views_and_gives_recorded_units():
    values = programs.Values(
        lambda state: state, lambda gain, view, _first, _action: gain * view.state[..., :1]
    )
    echo = programs.Program(lambda *_: None, (), lambda _: None, lambda state: state, values=values)
    numbers = {"state_moments": [[10.0], [4.0]], "return_scale": 10.0}
    statistics = DatasetStatistics(None, {name: np.array(x, "f4") for name, x in numbers.items()})
    args = programs.ValueArgs(Path(), normalise=("state",))
    critic = normalise_as_asked(args, echo, statistics).values
    view = View(jnp.zeros((1, 2, 1)), jnp.array([[[10.0], [18.0]]]), None, None)
    result = critic.apply(3.0, view, None, None)
    # The state 18 is 2 deviations above the mean; values of doubled rewards are halved.
    np.testing.assert_allclose(result, [[[0.0], [3.0]]])


def test_a_program_without_a_critic_is_named(data, tmp_path):
    write_policy(tmp_path / "run", PolicyConfig("feedforward", hidden=4), data.spec, [0])
    with pytest.raises(RunError, match="has no critic"):
        offmarl.load_critic(tmp_path / "run", program=plain.__file__)


@pytest.mark.slow
def test_a_step_that_was_not_kept_is_named(run):
    with pytest.raises(RunError, match=r"no checkpoint of step 5, but of \[12\]"):
        offmarl.load_critic(run, step=5)
