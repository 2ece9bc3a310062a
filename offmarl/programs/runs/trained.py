"""The programs and parameters of finished runs, read back from their directories."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from offmarl import tracking
from offmarl._imports import summarize
from offmarl.checkpoint import Checkpoints
from offmarl.config import from_json
from offmarl.envs.base import restart, transition
from offmarl.errors import OptionError, RunError
from offmarl.networks import blank_view
from offmarl.paths import local
from offmarl.programs import registry
from offmarl.programs.program import Program, state_shapes, structure
from offmarl.programs.runs import dataset
from offmarl.programs.runs.finite import require_finite
from offmarl.programs.runs.normalisation import normalise_as_asked
from offmarl.programs.runs.run import best_of
from offmarl.replay.device import bytes_of, require_room
from offmarl.types import ArrayTree, EnvSpec, Timestep, View

Step = int | str | None
"""The checkpoint to load: its number, "last" or "best"; None for the last."""


class Built(NamedTuple):
    """The program of a run."""

    program: Program
    policy: ArrayTree
    """Shapes of its policy's parameters."""
    state: ArrayTree
    """Shapes of its state."""


class TrainedRun(NamedTuple):
    """A run whose checkpoints are read."""

    directory: Path
    record: Mapping[str, Any]
    """Content of ``run.json``."""
    build: Callable[[EnvSpec], Built]
    """Builds its program for an environment."""

    @classmethod
    def open(cls, run_dir: str | Path, program: str | Path | None = None) -> "TrainedRun":
        """Read a run's record; ``program`` is its Python file, see `load_policy`."""
        directory = local(run_dir)
        record = tracking.read_run(directory)
        return cls(directory, record, builder_of(record, directory, program))

    @property
    def spec(self) -> EnvSpec:
        """The spec that it was trained for."""
        return EnvSpec.from_json(self.record["spec"])

    def restore(
        self, part: str, like: ArrayTree, seed: int | None = None, step: Step = None
    ) -> ArrayTree:
        """Return a part of a checkpoint, "policy" or "state", for one seed, if it is finite.

        ``like`` has its shapes for one seed; ``seed`` and ``step`` are those of `load_policy`.
        """
        seeds = self.record["seeds"]
        seed = seeds[0] if seed is None else seed
        if seed not in seeds:
            raise RunError(f"{self.directory} has no seed {seed!r}: its seeds are {seeds}.")
        shapes = seeds_to_read(like, len(seeds))
        earlier = part == "policy" and step not in (None, "last")
        checkpoints, unit = self._checkpoints(earlier)
        number = self._step(checkpoints.steps(), seed, step, unit)
        tree, _ = checkpoints.restore({part: shapes}, number)
        values = jax.tree.map(lambda leaf: leaf[seeds.index(seed)], tree[part])
        at = "" if number is None else f" at {number * unit}"
        require_finite(values, f"the {part} of seed {seed} in {self.directory}{at}")
        return values

    def steps(self) -> list[int]:
        """Return the steps of which it has policies, as `load_policy` takes them."""
        checkpoints, unit = self._checkpoints(earlier=True)
        return [unit * number for number in checkpoints.steps()]

    def best_step(self, seed: int) -> int:
        """Return the step of the best evaluation of a seed; see `best_of`."""
        if (step := best_of(tracking.read(self.directory / tracking.METRICS_FILE), seed)) is None:
            raise RunError(
                f"{self.directory} has no evaluation of seed {seed}, so none of its checkpoints is "
                "the best: give the number of one."
            )
        return step

    def _checkpoints(self, earlier: bool) -> tuple[Checkpoints, int]:
        """Return the last checkpoints, or those of earlier policies, and the steps of an update.

        The policies of a population are counted, and not its steps.
        """
        if not earlier or self.record["kind"] != "recorder":
            return Checkpoints(self.directory / tracking.CHECKPOINTS), 1
        num_steps = self.build(self.spec).program.num_steps
        unit = num_steps * int(self.record["args"].get("num_envs", 1))
        return Checkpoints(self.directory / tracking.POLICIES), unit or 1

    def _step(self, numbers: list[int], seed: int, step: Step, unit: int) -> int | None:
        """Return the number of the checkpoint that a user asked for.

        Steps are those of the metrics, ``unit`` times the numbers of checkpoints.
        """
        if step is None or step == "last":
            return None
        if isinstance(step, str) and step != "best":
            raise OptionError(
                f'step is {step!r}: give the number of a checkpoint, as an int, "last" or "best".'
            )
        target = self.best_step(seed) if step == "best" else int(step)
        steps = [unit * number for number in numbers]
        if not steps:
            raise RunError(
                f"{self.directory} keeps no policy but its last, as published runs do: leave the "
                'step out, or give "last".'
            )
        if target not in steps:
            keeps = self.record["kind"] == "baseline"
            raise RunError(
                f"{self.directory} has no checkpoint of step {target}, but of {steps}: give one of "
                f'these, or "last"{", or train again with --keep all (or best)" if keeps else ""}.'
            )
        return target // unit


