"""What an offline program is: its settings, and pure functions of one seed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from jaxtyping import Array, PRNGKeyArray

from offmarl.config import Fraction, NonNegative, Positive, PositiveInt, Seed, Validated
from offmarl.errors import OptionError
from offmarl.networks import PolicyConfig
from offmarl.types import ArrayTree, EnvSpec, Sequence

LOG_EVERY = 500
"""Most updates between two lines of metrics."""

FREE = ("out", "replay", "memory", "checkpoint_seconds")
"""Settings that a run may be resumed with others of, because they do not change its result."""


@dataclass(frozen=True)
class Args(Validated):
    """Settings that all offline programs share."""

    vault: Path
    """Dataset to learn from, such as vaults/swarm/coverage-3.vlt/medium, or the name of one that
    was pulled; `offmarl cat` makes one of several."""
    time_limit: PositiveInt | None = None
    """For a vault of another program that flags the end of time as a termination: the steps after
    which episodes were cut off; by default what `offmarl pull` noted of it."""
    env: str | None = None
    """Environment to evaluate in; by default the one the dataset was recorded in. "none": train
    without one."""
    validation: Path | None = None
    """Vault of held-out episodes, such as `offmarl split` makes: how far the policy agrees with
    their actions is evaluated too, which needs no environment."""
    held_out: Fraction | None = None
    """Part of the vault's episodes to hold out instead: never learnt from, always the same ones.
    By default 0.1 where there is neither an environment nor --validation, and 0 otherwise."""
    out: Path | None = None
    """Directory of the run; by default runs/ENVIRONMENT/TIER/PROGRAM."""
    seeds: PositiveInt = 1
    """Independent runs, trained side by side in one program."""
    seed: Seed = 0
    """The first of the seeds."""
    updates: PositiveInt | None = None
    """Gradient updates; by default 100,000, and 3,000 on classic/* and probe/* data."""
    batch_size: PositiveInt = 32
    """Windows a batch."""
    length: PositiveInt = 20
    """Steps a window."""
    replay: Literal["auto", "device", "stream"] = "auto"
    """Where batches come from: the whole dataset on the device, or streamed from disk; the same
    batches either way. "auto": the device where the data fits into half of its free memory."""
    memory: Positive = 1.0
    """GB that streamed batches may take at a time."""
    evaluate_every: PositiveInt | None = None
    """Updates between evaluations; by default a twentieth of all."""
    evaluate_episodes: PositiveInt = 32
    """Episodes an evaluation."""
    final_episodes: PositiveInt = 320
    """Episodes of the last evaluation, whose returns are the run's result."""
    checkpoint_seconds: NonNegative = 30.0
    """Seconds of work that a kill may cost; Ctrl-C and SIGTERM save before they stop."""


class Program(NamedTuple):
    """An offline algorithm, as pure functions of one seed.

    Attributes
    ----------
    config
        The policy it trains.
    init
        ``init(key) -> state``.
    update
        ``update(state, batch, key) -> (state, metrics)``, metrics being scalars by name.
    policy_params
        ``policy_params(state)``: the parameters its policy acts with.
    greedy
        Whether the policy is evaluated by its best actions. One that is not (a clone of stochastic
        data acts as the data did) is evaluated that way too, once, at the end.
    """

    config: PolicyConfig
    init: Callable[[PRNGKeyArray], ArrayTree]
    update: Callable[[ArrayTree, Sequence, PRNGKeyArray], tuple[ArrayTree, dict[str, Array]]]
    policy_params: Callable[[ArrayTree], ArrayTree]
    greedy: bool = True


class Schedule(NamedTuple):
    """Settings that were left to us, filled in."""

    updates: int
    evaluate_every: int

    @property
    def block(self) -> int:
        """Updates between two lines of metrics; they divide an evaluation's."""
        most = min(self.evaluate_every, LOG_EVERY)
        return max(size for size in range(1, most + 1) if self.evaluate_every % size == 0)


def schedule_of(args: Args, spec: EnvSpec) -> Schedule:
    """Fill in what is left to us, and refuse what cannot be.

    Raises
    ------
    OptionError
        Evaluations do not fall on updates.
    """
    small = spec.name.startswith(("classic/", "probe/"))
    updates = (3_000 if small else 100_000) if args.updates is None else args.updates
    every = max(updates // 20, 1) if args.evaluate_every is None else args.evaluate_every
    if updates % every:
        raise OptionError(
            f"updates ({updates}) must be a multiple of evaluate_every ({every}): "
            f"give --updates {updates - updates % every + every}, or another --evaluate-every."
        )
    return Schedule(updates, every)
