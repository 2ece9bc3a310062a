"""Updates of programs that collect their own steps, which are written to vaults."""

import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, use_abstract_mesh
from jaxtyping import Array, Int, PRNGKeyArray
from numpy.typing import NDArray

from offmarl._compiling import jit_in_order
from offmarl.programs.experience.buffer import ChunkWriter, chunks_at_once
from offmarl.programs.program import Hyperparameters, Program
from offmarl.programs.runs.loop import Schedule, copy_arrays, logged_loop, next_size
from offmarl.programs.runs.sharding import (
    ONE_DEVICE,
    SeedLayout,
    keep_divided,
    place_shared,
    place_state,
)
from offmarl.types import ArrayTree

MOST_AT_ONCE = 64
"""Largest number of updates in one call of the compiled loop."""

SECONDS_AT_ONCE = 0.25
"""Duration of a call of several updates: signals are handled between calls."""


def collect(
    program: Program,
    states: list[ArrayTree],
    hypers: list[Hyperparameters],
    keys: list[PRNGKeyArray],
    schedule: Schedule,
    done: int,
    chunks: Iterable[ChunkWriter | None],
    layout: SeedLayout = ONE_DEVICE,
    learns: bool = True,
) -> Iterator[tuple[int, list[ArrayTree], dict[str, NDArray[Any]]]]:
    """Update a program that collects its own steps, and write every step to vaults.

    Yields the number of updates done, the states of the seeds after them, and the metrics
    ``(seeds, n)`` of the n updates since the last yield. The caller may replace entries of the
    yielded list of states, and of ``hypers``, the hyperparameters of each seed.

    The updates run in a compiled loop, as many in a call as fit into `SECONDS_AT_ONCE`, if the
    buffer holds the steps that are written. One compiled loop serves every number, and the vault
    has a chunk for each update, so that neither depends on where a call ended.

    The seeds share the compiled program, and their calls run at the same time. (With
    `jax.lax.map` or `jax.vmap` over seeds, each update would copy their buffers.) So a seed has the
    same bits alone and with others. Without ``learns``, the program only plays a policy.
    """
    run = train if learns else play
    mesh_of, writers = [layout.mesh_of(seed) for seed in range(len(states))], list(chunks)
    # Copies, because donated leaves must have no other references. Buffers have none.
    copies = [_but_buffer(state) for state in states]
    states = [place_state(*pair) for pair in zip(copies, mesh_of, strict=True)]
    metrics: list[dict[str, Array]] = [{} for _ in states]
    captures = [state.capture for state, writer in zip(states, writers, strict=True) if writer]
    most = min([MOST_AT_ONCE, *(chunks_at_once(x, program.num_steps) for x in captures)])
    size = 1
    while done < schedule.updates:
        stage = schedule.stage(done)
        if done == schedule.starts[stage]:
            size = 1
        # Powers of two, so that few programs that copy steps out of the buffer are compiled.
        count = 1 << (min(size, most, schedule.next_stop(done) - done).bit_length() - 1)
        start_time = time.monotonic()
        for seed, (state, mesh) in enumerate(zip(states, mesh_of, strict=True)):
            place, shared = (done, count), place_shared((keys[seed], hypers[seed]), mesh)
            states[seed], metrics[seed] = run(program, stage, mesh, state, place, *shared)
        jax.block_until_ready(states)  # type: ignore[no-untyped-call]
        seconds = (time.monotonic() - start_time) / count
        if most > 1:
            size = next_size(size, seconds, SECONDS_AT_ONCE)
        done += count
        for seed, writer in enumerate(writers):
            if writer is not None:
                last = done == schedule.updates
                writer.put(states[seed].capture, program.num_steps, last, count)
        logs = jax.device_get(metrics)
        yield done, states, {x: np.stack([log[x][:count] for log in logs]) for x in logs[0]}


def _but_buffer(state: ArrayTree) -> ArrayTree:
    """Return a copy of a state; of its buffer, if it has one, the original."""
    if not hasattr(state, "capture"):
        return copy_arrays(state)
    return copy_arrays(state._replace(capture=None))._replace(capture=state.capture)


def _updates(
    program: Program,
    stage: int,
    mesh: Mesh | None,
    state: ArrayTree,
    place: tuple[Int[Array, ""] | int, Int[Array, ""] | int],
    key: PRNGKeyArray,
    hyper: Hyperparameters,
) -> tuple[ArrayTree, dict[str, Array]]:
    """Make ``count`` updates from the number ``first`` on; ``place`` holds both."""
    first, count = place

    def update(state: ArrayTree, index: Array) -> tuple[ArrayTree, dict[str, Array]]:
        own_key = jax.random.fold_in(key, first + index)
        if mesh is None:
            return program.stages[stage].update(state, None, own_key, hyper)
        with use_abstract_mesh(mesh.abstract_mesh):
            state, metrics = program.stages[stage].update(state, None, own_key, hyper)
        return keep_divided(state, mesh), metrics

    return logged_loop(update, state, count, MOST_AT_ONCE)


train = partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)(_updates)
"""Make ``count`` updates from the number ``first`` on, of which ``place`` consists, and return the
state and the metrics."""

play = jit_in_order(static_argnums=(0, 1, 2), donate_argnums=3)(_updates)
"""Do as `train` for a program that learns nothing."""