def builder_of(
    run: Mapping[str, Any], run_dir: Path, file: str | Path | None = None
) -> Callable[[EnvSpec], Built]:
    """Return a function that builds the program of a run for an environment, from its record.

    ``file`` is that of its program, see `load_policy`.
    """
    kind: registry.Kind = run["kind"]
    origin = registry.ProgramOrigin(run["program"], run["file"], run["sha256"])
    module = registry.load_origin(kind, origin, run_dir, file)
    try:
        args = from_json(module.Args, run["args"])
    except OptionError as error:
        raise RunError(f"{run_dir / tracking.RUN_FILE} is not valid (args): {error}") from None

    def build(spec: EnvSpec) -> Built:
        source: Any = _Blank(spec)
        if kind == "baseline":
            statistics = dataset.read(run_dir / dataset.STATISTICS_FILE)
            source = dataset.DatasetStatistics(None, statistics)
        try:
            base = module.make(spec, structure(args), source)
            program: Program = normalise_as_asked(args, base, source)
            state = state_shapes(program, args)
            return Built(program, jax.eval_shape(program.policy_params, state), state)
        except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError) as error:
            raise RunError(
                f"the program of {run_dir} cannot be built from its {tracking.RUN_FILE} and "
                f"{dataset.STATISTICS_FILE} ({summarize(error):.300}): train again."
            ) from error

    return build


def seeds_to_read(like: ArrayTree, seeds: int) -> ArrayTree:
    """Return the shapes of several seeds, ``(seeds, ...)``, from those of one.

    `OptionError` if no memory holds the arrays, whose run may be forged.
    """

    def of_all(leaf: Any) -> Array:
        return jnp.broadcast_to(leaf, (seeds, *leaf.shape))

    shapes = jax.eval_shape(lambda tree: jax.tree.map(of_all, tree), like)
    hint = "load it on a machine with more"
    require_room(bytes_of(shapes), "the arrays of the run", hint=hint)
    return shapes


@jax.jit
def stack_seeds(trees: Sequence[ArrayTree]) -> ArrayTree:
    """Return the trees of several seeds as one, with a leading axis of seeds."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@dataclass(frozen=True)
class _Blank:
    """An environment of a spec in which nothing happens, with shaped rewards of 0.

    A recorder's policy depends on sizes alone, so it is rebuilt without its environment.
    """

    spec: EnvSpec

    def reset(self, key: PRNGKeyArray) -> tuple[tuple[()], Timestep]:  # noqa: ARG002
        """Start an episode."""
        return (), restart(self._view())

    def step(
        self,
        key: PRNGKeyArray,  # noqa: ARG002
        state: tuple[()],  # noqa: ARG002
        action: Array,  # noqa: ARG002
    ) -> tuple[tuple[()], Timestep]:
        """Take a step."""
        nothing = jnp.zeros(self.spec.num_agents)
        ended = nothing.astype(bool)
        return (), transition(self._view(), nothing, ended, ended, shaping=nothing)

    def _view(self) -> View:
        view = blank_view(self.spec)
        return view._replace(
            legal_actions=jnp.ones_like(view.legal_actions), alive=jnp.ones_like(view.alive)
        )
