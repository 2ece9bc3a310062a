"""Trained critics, loaded from their runs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from offmarl.errors import RunError, ShapeError
from offmarl.programs.program import Values
from offmarl.programs.runs.trained import Step, TrainedRun
from offmarl.types import ArrayTree, Continuous, EnvSpec, Sequence, View, empty_view


@dataclass(frozen=True)
class LoadedCritic:
    """A trained critic of a run: a function of views and actions.

    Call it with the windows of a dataset, or with the steps of an episode:

        batch = vault.replay(batch=256, length=20).sample(key)
        values = critic(batch.view_tm1, batch.action, batch.first[:, :-1])
        values = critic.of(batch)  # the same
    """

    values: Values = field(repr=False)
    params: ArrayTree = field(repr=False)
    spec: EnvSpec = field(repr=False)
    name: str
    """The program that trained it."""

    def __call__(
        self,
        view: View,
        action: Array | np.ndarray,
        first: Bool[Array | np.ndarray, "*b T"] | None = None,
    ) -> Float[np.ndarray, "*b T V"]:
        """Return the values of actions.

        Parameters
        ----------
        view
            The views that the actions are taken in: a window ``(T, ...)``, or several
            ``(B, T, ...)``, in order of time, because a recurrent critic remembers.
        action
            The agents' actions, ``(*b, T, N)``, or ``(*b, T, N, A)`` if continuous.
        first
            Slots that begin an episode; by default those at the start of each window.

        Returns
        -------
        V values of each step, in the unit of the recorded returns: N, one for each agent, or 1 for
        a value of the team.

        Raises
        ------
        ShapeError
            The arrays are not windows of the environment that the critic was trained for.
        """
        lead = self._lead(view, np.shape(action))
        if first is None:
            first = jnp.zeros(lead, bool).at[..., 0].set(True)
        batched = (view, action, jnp.asarray(first, bool))
        if len(lead) == 1:
            batched = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], batched)
        found: np.ndarray = np.asarray(self._apply(self.params, *batched))
        return found if len(lead) == 2 else found[0]

    def of(self, batch: Sequence) -> Float[np.ndarray, "*b T V"]:
        """Return the values of the actions of windows."""
        return self(batch.view_tm1, batch.action, batch.first[..., :-1])

    def _lead(self, view: View, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the axes ``(T,)`` or ``(B, T)`` of a window, or raise `ShapeError`."""
        spec = self.spec
        size = (spec.action_size,) if isinstance(spec.action, Continuous) else ()
        per_step = (spec.num_agents, *size)
        lead = shape[: len(shape) - len(per_step)]
        wanted = [(*lead, *leaf.shape) for leaf in jax.tree.leaves(empty_view(spec))]
        found = [np.shape(leaf) for leaf in jax.tree.leaves(view)]
        if len(lead) not in (1, 2) or shape[len(lead) :] != per_step or found != wanted:
            raise ShapeError(
                f"the critic of {self.name} takes views and actions of windows (T, ...) or "
                f"(B, T, ...) of {spec.name or 'its data'}, whose actions are {per_step} each: "
                f"got actions {shape} and views {found}."
            )
        return lead

    @cached_property
    def _apply(self) -> Callable[..., Any]:
        values = self.values

        def apply(params: ArrayTree, view: View, action: Array, first: Array) -> Array:
            return values.apply(params, view, first, action)

        return jax.jit(apply)


def load_critic(
    run_dir: str | Path,
    seed: int | None = None,
    program: str | Path | None = None,
    step: Step = None,
) -> LoadedCritic:
    """Load the critic of a run, by default its last, built by the program that trained it.

    Parameters
    ----------
    run_dir
        A directory that `offmarl train` wrote.
    seed, program, step
        As for `load_policy`.

    Raises
    ------
    RunError
        The program has no critic; or as for `load_policy`.
    OptionError, CheckpointError
        As for `load_policy`.
    """
    trained = TrainedRun.open(run_dir, program)
    built, _, state = trained.build(trained.spec)
    name = trained.record["program"]
    if built.values is None:
        raise RunError(f"{run_dir}: {name} has no critic. Give the run of a program that has one.")
    params = built.values.params(trained.restore("state", state, seed, step))
    return LoadedCritic(built.values, params, trained.spec, name)
