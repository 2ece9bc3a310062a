"""Critics of joint and of single actions."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl._compiling import QUICKLY
from offmarl.networks import Critics, as_vectors, make_critics
from offmarl.types import Continuous, Discrete, EnvSpec, View
from tests.rollouts import dense, numbers, random_params, random_view

N, A = 3, 2
REACH = EnvSpec("reach", N, 7, 5, Continuous(A))
PICK = EnvSpec("pick", N, 7, 5, Discrete(A))


def by_hand(critics: Critics, params: Any, view: View, joint: Any, own: Any, agent: int) -> Any:
    """The values of one agent in one view, from its action and from those of all agents."""
    network = critics.network
    parts = [view.observation[agent]]
    if network.sees != "observation":
        parts.insert(0, view.state)
    if network.sees != "joint" and network.outputs == 1:
        parts.append(own[agent])
    if critics.share_parameters:
        parts.append(np.eye(N)[agent])
    else:
        params = jax.tree.map(lambda leaf: leaf[agent], params)
    x = np.concatenate(parts) @ params["InputLayer_0"]["kernel"] + params["InputLayer_0"]["bias"]
    if network.sees == "joint":
        replaced = np.where(np.arange(N)[:, None] == agent, own, joint)
        x = x + replaced.ravel() @ params["actions"]
    for layer in ("0", "1"):
        if network.normalised:
            norm = params[f"LayerNorm_{layer}"]
            x = (x - x.mean()) / np.sqrt(x.var() + 1e-6) * norm["scale"] + norm["bias"]
        x = dense(params, f"Dense_{layer}", np.maximum(x, 0))
    return x


@pytest.mark.parametrize(
    ("shared", "sees", "outputs", "normalised"),
    [
        (True, "observation", 1, False),
        (False, "state", 1, False),
        (True, "joint", 1, True),
        (False, "joint", 1, False),
        (True, "state", 2, False),
        (False, "joint", 2, False),
    ],
)
def test_values_by_hand(shared: bool, sees: Any, outputs: int, normalised: bool) -> None:
    """Of two critics, in two views, for one action of all agents and for three of each agent."""
    options = {"outputs": outputs, "hidden": 4, "sees": sees, "share_parameters": shared}
    critics = make_critics(REACH, count=2, **options)
    network = critics.network.clone(normalised=normalised)
    critics = Critics(network, N, critics.count, critics.share_parameters)
    params = random_params(lambda key: critics.init(key, REACH))
    view, action, own = random_view(REACH, 2), numbers(2, N, A), numbers(3, 2, N, A, seed=1)
    own = own if outputs == 1 else 0 * own
    values = jax.jit(critics.values, compiler_options=QUICKLY)
    replaced, joint = values(params, view, action, own), values(params, view, own)
    if sees == "joint" or outputs == 1:
        assert replaced.shape == joint.shape == (2, 3, 2, N, outputs)
    else:  # which no action changes
        assert replaced.shape == joint.shape == (2, 2, N, outputs)
        replaced, joint = (x[:, None].repeat(3, 1) for x in (replaced, joint))
    params, view, action, own = jax.device_get((params, view, action, own))
    for k, sample, row, agent in product(range(2), range(3), range(2), range(N)):
        inputs = critics, params[k]["params"], jax.tree.map(lambda leaf, i=row: leaf[i], view)
        theirs = own[sample, row]
        expected = by_hand(*inputs, action[row], theirs, agent)
        np.testing.assert_allclose(replaced[k, sample, row, agent], expected, rtol=1e-3, atol=1e-3)
        expected = by_hand(*inputs, theirs, theirs, agent)
        np.testing.assert_allclose(joint[k, sample, row, agent], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_critics_and_agents_begin_apart(shared: bool) -> None:
    critics = make_critics(REACH, count=2, hidden=4, share_parameters=shared)
    first, second = jax.jit(lambda key: critics.init(key, REACH))(jax.random.key(0))
    kernels = [x["params"]["Dense_0"]["kernel"].reshape(-1, 4, 4) for x in (first, second)]
    assert len(np.unique(jnp.concatenate(kernels)[:, 0, 0])) == 2 * (1 if shared else N)


def test_discrete_actions_are_one_hot() -> None:
    assert as_vectors(PICK, jnp.array([0, 1, 1])).tolist() == [[1, 0], [0, 1], [0, 1]]
    assert as_vectors(REACH, jnp.array([[0.5, -1.0]])).tolist() == [[0.5, -1.0]]
