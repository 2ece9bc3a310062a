"""Recording of a fixed policy, and the state of recordings."""

import math
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from offmarl import vault
from offmarl._compiling import pinned, quickly
from offmarl._mesh import DATA, by_shards, spec
from offmarl._version import __version__
from offmarl.checkpoint import Checkpoints
from offmarl.config import PositiveInt, check_rules, check_seed
from offmarl.envs import Environment, autoreset
from offmarl.envs.sides import Side, without_others
from offmarl.errors import RunError
from offmarl.paths import local_output, safe_path
from offmarl.programs.cluster import any_process, ends_with_others, is_first, on_first
from offmarl.programs.experience.buffer import (
    Capture,
    ChunkWriter,
    add,
    init_capture,
    make_buffer,
)
from offmarl.programs.experience.captures import CaptureCheckpoints
from offmarl.programs.program import Hyperparameters, Program, Stage
from offmarl.programs.recording.foreign import errors_of_functions
from offmarl.programs.recording.sides import opponents_of
from offmarl.programs.runs.compiling import compile_ahead, keep_compiled_programs
from offmarl.programs.runs.identity import (
    differences,
    environment_source,
    fingerprint,
    numerics,
    require_same_numerics,
)
from offmarl.programs.runs.loop import Schedule, collect, play_steps
from offmarl.programs.runs.sharding import SeedLayout, recorder_layout
from offmarl.programs.runs.training import CheckpointTimer, checkpoint_timer
from offmarl.replay.device import bytes_of, require_room
from offmarl.rollout import RolloutState, init_rollout, meet_others, rollout
from offmarl.statistics import mean_interval
from offmarl.teams import only_or_all
from offmarl.tracking import plain, progress
from offmarl.types import ArrayTree, EnvSpec, FinalObservations, Policy, Transition, View
from offmarl.vault.read.reader import Reader

CHUNK = 64
"""Largest number of time steps collected at once: they should fit into the processor's cache."""


_NO_HYPER = Hyperparameters()

JoinAgents = Callable[..., tuple[Transition, FinalObservations]]
"""Makes the written steps from the captured ones; see `ChunkWriter`."""


class _State(NamedTuple):
    params: ArrayTree
    rollout: RolloutState
    capture: Capture


def record_policy(
    env: Environment,
    policy: Policy,
    params: ArrayTree,
    path: str | Path,
    steps: int,
    num_envs: int = 64,
    seed: int = 0,
    provenance: Mapping[str, Any] | None = None,
    checkpoint_seconds: float = 30.0,
    devices: int | None = None,
) -> bool:
    """Play a policy in parallel environments, and write all steps to a vault.

    After a kill at any instant, the same call resumes from the last checkpoint and ends with the
    content of an uninterrupted call. A complete recording is not changed.

    Parameters
    ----------
    env
        The environment, without autoreset; `offmarl.envs.record_states` makes one whose states are
        recorded.
    policy, params
        The policy, recorded as policy 0; of several (`Policy.number`), the first has the id 0.
    path
        Path of the vault, ``<directory>/<name>.vlt/<uid>``, with one row for each environment.
    steps
        Total number of environment steps, rounded up to whole rows. Running episodes are cut off at
        the end.
    num_envs
        E, the number of environments.
    seed
        Random seed.
    provenance
        A JSON object to store with the data, such as the source of the policy.
    checkpoint_seconds
        Seconds between checkpoints. SIGINT and SIGTERM save one before they stop the recording.
    devices
        Number of devices that the environments are divided over, by default one. In a run of
        several processes (`jax.distributed`) it counts those of all, by default all of them; the
        first process writes the vault.

    Returns
    -------
    bool
        False if the recording was complete already.

    Raises
    ------
    OptionError
        ``steps`` or ``num_envs`` is not positive, or the environments cannot be divided over the
        devices.
    RunError
        The path holds another recording.
    ProcessLostError
        Another process ended.
    Stopped
        A signal stopped the recording; the message says where it resumes.
    VaultError
        The vault cannot be written.
    """
    arguments = env, policy, params, local_output(path), steps, num_envs, seed
    return Recording(*arguments, lambda: provenance or {}, checkpoint_seconds, devices).record()


