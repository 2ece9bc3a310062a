"""How the seeds, environments and batches of a run share the devices.

The devices form a mesh with two axes: seeds are divided along `SEEDS`; the environments of a
recorder, and the windows in the batches of a baseline, along `DATA`. Parameters, optimisers and a
dataset on the device are the same on all devices along `DATA`.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, use_abstract_mesh

from offmarl import tracking
from offmarl._arrays import is_key, largest_divisor
from offmarl._mesh import DATA, constrain, spec
from offmarl.errors import OptionError, RunError
from offmarl.programs.cluster import on_first, put
from offmarl.programs.experience.buffer import Capture
from offmarl.rollout import RolloutState
from offmarl.types import ArrayTree

TreeT = TypeVar("TreeT")

SEEDS = "seeds"
"""The axis of the mesh along which seeds are divided."""


class SeedLayout(NamedTuple):
    """How the seeds of a run share the devices; static under jit."""

    at_once: int
    """Seeds computed side by side, by `jax.vmap`, on one device. The others follow one after the
    other, by `jax.lax.map`. The results' bits depend on this number."""
    devices: int = 1
    """Devices that the seeds are spread over. With one seed at a time they need not divide the
    seeds: `place` adds copies of the last seed."""
    shards: int = 1
    """Devices that each batch of a seed, or its environments, are divided over. Sums over a batch
    are added in an order that depends on this number."""

    @property
    def local_devices(self) -> int:
        """Number of devices of this process."""
        return self.devices * self.shards // jax.process_count()

    def mesh(self) -> Mesh:
        """Return the devices, along the axes `SEEDS` and `DATA`."""
        return _mesh(first_devices(self.devices * self.shards), self.devices)

    def mesh_of(self, place: int) -> Mesh | None:
        """Return the devices of a recorder's seed, of which ``place`` is the number in its run.

        Seeds take groups of devices in turn, which compute at the same time. Each group has devices
        of every process. None for a single device, which needs no mesh.
        """
        if self.devices * self.shards == 1:
            return None
        devices = np.array(first_devices(self.devices * self.shards))
        groups = devices.reshape(jax.process_count(), self.devices, -1).swapaxes(0, 1)
        return _mesh(list(groups[place % self.devices].ravel()), 1)

    def place(self, tree: TreeT, *axes: str | None) -> TreeT:
        """Put arrays on the devices: divided by `SEEDS` and along other axes, or the same on each.

        ``axes`` are those of the mesh along which the first axes of the arrays are divided.
        """
        if self.devices * self.shards == 1:
            return tree
        sharding = NamedSharding(self.mesh(), spec(*axes))

        def of_leaf(leaf: Any) -> Any:
            if is_key(leaf):
                data = of_leaf(jax.random.key_data(leaf))
                return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
            missing = -len(leaf) % self.devices if axes else 0
            if missing or _must_be_cut(leaf, sharding):
                # On the host, because the device has a program for each shape that it cuts.
                host = np.asarray(leaf)
                leaf = np.concatenate([host, *[host[-1:]] * missing])
            return put(leaf, sharding)

        placed: TreeT = jax.tree.map(of_leaf, tree)
        return placed


