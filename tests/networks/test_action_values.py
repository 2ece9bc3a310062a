"""Critics of joint and of single actions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.networks import as_vectors, make_critics
from offmarl.types import Continuous, Discrete, EnvSpec, View
from tests.rollouts import random_view

REACH = EnvSpec("reach", 3, 7, 5, Continuous(2))
PICK = EnvSpec("pick", 3, 7, 5, Discrete(2))
SHARED = pytest.mark.parametrize("shared", [True, False])


@SHARED
@pytest.mark.slow
def test_each_agents_own_action_is_replaced_in_its_value_only(shared: bool) -> None:
    critics = make_critics(REACH, count=2, hidden=8, share_parameters=shared)
    params = critics.init(jax.random.key(0), REACH)
    action, own = jax.random.uniform(jax.random.key(1), (2, 4, 3, 2), minval=-1.0)
    view, values = random_view(REACH, 4), jax.jit(critics.values)
    result = values(params, view, action, own)
    assert result.shape == (2, 4, 3, 1)
    for agent in range(3):
        joint = action.at[:, agent].set(own[:, agent])
        expected = values(params, view, joint)[:, :, agent]
        np.testing.assert_allclose(result[:, :, agent], expected, rtol=1e-4, atol=1e-5)
    # The two critics differ, and so do the agents.
    assert np.unique(np.asarray(result).round(5)).size == 24


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "sees"), [(True, "observation"), (False, "state"), (True, "joint"), (False, "joint")]
)
def test_what_the_value_of_an_agent_depends_on(shared: bool, sees: str) -> None:
    critics = make_critics(REACH, hidden=8, sees=sees, share_parameters=shared)
    params = critics.init(jax.random.key(0), REACH)

    def first(view: View, action: jax.Array) -> jax.Array:
        return critics.values(params, view, action)[0, 0, 0]

    gradient, by_action = jax.jit(jax.grad(first, (0, 1), allow_int=True))(
        random_view(REACH), 0.1 * jnp.ones((3, 2))
    )
    assert (gradient.observation[0] != 0).any() and (by_action[0] != 0).all()
    assert not gradient.observation[1:].any()
    assert (by_action[1:] != 0).any() == (sees == "joint") == (by_action[1:] != 0).all()
    assert gradient.state.any() == (sees != "observation")


@pytest.mark.parametrize(("shared", "sees"), [(True, "joint"), (False, "joint"), (True, "state")])
@pytest.mark.slow
def test_the_values_of_several_actions_are_those_of_each(shared: bool, sees: str) -> None:
    critics = make_critics(REACH, hidden=8, count=2, sees=sees, share_parameters=shared)
    params, view = critics.init(jax.random.key(0), REACH), random_view(REACH, 4)
    action = jax.random.uniform(jax.random.key(1), (4, 3, 2), minval=-1.0)
    own = jax.random.uniform(jax.random.key(2), (5, 4, 3, 2), minval=-1.0)
    values = jax.jit(critics.values)
    replaced, joint = values(params, view, action, own), values(params, view, own)
    assert replaced.shape == joint.shape == (2, 5, 4, 3, 1)
    for number in range(5):
        expected = values(params, view, action, own[number])
        np.testing.assert_allclose(replaced[:, number], expected, rtol=1e-4, atol=1e-5)
        expected = values(params, view, own[number])
        np.testing.assert_allclose(joint[:, number], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@SHARED
def test_a_critic_of_every_discrete_action_does_not_see_the_agents_own(shared: bool) -> None:
    critics = make_critics(PICK, outputs=2, hidden=8, share_parameters=shared)
    params = critics.init(jax.random.key(0), PICK)
    values = jax.jit(
        lambda action: critics.values(params, random_view(REACH), action, jnp.zeros((3, 2)))
    )
    a, b = (values(as_vectors(PICK, jnp.array(choice))) for choice in ([0, 1, 1], [1, 1, 1]))
    assert a.shape == (1, 3, 2)
    np.testing.assert_allclose(a[0, 0], b[0, 0], atol=1e-5)
    assert (abs(a[0, 1:] - b[0, 1:]) > 1e-3).all()
