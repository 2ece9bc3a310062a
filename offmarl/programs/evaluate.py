"""What the policies of a training are judged by: episodes played, and held-out actions."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Key
from numpy.typing import NDArray

from offmarl import envs, tracking
from offmarl.envs.base import Environment
from offmarl.errors import OptionError, ShapeError, UnknownNameError
from offmarl.evaluation import agreement, evaluate, log_likelihood
from offmarl.networks import make_policy
from offmarl.programs.program import Args, Program
from offmarl.types import ArrayTree, EnvSpec, Sequence
from offmarl.vault import Dataset, open_vault

HELD_OUT = 0.1
"""Part of the episodes that is held out where nothing else could judge a policy."""


class Judges(NamedTuple):
    """What there is to judge policies by; made by `judges_of`."""

    spec: EnvSpec
    """Of the data."""
    env: Environment | None
    """What episodes are played in."""
    held_out: Sequence | None
    """Some whole episodes, whose actions the policy should agree with."""
    learnt_from: NDArray[np.int64] | None
    """Numbers of the episodes that are not held out; None for all."""
    fraction: float = 0.0
    """Part of the episodes that is."""

    @property
    def environment(self) -> str:
        """Name of the environment played in, or else of the one the data is from."""
        return self.env.spec.name if self.env else self.spec.name


def judges_of(args: Args, dataset: Dataset) -> Judges:
    """Make the environment, and read the held-out episodes, that settings ask for.

    Raises
    ------
    ShapeError
        One of them differs from the data that is learnt from.
    OptionError
        Episodes are to be held out that cannot be, or twice.
    UnknownNameError, VaultError
        There is no such environment or vault.
    """
    env = _environment(args, dataset)
    if args.validation is not None:
        return Judges(dataset.spec, env, _validation(args, args.validation, dataset), None)
    if not (fraction := _fraction(args, env, dataset)):
        return Judges(dataset.spec, env, None, None)
    rest, held_out = dataset.hold_out(fraction)
    episodes = dataset.whole_episodes(_some(held_out, args.final_episodes))
    return Judges(dataset.spec, env, episodes, rest, fraction)


def _some(episodes: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return at most so many episodes from everywhere: early ones may be those of worse agents."""
    chosen = np.linspace(0, len(episodes) - 1, min(most, len(episodes)))
    return episodes[chosen.round().astype(int)]


def _fraction(args: Args, env: Environment | None, dataset: Dataset) -> float:
    """Return which part of the episodes to hold out."""
    if args.held_out is not None:
        return args.held_out
    several = len(dataset.episodes.length) > 1
    return HELD_OUT if env is None and several else 0.0


def _environment(args: Args, dataset: Dataset) -> Environment | None:
    name = dataset.spec.name if args.env is None else args.env
    if name in ("", "none"):
        return None
    try:
        env = envs.make(name)
    except UnknownNameError as error:
        if args.env is not None:
            raise
        raise UnknownNameError(
            f"{dataset.path} was recorded in {str(name)!r}, which is not an installed environment: "
            "name one of the same sizes with --env (for code of your own, path/to/file.py:FACTORY "
            "or package.module:FACTORY), or train with --env none, which holds episodes out and "
            "measures the agreement with their actions."
        ) from error
    if difference := dataset.spec.difference(env.spec):
        raise ShapeError(
            f"{dataset.path} and {name} differ in {difference}: name the environment it was "
            "recorded in with --env, or train with --env none."
        )
    return env


def _validation(args: Args, path: Path, dataset: Dataset) -> Sequence:
    """Return held-out episodes, as many as the last evaluation is to have."""
    if args.held_out:
        raise OptionError("give --validation or --held-out, not both.")
    data = open_vault(path)
    if not data.native and dataset.time_limit is not None:
        data = open_vault(path, time_limit=dataset.time_limit)
    if difference := dataset.spec.difference(data.spec):
        raise ShapeError(
            f"{dataset.path} and {data.path} differ in {difference}: hold out episodes of the data "
            "that is learnt from, with `offmarl split`."
        )
    return data.whole_episodes(_some(np.arange(len(data.episodes.length)), args.final_episodes))


def judge(
    judges: Judges,
    program: Program,
    params: ArrayTree,
    keys: Key[Array, "seeds"],
    episodes: int,
    last: bool,
) -> dict[str, Float[np.ndarray, "seeds episodes"]]:
    """Evaluate every seed with every evaluator.

    Parameters
    ----------
    judges, program
        By what, and what.
    params
        Of the policies, one for each seed along the first axis.
    keys
        One for each seed.
    episodes
        How many to play.
    last
        Whether a policy that is judged by its draws is to be judged by its best actions too.

    Returns
    -------
    Values by metric: the returns, and `tracking.AGREEMENT` and `tracking.LOG_LIKELIHOOD`.
    """
    found: dict[str, Array] = {}
    if judges.held_out is not None:
        found |= _imitation(program, judges.spec, params, judges.held_out)
    if judges.env is not None:
        play = partial(_returns, program, judges.env, episodes, params=params, keys=keys)
        found[tracking.RETURN] = play(program.greedy)
        if last and not program.greedy:
            found[tracking.GREEDY_RETURN] = play(True)
    return jax.device_get(found)


@partial(jax.jit, static_argnums=(0, 1))
def _imitation(
    program: Program, spec: EnvSpec, params: ArrayTree, episodes: Sequence
) -> dict[str, Float[Array, "seeds episodes"]]:
    policy = make_policy(program.config, spec, greedy=True)

    def judge_one(params: ArrayTree) -> dict[str, Array]:
        found = {tracking.AGREEMENT: agreement(policy, params, episodes)}
        if policy.log_prob is not None:
            found[tracking.LOG_LIKELIHOOD] = log_likelihood(policy, params, episodes)
        return found

    return jax.vmap(judge_one)(params)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _returns(
    program: Program,
    env: Environment,
    episodes: int,
    greedy: bool,
    params: ArrayTree,
    keys: Key[Array, "seeds"],
) -> Float[Array, "seeds episodes"]:
    policy = make_policy(program.config, env.spec, greedy)
    play = partial(evaluate, env, policy, num_episodes=episodes)
    return jax.vmap(lambda params, key: play(params, key).returns)(params, keys)


def in_words(found: dict[str, Float[np.ndarray, "seeds episodes"]]) -> str:
    """Return a few words on an evaluation."""
    words = {tracking.AGREEMENT: "agreement {:.3f}", tracking.RETURN: "return {:.2f}"}
    return ", ".join(
        word.format(found[name].mean()) for name, word in words.items() if name in found
    )
