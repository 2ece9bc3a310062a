"""Recording of a fixed policy on a given number of devices, with the same bits on any number.

The last bits of floating-point numbers may depend on how many environments the compiler vectorises
together. So the environments form groups, whose number does not depend on the devices, and one
compiled program plays each group on one device. Nothing is exchanged until the steps are written.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int, PRNGKeyArray

from offmarl._compiling import jit_in_order
from offmarl._mesh import DATA, spec
from offmarl.envs import Environment
from offmarl.programs.cluster import is_key
from offmarl.programs.experience.buffer import Capture, ChunkWriter, add, make_buffer
from offmarl.programs.runs.sharding import SHARED, environment_axes
from offmarl.rollout import RolloutState, rollout
from offmarl.types import ArrayTree, Policy

GROUPS = 8
"""Number of groups, if it divides the number of environments."""


def groups_of(num_envs: int, devices: int) -> int:
    """Return the number of groups: the same for all numbers of devices that divide it."""
    return math.lcm(math.gcd(num_envs, GROUPS), devices)


class GroupState(NamedTuple):
    """The environments of a group, or all of them, and their last steps."""

    rollout: RolloutState
    capture: Capture


def collect_in_groups(
    env: Environment,
    policy: Policy,
    params: ArrayTree,
    state: GroupState,
    key: PRNGKeyArray,
    updates: range,
    chunks: ChunkWriter,
    mesh: Mesh,
) -> Iterator[tuple[int, Callable[[], GroupState]]]:
    """Play a policy in groups of environments, and write every step to a vault."""
    num_steps, total = state.capture.capacity, len(state.rollout.view.alive)
    count = groups_of(total, mesh.size)
    size, own = total // count, _own_groups(mesh, count)
    axes = environment_axes(state)
    states = {
        group: jax.device_put(_part(state, axes, group * size, size), device)
        for group, device in own.items()
    }
    copies = {device: jax.device_put((params, key), device) for device in {*own.values()}}
    for number in updates:
        for group, device in own.items():
            params, own_key = copies[device]
            folded = jax.random.fold_in(own_key, number)
            states[group] = _play(
                env, policy, num_steps, total, states[group], params, folded, group * size
            )
        joined = partial(_joined, states, axes, own, mesh)
        captures = {group: one.capture for group, one in states.items()}
        whole = _joined(captures, axes.capture, own, mesh)
        chunks.put_copy(whole, num_steps, cut=number == updates[-1])
        yield number + 1, joined


@jit_in_order(static_argnums=(0, 1, 2, 3), donate_argnums=4)
def _play(
    env: Environment,
    policy: Policy,
    num_steps: int,
    total: int,
    state: GroupState,
    params: ArrayTree,
    key: PRNGKeyArray,
    first: Int[Array, ""] | int,
) -> GroupState:
    buffer = make_buffer(len(state.rollout.view.alive), num_steps)
    after, transitions, next_views = rollout(
        env, policy, params, state.rollout, key, num_steps, 0, (first, total)
    )
    return GroupState(after, add(buffer, state.capture, transitions, next_views))


# ---------------------------------------------------------------------------------- division


def _own_groups(mesh: Mesh, count: int) -> dict[int, Any]:
    """Return the groups that this process plays, each with its device."""
    devices = mesh.devices.ravel()
    each = count // len(devices)
    placed = {group: devices[group // each] for group in range(count)}
    return {
        group: device
        for group, device in placed.items()
        if device.process_index == jax.process_index()
    }


def _part(state: GroupState, axes: GroupState, first: int, size: int) -> GroupState:
    """Return some of the environments."""

    def part(leaf: Any, axis: int) -> Any:
        if axis == SHARED:
            return jnp.copy(leaf)
        return jax.lax.slice_in_dim(jnp.asarray(leaf), first, first + size, axis=axis)

    found: GroupState = jax.tree.map(part, state, axes)
    return found


def _joined(states: dict[int, ArrayTree], axes: ArrayTree, own: dict[int, Any], mesh: Mesh) -> Any:
    """Return the states of all groups as one, divided over the devices."""
    by_device: dict[Any, list[ArrayTree]] = {}
    for group, device in own.items():
        by_device.setdefault(device, []).append(states[group])

    def join(axis: int, *leaves: Any) -> Any:
        of_devices, rest = [], list(leaves)
        for parts in by_device.values():
            ours, rest = rest[: len(parts)], rest[len(parts) :]
            of_devices.append(ours[0] if axis == SHARED or len(ours) == 1 else _concat(ours, axis))
        return _global(of_devices, axis, mesh)

    order = [one for parts in by_device.values() for one in parts]
    return jax.tree.map(join, axes, *order)


def _concat(parts: Sequence[Array], axis: int) -> Array:
    return jnp.concatenate(parts, axis=axis)


def _global(parts: Sequence[Array], axis: int, mesh: Mesh) -> Array:
    """Return an array of which each device has a part; or the same everywhere."""
    if is_key(parts[0]):
        data = [jax.random.key_data(part) for part in parts]
        return jax.random.wrap_key_data(_global(data, axis, mesh))
    shape = list(parts[0].shape)
    if axis == SHARED:
        sharding = NamedSharding(mesh, spec())
    else:
        shape[axis] *= mesh.size
        sharding = NamedSharding(mesh, spec(*[None] * axis, DATA))
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(parts))
