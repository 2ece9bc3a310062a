"""A recorder's run of one training seed: its paths, keys and settings, and its policies."""

import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, PRNGKeyArray

from offmarl import envs, tracking
from offmarl.checkpoint import Checkpoints
from offmarl.config import Role, with_role
from offmarl.envs import Environment
from offmarl.errors import CheckpointError
from offmarl.evaluation import Evaluation, returns_by_team
from offmarl.programs.cluster import gather_all, load_on_first
from offmarl.programs.program import OnlineArgs, Program, recorded_args, state_shapes
from offmarl.programs.recording.sides import against_reference
from offmarl.programs.registry import ProgramOrigin
from offmarl.programs.runs.compiling import compile_ahead
from offmarl.programs.runs.evaluate import place_arguments, play_against
from offmarl.programs.runs.finite import require_finite
from offmarl.programs.runs.sharding import ONE_DEVICE, SeedLayout
from offmarl.programs.runs.trained import seeds_to_read
from offmarl.teams import Team, only_or_all, teams_of
from offmarl.types import ArrayTree, Policy

INIT, TRAIN, EVALUATE, EVALUATE_AGAIN, EVALUATE_RANDOM, RECORD, CHOOSE = range(7)
"""Purposes of random keys; see `OnlineRecorder.key`."""

LEARNED, UNIFORM, GREEDY = np.int32(0), np.int32(1), np.int32(2)
"""Which policy `OnlineRecorder.policy` acts by."""

_ROUNDS = 4
"""Evaluations of a tier's policy, each of `OnlineArgs.eval_episodes` episodes."""


class Version(NamedTuple):
    """An evaluated version of the policy of a training seed."""

    iteration: int
    """Number of training iterations before it; its policy id in the replay data."""
    means: tuple[float, ...]
    """Mean return of the only team, or of each of several that all learn."""

    @property
    def mean(self) -> float:
        """Mean return of the only team, or of the first of several."""
        return self.means[0]

    def of_team(self, number: int) -> "Version":
        """Return the version with the returns of one team."""
        return Version(self.iteration, self.means[number : number + 1])


