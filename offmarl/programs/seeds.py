"""How the seeds of a run share the devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from offmarl._arrays import largest_divisor
from offmarl.types import ArrayTree

_spec: Any = PartitionSpec  # untyped
_PER_SEED, _SHARED = _spec("seed"), _spec()


class Layout(NamedTuple):
    """How the seeds of a run share the devices; static under jit."""

    at_once: int
    """Seeds computed side by side, by `jax.vmap`, on one device. The others follow one after the
    other, by `jax.lax.map`. The results' bits depend on this number, and not on the devices."""
    devices: int = 1
    """Devices that the seeds are spread over. With one seed at a time they need not divide the
    seeds: `place` adds copies of the last seed."""

    def mesh(self) -> Mesh:
        """Return the devices, along the axis "seed"."""
        return Mesh(np.array(jax.local_devices()[: self.devices]), ("seed",))

    def place(self, tree: ArrayTree, per_seed: bool) -> ArrayTree:
        """Put arrays on the devices: divided by seeds, or the same on each."""
        if self.devices == 1:
            return tree
        if per_seed:
            tree = jax.tree.map(self._pad, tree)
        axes = _PER_SEED if per_seed else _SHARED
        return jax.device_put(tree, NamedSharding(self.mesh(), axes))

    def _pad(self, leaf: Any) -> Any:
        missing = -len(leaf) % self.devices
        return jnp.concatenate([leaf, *[leaf[-1:]] * missing]) if missing else leaf


def layout_of(seeds: int, batching: str, at_once: int | None = None) -> Layout:
    """Choose how seeds are computed on this process's devices.

    Parameters
    ----------
    seeds
        Number of seeds.
    batching
        "map", "vmap", or "auto": whichever is faster on the backend.
    at_once
        The value of a resumed run, which is kept.
    """
    most = len(jax.local_devices())
    if at_once is None:
        if batching == "auto":
            batching = "map" if jax.default_backend() == "cpu" else "vmap"
        at_once = 1 if batching == "map" else seeds // largest_divisor(seeds, most)
    if at_once == 1:
        rounds = -(-seeds // most)
        return Layout(1, -(-seeds // rounds))
    groups = seeds // at_once if seeds % at_once == 0 else 1
    return Layout(at_once, largest_divisor(groups, most))


def map_seeds(
    layout: Layout, function: Callable[..., ArrayTree], per_seed: tuple[Any, ...], *shared: Any
) -> ArrayTree:
    """Apply a function of one seed to all seeds, under jit.

    Parameters
    ----------
    layout
        How the seeds are computed.
    function
        Function of an entry of each of ``per_seed``, and of ``shared``.
    per_seed
        Trees with a leading axis of seeds.
    shared
        Trees that are the same for all.
    """
    one_by_one = None if layout.at_once == 1 else layout.at_once

    def on_device(per_seed: tuple[Any, ...], shared: tuple[Any, ...]) -> ArrayTree:
        return jax.lax.map(lambda own: function(*own, *shared), per_seed, batch_size=one_by_one)

    if layout.devices == 1:
        return on_device(per_seed, shared)
    spread = jax.shard_map(
        on_device,
        mesh=layout.mesh(),
        in_specs=(_PER_SEED, _SHARED),
        out_specs=_PER_SEED,
        check_vma=False,
    )
    return spread(per_seed, shared)