def _must_be_cut(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether a CPU has an array as a whole that is to be divided over its devices."""
    on_one_device = isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) == 1
    return on_one_device and jax.default_backend() == "cpu" and not sharding.is_fully_replicated


ONE_DEVICE = SeedLayout(1)
"""The layout of a single device."""


def _mesh(devices: list[Any], rows: int) -> Mesh:
    return Mesh(np.array(devices).reshape(rows, -1), (SEEDS, DATA), axis_types=(AxisType.Auto,) * 2)


# ---------------------------------------------------------------------------------- choice


def first_devices(count: int) -> list[Any]:
    """Return equally many devices of each process, in the order of the processes."""
    processes = range(jax.process_count())
    share = count // len(processes)
    return [device for process in processes for device in jax.local_devices(process)[:share]]


def count_devices(devices: int | None) -> int:
    """Return the number of devices to use, from ``--devices``; by default all of them."""
    total, processes = len(jax.devices()), jax.process_count()
    if devices is None:
        return total
    if devices > total:
        kind, more = jax.default_backend().upper(), ""
        if kind == "CPU":
            more = f" JAX_NUM_CPU_DEVICES={-(-devices // processes)} splits a CPU into that many."
        raise OptionError(
            f"--devices {devices}: JAX has {total} (kind: {kind}) in all processes: give at most "
            f"{total}.{more}"
        )
    if devices % processes:
        raise OptionError(
            f"--devices {devices} cannot be divided over {processes} processes: give a multiple of "
            f"{processes}, the number of all their devices together."
        )
    return devices


def layout_of(
    seeds: int, batching: str, at_once: int | None = None, devices: int | None = None
) -> SeedLayout:
    """Choose how the seeds and batches of a baseline are computed."""
    most = count_devices(devices)
    if at_once is None:
        if batching == "auto":
            batching = "map" if jax.default_backend() == "cpu" else "vmap"
        at_once = 1 if batching == "map" else seeds // largest_divisor(seeds, most)
    groups = seeds // at_once if seeds % at_once == 0 else 1
    if devices is not None or jax.process_count() > 1:
        rows = largest_divisor(most, seeds) if at_once == 1 else math.gcd(groups, most)
        return SeedLayout(at_once, rows, most // rows)
    if at_once == 1:
        rounds = -(-seeds // most)
        return SeedLayout(1, -(-seeds // rounds))
    return SeedLayout(at_once, largest_divisor(groups, most))


def recorder_layout(seeds: int, num_envs: int, devices: int | None) -> SeedLayout:
    """Choose how the seeds and environments of a recorder are computed.

    By default a single process uses one device, and several use all of theirs. `OptionError` if
    the environments cannot be divided over the devices.
    """
    if devices is None and jax.process_count() == 1:
        return SeedLayout(1)
    total = count_devices(devices)
    rows = largest_divisor(total // jax.process_count(), seeds)
    layout = SeedLayout(1, rows, total // rows)
    check_divisible("--num-envs", num_envs, layout)
    return layout


def check_divisible(option: str, count: int, layout: SeedLayout) -> None:
    """Raise `OptionError` if environments or windows cannot be divided over their devices."""
    if count % layout.shards:
        smaller = largest_divisor(count, layout.shards)
        raise OptionError(
            f"{option} {count} cannot be divided over {layout.shards} devices: give a multiple of "
            f"{layout.shards}, or fewer devices (--devices {smaller * layout.devices} divides it)."
        )


def shards_record(layout: SeedLayout) -> dict[str, int]:
    """Return what a run's record says of the layout, if it has several devices.

    Only ``shards`` changes the last bits of the result.
    """
    devices, processes = layout.devices * layout.shards, jax.process_count()
    record = {"devices": devices, "processes": processes} if devices > 1 else {}
    return record | ({"shards": layout.shards} if layout.shards > 1 else {})


def check_shards(directory: Path, what: str, layout: SeedLayout) -> None:
    """Raise `RunError` if an unfinished run was divided over another number of devices.

    Training then adds in another order, and a resumed run would not have the same bits.
    """
    record = on_first(lambda: tracking.read_run_if_any(directory))
    shards = record.get("shards", 1)
    if record and not record.get("complete") and shards != layout.shards:
        raise RunError(
            f"{directory} was started with its {what} divided over {shards} devices, not "
            f"{layout.shards}, which changes the last digits of sums: give --devices "
            f"{shards * layout.devices} to resume it, or another directory with --out."
        )


# ---------------------------------------------------------------------------------- seeds


def map_seeds(
    layout: SeedLayout, function: Callable[..., ArrayTree], per_seed: tuple[Any, ...], *shared: Any
) -> ArrayTree:
    """Apply a function of a seed's part of each tree, and of shared ones, to all, under jit."""
    one_by_one = None if layout.at_once == 1 else layout.at_once

    def on_device(per_seed: tuple[Any, ...], shared: tuple[Any, ...]) -> ArrayTree:
        return jax.lax.map(lambda seed: function(*seed, *shared), per_seed, batch_size=one_by_one)

    if layout.devices * layout.shards == 1:
        return on_device(per_seed, shared)
    mesh = layout.mesh()
    if layout.devices == 1:
        with use_abstract_mesh(mesh.abstract_mesh):
            return on_device(per_seed, shared)
    spread = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(spec(SEEDS), spec()),
        out_specs=spec(SEEDS),
        axis_names={SEEDS} if layout.shards > 1 else set(mesh.axis_names),
        check_vma=False,
    )
    return spread(per_seed, shared)


# ---------------------------------------------------------------------------------- environments


def place_state(state: ArrayTree, mesh: Mesh | None) -> ArrayTree:
    """Put the state of a recorder's seed on the devices of a mesh, divided by environments."""
    if mesh is None:
        return state
    return jax.tree.map(put, state, _shardings(state, mesh))


def keep_divided(state: ArrayTree, mesh: Mesh) -> ArrayTree:
    """Divide a state as `place_state` does, under jit."""
    return constrain(state, _shardings(state, mesh))


def place_shared(tree: TreeT, mesh: Mesh | None) -> TreeT:
    """Put the same arrays on all devices of a mesh."""
    if mesh is None:
        return tree
    placed: TreeT = jax.tree.map(lambda leaf: put(leaf, NamedSharding(mesh, spec())), tree)
    return placed


def _shardings(state: ArrayTree, mesh: Mesh) -> ArrayTree:
    """Return the sharding of each array in a state: along its axis of environments, if any."""

    def all_at(axis: int | None, tree: ArrayTree) -> ArrayTree:
        def of_leaf(leaf: Any) -> NamedSharding:
            if axis is None or leaf.shape[axis] % mesh.shape[DATA]:
                return NamedSharding(mesh, spec())
            return NamedSharding(mesh, spec(*[None] * axis, DATA))

        return jax.tree.map(of_leaf, tree)

    def of_node(node: Any) -> Any:
        if isinstance(node, RolloutState):
            others = all_at(None, node.others)
            return all_at(0, node._replace(others=()))._replace(others=others)
        shared = all_at(None, node)
        if not isinstance(node, Capture):
            return shared
        buffer = shared.buffer.replace(experience=all_at(0, node.buffer.experience))
        next_views = all_at(0 if node.is_sampled else 1, node.next_views)
        return shared._replace(buffer=buffer, next_views=next_views)

    return jax.tree.map(
        of_node, state, is_leaf=lambda node: isinstance(node, RolloutState | Capture)
    )