class OnlineRecorder(NamedTuple):
    """A program, its environment, its arguments and a training seed, and what follows from them."""

    origin: ProgramOrigin
    args: OnlineArgs
    env: Environment
    program: Program
    policy: Policy
    """The program's policy with sampled actions, uniform legal actions, or the program's with its
    best actions: parameters say which, so that one compiled program plays all. See `load` and
    `uniform`."""
    directory: Path
    """Directory of the run, which all of its training seeds share."""
    seed: int
    """The training seed."""
    source: Mapping[str, Any]
    """What else determines the result: the code of the environment, the opponents, and what
    training starts from."""
    layout: SeedLayout = ONE_DEVICE
    """How the seeds and environments share the devices."""
    team: Team | None = None
    """Where all of several teams learn: the one whose returns are taken, while reference policies
    act for the others; see `by_team`."""

    @property
    def name(self) -> str:
        """Name of the program."""
        return self.origin.name

    @property
    def label(self) -> str:
        """Name of the program, with the side that it learned if there are several."""
        return label_of(self.name, self.args)

    def by_team(self) -> list["OnlineRecorder"]:
        """Return the recorder as that of each team of its environment.

        If all of several teams learn, the skill of one cannot be told from episodes that it plays
        against a learner. Each team is therefore evaluated against reference policies, the
        environment's scripted ones or else uniform legal actions, which never change.
        """
        teams = teams_of(self.env.spec)
        return [self._replace(team=team) for team in teams] if len(teams) > 1 else [self]

    @property
    def seeds(self) -> list[int]:
        """The training seeds of the run."""
        return list(range(self.args.seed, self.args.seed + self.args.seeds))

    @property
    def iteration_steps(self) -> int:
        """Environment steps in an update."""
        return self.program.num_steps * self.args.num_envs

    @property
    def iterations(self) -> int:
        """Number of updates."""
        return -(-self.args.total_steps // self.iteration_steps)

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of this training seed, as in the provenance on disk."""
        args = recorded_args(self.args) | {"env": envs.short_name(self.args.env), "seed": self.seed}
        return tracking.plain(args)

    @property
    def recipe(self) -> dict[str, Any]:
        """Everything that determines the training of this seed, for the vaults."""
        later = with_role(type(self.args), Role.TRACED)  # what is recorded after the training
        args = {name: value for name, value in self.settings.items() if name not in later}
        return {"program": self.name, "file_sha256": self.origin.sha256} | args | dict(self.source)

    def vault(self, tier: str) -> Path:
        """Return the path of a tier's vault."""
        name = f"{self.label}-{self.seed}-{tier}"
        return self.args.out / f"{envs.short_name(self.args.env)}.vlt" / name

    def key(self, purpose: int, *parts: int) -> PRNGKeyArray:
        """Return the random key for a purpose, such as `TRAIN`, and for parts of it."""
        return fold_key(self.seed, purpose, *parts)

    # ------------------------------------------------------------------------------ policies

    def play(self, params: ArrayTree, key: PRNGKeyArray) -> Evaluation:
        """Play `OnlineArgs.eval_episodes` episodes of the policy."""
        return gather_all(play_against(*self._play_arguments(params, key)))

    def returns_in(self, evaluation: Evaluation) -> Float[np.ndarray, "episodes"]:
        """Return the returns of played episodes."""
        team = 0 if self.team is None else teams_of(self.env.spec).index(self.team)
        return returns_by_team(self.env.spec, evaluation)[:, team]

    def play_ahead(self, params: ArrayTree) -> "Future[None]":
        """Compile what `play` plays, in a thread."""
        return compile_ahead(play_against, *self._play_arguments(params, self.key(EVALUATE)))

    def _play_arguments(self, params: ArrayTree, key: PRNGKeyArray) -> tuple[Any, ...]:
        """Return the arguments of `play_against`."""
        policy, mesh = self.policy, self.mesh
        if self.team is not None:
            joint, references = against_reference(self.env, self.team, policy)  # type: ignore[arg-type]
            policy, params = joint, (params, *references)
        return place_arguments(self.env, policy, self.args.eval_episodes, mesh, params, key)

    @property
    def mesh(self) -> Mesh | None:
        """The devices of this training seed; None for a single one."""
        return self.layout.mesh_of(self.seeds.index(self.seed))

    def returns_again(self, params: ArrayTree, key: PRNGKeyArray) -> Float[np.ndarray, "episodes"]:
        """Return the returns of the episodes that describe a tier: more than during training."""
        rounds = (jax.random.fold_in(key, number) for number in range(_ROUNDS))
        return np.concatenate([self.returns_in(self.play(params, key)) for key in rounds])

    def policies(self) -> Checkpoints:
        """Return the checkpoints of all evaluated versions of the policies."""
        return Checkpoints(self.directory / tracking.POLICIES)

    def policy_shapes(self) -> ArrayTree:
        """Return the shapes of the parameters of all seeds' policies, ``(seeds, ...)``."""
        shapes = jax.eval_shape(self.program.policy_params, state_shapes(self.program, self.args))
        return seeds_to_read(shapes, self.args.seeds)

    def uniform(self) -> ArrayTree:
        """Return the parameters of uniform legal actions."""
        return UNIFORM, jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), self.policy_shapes())

    def load(self, version: Version) -> ArrayTree:
        """Return the parameters of a version of the policy."""
        shapes = {"policy": self.policy_shapes()}
        tree = load_on_first(lambda: self._restore(shapes, version.iteration), shapes)
        index = self.seeds.index(self.seed)
        policy = jax.tree.map(lambda leaf: np.asarray(leaf)[index], tree["policy"])
        label = f"policy {version.iteration} of seed {self.seed} in {self.directory}"
        require_finite(policy, label)
        return LEARNED, policy

    def _restore(self, like: dict[str, ArrayTree], iteration: int) -> dict[str, ArrayTree]:
        try:
            return self.policies().restore(like, iteration)[0]
        except CheckpointError as error:
            raise CheckpointError(
                self.directory / tracking.POLICIES / str(iteration),
                error.reason,
                f"delete {self.directory} and repeat the command: it keeps the recorded data and "
                "repeats the training.",
            ) from error

    # ------------------------------------------------------------------------------ provenance

    def provenance(self, tier: str) -> dict[str, Any]:
        """Return the provenance of a tier's vault; local paths stay in the run."""
        local = ("init", "prefill", "opponents")
        return {
            "program": self.name,
            "training_seed": self.seed,
            "args": {name: self.settings[name] for name in self.settings if name not in local},
            "tier": tier,
            "run": self.directory.name,
        }

    def about(self, version: Version) -> dict[str, Any]:
        """Describe a version of the policy for a vault."""
        alone = self.team is not None  # and the version has the returns of this team alone
        names = (team.name for team in teams_of(self.env.spec))
        mean = version.mean if alone else only_or_all(dict(zip(names, version.means, strict=True)))
        return {
            "policy_id": version.iteration,
            "training_steps": version.iteration * self.iteration_steps,
            "return": mean,
        }


def fold_key(seed: int, *parts: int) -> PRNGKeyArray:
    """Return a seed's random key for some numbers; all combinations give independent keys."""
    return reduce(jax.random.fold_in, parts, jax.random.key(seed))


def tier_key(seed: int, tier: str) -> PRNGKeyArray:
    """Return the random key of the recording of a tier, from its training seed."""
    return fold_key(seed, RECORD, zlib.crc32(tier.encode()))


def run_directory(args: Any, program: str) -> Path:
    """Return the directory of a run: ``<out>/<env>.run/<program>-<seed>``.

    With several training seeds it is ``<program>-<first>-to-<last>``; if one side learns, its name
    follows that of the program. ``args`` are those of a recorder.
    """
    last = args.seed + args.seeds - 1
    seeds = f"{args.seed}-to-{last}" if args.seeds > 1 else f"{args.seed}"
    out: Path = args.out
    return out / f"{envs.short_name(args.env)}.run" / f"{label_of(program, args)}-{seeds}"


def label_of(program: str, args: Any) -> str:
    """Return the name of a program with its side; a vault with a comma cannot be published."""
    return f"{program}-{args.side.replace(',', '-')}" if args.side else program
