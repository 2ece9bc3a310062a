"""Recording environments that are stepped in Python: those of the PettingZoo parallel API.

`record` follows a loop of the user's; `record_episodes` plays episodes in several processes.
"""

import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offmarl import vault
from offmarl._imports import import_optional
from offmarl.config import PositiveInt, check_rules
from offmarl.errors import (
    OptionError,
    RunError,
    ShapeError,
    VaultError,
    VaultExistsError,
    VaultFormatError,
    VaultLockedError,
    VaultNotFoundError,
)
from offmarl.paths import local_output
from offmarl.programs.runs.parallel import (
    Answers,
    Process,
    RunningEpisode,
    close,
    episode_seeds,
    in_threads,
)
from offmarl.tracking import progress
from offmarl.types import EnvSpec

if TYPE_CHECKING:
    from offmarl.envs.translator import Translator

_CREATION_SECONDS = 10.0
"""How long to wait for another process that creates the vault."""

_FLUSH_SECONDS = 30.0
"""Largest time between two writes to disk: what a killed process may lose."""


class Recorder(AbstractContextManager["Recorder"]):
    """Steps an environment and records its episodes in a vault; made by `record`.

    Each episode is written to the vault when it ends. An episode that a reset, the end of the block
    or an exception such as Ctrl-C interrupts is cut off there, with its last observations.

    Attributes
    ----------
    env
        The environment, which is not wrapped.
    episodes, steps
        Numbers of episodes and steps that this recorder has recorded.
    """

    def __init__(
        self,
        env: Any,
        translate: Callable[..., "Translator"],
        create: Callable[[EnvSpec], vault.SharedWriter],
        writer: vault.SharedWriter | None,
    ):
        self.env = env
        self.episodes = 0
        self.steps = 0
        self._translate, self._create, self._writer = translate, create, writer
        self._translator: Translator | None = None
        self._episode: RunningEpisode | None = None
        self._flushed = time.monotonic()

    def reset(self, **arguments: Any) -> tuple[Mapping[str, Any], Any]:
        """Start an episode: call ``env.reset`` with these arguments, and return its result."""
        self._cut()
        observations, infos = self.env.reset(**arguments)
        self._translator = self._translator or self._open()
        self._episode = RunningEpisode(self._translator, self.env, observations, infos)
        return observations, infos

    def step(
        self,
        actions: Mapping[str, Any],
        log_prob: Mapping[str, float] | None = None,
        policy_id: int | Mapping[str, int] = -1,
    ) -> tuple[Any, ...]:
        """Take a step, and return the result of ``env.step``.

        Parameters
        ----------
        actions
            Action of each agent in ``env.agents``.
        log_prob
            Log-probability of each action under the policy that chose it, if known; of an action of
            a box the log-density of the action scaled to [-1, 1], as the vault stores it.
        policy_id
            Id of the policy that chose the actions, if there are several policies: one number, or
            one for each agent.

        Raises
        ------
        OptionError
            No episode is running.
        InvalidValueError
            An agent's action is missing or outside its action space; the environment did not take
            the step. Or the environment returned NaN, infinity, something that does not fit its
            spaces, or nothing for an agent that is alive, or ``log_prob`` is infinite or above 0;
            the episode is cut off before the step, and `reset` starts the next one.
        """
        episode = self._episode
        if episode is None or episode.broken:
            raise OptionError(
                "no episode is running: call reset before step. An episode ends when each agent "
                "has terminated, was truncated, or has left env.agents."
            )
        joint = episode.joint(actions)
        outcome = self.env.step(actions)
        episode.add(joint, log_prob or {}, policy_id, outcome)
        self.steps += 1
        if episode.over:
            self._store(episode, cut=False)
        return tuple(outcome)

    @property
    def running(self) -> bool:
        """Whether an episode is running: `reset` starts one, and it ends with all agents."""
        return self._episode is not None and not self._episode.broken

    def discard(self) -> None:
        """Drop the running episode."""
        self._episode = None

    def flush(self) -> None:
        """Write the finished episodes to disk."""
        if self._writer is not None:
            self._writer.flush()
        self._flushed = time.monotonic()

    def recorded(self) -> int:
        """Return the number of episodes of this run on disk."""
        return self._writer.chunks() if self._writer is not None else 0

    def close(self) -> None:
        """Cut off the running episode, and write everything to disk."""
        self._cut()
        if self._writer is not None:
            self._writer.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> "Translator":
        """Create the vault or join it; only a reset environment knows its sizes."""
        translator = self._translate(self.env, like=self._writer and self._writer.spec)
        self._writer = self._writer or self._create(translator.spec)
        _check_fit(self._writer, translator.spec)
        return translator

    def _cut(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None and len(episode):
            self._store(episode, cut=True)

    def _store(self, episode: "RunningEpisode", cut: bool) -> None:
        self._episode = None
        assert self._writer is not None  # `reset` has opened it
        transition, finals = episode.record(cut)
        self._writer.append(transition, finals, cut=cut)
        self.episodes += 1
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()


def record(
    env: Any,
    path: str | os.PathLike[str],
    *,
    resume: bool = False,
    name: str | None = None,
    time_limit: int | None = None,
    provenance: Mapping[str, Any] | None = None,
    run: str | None = None,
) -> Recorder:
    """Record an environment of the PettingZoo parallel API while you step it.

        with offmarl.record(env, "mine.vlt", resume=True) as recorder:
            observations, infos = recorder.reset(seed=0)
            while env.agents:
                observations, *_, infos = recorder.step(choose(observations))

    Parameters
    ----------
    env
        An environment of the parallel API. Its agents may have different spaces, and may die.
    path
        Path of the vault, ``<directory>/<name>.vlt/<uid>``. Several processes may record to one.
    resume
        Whether to append to an existing vault.
    name
        Name under which `offmarl.envs.make` builds this environment, if any; trained policies are
        evaluated there. By default the name in its metadata, if `make` knows it.
    time_limit
        Number of steps after which the environment truncates its episodes, if known.
    provenance
        A JSON object to store with a new vault, such as the source of the policy.
    run
        Name of this writer, for a recording whose episodes must not be recorded twice.

    Raises
    ------
    MissingExtraError
        PettingZoo is not installed.
    VaultExistsError
        The path exists, and ``resume`` is False.
    ShapeError
        The environment does not have the parallel API, its agents' actions do not fit into one
        array, or the environment does not fit the vault.
    """
    import_optional("pettingzoo", "pettingzoo")
    from offmarl.envs.translator import Translator, check_parallel, name_of

    check_parallel(env)
    check_rules("time_limit", PositiveInt, time_limit)
    path = local_output(path)
    if path.exists() and not resume:
        raise VaultExistsError(
            f"there is a vault at {path} already: choose another path, or append with resume=True."
        )
    about = {"environment": name_of(env), "recorded": "in Python", **(provenance or {})}
    run = run or f"python-{uuid.uuid4().hex[:12]}"
    writer = None
    with suppress(VaultNotFoundError, VaultFormatError):  # another process may be creating it
        writer = vault.join(path, run)
    translate = partial(Translator, name=name, time_limit=time_limit)
    return Recorder(env, translate, partial(_create, path, run, about, resume), writer)


def _create(
    path: Path, run: str, provenance: Mapping[str, Any], resume: bool, spec: EnvSpec
) -> vault.SharedWriter:
    """Create a vault, unless another process is creating it, and join it."""
    deadline = time.monotonic() + _CREATION_SECONDS
    while True:
        try:
            vault.create(path, spec, rows=1, provenance=provenance).close()
        except VaultExistsError:
            if not resume:
                raise
        except VaultLockedError:
            if not resume or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        return vault.join(path, run)


def _check_fit(writer: vault.SharedWriter, spec: EnvSpec) -> None:
    if difference := writer.spec.difference(spec):
        raise ShapeError(
            f"{writer.path} holds data of {writer.spec.name or 'another environment'}, which "
            f"differs from {spec.name or 'this one'} in {difference}: record to another vault."
        )
    if writer.rows != 1:
        raise VaultError(
            f"{writer.path} has {writer.rows} rows, but episodes that are recorded one by one need "
            "a vault of one row: record to another vault, and join both with `offmarl cat`."
        )


# ---------------------------------------------------------------------------------- processes

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
                sample = self._random.uniform(space.low, space.high)
                actions[agent] = sample.astype(space.dtype)
                log_prob[agent] = -sample.size * float(np.log(2))
        return actions, log_prob


def _legal(observation: Any, info: Mapping[str, Any], num_actions: int) -> Any:
    mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
    mask = info.get("action_mask") if mask is None else mask
    legal = np.flatnonzero(np.ones(num_actions) if mask is None else mask)
    return legal if len(legal) else np.arange(num_actions)


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
    check_rules("episodes", PositiveInt, episodes)
    check_rules("processes", PositiveInt, processes)
    if seed is None or seed < 0:  # NumPy takes None for a random seed
        raise OptionError(f"seed must be at least 0, not {seed}.")
    recipe = {"seed": seed, "processes": processes, "episode_seeds": "folded"}
    path, about = local_output(path), {**(provenance or {}), "recipe": recipe}
    begin = partial(record, path=path, name=name, time_limit=time_limit, provenance=about)
    play = partial(_play, make_env, make_policy, begin, (episodes, processes, seed))
    with progress(f"record {path.name}", episodes, _recorded(path, recipe)) as advance:
        return _play_all(play, processes, path.name, advance)


def _play_all(
    play: Callable[[int], Answers], processes: int, name: str, advance: Callable[[int], None]
) -> int:
    """Return how many episodes were played."""

    def count(answers: Process | Answers) -> int:
        total = 0
        while answers.send(None):
            advance(1)
            total += 1
        return total

    if processes == 1:
        return count(play(0))
    started = [Process(name, partial(play, number)) for number in range(processes)]
    total = sum(in_threads(started, count))
    close(started)
    return total


def _recorded(path: Path, recipe: Mapping[str, Any]) -> int:
    """Return how many episodes were recorded before; `RunError` if in another recording."""
    try:
        existing = vault.open_vault(path)
    except (VaultNotFoundError, VaultFormatError):  # nothing, or the remains of a killed process
        return 0
    if (old := existing.provenance.get("recipe")) != recipe:
        raise RunError(
            f"{path} was started with {old or 'another kind of recording'}, not {dict(recipe)}: "
            "give the same arguments to resume it, or another path."
        )
    return len(existing.episodes.row)


def _play(
    make_env: Callable[[], Any],
    make_policy: Callable[[Any], PythonPolicy],
    begin: Callable[..., Recorder],
    sizes: tuple[int, int, int],
    number: int,
) -> Answers:
    """Record the missing episodes of one process, yield True after each, and False at the end."""
    episodes, processes, seed = sizes
    with closing(make_env()) as env:
        policy = make_policy(env)
        with begin(env, resume=True, run=f"process {number} of {processes}") as recorder:
            for episode in range(number, episodes, processes)[recorder.recorded() :]:
                try:
                    _play_episode(recorder, policy, *episode_seeds(seed, episode))
                except BaseException:
                    recorder.discard()  # the next call plays it again
                    raise
                yield True
    yield False


def _play_episode(recorder: Recorder, policy: PythonPolicy, seed: int, draws: int) -> None:
    observations, infos = recorder.reset(seed=seed)
    if hasattr(policy, "reset"):
        policy.reset()
    if hasattr(policy, "seed"):
        policy.seed(draws)
    while recorder.running:
        output = policy(observations, infos)
        actions, log_prob = output if isinstance(output, tuple) else (output, None)
        observations, *outcome, infos = recorder.step(actions, log_prob)
        if hasattr(policy, "after_step"):
            policy.after_step(*outcome)
