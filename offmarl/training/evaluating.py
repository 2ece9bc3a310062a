"""What the policies of a training are judged by: episodes played, and held-out actions."""

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from offmarl import envs, runs, tracking
from offmarl.envs.base import Environment
from offmarl.errors import ShapeError
from offmarl.evaluation import agreement, evaluate
from offmarl.networks import make_policy
from offmarl.replay import Dataset, load, open_dataset
from offmarl.training.program import Args, Program
from offmarl.types import ArrayTree, EnvSpec, Sequence


class Judges(NamedTuple):
    """What there is to judge policies by; made by `judges_of`."""

    spec: EnvSpec
    """Of the data."""
    env: Environment | None
    """What episodes are played in."""
    held_out: Sequence | None
    """Whole episodes, whose actions the policy should agree with."""

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
    UnknownNameError, VaultError
        There is no such environment or vault.
    """
    return Judges(dataset.spec, _environment(args, dataset), _held_out(args, dataset))


def _environment(args: Args, dataset: Dataset) -> Environment | None:
    name = dataset.spec.name if args.env is None else args.env
    if name in ("", "none"):
        return None
    env = envs.make(name)
    if difference := dataset.spec.difference(env.spec):
        raise ShapeError(
            f"{dataset.path} and {name} differ in {difference}: name the environment it was "
            "recorded in with --env, or train with --env none."
        )
    return env


def _held_out(args: Args, dataset: Dataset) -> Sequence | None:
    """Return the first held-out episodes, as many as the last evaluation is to have."""
    if args.validation is None:
        return None
    data = open_dataset(args.validation)
    if difference := dataset.spec.difference(data.spec):
        raise ShapeError(
            f"{dataset.path} and {data.path} differ in {difference}: hold out episodes of the data "
            "that is learnt from, with `offmarl split`."
        )
    longest = max(data.episodes.length, default=0)
    replay = load(data, 1, int(longest))  # windows so long that there is one for each episode
    return replay.windows(replay.starts[: args.final_episodes])


def judge(
    judges: Judges,
    program: Program,
    params: ArrayTree,
    keys: Key[Array, "seeds"],
    episodes: int,
    last: bool,
) -> dict[str, Float[np.ndarray, "seeds episodes"]]:
    """Judge the policies of all seeds by all that there is.

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
    Values by metric, `tracking.AGREEMENT` and the returns.
    """
    found = {}
    if judges.held_out is not None:
        found[tracking.AGREEMENT] = _agreements(program, judges.spec, params, judges.held_out)
    if judges.env is not None:
        play = partial(_returns, program, judges.env, episodes, params=params, keys=keys)
        found[tracking.RETURN] = play(program.greedy)
        if last and not program.greedy:
            found[tracking.GREEDY_RETURN] = play(True)
    return jax.device_get(found)


@partial(jax.jit, static_argnums=(0, 1))
def _agreements(
    program: Program, spec: EnvSpec, params: ArrayTree, episodes: Sequence
) -> Float[Array, "seeds episodes"]:
    policy = make_policy(program.config, spec, greedy=True)
    return jax.vmap(lambda params: agreement(policy, params, episodes))(params)


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


def write_marl_eval(run: runs.Run, env: str) -> None:
    """Arrange the evaluations logged, those before a resume included, for comparison."""
    rows, seeds = tracking.read(run.metrics), run.record["seeds"]
    names = (tracking.RETURN, tracking.GREEDY_RETURN, tracking.AGREEMENT)
    found = {name: steps for name in names if (steps := _by_step(rows, name, seeds))}
    if not found:
        return
    main = next(iter(found))
    dataset, _, uid = run.record["vault"].rpartition("/")
    environment, _, task = (env or f"unknown/{dataset}").partition("/")
    data = tracking.marl_eval(
        environment,
        f"{task}/{uid}",
        run.record["program"],
        seeds,
        found[main],
        {name: steps[-1][1] for name, steps in found.items()},
        main,
    )
    tracking.write_json(run.directory / tracking.MARL_EVAL_FILE, data)


def _by_step(
    rows: list[dict[str, Any]], metric: str, seeds: list[int]
) -> list[tuple[int, Float[np.ndarray, "seeds episodes"]]]:
    """Collect a metric's rows, of one seed each, into one array for each step."""
    found: dict[int, dict[int, list[float]]] = {}
    for row in rows:
        if metric in row:
            found.setdefault(row["step"], {})[row["seed"]] = row[metric]
    return [(step, np.array([found[step][seed] for seed in seeds])) for step in sorted(found)]
