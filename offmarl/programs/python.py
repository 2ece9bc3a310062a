"""Recording environments that are stepped in Python: those of the PettingZoo parallel API."""

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from offmarl import vault
from offmarl._imports import import_optional
from offmarl.errors import (
    InvalidValueError,
    OptionError,
    ShapeError,
    VaultError,
    VaultExistsError,
    VaultFormatError,
    VaultLockedError,
    VaultNotFoundError,
)
from offmarl.paths import local
from offmarl.types import (
    EnvSpec,
    FinalObservations,
    Transition,
    View,
    flatten_tree,
    map_tree,
)
from offmarl.vault.values import RecordPosition
from offmarl.vault.values import check as check_values

if TYPE_CHECKING:
    from offmarl.envs.translator import Translator

_CREATION_SECONDS = 10.0
"""How long to wait for another process that creates the vault."""

_FLUSH_SECONDS = 30.0
"""Largest time between two writes to disk: what a killed process may lose."""

_DISK_NAMES = {
    "action": "actions",
    "reward": "rewards",
    "behaviour_log_prob": "infos.behaviour_log_probs",
}
"""The fields of a step that are checked, and their names on disk."""


class Recorder:
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

    def __init__(self, env: Any, path: Path, run: str, resume: bool, about: Mapping[str, Any]):
        self.env = env
        self.path = path
        self.episodes = 0
        self.steps = 0
        self._run = run
        self._resume = resume
        self._about = about
        self._translator: Translator | None = None
        self._writer = _join_if_there(path, run)
        self._episode: _Episode | None = None
        self._flushed = time.monotonic()

    def reset(self, **arguments: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Start an episode: call ``env.reset`` with these arguments, and return its result."""
        self._cut()
        observations, infos = self.env.reset(**arguments)
        self._translator = self._translator or self._open()
        self._episode = _Episode(self._translator, self.env, observations, infos)
        return observations, infos

    def step(
        self,
        actions: Mapping[str, Any],
        log_prob: Mapping[str, float] | None = None,
        policy_id: int | Mapping[str, int] = -1,
    ) -> tuple[Mapping[str, Any], ...]:
        """Take a step, and return the result of ``env.step``.

        Parameters
        ----------
        actions
            Action of each agent in ``env.agents``.
        log_prob
            Log-probability of each action under the policy that chose it, if known.
        policy_id
            Id of the policy that chose the actions, if there are several policies: one number, or
            one for each agent.

        Raises
        ------
        OptionError
            No episode is running.
        InvalidValueError
            An action is outside its agent's action space; the environment did not take the step.
            Or the environment returned NaN or infinity, or ``log_prob`` is infinite or above 0; the
            episode is cut off before the step, and `reset` starts the next one.
        """
        episode = self._episode
        if episode is None or episode.broken:
            raise OptionError("no episode is running: call reset before step.")
        joint = episode.joint(actions)
        outcome = self.env.step(actions)
        episode.add(joint, log_prob or {}, policy_id, outcome)
        self.steps += 1
        if not self.env.agents:
            self._store(episode, cut=False)
        return tuple(outcome)

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

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> "Translator":
        """Create the vault or join it; only a reset environment knows its sizes."""
        from offmarl.envs.translator import Translator, name_of

        options = {k: self._about[k] for k in ("name", "time_limit")}
        flat = self._writer is not None and self._writer.spec.is_vector
        translator = Translator(self.env, **options, flat=flat)
        if self._writer is None:
            provenance = {"environment": name_of(self.env), **self._about["provenance"]}
            _create(self.path, translator.spec, provenance, self._resume)
            self._writer = vault.join(self.path, self._run)
        _check_fit(self._writer, translator.spec)
        return translator

    def _cut(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None and len(episode):
            self._store(episode, cut=True)

    def _store(self, episode: "_Episode", cut: bool) -> None:
        self._episode = None
        if self._writer is None:
            return
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
    from offmarl.envs.translator import check_parallel

    check_parallel(env)
    path = local(path)
    if path.exists() and not resume:
        raise VaultExistsError(
            f"there is a vault at {path} already: choose another path, or append with resume=True."
        )
    about = {
        "name": name,
        "time_limit": time_limit,
        "provenance": {"recorded": "in Python", **(provenance or {})},
    }
    return Recorder(env, path, run or f"python-{uuid.uuid4().hex[:12]}", resume, about)


class _Episode:
    """The steps of the running episode.

    Attributes
    ----------
    broken
        Whether the outcome of the last step was invalid, so that the episode cannot continue.
    """

    def __init__(self, translator: "Translator", env: Any, observations: Any, infos: Any):
        self._translator, self._env = translator, env
        self._agents = list(env.possible_agents)
        present = np.array([agent in env.agents for agent in self._agents])
        self._terminated = ~present  # agents that are absent at the start never take part
        self._truncated = np.zeros_like(present)
        self._steps: list[dict[str, Any]] = []
        self.broken = False
        view = self._view_of(observations, infos, present)
        self._check({}, view)
        self._views = [view]

    def __len__(self) -> int:
        return len(self._steps)

    def joint(self, actions: Mapping[str, Any]) -> Any:
        """Return the agents' actions as an array; `InvalidValueError` if one is invalid."""
        try:
            return self._translator.joint(actions)
        except InvalidValueError as error:
            raise InvalidValueError(
                f"step {len(self)} of the episode: {error} The step was not taken."
            ) from None

    def add(
        self,
        joint: Any,
        log_prob: Mapping[str, float],
        policy_id: int | Mapping[str, int],
        outcome: tuple[Any, ...],
    ) -> None:
        """Add the outcome of a step, or raise `InvalidValueError` and add nothing."""
        observations, rewards, terminations, truncations, infos = outcome
        ended = self._of(terminations, False, bool)
        cut_off = self._of(truncations, False, bool) & ~ended
        present = np.array([agent in self._env.agents for agent in self._agents])
        terminated = (self._terminated | ended) & ~present
        truncated = ((self._truncated | cut_off) & ~present) & ~terminated
        truncated |= ~present & ~terminated  # agents that left without a flag
        same_for_all = dict.fromkeys(self._agents, policy_id)
        step = {
            "action": joint,
            "reward": self._of(rewards, 0, float),
            "terminated": terminated,
            "truncated": truncated,
            "behaviour_log_prob": self._of(log_prob, np.nan, float),
            "policy_id": self._of(
                policy_id if isinstance(policy_id, Mapping) else same_for_all, -1, np.int32
            ),
        }
        view = self._view_of(observations, infos, present | cut_off)
        self.broken = True
        self._check(step, view)
        self.broken = False
        self._terminated, self._truncated = terminated, truncated
        self._steps.append(step)
        self._views.append(view)

    def _check(self, step: Mapping[str, Any], view: View) -> None:
        """Raise `InvalidValueError` for invalid values of a step when it is taken.

        ``view`` is the next view of the step, or the first view of the episode.
        """
        arrays = {_DISK_NAMES[name]: value for name, value in step.items() if name in _DISK_NAMES}
        arrays |= flatten_tree(view.observation, "observations")
        arrays |= flatten_tree(view.state, "infos.state")
        check_values(
            {name: np.asarray(array)[None, None] for name, array in arrays.items()},
            self._translator.spec,
            place=RecordPosition(len(self), "of the episode"),
        )

    def record(self, cut: bool) -> tuple[Transition, FinalObservations]:
        """Return the episode, ``(1, T, ...)``, and its final view.

        Parameters
        ----------
        cut
            Whether the recording ends the episode here. Agents that have not terminated are then
            marked as truncated.
        """
        fields: dict[str, Any] = {
            k: np.stack([step[k] for step in self._steps])[None] for k in self._steps[0]
        }
        if cut:
            fields["truncated"][:, -1] = ~fields["terminated"][:, -1]
        last = (fields["terminated"] | fields["truncated"]).all(-1)
        views = map_tree(lambda *leaves: np.stack(leaves)[None], *self._views)
        before = map_tree(lambda leaf: leaf[:, :-1], views)
        transition = Transition(view=before, last=last, **fields)
        final = map_tree(lambda leaf: leaf[:, -1], views)
        row: Any = np.zeros(1, np.int32)
        return transition, FinalObservations(row, row + len(self._steps) - 1, final)

    def _view_of(self, observations: Any, infos: Any, alive: Any) -> View:
        from offmarl.envs.translator import state_of

        return self._translator.view(observations, infos, alive, state_of(self._env))

    def _of(self, by_agent: Mapping[str, Any], default: Any, kind: Any) -> Any:
        return np.array([by_agent.get(agent, default) for agent in self._agents], kind)


def _join_if_there(path: Path, run: str) -> vault.SharedWriter | None:
    """Join a vault; None if it does not exist or another process is creating it."""
    try:
        return vault.join(path, run)
    except (VaultNotFoundError, VaultFormatError):
        return None


def _create(path: Path, spec: EnvSpec, provenance: Mapping[str, Any], resume: bool) -> None:
    """Create a vault, unless another process is creating it."""
    deadline = time.monotonic() + _CREATION_SECONDS
    while True:
        try:
            return vault.create(path, spec, rows=1, provenance=provenance).close()
        except VaultExistsError:
            if not resume:
                raise
            return None
        except VaultLockedError:
            if not resume or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


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
