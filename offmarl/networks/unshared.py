"""Networks whose parameters are not shared: one for each agent, used like one for all."""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from offmarl.networks.encoders import central
from offmarl.networks.torsos import FeedForward, Recurrent
from offmarl.types import ArrayTree, EnvSpec, View, map_tree


@dataclass(frozen=True)
class Unshared:
    """A network for each agent with parameters of its own; it has the methods of a torso.

    The leaves of the parameters have an axis of agents in front.

    Parameters
    ----------
    torso
        The network of one agent. It needs no agent id.
    spec
        The spec of the environment. All agents have all leaves of observations.
    sees
        Whether the input of the network is the agents' observations, or a `View` with the state,
        which all agents see. In place of a missing state they see all observations.
    """

    torso: FeedForward | Recurrent
    spec: EnvSpec
    sees: Literal["observation", "view"] = "observation"

    def initial_carry(self, num_agents: int) -> ArrayTree:
        """Return the memory of all agents at the start of an episode."""
        return self.torso.initial_carry(num_agents)

    def init(self, key: PRNGKeyArray, carry: ArrayTree, seen: ArrayTree) -> ArrayTree:
        """Draw the parameters of each agent's network.

        One after the other: see `offmarl.programs.start`.
        """
        parts = self._split(seen)
        carry, part = jax.tree.map(lambda leaf: leaf[0], (_split_carry(carry), parts))
        part = part if self.sees == "observation" else part._replace(state=parts.state)
        keys = jax.random.split(key, self.spec.num_agents)
        return jax.lax.map(lambda key: self.torso.init(key, carry, part), keys)

    def apply(self, params: ArrayTree, *args: Any, method: str = "__call__") -> ArrayTree:
        """Apply each agent's network; arguments and results are those of the torso's method."""
        if method == "__call__":
            carry, seen = args
        else:
            seen, first, carry = (*args, None)[:3]

        def one(params: ArrayTree, seen: ArrayTree, carry: ArrayTree) -> ArrayTree:
            if method == "__call__":
                return self.torso.apply(params, carry, seen)
            return self.torso.apply(params, seen, first, carry, method=method)

        parts = self._split(seen), _split_carry(carry)
        found = jax.vmap(one, in_axes=(0, self._axes, 0))(params, *parts)
        return jax.tree.map(lambda leaf: jnp.moveaxis(leaf.squeeze(-2), 0, -2), found)

    @property
    def _axes(self) -> ArrayTree:
        return 0 if self.sees == "observation" else View(0, None, 0, 0)  # type: ignore[arg-type]

    def _split(self, seen: ArrayTree) -> ArrayTree:
        """Move the axis of agents to the front, and leave an axis of size 1 in its place."""
        if self.sees == "observation":
            ranks = map_tree(lambda leaf: len(leaf.shape), self.spec.observation_spec)
            return jax.tree.map(lambda leaf, rank: _split(leaf, -rank - 1), seen, ranks)
        return View(
            Unshared(self.torso, self.spec)._split(seen.observation),
            central(seen),
            _split(seen.legal_actions, -2),
            _split(seen.alive, -1),
        )


def _split(leaf: Array, axis: int) -> Array:
    return jnp.expand_dims(jnp.moveaxis(leaf, axis, 0), axis)


def _split_carry(carry: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda leaf: _split(leaf, -2), carry)
