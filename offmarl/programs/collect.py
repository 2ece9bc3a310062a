"""The loop that collects steps, learning from them or not, and hands them to a vault."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, PRNGKeyArray

from offmarl.checkpoint import Checkpoints
from offmarl.programs.writer import ChunkWriter
from offmarl.types import ArrayTree

State = Any
"""The state of a program: a NamedTuple of arrays with a field ``capture``, a `Capture`."""


class OnlineProgram(NamedTuple):
    """What acts in parallel environments: an online algorithm, or a policy that stays as it is."""

    num_steps: int
    """Time steps that an iteration takes in each environment."""
    init: Callable[[PRNGKeyArray], State]
    iterate: Callable[[State, PRNGKeyArray], tuple[State, dict[str, Array]]]
    """Take ``num_steps``, `add` them to the state's capture and learn from it; pure. Returns the
    next state and scalars worth logging."""
    acting: Callable[[State], ArrayTree]
    """The parameters of the policy to evaluate and to record."""
    prepare: Callable[[State], State] = lambda state: state
    """What to do with a fresh state, outside of jit: such as filling its buffer from the disk."""


def resume(
    program: OnlineProgram, checkpoints: Checkpoints, key: PRNGKeyArray
) -> tuple[int, State, dict[str, Any]]:
    """Return where to go on: iterations done, the state after them, the checkpoint's info."""
    init = jax.jit(program.init)
    found = checkpoints.resume({"state": jax.eval_shape(init, key)})
    if found is None:
        return 0, program.prepare(init(key)), {}
    return found.step, found.tree["state"], found.info


def collect(
    program: OnlineProgram,
    state: State,
    key: PRNGKeyArray,
    iterations: range,
    chunks: ChunkWriter | None,
) -> Iterator[tuple[int, State, dict[str, Array]]]:
    """Iterate, and hand every step to the vault.

    Parameters
    ----------
    program
        What acts.
    state
        Where it stands; donated, as is each state that is yielded once the next is asked for.
    key
        Iteration i draws from ``fold_in(key, i)``, whenever it is done.
    iterations
        Those still to do, of ``iterations.stop`` in all. Episodes are cut after the last.
    chunks
        Where the steps go; None where they are not kept.

    Yields
    ------
    tuple
        Iterations done, the state, and the iteration's metrics.
    """
    iterate = jax.jit(program.iterate, donate_argnums=0)
    for iteration in iterations:
        state, metrics = iterate(state, jax.random.fold_in(key, iteration))
        if chunks is not None:
            cut = iteration == iterations.stop - 1
            state = state._replace(capture=chunks.put(state.capture, program.num_steps, cut))
        yield iteration + 1, state, metrics
