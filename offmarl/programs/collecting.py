"""Updates of programs that collect their own steps, which are written to vaults."""

from collections.abc import Iterable, Iterator
from functools import partial

import jax
from jax.sharding import Mesh, use_abstract_mesh
from jaxtyping import Array, PRNGKeyArray

from offmarl.programs.buffer import ChunkWriter
from offmarl.programs.loop import Schedule, copied
from offmarl.programs.program import Hyperparameters, Program
from offmarl.programs.sharding import (
    ONE_DEVICE,
    Layout,
    keep_divided,
    place_shared,
    place_state,
)
from offmarl.types import ArrayTree


def collect(
    program: Program,
    states: list[ArrayTree],
    hyper: Hyperparameters,
    keys: list[PRNGKeyArray],
    schedule: Schedule,
    done: int,
    chunks: Iterable[ChunkWriter | None],
    layout: Layout = ONE_DEVICE,
) -> Iterator[tuple[int, list[ArrayTree], list[dict[str, Array]]]]:
    """Update a program that collects its own steps, and write every step to vaults.

    The seeds share one compiled program, and their updates are in flight at the same time. (With
    `jax.lax.map` or `jax.vmap` over seeds, each update would copy their buffers.) So a seed has the
    same bits alone and with others.

    Parameters
    ----------
    program
        The program, which acts and learns.
    states
        The state of each seed. They are donated, and so are the yielded states at the next step.
    hyper
        The hyperparameters of all seeds.
    keys
        Update i of a seed always draws from ``fold_in(key, i)``.
    schedule
        The updates. Episodes are cut off after the last one.
    done
        Number of updates done before.
    chunks
        Writers of each seed's steps; None where they are not kept.
    layout
        How the seeds and environments share the devices.

    Yields
    ------
    The number of updates done, the states after them, and the last update's metrics of each seed on
    the device.
    """
    meshes, writers = layout.meshes(), list(chunks)
    mesh_of = [meshes[seed % len(meshes)] for seed in range(len(states))]
    states = [place_state(*one) for one in zip(states, mesh_of, strict=True)]
    rest = [place_shared((key, hyper), mesh) for key, mesh in zip(keys, mesh_of, strict=True)]
    metrics: list[dict[str, Array]] = [{} for _ in states]
    for number in range(done, schedule.updates):
        stage = schedule.stage(number)
        if number == schedule.starts[stage]:
            # A copy, because donated leaves must not be aliases or kept elsewhere.
            started = [copied(program.stages[stage].on_start(state)) for state in states]
            states = [place_state(*one) for one in zip(started, mesh_of, strict=True)]
        for seed, (state, mesh) in enumerate(zip(states, mesh_of, strict=True)):
            key, own = rest[seed]
            folded = jax.random.fold_in(key, number)
            states[seed], metrics[seed] = _collect(program, stage, mesh, state, folded, own)
        cut = number == schedule.updates - 1
        for seed, writer in enumerate(writers):
            if writer is not None:  # waits for the seed's update
                capture = writer.put(states[seed].capture, program.num_steps, cut)
                states[seed] = states[seed]._replace(capture=capture)
        yield number + 1, list(states), list(metrics)


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _collect(
    program: Program,
    stage: int,
    mesh: Mesh | None,
    state: ArrayTree,
    key: PRNGKeyArray,
    hyper: Hyperparameters,
) -> tuple[ArrayTree, dict[str, Array]]:
    if mesh is None:
        return program.stages[stage].update(state, None, key, hyper)
    with use_abstract_mesh(mesh.abstract_mesh):
        state, metrics = program.stages[stage].update(state, None, key, hyper)
    return keep_divided(state, mesh), metrics
