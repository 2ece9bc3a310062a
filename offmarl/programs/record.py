"""Recording of a fixed policy, and the state of recordings."""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

import offmarl
from offmarl import envs, vault
from offmarl.checkpoint import Checkpoints
from offmarl.envs import Environment, autoreset
from offmarl.envs.base import require_positive
from offmarl.envs.sides import Side
from offmarl.errors import RunError
from offmarl.paths import local
from offmarl.programs.buffer import Capture, ChunkWriter, add, init_capture, make_buffer
from offmarl.programs.captures import CaptureCheckpoints
from offmarl.programs.loop import Schedule, collect, copied
from offmarl.programs.program import Hyperparameters, Program, Stage
from offmarl.programs.run import (
    CheckpointTimer,
    checkpoint_timer,
    environment_source,
    keep_compiled_programs,
)
from offmarl.rollout import RolloutState, init_rollout, rollout
from offmarl.tracking import progress
from offmarl.types import ArrayTree, EnvSpec, FinalObservations, Policy, Transition

_CHUNK = 64
"""Largest number of time steps collected at once: they should fit into the processor's cache."""


Whole = Callable[..., tuple[Transition, FinalObservations]]
"""Makes the steps that are written of those that were captured; see `ChunkWriter`."""


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
    agent_ids: Sequence[int] | None = None,
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
        The policy, recorded as policy 0.
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
    agent_ids
        Policy id of each agent, if the policy is composed of several; by default that of all is 0.

    Returns
    -------
    bool
        False if the recording was complete already.

    Raises
    ------
    OptionError
        ``steps`` or ``num_envs`` is not positive.
    RunError
        The path holds another recording.
    Stopped
        A signal stopped the recording; the message says where it resumes.
    VaultError
        The vault cannot be written.
    """
    require_positive(steps=steps, num_envs=num_envs)
    keep_compiled_programs()
    path = local(path)
    row = -(-steps // num_envs)
    num_chunks = -(-row // _CHUNK)
    program = _fixed(env, policy, num_envs, -(-row // num_chunks))  # type: ignore[arg-type]
    recipe = {
        "env": env.spec.name,
        "policy": fingerprint(params),
        "num_envs": num_envs,
        "chunks": [num_chunks, program.num_steps],
        "seed": seed,
    } | environment_source(env.spec.name)
    if extras := recorded(env, first_id=1)[0].extras:
        recipe["extras"] = sorted(extras)
    if is_complete(path, recipe):
        return False
    spec, whole = recorded(env, first_id=1)
    if agent_ids is not None:
        whole = partial(_with_ids, ids=np.array(agent_ids, np.int32))
    with checkpoint_timer(checkpoint_seconds, "step") as timer:
        _record(program, params, path, (spec, whole), recipe, provenance or {}, timer)
    return True


@lru_cache(maxsize=4)
def _fixed(env: Environment, policy: Policy, num_envs: int, num_steps: int) -> Program:
    """Return a fixed policy as a program that does not learn.

    The caller puts the parameters into the initial state. Cached, so that recordings of a policy
    with other parameters share the compiled program.
    """
    env = autoreset(env)
    buffer = make_buffer(num_envs, num_steps)

    def init(key: PRNGKeyArray, _hyper: Hyperparameters) -> _State:
        state = init_rollout(env, policy, key, num_envs)
        return _State((), state, init_capture(buffer, env.spec))

    def update(
        state: _State, _batch: None, key: PRNGKeyArray, _hyper: Hyperparameters
    ) -> tuple[_State, dict[str, Array]]:
        after, transitions, next_views = rollout(
            env, policy, state.params, state.rollout, key, num_steps, policy_id=0
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


def _record(
    program: Program,
    params: ArrayTree,
    path: Path,
    recording: tuple[EnvSpec, Whole | None],
    recipe: Mapping[str, Any],
    provenance: Mapping[str, Any],
    timer: CheckpointTimer,
) -> None:
    directory = path.parent / f".{path.name}.recording"
    checkpoints, hyper = CaptureCheckpoints(directory, keep=1), Hyperparameters({})
    init_key, key = jax.random.split(jax.random.key(recipe["seed"]))
    start, begin, _ = resume(program, checkpoints, init_key, hyper)
    timer.begin(start * recipe["num_envs"] * recipe["chunks"][1])
    begin = begin._replace(params=copied(params))  # the state will be donated
    num_chunks, num_steps = recipe["chunks"]
    schedule = Schedule(num_chunks, num_chunks, 1, (0,))
    spec, whole = recording
    writer = open_for_recording(path, spec, recipe["num_envs"], recipe, provenance)
    with (
        ChunkWriter(writer, "policy", start, start * num_steps, whole) as chunks,
        progress(f"record {path.name}", num_chunks * num_steps, start * num_steps) as advance,
    ):
        for done, state, _ in collect(program, begin, hyper, key, schedule, start, chunks):
            timer.work_done()
            advance(num_steps)
            if timer.is_due():
                chunks.flush()
                checkpoints.save(done, {"state": state._replace(params=())}, {})
                timer.saved(done * num_steps * recipe["num_envs"])
        chunks.complete()
    checkpoints.close()
    shutil.rmtree(directory, ignore_errors=True)


def resume(
    program: Program, checkpoints: Checkpoints, key: PRNGKeyArray, hyper: Hyperparameters
) -> tuple[int, ArrayTree, dict[str, Any]]:
    """Return the number of updates done, the state after them, and the checkpoint's info."""
    init = jax.jit(program.init)
    found = checkpoints.resume({"state": jax.eval_shape(init, key, hyper)})
    if found is None:
        return 0, init(key, hyper), {}
    return found.step, found.tree["state"], found.info


