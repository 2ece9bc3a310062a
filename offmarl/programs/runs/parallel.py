"""Episodes of environments of PettingZoo's parallel API, which are stepped in Python.

`RunningEpisode` checks and keeps the steps of one. `ParallelEnvironment` plays policies in copies
of an environment that code of the user makes: the copies step in processes of their own, and the
policies act in this one.
"""

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl._imports import summarize
from offmarl.envs.registry import make_parallel
from offmarl.errors import InvalidValueError, OffmarlError, RunError, ShapeError
from offmarl.gate import fit
from offmarl.launch.local import own_cores
from offmarl.types import (
    ArraySpec,
    ArrayTree,
    EnvSpec,
    FinalObservations,
    Policy,
    Transition,
    View,
    flatten_tree,
    map_tree,
    remember,
)
from offmarl.vault.format import values
from offmarl.vault.format.layout import DISK_NAMES

if TYPE_CHECKING:
    from offmarl.envs.translator import Translator

_END_SECONDS = 5.0
"""How long a process may take to close its environment."""

_MOST_PROCESSES = 8
"""Largest number of processes by default: each has a copy of the environment in memory."""

_CHECKED = ("action", "reward", "behaviour_log_prob")
"""The fields of a step that are checked."""


class RunningEpisode:
    """The steps of the running episode; it is broken if the outcome of the last step was invalid.

    An agent ends when it leaves ``env.agents``; its flags are kept until then. When all agents have
    left or have a flag, the episode is over.
    """

    def __init__(self, translator: "Translator", env: Any, observations: Any, infos: Any):
        self._translator, self._env = translator, env
        self._agents = translator.keys
        count = (len(self._agents),)
        self._flag, self._number = ArraySpec(count, "bool"), ArraySpec(count)
        self._id = ArraySpec(count, "int32")
        self._acting = present = self._present()  # who acts in the next step
        self._terminated = ~present  # agents that are absent at the start never take part
        self._truncated = np.zeros_like(present)
        self._steps: list[dict[str, Any]] = []
        self._final_is_known = True
        self.broken = self.over = False
        with _locating("the first view"):
            view = self._view_of(observations, infos, present)
        self._check({}, view)
        self._views = [view]

    def __len__(self) -> int:
        return len(self._steps)

    def _present(self) -> Any:
        return np.array([agent in self._env.agents for agent in self._agents])

    def joint(self, actions: Mapping[str, Any]) -> Any:
        """Return the agents' actions as an array; `InvalidValueError` if one is invalid."""
        with _locating(f"step {len(self)} of the episode", " The step was not taken."):
            self._of("action", actions, required=self._present())
            return self._translator.joint(actions)

    def add(
        self,
        joint: Any,
        log_prob: Mapping[str, float],
        policy_id: int | Mapping[str, int],
        outcome: tuple[Any, ...],
    ) -> None:
        """Add the outcome of a step, or raise `InvalidValueError` and add nothing."""
        self.broken = True
        with _locating(f"step {len(self)} of the episode"):
            if len(self) == self._translator.spec.time_limit:
                raise InvalidValueError(
                    f"the episode has not ended after {len(self)} steps, its time_limit: give the "
                    "real limit, or let the environment truncate all agents there."
                )
            step, view = self._read(joint, log_prob, policy_id, outcome)
        self._check(step, view)
        self.broken = False
        self._steps.append(step)
        self._views.append(view)

    def _read(
        self, joint: Any, log_prob: Any, policy_id: Any, outcome: Any
    ) -> tuple[dict[str, Any], View]:
        """Return a step and the view after it."""
        if not isinstance(outcome, tuple) or len(outcome) != 5:
            raise InvalidValueError(
                "env.step returned no five dicts: observations, rewards, terminations, "
                "truncations and infos."
            )
        observations, rewards, terminations, truncations, infos = outcome
        acted, present = self._acting, self._present()
        self._acting, joined = present, present & ~acted
        ended = self._of("termination", terminations, self._flag, False, acted)
        cut_off = self._of("truncation", truncations, self._flag, False, acted) & ~ended
        self._terminated = self._terminated & ~joined | ended
        self._truncated = self._truncated & ~joined | cut_off
        self.over = bool((self._terminated | self._truncated | ~present).all())
        terminated = self._terminated & (self.over | ~present)
        if not isinstance(policy_id, Mapping):
            policy_id = dict.fromkeys(self._agents, policy_id)
        step = {
            "action": joint,
            "reward": self._of("reward", rewards, self._number, 0.0, acted),
            "terminated": terminated,
            "truncated": ~terminated & (self.over | ~present),
            "behaviour_log_prob": self._of("log_prob", log_prob, self._number, np.nan),
            "policy_id": self._of("policy id", policy_id, self._id, -1),
        }
        # The last view of an agent that is truncated alone is of a step in which it does not act.
        alive = (present | cut_off & self.over) & ~terminated
        final = _final_observations(infos, self._agents) if self.over else {}
        if final:  # the environment has begun the next episode: its state and masks are of that
            observations, infos = {**observations, **final}, {}
            has_final = np.array([agent in final for agent in self._agents])
            has_state = self._translator.spec.state == "native"
            self._final_is_known = not has_state and bool((has_final | ~alive).all())
        return step, self._view_of(observations, infos, alive)

    def _check(self, step: Mapping[str, Any], view: View) -> None:
        """Raise `InvalidValueError` for invalid values of a step when it is taken.

        ``view`` is the next view of the step, or the first view of the episode.
        """
        arrays = {DISK_NAMES[name]: step[name] for name in _CHECKED if name in step}
        arrays |= flatten_tree(view.observation, "observations")
        arrays |= flatten_tree(view.state, "infos.state")
        columns = {name: np.asarray(array)[None, None] for name, array in arrays.items()}
        place = values.RecordPosition(len(self), "of the episode")
        values.refuse(values.find(columns, self._translator.spec, place=place), "")

    def seen(self) -> tuple[Any, Any, Any, Any, bool]:
        """Return observations, legal actions, and after a step rewards and which agents are done.

        The last entry says whether the episode is over.
        """
        view, reward = self._views[-1], np.zeros(len(self._agents))
        done = np.zeros(len(self._agents), bool)
        if self._steps:
            step = self._steps[-1]
            reward, done = step["reward"], step["terminated"] | step["truncated"]
        return view.observation, np.asarray(view.legal_actions), reward, done, self.over

    def record(self, cut: bool) -> tuple[Transition, FinalObservations | None]:
        """Return the episode, ``(1, T, ...)``, and its final view if it is known.

        If the recording cuts it here, agents that have not terminated are marked as truncated.
        """
        fields: dict[str, Any] = {
            k: np.stack([step[k] for step in self._steps])[None] for k in self._steps[0]
        }
        if cut:
            fields["terminated"][:, -1] |= self._terminated
            fields["truncated"][:, -1] = ~fields["terminated"][:, -1]
        last = (fields["terminated"] | fields["truncated"]).all(-1)
        views = map_tree(lambda *leaves: np.stack(leaves)[None], *self._views)
        before = map_tree(lambda leaf: leaf[:, :-1], views)
        transition = Transition(view=before, last=last, **fields)
        if not self._final_is_known:
            return transition, None
        final = map_tree(lambda leaf: leaf[:, -1], views)
        row: Any = np.zeros(1, np.int32)
        return transition, FinalObservations(row, row + len(self._steps) - 1, final)

    def _view_of(self, observations: Any, infos: Any, alive: Any) -> View:
        from offmarl.envs.translator import state_of

        return self._translator.view(observations, infos, alive, state_of(self._env))

    def _of(
        self,
        what: str,
        by_agent: Any,
        leaf: ArraySpec | None = None,
        default: Any = None,
        required: Any = (),
    ) -> Any:
        """Return the agents' values as an array; without a ``leaf``, only check their names."""
        from offmarl.envs.translator import check_agents

        check_agents(f"the {what}s", by_agent, self._agents)
        for agent, must in zip(self._agents, required, strict=False):
            if must and agent not in by_agent:
                raise InvalidValueError(f"{agent} is alive and has no {what}.")
        if leaf is None:
            return None
        entries = [by_agent.get(agent, default) for agent in self._agents]
        try:
            return fit(entries, leaf, what)
        except InvalidValueError:  # name the first agent whose value is invalid
            scalar = ArraySpec((), leaf.dtype)
            for agent, value in zip(self._agents, entries, strict=True):
                fit(value, scalar, f"the {what} of {agent}")
            raise


