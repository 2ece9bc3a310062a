"""Networks of agents that learn in turns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.networks import JointActionModel, OwnCritic, blank_view, given_actions, view_of_agent
from offmarl.types import ArraySpec, Discrete, EnvSpec
from tests.rollouts import random_view


def test_the_actions_that_are_given():
    alive = jnp.array([True, True, True, False])
    result = given_actions(jnp.array([1, 0, 1, 1]), alive, 2, 2).reshape(4, 4, 2)
    none, first, second = [0, 0], [1, 0], [0, 1]
    expected = [
        [none, none, second, none],  # of agent 0: that of agent 2, whose turn it is
        [second, none, second, none],  # of agent 1: that of agent 0 before it, too
        [second, first, none, none],
        [second, first, second, none],  # of agent 3: those of all others
    ]
    np.testing.assert_array_equal(result, expected)


def test_the_joint_probability_is_a_distribution():
    spec = EnvSpec("", 3, 2, 2, Discrete(2))
    model, alive = JointActionModel(spec, 4), jnp.ones(3, bool)
    view = blank_view(spec)._replace(state=jnp.array([0.3, -2.0]))

    params = jax.jit(model.init)(jax.random.key(0), view, jnp.zeros((3, 6)))

    @jax.jit
    def probability(action, agent):
        """Of the others' actions, given that of one agent."""
        logits = model.apply(params, view, given_actions(action, alive, agent, 2))
        log_probs = jax.nn.log_softmax(logits)[jnp.arange(3), action]
        return jnp.exp(jnp.where(jnp.arange(3) == agent, 0.0, log_probs).sum())

    for agent in range(3):
        joint = (np.insert(other_actions, agent, 1) for other_actions in np.ndindex(2, 2))
        total = sum(probability(jnp.asarray(action), agent) for action in joint)
        np.testing.assert_allclose(total, 1.0, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        EnvSpec("", 3, 4, 5, Discrete(2)),
        EnvSpec("", 3, 4, 0, Discrete(2)),
        EnvSpec("", 3, 0, 0, Discrete(2), observation=ArraySpec((3, 3), "uint8")),
    ],
    ids=["state", "no state", "grids"],
)
def test_a_critic_sees_the_state_and_its_own_observation(spec):
    critic = OwnCritic(spec, 2, 16)
    view = random_view(spec, 1, 1)
    params = critic.init(jax.random.key(0), view_of_agent(view, 0))

    @jax.jit
    def values(view, agent):
        return critic.apply(params, view_of_agent(view, agent))

    assert values(view, 1).shape == (1, 1, 2)
    changed = view._replace(observation=view.observation.at[:, :, 2].add(3))
    seen = (values(changed, 2) != values(view, 2)).any()
    unseen = (values(changed, 1) == values(view, 1)).all()
    assert seen and bool(unseen) == bool(spec.state_size)
