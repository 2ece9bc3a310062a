"""Evaluation of policies in training: by played episodes, and by held-out actions."""

from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, use_abstract_mesh
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from numpy.typing import NDArray

from offmarl import envs, evaluation, tracking
from offmarl._arrays import is_key
from offmarl._compiling import jit_rarely_run
from offmarl.envs.base import Environment
from offmarl.envs.sides import one_of, others_of, without_others
from offmarl.errors import NotFiniteError, OptionError, ShapeError, UnknownNameError
from offmarl.evaluation import agreement, log_likelihood, require_room_for
from offmarl.programs.cluster import gather_all, on_first
from offmarl.programs.program import Args, Program
from offmarl.programs.runs.compiling import compile_ahead
from offmarl.programs.runs.identity import environment_source
from offmarl.programs.runs.parallel import ParallelEnvironment, Player, is_parallel
from offmarl.programs.runs.sharding import SEEDS, SeedLayout, map_seeds, place_shared
from offmarl.replay.device import bytes_of
from offmarl.teams import by_team, names_by_team, teams_of
from offmarl.types import ArrayTree, EnvSpec, Policy, Sequence
from offmarl.vault import Dataset, Mixture, open_vault

HELD_OUT = 0.1
"""Fraction of the episodes that is held out if there is no other way to evaluate a policy."""


class Evaluator(NamedTuple):
    """How policies are evaluated; made by `make_evaluator`."""

    spec: EnvSpec
    """The dataset's spec."""
    env: Environment | ParallelEnvironment | None
    """Environment in which episodes are played."""
    held_out: Sequence | None
    """Whole episodes, whose actions are compared with the policy's."""
    learned_from: NDArray[np.int64] | None
    """Numbers of the episodes to train on; None for all."""
    episodes: int
    """Number of episodes of an evaluation, which are played side by side."""
    final_episodes: int
    """Number of episodes of the last evaluation."""
    evaluations: int
    """Number of evaluations after the first, by default."""
    fraction: float = 0.0
    """Fraction of the episodes that is held out."""
    validation: str = ""
    """Digest of the vault of held-out episodes, if they are not of the dataset."""

    @property
    def environment(self) -> str:
        """Name of the environment that is played in, or of the data's if there is none."""
        return self.env.spec.name if self.env else self.spec.name

    def close(self) -> None:
        """End the processes of the environment, if it has any."""
        if isinstance(self.env, ParallelEnvironment):
            self.env.close()


def default_sizes(env: object) -> tuple[int, int, int]:
    """Return the episodes of an evaluation and of the last one, and how many evaluations follow."""
    return (8, 32, 5) if isinstance(env, ParallelEnvironment) else (32, 320, 20)


def make_evaluator(args: Args, dataset: Dataset | Mixture) -> Evaluator:
    """Make the environment, read the held-out episodes, and choose those to train on."""
    evaluator = _evaluator(args, dataset)
    if args.top is None:
        return evaluator
    table, training = dataset.episodes, evaluator.learned_from
    scored = np.flatnonzero(table.scored)
    scored = scored if training is None else np.intersect1d(scored, training)
    if not len(scored):
        raise OptionError("no episode to learn from is complete: leave out --top.")
    count = max(round(args.top * len(scored)), 1)
    order = np.argsort(-table.episode_returns[scored], kind="stable")
    return evaluator._replace(learned_from=np.sort(scored[order[:count]]))


def _evaluator(args: Args, dataset: Dataset | Mixture) -> Evaluator:
    env = environment_for(args.env, dataset)
    size, last, evaluations = default_sizes(env)
    sizes = args.eval_episodes or size, args.final_episodes or last
    evaluator = Evaluator(dataset.spec, env, None, None, *sizes, evaluations)
    if env is not None and not isinstance(env, ParallelEnvironment):
        require_room_for(env.spec, max(sizes))
    if env is not None:
        _warn_of_other_code(env, dataset)
    if args.validation is not None:
        data = _validation(args, args.validation, dataset)
        indices = np.arange(len(data.episodes.length))
        episodes = with_actions(data.whole_episodes(_spread(indices, sizes[1])))
        return evaluator._replace(held_out=episodes, validation=data.known_digest())
    by_default = HELD_OUT if env is None and len(dataset.episodes.length) > 1 else 0.0
    if not (fraction := by_default if args.held_out is None else args.held_out):
        return evaluator
    training, held_out = dataset.hold_out(fraction)
    episodes = with_actions(dataset.whole_episodes(_spread(held_out, sizes[1])))
    return evaluator._replace(held_out=episodes, learned_from=training, fraction=fraction)