@contextmanager
def _locating(place: str, then: str = "") -> Iterator[None]:
    """Say in the messages of invalid values where they are."""
    try:
        yield
    except InvalidValueError as error:
        raise InvalidValueError(f"{place}: {error}{then}") from None


def _final_observations(infos: Any, agents: list[Any]) -> dict[Any, Any]:
    """Return the last observations, which Gymnasium's vector API has in the next infos."""
    infos = infos if isinstance(infos, Mapping) else {}
    for name in ("final_obs", "final_observation"):
        shared = infos.get(name)
        observations = {**shared} if isinstance(shared, Mapping) else {}
        for agent in agents:
            info = infos.get(agent)
            if isinstance(info, Mapping) and info.get(name) is not None:
                observations[agent] = info[name]
        if observations:
            return observations
    return {}


# ---------------------------------------------------------------------------------- processes

T = TypeVar("T")

Answers = Generator[Any, Any, Any]
"""Yields an answer to each question that it is sent, the first of which is None."""


class Process:
    """A generator in a process of its own, which ends with `close` or with this process."""

    def __init__(self, name: str, answers: Callable[[], Answers]):
        startup = multiprocessing.get_context("spawn")  # a fork of a process that runs JAX may hang
        self._name = name
        self._pipe, theirs = startup.Pipe()
        self._process = startup.Process(target=_serve, args=(theirs, name, answers))
        self._process.start()
        theirs.close()
        # Before multiprocessing waits for the processes that are left at the exit.
        self.close = Finalize(self, _end, (self._pipe, self._process), exitpriority=10)

    def send(self, question: Any) -> Any:
        """Return the generator's answer, or raise its error."""
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # it may have sent its error
                self._pipe.send(question)
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_END_SECONDS)
            raise RunError(
                f"the process that plays {self._name} has ended with exit code "
                f"{self._process.exitcode}: repeat the command, and if it happens again, play the "
                "environment alone to see why."
            ) from None
        if isinstance(answer, OffmarlError):
            raise answer
        return answer


