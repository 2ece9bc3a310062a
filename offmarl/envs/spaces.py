"""Agents of different sizes in arrays of one size, for the adapters.

Observations are padded with zeros, and padded actions are never legal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from offmarl.errors import ShapeError
from offmarl.gate import to_unit_range
from offmarl.types import ArraySpec, Continuous, Discrete, EnvSpec, map_tree


@dataclass(frozen=True)
class Box:
    """A bounded vector as an action.

    Policies act in [-1, 1], which is scaled to the bounds.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        """Number of entries."""
        return len(self.low)


ActionSpace = Discrete | Box


@dataclass(frozen=True)
class Actions:
    """The action spaces of all agents."""

    spaces: tuple[ActionSpace, ...]

    def __post_init__(self) -> None:
        kinds = {type(space) for space in self.spaces}
        if len(kinds) != 1:
            raise ShapeError(
                "the agents' actions are of both kinds, discrete and continuous, and a dataset "
                "holds one: wrap the environment so that all its agents act alike."
            )

    @property
    def discrete(self) -> bool:
        """Whether the actions are discrete."""
        return isinstance(self.spaces[0], Discrete)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of discrete actions, or of dimensions, of each agent."""
        return tuple(
            space.num_actions if isinstance(space, Discrete) else space.size
            for space in self.spaces
        )

    @property
    def joint(self) -> Discrete | Continuous:
        """The kind and size for `EnvSpec`."""
        return (Discrete if self.discrete else Continuous)(max(self.sizes))

    @cached_property
    def mask(self) -> np.ndarray:
        """Which of the A actions each agent has, ``(N, A)`` bool."""
        return np.arange(max(self.sizes)) < np.array(self.sizes)[:, None]

    def split(self, action: Any) -> list[Any]:
        """Return the action of each agent, in its own size and bounds."""
        if self.discrete:
            return [action[i] for i in range(len(self.spaces))]
        return [
            _from_unit_range(action[i, : space.size], space)
            for i, space in enumerate(self.spaces)
            if isinstance(space, Box)
        ]

    def join(self, actions: Sequence[Any]) -> np.ndarray:
        """Return the actions of all agents as one array: the inverse of `split`.

        Continuous actions are clipped to their bounds.
        """
        if self.discrete:
            return np.array(actions, np.int32)
        joint = np.zeros(self.mask.shape, np.float32)
        for i, (action, space) in enumerate(zip(actions, self.spaces, strict=True)):
            if isinstance(space, Box):
                low, high = np.array(space.low), np.array(space.high)
                joint[i, : space.size] = to_unit_range(np.ravel(action), low, high).clip(-1, 1)
        return joint


def _from_unit_range(action: Any, space: Box) -> Any:
    low, high = np.array(space.low, np.float32), np.array(space.high, np.float32)
    if (low == -1).all() and (high == 1).all():
        return action
    return low + (action + 1) / 2 * (high - low)


def pad(vectors: Sequence[Any], size: int) -> Array:
    """Stack vectors of different lengths as ``(N, size)``, padded with zeros."""
    return jnp.stack([jnp.pad(vector, (0, size - len(vector))) for vector in vectors])


def flatten(tree: Any) -> Float[Array, "O"]:
    """Concatenate the arrays of a tree into one float32 vector."""
    leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves)


def trace_spec(env: Any, kind: type[Discrete | Continuous], **fields: Any) -> EnvSpec:
    """Return the spec of an adapter: the shapes and types of its first view, and other fields."""
    view = jax.eval_shape(env.reset, jax.random.key(0))[1].view
    num_agents, num_actions = view.legal_actions.shape
    return EnvSpec(
        env.name,
        num_agents,
        observation_size=0,
        state_size=0,
        action=kind(num_actions),
        observation=map_tree(lambda x: ArraySpec(x.shape[1:], x.dtype.name), view.observation),
        global_state=map_tree(lambda x: ArraySpec(x.shape, x.dtype.name), view.state),
        **fields,
    )


def sizes_if_unequal(sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Return the sizes if they differ, for `EnvSpec`; None if they are equal."""
    return tuple(sizes) if len(set(sizes)) > 1 else None


def strengthen_types(state: Any) -> Any:
    """Return a state whose arrays have strong types, so that a program compiles once.

    Python constants are weakly typed in JAX: otherwise a state after a reset could have other types
    than one after a step.
    """
    arrays = jax.tree.map(jnp.asarray, state)
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), arrays)