def _warn_of_other_code(env: Environment | ParallelEnvironment, dataset: Dataset | Mixture) -> None:
    """Warn of data that was recorded with other code of an environment of the same name."""
    now = environment_source(env.spec.name).get("environment_source", {}).get("sha256")
    for source in dataset.sources if isinstance(dataset, Mixture) else [dataset]:
        then = source.provenance.get("environment_source")
        then = then.get("sha256") if isinstance(then, dict) else None
        if now and then and now != then and source.spec.name == env.spec.name:
            tracking.notice(
                f"warning: the code of {env.spec.name} has changed since {source.path} was "
                "recorded: the returns of policies and those of the data may not be compared."
            )


def with_actions(episodes: Sequence) -> Sequence:
    """Return the episodes in which an agent ever has a choice: in others all policies agree."""
    acts = np.asarray(episodes.choices).any((1, 2))
    if not acts.any():
        raise OptionError("no agent has a choice in the held-out episodes: hold out others.")
    return episodes if acts.all() else jax.tree.map(lambda leaf: leaf[acts], episodes)


def _spread(episodes: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return at most ``most`` episodes, evenly spread: early agents may be worse than late ones."""
    indices = np.linspace(0, len(episodes) - 1, min(most, len(episodes)))
    return episodes[indices.round().astype(int)]


def environment_for(
    env_name: str | None, dataset: Dataset | Mixture
) -> Environment | ParallelEnvironment | None:
    """Return the environment of a name, by default that of the data, if it fits the data."""
    name = dataset.spec.name if env_name is None else env_name
    if name in ("", "none"):
        return None
    if env_name is not None and is_parallel(env_name):
        return ParallelEnvironment(env_name, dataset.spec, str(dataset.path))
    try:
        env = envs.make(name)
    except UnknownNameError as error:
        if env_name is not None:
            raise
        raise UnknownNameError(
            f"{dataset.path} was recorded in {str(name)!r}, which is not an installed environment: "
            "give one of the same sizes with --env (code of your own as path/to/file.py:FACTORY or "
            "package.module:FACTORY), or train with --env none, which holds out episodes and "
            "measures the agreement with their actions."
        ) from error
    if difference := dataset.spec.difference(env.spec, extras=False):
        raise ShapeError(
            f"{dataset.path} and {name} differ in {difference}: give the environment it was "
            "recorded in with --env, or train with --env none."
        )
    return env


def _validation(args: Args, path: Path, dataset: Dataset | Mixture) -> Dataset:
    """Open the vault of held-out episodes."""
    if args.held_out:
        raise OptionError("give --validation or --held-out, not both.")
    data = open_vault(path)
    sources = dataset.sources if isinstance(dataset, Mixture) else [dataset]
    if data.path in [source.path for source in sources]:
        raise OptionError(
            f"--validation {path} is data that the policy is trained on, so agreement with it says "
            "nothing: give other episodes, such as `offmarl split` writes, or --held-out."
        )
    if not data.native and dataset.time_limit is not None:
        data = open_vault(path, time_limit=dataset.time_limit)
    if difference := dataset.spec.difference(data.spec, extras=False):
        raise ShapeError(
            f"{dataset.path} and {data.path} differ in {difference}: hold out episodes of the "
            "training data, with `offmarl split`."
        )
    return data


def evaluate(
    evaluator: Evaluator,
    program: Program,
    layout: SeedLayout,
    params: ArrayTree,
    keys: Key[Array, "seeds"],
    episodes: int,
) -> dict[str, Float[np.ndarray, "seeds episodes"]]:
    """Return the evaluated metrics of the policy of every seed; ``params`` may have more seeds.

    The returns (of each team, where there are several) are those of greedy and of sampled actions,
    if the policy samples.
    """
    metrics: dict[str, Any] = {}
    seeds, params = len(keys), layout.place(params, SEEDS)
    if evaluator.held_out is not None:
        metrics |= _imitation(policy_of(program, True), layout, params, evaluator.held_out)
    if evaluator.env is not None:
        env, modes, teams = evaluator.env, _modes(program, params), teams_of(evaluator.spec)
        ways = tuple(modes.values())
        if isinstance(env, ParallelEnvironment):
            by_agent = _play_in_python(env, program, ways, gather_all((params, keys)), episodes)
            returns = np.stack(by_team(by_agent, teams), -1)
        else:
            policies = tuple(policy_of(program, greedy) for greedy in ways)
            rounds, size = [], evaluator.episodes  # all evaluations share a compiled program
            for number in range(-(-episodes // size)):
                round_keys = layout.place(fold_in(keys, number) if number else keys, SEEDS)
                outcome = gather_all(play(policies, env, layout, size, params, round_keys))
                rounds.append(evaluation.returns_by_team(env.spec, outcome))
            returns = np.concatenate(rounds, axis=2)[:, :, :episodes]
        for mode, name in enumerate(modes):
            names = enumerate(names_by_team(name, teams))
            metrics |= {metric: returns[:, mode, :, team] for team, metric in names}
    return {name: values[:seeds] for name, values in jax.device_get(gather_all(metrics)).items()}


def _play_in_python(
    env: ParallelEnvironment,
    program: Program,
    modes: tuple[bool, ...],
    of_seeds: tuple[ArrayTree, Key[Array, "seeds"]],
    episodes: int,
) -> Float[np.ndarray, "seeds modes episodes N"]:
    """Play the same episodes in modes, greedy or not, in the first process."""
    params, keys = jax.device_get(of_seeds[0]), of_seeds[1]
    numbers = [int(jax.random.bits(key)) for key in keys]
    players = [
        Player(
            policy_of(program, greedy), jax.tree.map(lambda leaf, s=seed: leaf[s], params), number
        )
        for seed, number in enumerate(numbers)
        for greedy in modes
    ]
    returns = np.array(on_first(lambda: env.play(players, episodes).tolist()))
    return returns.reshape(len(numbers), len(modes), *returns.shape[1:])


@lru_cache(maxsize=8)
def policy_of(program: Program, greedy: bool) -> Policy:
    """Return a program's policy, the same each time, so that it is compiled once."""
    return program.policy(greedy)


def play_ahead(
    evaluator: Evaluator,
    program: Program,
    layout: SeedLayout,
    params: ArrayTree,
    keys: Key[Array, "seeds"],
) -> "list[Future[None]]":
    """Compile the program by which `evaluate` plays episodes, in a thread; see its arguments."""
    env = evaluator.env
    if env is None or isinstance(env, ParallelEnvironment) or jax.process_count() > 1:
        return []
    params, keys = layout.place((params, keys), SEEDS)
    policies = tuple(policy_of(program, greedy) for greedy in _modes(program, params).values())
    return [compile_ahead(play, policies, env, layout, evaluator.episodes, params, keys)]


def _modes(program: Program, params: ArrayTree) -> dict[str, bool]:
    """Return for each metric of returns whether the policy acts greedily."""
    modes = {tracking.RETURN: program.greedy}
    if not program.greedy or _can_sample(program, params):
        name = tracking.OTHER_RETURN["sampled" if program.greedy else "greedy"]
        modes[name] = not program.greedy
    return modes


def _can_sample(program: Program, params: ArrayTree) -> bool:
    """Whether a program's policies draw their actions; ``params`` has a leading axis of seeds."""

    def first(leaf: Any) -> Any:  # on the host, where no program is compiled for each shape
        leaf = leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf
        return leaf[0] if is_key(leaf) else np.asarray(leaf)[0]

    return program.policy(False).draws(jax.tree.map(first, params))


@jax.jit
def fold_in(keys: Key[Array, "seeds"], number: Int[Array, ""] | int) -> Key[Array, "seeds"]:
    """Fold a number into the key of each seed."""
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)


