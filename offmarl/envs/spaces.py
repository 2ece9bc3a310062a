"""Agents of several sizes in arrays of one size, for the adapters.

Observations are padded with zeros, and what an agent has not is never among its legal actions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from offmarl.errors import ShapeError
from offmarl.types import Continuous, Discrete


@dataclass(frozen=True)
class Box:
    """A vector that an environment takes as an action, between bounds.

    Policies act in [-1, 1], which is stretched over the bounds.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]

    @property
    def size(self) -> int:
        """How many numbers."""
        return len(self.low)


ActionSpace = Discrete | Box


@dataclass(frozen=True)
class Actions:
    """The action spaces of all agents, as one.

    Parameters
    ----------
    spaces
        Of each agent, all of one kind.

    Raises
    ------
    ShapeError
        Some are discrete and some continuous.
    """

    spaces: tuple[ActionSpace, ...]

    def __post_init__(self) -> None:
        kinds = {type(space) for space in self.spaces}
        if len(kinds) != 1:
            listed = ", ".join(
                "discrete" if isinstance(space, Discrete) else "continuous" for space in self.spaces
            )
            raise ShapeError(
                f"the agents' actions are of both kinds ({listed}), and a dataset holds one: wrap "
                "the environment so that all its agents act alike."
            )

    @property
    def discrete(self) -> bool:
        """Whether actions are numbers."""
        return isinstance(self.spaces[0], Discrete)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of each agent's actions, or of its action's dimensions."""
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
        """Which of the A actions each agent has at all, ``(N, A)`` bool."""
        return np.arange(max(self.sizes)) < np.array(self.sizes)[:, None]

    def split(self, action: Any) -> list[Any]:
        """Return each agent's own action, in its own size and bounds.

        Parameters
        ----------
        action
            ``(N,)`` integers, or ``(N, A)`` in [-1, 1]; NumPy or JAX.
        """
        if self.discrete:
            return [action[i] for i in range(len(self.spaces))]
        return [
            _stretch(action[i, : space.size], space)
            for i, space in enumerate(self.spaces)
            if isinstance(space, Box)
        ]

    def join(self, actions: Sequence[Any]) -> np.ndarray:
        """Return the agents' own actions as one array: what `split` takes apart.

        Continuous actions are clipped to their bounds.
        """
        if self.discrete:
            return np.array(actions, np.int32)
        joint = np.zeros(self.mask.shape, np.float32)
        for i, (action, space) in enumerate(zip(actions, self.spaces, strict=True)):
            if isinstance(space, Box):
                joint[i, : space.size] = np.clip(_unstretch(np.ravel(action), space), -1, 1)
        return joint

    def legal(self, masks: Sequence[Any] | None) -> Bool[Array, "N A"]:
        """Pad the agents' masks of legal actions; None says that all are."""
        if masks is None:
            return jnp.asarray(self.mask)
        return pad(masks, max(self.sizes)).astype(bool)


def _stretch(action: Any, space: Box) -> Any:
    low, high = np.array(space.low, np.float32), np.array(space.high, np.float32)
    if (low == -1).all() and (high == 1).all():
        return action
    return low + (action + 1) / 2 * (high - low)


def _unstretch(action: Any, space: Box) -> Any:
    low, high = np.array(space.low), np.array(space.high)
    width = np.where(high > low, high - low, 1)  # an entry may have a single value
    return 2 * (action - low) / width - 1


def pad(vectors: Sequence[Any], size: int) -> Array:
    """Stack vectors of several lengths, ``(N, size)``, with zeros behind."""
    return jnp.stack([jnp.pad(vector, (0, size - len(vector))) for vector in vectors])


def flatten(tree: Any) -> Float[Array, "O"]:
    """Join the arrays of a tree into one float32 vector."""
    leaves = [jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(tree)]
    return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves)


def unequal(sizes: Sequence[int]) -> tuple[int, ...] | None:
    """Return the sizes where they differ, for `EnvSpec`; None where they do not."""
    return tuple(sizes) if len(set(sizes)) > 1 else None


def strong(state: Any) -> Any:
    """Give the arrays of a state the types they have, so that a program compiles for it once.

    Constants are "weakly" typed in JAX until something else has touched them: a fresh state would
    have other types than one after a step.
    """

    def settle(leaf: Any) -> Array:
        array = jnp.asarray(leaf)
        return jax.lax.convert_element_type(array, array.dtype)

    return jax.tree.map(settle, state)
