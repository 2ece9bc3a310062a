"""A recorder's run: its paths, keys and settings, and the versions of its policy."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PRNGKeyArray

from offmarl import envs, tracking
from offmarl.checkpoint import Checkpoints
from offmarl.envs import Environment
from offmarl.errors import CheckpointError
from offmarl.evaluation import Evaluation, evaluate
from offmarl.programs.program import OnlineArgs, Program, hyperparameters
from offmarl.programs.registry import Origin
from offmarl.types import ArrayTree, Policy

INIT, TRAIN, EVALUATE, EVALUATE_EXPERT, EVALUATE_RANDOM = range(5)
"""Purposes of random keys; see `Recorder.key`."""


class Version(NamedTuple):
    """An evaluated version of the policy."""

    iteration: int
    """Number of training iterations before it; its policy id in the replay data."""
    returns: list[float]

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))


class Recorder(NamedTuple):
    """A program, its environment and its arguments, and what follows from them."""

    origin: Origin
    args: OnlineArgs
    env: Environment
    program: Program
    policy: Policy
    """The program's policy with sampled actions."""
    source: dict[str, dict[str, str]]
    """From `environment_source`."""

    @property
    def name(self) -> str:
        """Name of the program."""
        return self.origin.name

    @property
    def directory(self) -> Path:
        """Directory of the run."""
        return run_directory(self.args, self.name)

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
        """The arguments that determine the result."""
        args = asdict(self.args) | {"env": envs.short_name(self.args.env)}
        del args["out"], args["checkpoint_seconds"], args["track"]
        if not self.args.env_states:  # as recordings before there were states
            del args["env_states"]
        return tracking.plain(args)  # as in the provenance on disk

    @property
    def recipe(self) -> dict[str, Any]:
        """Everything that determines the result, for the vaults."""
        return self.settings | self.source

    def vault(self, tier: str) -> Path:
        """Return the path of a tier's vault."""
        return self.args.out / f"{envs.short_name(self.args.env)}.vlt" / tier

    def key(self, purpose: int) -> PRNGKeyArray:
        """Return the random key for a purpose, such as `TRAIN`."""
        return jax.random.fold_in(jax.random.key(self.args.seed), purpose)

    def returns(self, policy: Policy, params: ArrayTree, key: PRNGKeyArray) -> np.ndarray:
        """Evaluate a policy, and return the returns of its episodes."""
        evaluation = _evaluate(self.env, policy, self.args.eval_episodes, params, key)
        return np.asarray(evaluation.returns)

    def policies(self) -> Checkpoints:
        """Return the checkpoints of all evaluated versions of the policy."""
        return Checkpoints(self.directory / "policies")

    def load(self, version: Version) -> ArrayTree:
        """Return the parameters of a version of the policy."""
        policies = self.policies()

        def params(key: PRNGKeyArray) -> ArrayTree:
            state = self.program.init(key, hyperparameters(self.args))
            return self.program.policy_params(state)

        like = jax.eval_shape(params, self.key(INIT))
        try:
            tree, _ = policies.restore({"policy": like}, version.iteration)
        except CheckpointError as error:
            raise CheckpointError(
                self.directory / "policies" / str(version.iteration),
                error.reason,
                f"delete {self.directory} and repeat the command: it keeps the recorded data and "
                "repeats the training.",
            ) from error
        policies.close()
        return tree["policy"]

    def provenance(self, tier: str) -> dict[str, Any]:
        """Return what a tier's vault says of its origin."""
        return {"program": self.name, "args": self.settings, "tier": tier}

    def about(self, version: Version) -> dict[str, Any]:
        """Describe a version of the policy for a vault."""
        return {
            "policy_id": version.iteration,
            "training_steps": version.iteration * self.iteration_steps,
            "return": version.mean,
        }


def run_directory(args: OnlineArgs, program: str) -> Path:
    """Return the directory of a program's run."""
    return args.out / f"{envs.short_name(args.env)}.run-{program}"


@partial(jax.jit, static_argnums=(0, 1, 2))
def _evaluate(
    env: Environment, policy: Policy, num_episodes: int, params: ArrayTree, key: PRNGKeyArray
) -> Evaluation:
    return evaluate(env, policy, params, key, num_episodes)