@jit_rarely_run(static_argnums=(0, 1))
def _imitation(
    policy: Policy, layout: SeedLayout, params: ArrayTree, episodes: Sequence
) -> dict[str, Float[Array, "seeds episodes"]]:
    def of_seed(params: ArrayTree, episodes: Sequence) -> dict[str, Array]:
        metrics = {tracking.AGREEMENT: agreement(policy, params, episodes)}
        if policy.log_prob is not None:
            metrics[tracking.LOG_LIKELIHOOD] = log_likelihood(policy, params, episodes)
        return metrics

    return map_seeds(layout, of_seed, (params,), episodes)


@jit_rarely_run(static_argnums=(0, 1, 2, 3))
def play(
    policies: tuple[Policy, ...],
    env: Environment,
    layout: SeedLayout,
    episodes: int,
    params: ArrayTree,
    keys: Key[Array, "seeds"],
) -> evaluation.Evaluation:
    """Play the same episodes with each policy; the arrays have the axes seeds and policies.

    Programs with equal policies, such as `bc` and `maicq`, share what is compiled.
    """
    run = partial(evaluation.evaluate, env, num_episodes=episodes)

    def of_seed(params: ArrayTree, key: PRNGKeyArray) -> evaluation.Evaluation:
        def of_mode(mode: Int[Array, ""]) -> evaluation.Evaluation:
            return run(one_of(policies), (mode, params), key)

        carries = jax.eval_shape(lambda: [policy.initial_carry() for policy in policies])
        if bytes_of(carries) <= _MOST_CARRY_BYTES:
            return jax.lax.map(of_mode, jnp.arange(len(policies)))
        one_by_one = [run(policy, params, key) for policy in policies]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one)

    return map_seeds(layout, of_seed, (params, keys))