def in_threads(processes: list[Process], follow: Callable[[Process], T]) -> list[T]:
    """Return what a function returns of each process; end all of them if one fails."""
    with ThreadPoolExecutor(len(processes)) as pool:
        try:
            running = [pool.submit(follow, process) for process in processes]
            for future in wait(running, return_when=FIRST_EXCEPTION).done:
                future.result()
            return [future.result() for future in running]
        except BaseException:
            close(processes)  # which ends the threads
            raise


def close(processes: list[Process]) -> None:
    """End processes side by side, and take them out of the list."""
    if processes:
        with ThreadPoolExecutor(len(processes)) as pool:
            list(pool.map(lambda process: process.close(), processes))
    processes.clear()


def _end(pipe: Connection, process: Any) -> None:
    """Let a process close what it has open, and end."""
    pipe.close()
    process.join(_END_SECONDS)
    if process.is_alive():
        process.kill()


def _serve(pipe: Connection, name: str, answers: Callable[[], Answers]) -> None:
    """Answer what the other end of a pipe asks, until that closes."""
    try:
        with closing(answers()) as generator:
            while True:
                pipe.send(generator.send(pipe.recv()))
    except (EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        pass
    except Exception as error:
        reply: OffmarlError = RunError(f"{name} failed: {summarize(error)}.")
        if isinstance(error, OffmarlError):
            with suppress(TypeError):  # of an error that takes more than a message
                reply = type(error)(f"{name}: {error}")
        reply.add_note(traceback.format_exc())
        pipe.send(reply)


# ---------------------------------------------------------------------------------- playing


def is_parallel(name: str) -> bool:
    """Whether code of the user makes a PettingZoo environment; the errors are those of `make`."""
    if (pair := make_parallel(name)) is None:
        return False
    with suppress(Exception):
        pair[1].close()
    return True


class Player(NamedTuple):
    """A policy, its parameters, and the seed of its episodes."""

    policy: Policy
    params: ArrayTree
    seed: int


class ParallelEnvironment:
    """Copies of a user's PettingZoo environment, each in a process that lasts until `close`.

    ``spec`` is that of the players, and ``what`` its source for messages: agents of the same names
    keep its order, and observations become flat vectors if its are. `ShapeError` if the environment
    differs, except in states, on which policies do not act.
    """

    def __init__(self, name: str, spec: EnvSpec, what: str, processes: int | None = None):
        self._start = partial(Process, name, partial(_steps, name, spec))
        self._most = processes or min(len(own_cores()), _MOST_PROCESSES)
        self._copies = [self._start()]
        self.spec: EnvSpec = self._copies[0].send(None)
        other = replace(self.spec, state_size=spec.state_size, global_state=spec.global_state)
        if difference := spec.difference(other, extras=False):
            self.close()
            raise ShapeError(
                f"{what} and {other.name} differ in {difference}: give the environment that was "
                "recorded, or one of the same sizes, with --env."
            )

    def play(
        self,
        players: Sequence[Player],
        episodes: int,
        advance: Callable[[int], None] = lambda _: None,
    ) -> Float[np.ndarray, "players episodes N"]:
        """Return the return of each agent in episodes of policies.

        They do not depend on the number of processes, if the environment's episodes depend on the
        seed of ``reset`` alone. Players with the same seed play the same episodes.
        """
        jobs = [(index, number) for index in range(len(players)) for number in range(episodes)]
        returns = np.zeros((len(players), episodes, self.spec.num_agents))
        while len(self._copies) < min(self._most, len(jobs)):
            self._copies.append(self._start())
        placed = [player._replace(params=jax.device_put(player.params)) for player in players]
        waiting = iter(jobs)  # of all threads

        def play_waiting(copy: Process) -> None:
            copy.send(None)
            for index, number in waiting:
                returns[index, number] = _play(copy, placed[index], number)
                advance(1)

        in_threads(self._copies, play_waiting)
        return returns

    def close(self) -> None:
        """End the processes."""
        close(self._copies)


def _steps(name: str, spec: EnvSpec) -> Answers:
    """Yield what `RunningEpisode.seen` has after a reset with a seed or a step with actions.

    For None, yield the spec.
    """
    from offmarl.envs.translator import Translator

    for signum in (signal.SIGINT, signal.SIGTERM):  # they end the other process, and so this one
        signal.signal(signum, lambda *_: None)  # processes of env would inherit SIG_IGN
    pair: Any = make_parallel(name)
    name, env = pair
    try:
        env.reset(seed=0)  # the sizes of a state are known after a reset
        translator = Translator(env, name=name, like=spec)
        episode: Any = None
        question = yield translator.spec
        while True:
            if isinstance(question, int):
                episode = RunningEpisode(translator, env, *env.reset(seed=question))
            elif question is not None:
                actions = translator.by_agent(question, list(env.agents))
                episode.add(question, {}, -1, env.step(actions))
            question = yield translator.spec if question is None else episode.seen()
    finally:
        with suppress(Exception):
            env.close()


def _play(copy: Process, player: Player, number: int) -> Float[np.ndarray, "N"]:
    """Play one episode, and return the return of each agent."""
    policy, params, seed = player
    reset, draws = episode_seeds(seed, number)
    carry, key = policy.initial_carry(), jax.random.key(draws)
    *view, returns, _, over = copy.send(reset)
    while not over:
        action, carry, key = _act(policy, params, carry, key, *view)
        *view, reward, done, over = copy.send(np.asarray(action))
        if policy.after_step is not None:
            carry = _remember(policy, carry, reward, done)
        returns = returns + reward
    return returns


@partial(jax.jit, static_argnums=0)
def _act(
    policy: Policy,
    params: ArrayTree,
    carry: ArrayTree,
    key: PRNGKeyArray,
    observation: ArrayTree,
    legal_actions: Bool[Array, "N A"],
) -> tuple[Array, ArrayTree, PRNGKeyArray]:
    key, act_key = jax.random.split(key)
    action, _, carry = policy.act(params, carry, observation, legal_actions, act_key)
    return action, carry, key


_remember = jax.jit(remember, static_argnums=0)


def episode_seeds(seed: int, episode: int) -> list[int]:
    """Return an episode's seeds, for the environment and for the policy.

    They have 31 bits, which environments of any kind accept.
    """
    seeds = np.random.SeedSequence(seed, spawn_key=(episode,)).generate_state(2) >> 1
    return [int(number) for number in seeds]
