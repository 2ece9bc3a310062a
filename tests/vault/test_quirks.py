"""Vaults as stock flashbax writes them, with the deviations of published ones."""

import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import vault
from offmarl.types import Continuous, Discrete

from .test_stock import write_stock

AGENTS = (3,)


def tree(rows, lengths, **leaves):
    """The arrays of a published vault whose episodes, of these lengths, end in terminations."""
    steps = sum(lengths)
    ends = np.zeros((rows, steps, *AGENTS), np.float32)
    ends[:, np.cumsum(lengths) - 1] = 1
    rng = np.random.default_rng(0)
    arrays = {
        "observations": rng.normal(size=(rows, steps, *AGENTS, 4)),
        "actions": rng.uniform(-1, 1, (rows, steps, *AGENTS, 2)),
        "rewards": np.ones((rows, steps, *AGENTS)),
        "terminals": ends,
        "truncations": np.zeros_like(ends),
        "infos": {"state": rng.normal(size=(rows, steps, 6))},
        **leaves,
    }
    to_jax = {
        k: jnp.asarray(v, jnp.float32) for k, v in arrays.items() if k not in ("infos", "actions")
    }
    actions = arrays["actions"]
    kind = jnp.int32 if actions.dtype.kind == "i" else jnp.float32
    infos = {k: jnp.asarray(v, jnp.float32) for k, v in arrays["infos"].items()}
    return to_jax | {"actions": jnp.asarray(actions, kind)} | ({"infos": infos} if infos else {})


def test_omar(tmp_path):
    """Five rows, a state for each agent, observations padded with -inf."""
    plain = tree(5, [6, 6])
    observations = np.array(plain["observations"])
    observations[:, :, 1:, -1] = -np.inf
    state = np.random.default_rng(1).normal(size=(5, 12, 3, 6)).astype(np.float32)
    dataset = write_stock(
        tmp_path / "simple_tag.vlt" / "Expert",
        tree(5, [6, 6], observations=observations, infos={"state": state}),
    )
    assert dataset.quirks == (
        "several rows",
        "state per agent",
        "no legal actions",
        "padded observations",
        "time limit unknown",
    )
    assert dataset.spec.action == Continuous(2)
    assert (dataset.spec.state_size, dataset.spec.state) == (18, "native")
    steps = dataset.transitions()
    padding = np.isneginf(observations)
    np.testing.assert_array_equal(steps.view.observation, np.where(padding, 0, observations))
    np.testing.assert_array_equal(steps.view.state, state.reshape(5, 12, 18))
    assert steps.view.legal_actions.shape == (5, 12, 3, 2)
    assert steps.view.legal_actions.all()
    np.testing.assert_array_equal(dataset.read()["observations"], observations)
    np.testing.assert_array_equal(dataset.read()["infos.state"], state)
    windows = dataset.window_transitions(np.array([0, 4]), np.array([1, 7]), 3)
    np.testing.assert_array_equal(windows.view.observation[1], steps.view.observation[4, 7:10])
    assert dataset.episodes.returns.tolist() == [[6.0] * 3] * 10


def test_rware(tmp_path):
    """An additional axis of actions, no state and no truncations."""
    actions = np.random.default_rng(0).integers(0, 5, (1, 9, 3, 1))
    arrays = tree(1, [4, 5], actions=actions, infos={})
    del arrays["truncations"]
    dataset = write_stock(tmp_path / "tiny.vlt" / "Expert", arrays)
    assert dataset.quirks == ("action axis", "no legal actions", "no state", "no truncations")
    assert dataset.spec.action == Discrete(int(actions.max()) + 1)
    assert dataset.spec.state == "concatenated"
    steps = dataset.transitions()
    np.testing.assert_array_equal(steps.action, actions[..., 0])
    np.testing.assert_array_equal(
        steps.view.state, np.asarray(arrays["observations"]).reshape(1, 9, 12)
    )
    assert not steps.truncated.any()
    assert steps.view.legal_actions.all() and steps.view.alive.all()
    assert np.isnan(steps.behaviour_log_prob).all() and (steps.policy_id == -1).all()


@pytest.mark.parametrize("rows", [1, 2])
def test_smac(tmp_path, rows):
    """The time limit is flagged as termination."""
    lengths = [6, 3, 6, 4]
    path = tmp_path / "3m.vlt" / "Good"
    raw = write_stock(path, tree(rows, lengths, infos={"state": np.ones((rows, 19, 6))}))
    assert "time limit unknown" in raw.quirks
    assert raw.episodes.cause.tolist() == ["terminated"] * 4 * rows
    assert raw.spec.time_limit is None
    dataset = vault.open_vault(path, time_limit=6)
    assert dataset.quirks[-1] == "time limit terminal"
    assert dataset.spec.time_limit == 6
    causes = ["truncated", "terminated", "truncated", "terminated"]
    assert dataset.episodes.cause.tolist() == causes * rows
    assert dataset.episodes.length.tolist() == lengths * rows
    steps = dataset.transitions()
    for flag, ends in ((steps.truncated, [5, 14]), (steps.terminated, [8, 18])):
        assert np.flatnonzero(flag[0].all(-1)).tolist() == ends
        assert flag.sum() == 2 * 3 * rows
    assert dataset[8:15].truncated[:, :, 0].tolist() == [[False] * 6 + [True]] * rows
    windows = dataset.window_transitions(np.array([rows - 1]), np.array([12]), 4)
    assert windows.truncated[0, :, 0].tolist() == [False, False, True, False]
    assert raw.digest() != dataset.digest()
    assert vault.open_vault(path, time_limit=7).episodes.cause.tolist() == ["terminated"] * 4 * rows
