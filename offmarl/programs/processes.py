"""Recording Python environments in several processes at once, into one vault."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offmarl import vault
from offmarl.errors import OptionError, RunError, VaultFormatError, VaultNotFoundError
from offmarl.paths import local
from offmarl.programs.python import Recorder, record
from offmarl.tracking import progress

_STARTUP = multiprocessing.get_context("spawn")  # a fork of a process that runs JAX may hang


PythonPolicy = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
"""A function of observations and infos that returns the actions of the present agents: a dict by
agent, or a pair of this dict and a dict of log-probabilities.

Three methods are called if the policy has them: ``reset()`` at the start of every episode,
``seed(number)`` there with a seed for the episode's draws, and ``after_step(rewards, terminations,
truncations)`` with the outcome of each step.
"""


class RandomPolicy:
    """Draws each agent's action uniformly, among the legal ones if there is a mask."""

    def __init__(self, env: Any):
        self._env = env
        self._random = np.random.default_rng(0)

    def seed(self, number: int) -> None:
        """Seed the draws of an episode."""
        self._random = np.random.default_rng(number)

    def __call__(
        self, observations: Mapping[str, Any], infos: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Return actions and their log-probabilities (log-densities, for boxes in [-1, 1])."""
        actions, log_prob = {}, {}
        for agent in self._env.agents:
            space = self._env.action_space(agent)
            if hasattr(space, "n"):
                legal = _legal(observations[agent], (infos or {}).get(agent) or {}, int(space.n))
                actions[agent] = int(self._random.choice(legal)) + int(space.start)
                log_prob[agent] = -float(np.log(len(legal)))
            else:
                drawn = self._random.uniform(space.low, space.high)
                actions[agent] = drawn.astype(space.dtype)
                log_prob[agent] = -drawn.size * float(np.log(2))
        return actions, log_prob


def _legal(observation: Any, info: Mapping[str, Any], num_actions: int) -> Any:
    mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
    mask = info.get("action_mask") if mask is None else mask
    legal = np.flatnonzero(np.ones(num_actions) if mask is None else mask)
    return legal if len(legal) else np.arange(num_actions)


class _Share(NamedTuple):
    """The episodes of one process: ``number``, ``number + of``, ... below ``episodes``."""

    make_env: Callable[[], Any]
    make_policy: Callable[[Any], PythonPolicy]
    path: Path
    episodes: int
    number: int
    of: int
    seed: int
    options: Mapping[str, Any]


def record_episodes(
    make_env: Callable[[], Any],
    path: str | os.PathLike[str],
    episodes: int,
    make_policy: Callable[[Any], PythonPolicy] = RandomPolicy,
    *,
    processes: int = 1,
    seed: int = 0,
    name: str | None = None,
    time_limit: int | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> int:
    """Record episodes of a PettingZoo environment in several processes, into one vault.

    After Ctrl-C or a kill, the same call resumes the recording, which holds whole episodes only. A
    complete recording is not changed. Episode i is always played with the same seeds, 31 bits of
    ``numpy.random.SeedSequence(seed, spawn_key=(i,))`` for the environment and 31 for the policy.
    The order of the processes' episodes in the vault varies between recordings.

    Parameters
    ----------
    make_env
        Builds the environment, in each process: a function at the top level of a module.
    path
        Path of the vault, ``<directory>/<name>.vlt/<uid>``.
    episodes
        Total number of episodes in the vault.
    make_policy
        Builds the policy from the environment, in each process; by default a random policy. For a
        trained one, give ``functools.partial(make, "runs/mine/bc")`` with your own function
        ``make`` that returns an `offmarl.envs.PettingZooPolicy`.
    processes
        Number of processes.
    seed
        Seed of all episodes.
    name, time_limit, provenance
        As for `record`.

    Returns
    -------
    int
        Episodes recorded by this call.

    Raises
    ------
    RunError
        The vault was started with another seed or number of processes, or by another program.
    OptionError
        ``episodes`` or ``processes`` is below 1, or ``seed`` below 0.
    """
    if episodes < 1 or processes < 1 or seed < 0:
        raise OptionError(
            "episodes and processes must be above 0, and the seed 0 or above, not "
            f"{episodes}, {processes} and {seed}."
        )
    path = local(path)
    recipe = {"seed": seed, "processes": processes, "episode_seeds": "folded"}
    _check_recipe(path, recipe)
    about = {**(provenance or {}), "recipe": recipe}
    options = {"name": name, "time_limit": time_limit, "provenance": about}
    shares = [
        _Share(make_env, make_policy, path, episodes, number, processes, seed, options)
        for number in range(processes)
    ]
    with progress(f"record {path.name}", episodes) as advance:
        if processes == 1:
            return _play(shares[0], lambda: advance(1))
        return _play_all(shares, advance)


def _check_recipe(path: Path, recipe: Mapping[str, Any]) -> None:
    try:
        found = vault.open_vault(path).provenance.get("recipe")
    except (VaultNotFoundError, VaultFormatError):  # nothing, or the remains of a killed process
        return
    if found != recipe:
        raise RunError(
            f"{path} was started with {found or 'another kind of recording'}, not {dict(recipe)}: "
            "give the same arguments to resume it, or another path."
        )


def _play_all(shares: list[_Share], advance: Callable[[int], None]) -> int:
    counter = _STARTUP.Value("q", 0)
    shown = 0
    with ProcessPoolExecutor(
        len(shares), mp_context=_STARTUP, initializer=_begin, initargs=(counter,)
    ) as pool:
        running: list[Future[int]] = [pool.submit(_play_counted, share) for share in shares]
        waiting = set(running)
        while waiting:
            _, waiting = wait(waiting, timeout=0.5)
            done = counter.value
            advance(done - shown)
            shown = done
        return sum(future.result() for future in running)


_counter: Any = None


def _begin(counter: Any) -> None:
    global _counter  # noqa: PLW0603 - how a pool hands shared memory to its processes
    _counter = counter


def _play_counted(share: _Share) -> int:
    def count() -> None:
        with _counter.get_lock():
            _counter.value += 1

    return _play(share, count)


def _play(share: _Share, count: Callable[[], None]) -> int:
    """Record the missing episodes of a share; return how many were played."""
    env = share.make_env()
    policy = share.make_policy(env)
    run = f"process {share.number} of {share.of}"
    mine = range(share.number, share.episodes, share.of)
    with record(env, share.path, resume=True, run=run, **share.options) as recorder:
        there = recorder.recorded()
        for episode in mine[there:]:
            try:
                _play_episode(recorder, policy, *_seeds(share.seed, episode))
            except BaseException:
                recorder.discard()  # the next call plays it again
                raise
            count()
    env.close()
    return recorder.episodes


def _seeds(seed: int, episode: int) -> list[int]:
    """Return an episode's seeds for the environment and the policy, which NumPy alike draws from.

    They have 31 bits, which environments of any kind accept.
    """
    found = np.random.SeedSequence(seed, spawn_key=(episode,)).generate_state(2) >> 1
    return [int(number) for number in found]


def _play_episode(recorder: Recorder, policy: PythonPolicy, seed: int, draws: int) -> None:
    observations, infos = recorder.reset(seed=seed)
    for start, arguments in (("reset", ()), ("seed", (draws,))):
        if hasattr(policy, start):
            getattr(policy, start)(*arguments)
    while recorder.running:
        chosen = policy(observations, infos)
        actions, log_prob = chosen if isinstance(chosen, tuple) else (chosen, None)
        observations, *outcome, infos = recorder.step(actions, log_prob)
        if hasattr(policy, "after_step"):
            policy.after_step(*outcome)