def _with_ids(
    transition: Transition, finals: FinalObservations, ids: Int[np.ndarray, "N"]
) -> tuple[Transition, FinalObservations]:
    """Return steps with the id of each agent's policy."""
    policy_id: Any = np.broadcast_to(ids, (*transition.last.shape, len(ids)))
    return transition._replace(policy_id=policy_id), finals


def recorded(env: Environment, first_id: int) -> tuple[EnvSpec, Whole | None]:
    """Return the spec of an environment's recordings, and what makes them of captured steps.

    These differ for one side of an adversarial environment, whose recordings hold all agents.

    Parameters
    ----------
    env
        The environment, without autoreset.
    first_id
        Policy id of the first opponents.
    """
    if isinstance(env, Side):
        return env.recorded_spec, partial(env.whole, first_id=first_id)
    return env.spec, None


# ---------------------------------------------------------------------------------- provenance


def fingerprint(tree: ArrayTree) -> str:
    """Return a SHA-256 of the names and contents of a tree's arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def is_complete(path: Path, recipe: Mapping[str, Any]) -> bool:
    """Whether a recording exists and is complete.

    Parameters
    ----------
    path
        Path of its vault.
    recipe
        A JSON object of everything that determines the recording.

    Raises
    ------
    RunError
        The vault was recorded with another recipe.
    """
    if not path.exists():
        return False
    provenance = vault.open_vault(path).provenance
    found = provenance.get("recipe", {})
    for name in sorted(found.keys() | recipe.keys()):
        if found.get(name) != recipe.get(name):
            raise RunError(
                f"{path} was started with {name}={found.get(name)!r}, not {recipe.get(name)!r}: "
                "give the same arguments to resume it, or another path for the new recording."
            )
    return bool(provenance["complete"])


def open_for_recording(
    path: Path,
    spec: EnvSpec,
    rows: int,
    recipe: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> vault.Writer:
    """Create the vault of a recording, or resume it.

    The provenance is stored with the data, with the recipe (see `is_complete`), the versions of the
    software and, for an environment that is not one of offmarl, the source of its code
    (``environment_source``).
    """
    if path.exists():
        return vault.resume(path)
    about = dict(provenance) | {"recipe": dict(recipe), "software": _software(), "complete": False}
    if source := envs.source(spec.name):
        about["environment_source"] = source
    return vault.create(path, spec, rows=rows, provenance=about)


def _software() -> dict[str, str]:
    return {
        "offmarl": offmarl.__version__,
        "jax": jax.__version__,
        "platform": jax.default_backend(),
    }