def record_tiers(
    env: Environment,
    policy: Policy,
    tiers: Mapping[str, ArrayTree],
    steps: int,
    out: str | Path = "vaults",
    num_envs: int = 64,
    seed: int = 0,
    provenance: Mapping[str, Any] | None = None,
) -> dict[str, Path]:
    """Record a policy of one's own at several tiers; return the path of each tier's vault.

    ``tiers`` holds the policy's parameters by the name of the tier. ``steps`` and the rest are of
    each tier, as for `record_policy`. The vaults are ``ENV.vlt/TIER`` in the directory ``out``.

    Examples
    --------
    >>> offmarl.record_tiers(env, policy, {"medium": halfway, "expert": last}, steps=100_000)
    """
    place = local_output(out) / safe_path(f"{env.spec.name}.vlt", option="out")
    paths = {tier: place / safe_path(tier, option="tiers") for tier in tiers}
    for tier, path in paths.items():
        about = {**(provenance or {}), "tier": tier}
        record_policy(env, policy, tiers[tier], path, steps, num_envs, seed, about)
    return paths


@dataclass(frozen=True)
class Recording:
    """Everything that determines a recording of a fixed policy; see `record_policy`."""

    env: Environment
    policy: Policy
    params: ArrayTree
    path: Path
    steps: int
    num_envs: int = 64
    seed: int = 0
    provenance: Callable[[], Mapping[str, Any]] = dict
    """Returns the provenance. It may take a while, so it is called only before writing."""
    checkpoint_seconds: float = 30.0
    devices: int | None = None
    key: PRNGKeyArray | None = None
    """Random key, by default that of the seed."""
    identity: Mapping[str, Any] | None = None
    """JSON of the origin of the key, and of the policies, as far as the parameters do not identify
    them; by default the seed, and the opponents of a side."""
    size: int = 1
    """Number of policies; their ids are 0, 1 and so on."""

    def __post_init__(self) -> None:
        check_rules("num_envs", PositiveInt, self.num_envs)
        check_rules("steps", PositiveInt, self.steps)
        check_seed(self.seed)

    @pinned()
    def record(self) -> bool:
        """Do as `record_policy`."""
        keep_compiled_programs()
        path, layout = local_output(self.path), recorder_layout(1, self.num_envs, self.devices)
        recipe = self.recipe | {"chunks": [*chunks_of(self.steps, self.num_envs)]}
        if self.devices is not None or jax.process_count() > 1:
            recipe["groups"] = groups_of(self.num_envs, layout.shards)
        with ends_with_others(path), errors_of_functions():
            if is_complete(path, recipe):
                return False
            about, label = self.provenance(), f"the recording {path.name}"
            with checkpoint_timer(self.checkpoint_seconds, "step", label) as timer:
                self._write(path, layout, recipe, about, timer)
        return True

    def _write(
        self,
        path: Path,
        layout: SeedLayout,
        recipe: Mapping[str, Any],
        provenance: Mapping[str, Any],
        timer: CheckpointTimer,
    ) -> None:
        directory = path.parent / f".{path.name}.recording"
        checkpoints = CaptureCheckpoints(directory, keep=1)
        program, num_envs = self.program(recipe.get("groups", 1)), self.num_envs
        key = jax.random.key(self.seed) if self.key is None else self.key
        init_key, key = jax.random.split(key)
        start, begin = _begin(self.env, program, checkpoints, init_key)
        num_chunks, num_steps = recipe["chunks"]
        timer.begin(start * num_envs * num_steps)
        schedule = Schedule(num_chunks, num_chunks, 1, (0,))
        spec, join_agents = recording_layout(self.env, first_id=self.size)
        steps = num_chunks * num_steps  # of each environment
        writer = open_for_recording(path, spec, (num_envs, steps), recipe, provenance)
        with (
            ChunkWriter(writer, "policy", start, start * num_steps, join_agents) as chunks,
            progress(f"record {path.name}", steps, start * num_steps) as advance,
        ):
            states = [begin._replace(params=self.params)]
            arguments = [_NO_HYPER], [key], schedule, start, [chunks], layout
            work = collect(program, states, *arguments, learns=False)
            for done, (state,), _ in work:
                timer.work_done()
                advance(num_steps)
                if timer.is_due():
                    chunks.flush()
                    checkpoints.save(done, {"state": state._replace(params=())}, {})
                    timer.saved(done * num_steps * num_envs)
            chunks.flush()
            if writer is not None:
                chunks.complete(recorded=recorded_return(Reader(writer.store), steps))
        any_process(False)  # no process ends, or reads the vault, before it is complete
        if is_first():
            shutil.rmtree(directory, ignore_errors=True)

    def compile_ahead(self) -> "Future[None]":
        """Compile what `record` runs on one device, in a thread."""
        program, key = self.program(1), jax.random.key(self.seed)
        state = jax.eval_shape(program.init, key, _NO_HYPER)._replace(params=self.params)
        return compile_ahead(play_steps, program, 0, None, state, (0, 1), key, _NO_HYPER)

    def program(self, groups: int) -> Program:
        """Return the policy as a program without learning, in groups of environments."""
        num_steps = chunks_of(self.steps, self.num_envs)[1]
        return _fixed(without_others(self.env), self.policy, self.num_envs, num_steps, groups)  # type: ignore[arg-type]

    @property
    def recipe(self) -> dict[str, Any]:
        """What determines the data, but for their division into chunks or blocks."""
        who: dict[str, Any] = {"policy": fingerprint(self.params)}
        if self.policy.code:
            who["functions"] = [self.policy.code]
        if self.identity is None:
            who |= {"seed": self.seed} | opponents_of(self.env)
        else:
            who |= self.identity
        if extras := recording_layout(self.env, self.size)[0].extras:
            who["extras"] = sorted(extras)
        name = self.env.spec.name
        return {"env": name, "num_envs": self.num_envs, **who, **environment_source(name)}


