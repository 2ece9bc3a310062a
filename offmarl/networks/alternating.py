"""Networks of agents that learn in turns, while the others keep their policies."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from offmarl.networks.encoders import central, state_encoder, view_encoder
from offmarl.networks.linear import SMALL, Inputs
from offmarl.networks.torsos import FeedForward
from offmarl.types import ArrayTree, EnvSpec, View


def of_agent(tree: ArrayTree, agent: Int[Array, ""] | int, axis: int) -> ArrayTree:
    """Return the part of one agent, with an axis of size 1 in place of that of the agents."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, agent, 1, axis), tree)


def view_of_agent(view: View, agent: Int[Array, ""] | int) -> View:
    """Return what the `OwnCritic` of one agent sees of views ``(B, T, ...)``.

    Observations of a dead agent, which have no meaning, are zeros.
    """
    x, legal, alive = of_agent((view.observation, view.legal_actions, view.alive), agent, 2)

    def of_living(leaf: Array) -> Array:
        return jnp.where(alive.reshape(*alive.shape, *(1,) * (leaf.ndim - 3)), leaf, 0)

    return View(jax.tree.map(of_living, x), central(view), legal, alive)


class OwnCritic(nn.Module):
    """The values of one agent, which depend on the global state and its own observation.

    Attributes
    ----------
    spec
        The environment's spec.
    outputs
        Number of values, such as one for each action.
    hidden, layers
        Width and number of the hidden layers; None for the default of `FeedForward`.
    """

    spec: EnvSpec
    outputs: int
    hidden: int = 64
    layers: int | None = None

    def setup(self) -> None:  # noqa: D102
        self.encoder = view_encoder(self.spec, self.hidden)
        self.torso = FeedForward(self.outputs, self.hidden, "none", SMALL, layers=self.layers)

    def __call__(self, view: View) -> Float[Array, "*b outputs"]:
        """Return the values of views of one agent, as `view_of_agent` returns them."""
        return self.of_inputs(self.encode(view))

    def encode(self, view: View) -> Inputs:
        """Return the vectors that the values depend on."""
        inputs: Inputs = self.encoder(view)
        return inputs

    def of_inputs(self, inputs: Inputs) -> Float[Array, "*b outputs"]:
        """Return the values of encoded views."""
        return self.torso((), inputs)[0][..., 0, :]


class JointActionModel(nn.Module):
    """Predicts each agent's action from the global state and the actions of some other agents.

    Attributes
    ----------
    spec, hidden, layers
        As in `OwnCritic`.
    """

    spec: EnvSpec
    hidden: int = 64
    layers: int | None = None

    @nn.compact
    def __call__(self, view: View, given: Float[Array, "*b N given"]) -> Float[Array, "*b N A"]:
        """Return the logits of all agents' actions; ``given`` comes from `given_actions`."""
        encoder, state = state_encoder(self.spec, self.hidden), central(view)
        inputs = Inputs(state if encoder is None else encoder(state), given)
        torso = FeedForward(self.spec.num_actions, self.hidden, layers=self.layers)
        return torso((), inputs)[0]


def given_actions(
    action: Int[Array, "*b N"],
    alive: Bool[Array, "*b N"],
    agent: Int[Array, ""] | int,
    num_actions: int,
) -> Float[Array, "*b N given"]:
    """Return the actions from which a `JointActionModel` predicts that of each agent.

    Row j holds the one-hot actions of ``agent`` and of the agents before j, with zeros for dead
    agents and for all others. So the rows of the agents other than ``agent``, multiplied, are the
    probability of their joint action given that of ``agent``.
    """
    number = jnp.arange(action.shape[-1])
    earlier, diagonal = number < number[:, None], number == number[:, None]
    given = (earlier | (number == agent)) & ~diagonal
    one_hot = jax.nn.one_hot(action, num_actions) * alive[..., None]
    rows = jnp.where(given[..., None], one_hot[..., None, :, :], 0.0)
    return rows.reshape(*rows.shape[:-2], -1)