_MOST_CARRY_BYTES = 2**15
"""Largest carry of `one_of` here: each of its steps copies the carries, which takes longer than the
step itself if they are as large as those of attention or retention over time."""


def play_policy(
    env: Environment, policy: Policy, episodes: int, params: ArrayTree, key: PRNGKeyArray
) -> Float[np.ndarray, "episodes teams"]:
    """Return the returns of episodes of one policy; `NotFiniteError` if one is not finite."""
    outcome = play_against(*place_arguments(env, policy, episodes, None, params, key))
    if not np.isfinite(outcome.team_returns).all():
        raise NotFiniteError(
            f"{env.spec.name or 'the environment'} gave rewards whose sum is NaN or infinite, so "
            "that there is no mean return: mend the environment."
        )
    return evaluation.returns_by_team(env.spec, outcome)


def place_arguments(
    env: Environment, policy: Policy, episodes: int, mesh: Mesh | None, *inputs: ArrayTree
) -> tuple[Any, ...]:
    """Return the arguments of `play_against`, on the devices of a mesh; ``inputs`` are its own."""
    shared = place_shared((*inputs, others_of(env)), mesh)
    return without_others(env), policy, episodes, mesh, *shared


@jit_rarely_run(static_argnums=(0, 1, 2, 3))
def play_against(
    env: Environment,
    policy: Policy,
    episodes: int,
    mesh: Mesh | None,
    params: ArrayTree,
    key: PRNGKeyArray,
    others: ArrayTree,
) -> evaluation.Evaluation:
    """Play episodes in an environment `without_others`, whose other agents are data."""
    with nullcontext() if mesh is None else use_abstract_mesh(mesh.abstract_mesh):
        return evaluation.evaluate(env, policy, params, key, episodes, others)


def summary(metrics: Mapping[str, Float[np.ndarray, "seeds episodes"]]) -> str:
    """Summarize an evaluation in a few words."""
    words = {
        tracking.AGREEMENT: "agreement{} {:.3f}",
        tracking.RETURN: "return{} {:.2f}",
        tracking.GREEDY_RETURN: "greedy{} {:.2f}",
        tracking.WON: "won{} {:.0%}",
        tracking.GREEDY_WON: "greedy won{} {:.0%}",
        tracking.SAMPLED_RETURN: "sampled{} {:.2f}",
    }
    return ", ".join(
        word.format(name.removeprefix(metric).replace("_", " of ", 1), metrics[name].mean())
        for metric, word in words.items()
        for name in metrics
        if name.startswith(metric)
    )