HINTS = {
    "chunks": "--steps or --num-envs",
    "functions": "code of the Python function",
    "blocks": "--steps, --num-envs or --block-steps",
    "groups": "--devices",
}
"""What entries of a recipe follow from, for errors."""


def chunks_of(steps: int, num_envs: int) -> tuple[int, int]:
    """Return the number of a recording's chunks, and of the time steps in each."""
    row = -(-steps // num_envs)
    num_chunks = -(-row // CHUNK)
    return num_chunks, -(-row // num_chunks)


GROUPS = 8
"""Number of groups of environments, if it divides their number."""


def groups_of(num_envs: int, devices: int) -> int:
    """Return the number of groups: the same for all numbers of devices that divide it."""
    return math.lcm(math.gcd(num_envs, GROUPS), devices)


@lru_cache(maxsize=4)
def _fixed(env: Environment, policy: Policy, num_envs: int, num_steps: int, groups: int) -> Program:
    """Return a fixed policy as a program without learning.

    The caller puts the parameters into the initial state. Cached, so that recordings of a policy
    with other parameters share the compiled program.
    """
    env = autoreset(env)
    play_once = rollout if groups == 1 else partial(_rollout_in_groups, groups)
    buffer = make_buffer(num_envs, num_steps)

    def init(key: PRNGKeyArray, _hyper: Hyperparameters) -> _State:
        numbered = policy.number is not None
        capture = init_capture(buffer, env.spec, each_agent=numbered)
        return _State((), init_rollout(env, policy, key, num_envs), capture)

    def update(
        state: _State, _batch: None, key: PRNGKeyArray, _hyper: Hyperparameters
    ) -> tuple[_State, dict[str, Array]]:
        after, transitions, next_views, _ = play_once(
            env, policy, state.params, state.rollout, key, num_steps, 0
        )
        capture = add(buffer, state.capture, transitions, next_views)
        return _State(state.params, after, capture), {}

    return Program(
        init,
        (Stage(update),),
        policy=lambda _greedy: policy,
        policy_params=lambda state: state.params,
        num_steps=num_steps,
    )


def _rollout_in_groups(
    groups: int,
    env: Environment,
    policy: Policy,
    params: ArrayTree,
    state: RolloutState,
    key: PRNGKeyArray,
    num_steps: int,
    policy_id: int,
) -> tuple[RolloutState, Transition, View, Float[Array, "T E N"] | None]:
    """Do as `rollout`, in groups of environments, of which each device plays one after the other.

    The last bits of floating-point numbers may depend on how many environments the compiler
    vectorises together. The number of groups does not depend on the devices.
    """
    total, others = len(state.view.alive), state.others
    size = total // groups

    def play_own(
        states: RolloutState, first: Int[Array, "own"], shared: ArrayTree, key: PRNGKeyArray
    ) -> ArrayTree:
        def of_group(group: tuple[RolloutState, Int[Array, ""]]) -> ArrayTree:
            params, others = shared
            state, among = group[0]._replace(others=others), (group[1], total)
            after, *steps = rollout(env, policy, params, state, key, num_steps, policy_id, among)
            return after._replace(others=()), *steps

        return jax.lax.map(of_group, (states, first))

    play_groups = by_shards(
        play_own, groups, (spec(DATA), spec(DATA), spec(), spec()), out_specs=spec(DATA)
    )
    parts = jax.tree.map(
        lambda leaf: leaf.reshape(groups, size, *leaf.shape[1:]), state._replace(others=())
    )
    results = play_groups(parts, size * jnp.arange(groups), (params, others), key)
    after = jax.tree.map(lambda leaf: leaf.reshape(total, *leaf.shape[2:]), results[0])
    return after._replace(others=others), *jax.tree.map(
        lambda leaf: leaf.swapaxes(0, 1).reshape(num_steps, total, *leaf.shape[3:]), results[1:]
    )


def recorded_return(dataset: Reader, steps: int) -> dict[str, Any]:
    """Return the mean return and its interval, by team, in a vault recorded ``steps`` at a time."""
    # Of the episodes that begin within a time limit of the end, only short ones are complete.
    episodes, limit = dataset.episodes, dataset.spec.time_limit
    if limit is not None and limit <= steps:
        episodes = episodes.take(episodes.start % steps <= steps - limit)
    means: dict[str, float | None] = {}
    intervals: dict[str, list[float] | None] = {}
    for team, returns in episodes.complete_team_returns.items():
        means[team], intervals[team] = None, None
        if len(returns):
            means[team], low, high = mean_interval(returns)
            intervals[team] = None if low is None or high is None else [low, high]
    return {
        "episodes": int(episodes.scored.sum()),
        "return": only_or_all(means),
        "return_interval": only_or_all(intervals),
    }


def _begin(
    env: Environment, program: Program, checkpoints: Checkpoints, key: PRNGKeyArray
) -> tuple[int, _State]:
    """Return the number of chunks recorded, and the state after them."""
    init = jax.jit(program.init, compiler_options=quickly())
    shapes = jax.eval_shape(init, key, _NO_HYPER)
    require_room(bytes_of(shapes), "so many environments")
    checkpoint = checkpoints.resume({"state": shapes})
    if checkpoint is None:
        return 0, meet_others(env, init(key, _NO_HYPER))
    return checkpoint.step, checkpoint.tree["state"]


def recording_layout(env: Environment, first_id: int) -> tuple[EnvSpec, JoinAgents | None]:
    """Return the spec of an environment's recordings, and the `JoinAgents` of their steps, if any.

    These differ for one side of an adversarial environment, whose recordings hold all agents.
    """
    if isinstance(env, Side):
        return env.recorded_spec, partial(env.join_agents, first_id=first_id)
    return env.spec, None


# ---------------------------------------------------------------------------------- provenance


def is_complete(path: Path, recipe: Mapping[str, Any]) -> bool:
    """Whether a recording exists and is complete."""
    return bool(check_recipe(path, recipe).get("complete"))


def check_recipe(path: Path, recipe: Mapping[str, Any], partly: bool = False) -> dict[str, Any]:
    """Return the provenance of a recording; empty if it does not exist.

    `RunError` if it has another recipe, of which ``partly`` ignores entries that ours lacks.
    """
    return on_first(lambda: _checked_provenance(path, recipe, partly))


def _checked_provenance(path: Path, recipe: Mapping[str, Any], partly: bool) -> dict[str, Any]:
    if not path.exists():
        return {}
    existing = vault.open_vault(path)
    provenance = existing.provenance
    noted, new_recipe = provenance.get("recipe"), plain(recipe)
    old_recipe = noted if isinstance(noted, dict) else {}  # a vault of others has what it likes
    further = tuple(old_recipe.keys() - new_recipe.keys()) if partly else ()
    for name, theirs, ours in differences(old_recipe, new_recipe, further):
        how = f"other {HINTS[name]}" if name in HINTS else f"{name}={theirs!r}, not {ours!r}"
        advice = (
            "give the same arguments to resume it, or another path (--out) for the new recording."
            if existing.length
            else "it holds no steps yet: if no process is writing it, remove it to start again."
        )
        raise RunError(f"{path} was started with {how}: {advice}")
    if not provenance.get("complete"):
        require_same_numerics(path, provenance.get("numerics"), numerics())
    return dict(provenance)


def open_for_recording(
    path: Path,
    spec: EnvSpec,
    size: tuple[int, int],
    recipe: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> vault.Writer | None:
    """Create the vault of a recording, or resume it, in the process that writes it.

    ``size`` is its rows, and the steps that each of them will have.
    The provenance is stored with the data, with the recipe (see `is_complete`) and `software`.
    """
    if not is_first():
        return None
    if path.exists():
        if difference := vault.open_vault(path).spec.difference(spec):
            raise RunError(
                f"{path} was started in another {spec.name}: it differs in {difference}."
            )
        return vault.resume(path)
    about = dict(provenance) | {"recipe": dict(recipe), **software(spec.name), "complete": False}
    about["numerics"] = numerics()
    rows, steps = size
    return vault.create(path, spec, rows=rows, expected_steps=steps, provenance=about)


def software(env_name: str) -> dict[str, dict[str, str]]:
    """Return what a recording notes of software: versions, and the code of the environment."""
    versions = {"offmarl": __version__, "jax": jax.__version__, "platform": jax.default_backend()}
    return {"software": versions, **environment_source(env_name)}
