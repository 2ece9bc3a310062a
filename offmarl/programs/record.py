"""Recording a policy that does not learn."""

import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from offmarl.checkpoint import Checkpoints
from offmarl.envs import Environment, autoreset
from offmarl.envs.base import require_positive
from offmarl.paths import local
from offmarl.programs.buffer import Capture, add, init_capture, make_buffer
from offmarl.programs.collect import OnlineProgram, collect, resume
from offmarl.programs.interruption import CheckpointTimer, checkpoint_timer
from offmarl.programs.provenance import fingerprint, is_complete, open_for_recording
from offmarl.programs.writer import ChunkWriter
from offmarl.rollout import RolloutState, init_rollout, rollout
from offmarl.tracking import progress
from offmarl.types import ArrayTree, EnvSpec, Policy

_CHUNK = 64
"""Time steps collected at once, at most: few enough to stay in the processor's cache."""


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
) -> bool:
    """Let a policy act in parallel environments, and write all of it to a vault.

    Killed at any instant, the same call again goes on from the last checkpoint and ends with the
    content of a call that was never stopped. Once it has ended, it changes nothing.

    Parameters
    ----------
    env
        The environment, without autoreset.
    policy, params
        Who acts; recorded as policy 0.
    path
        Of the vault to make, ``<directory>/<name>.vlt/<uid>``; it gets one row per environment.
    steps
        Environment steps to record in all, rounded up to whole rows. Episodes running at the end
        are cut there.
    num_envs
        E.
    seed
        Decides everything random.
    provenance
        A JSON object to keep with the data, such as where the policy comes from.
    checkpoint_seconds
        How much work a kill may cost, in seconds; SIGINT and SIGTERM save before they stop.

    Returns
    -------
    bool
        False where the recording was there already, and whole.

    Raises
    ------
    OptionError
        There is nothing to record, or no environment to record it in.
    RunError
        There is another recording at the path.
    Stopped
        A signal stopped the recording; the message says where it goes on.
    VaultError
        The vault cannot be written.
    """
    require_positive(steps=steps, num_envs=num_envs)
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
    }
    if is_complete(path, recipe):
        return False
    with checkpoint_timer(checkpoint_seconds, "step") as timer:
        _record(program, params, path, env.spec, recipe, provenance or {}, timer)
    return True


@lru_cache(maxsize=4)
def _fixed(env: Environment, policy: Policy, num_envs: int, num_steps: int) -> OnlineProgram:
    """Describe a policy that stays as it is as a program that learns nothing.

    Its parameters are put into the state that it begins with. Cached, so that recordings of one
    policy with other parameters share what is compiled.
    """
    env = autoreset(env)
    buffer = make_buffer(num_envs, num_steps)

    def init(key: PRNGKeyArray) -> _State:
        state = init_rollout(env, policy, key, num_envs)
        return _State((), state, init_capture(buffer, env.spec))

    def iterate(state: _State, key: PRNGKeyArray) -> tuple[_State, dict[str, Array]]:
        after, transitions, next_views = rollout(
            env, policy, state.params, state.rollout, key, num_steps, policy_id=0
        )
        capture = add(buffer, state.capture, transitions, next_views)
        return _State(state.params, after, capture), {}

    return OnlineProgram(num_steps, init, iterate, acting=lambda state: state.params)


def _record(
    program: OnlineProgram,
    params: ArrayTree,
    path: Path,
    spec: EnvSpec,
    recipe: Mapping[str, Any],
    provenance: Mapping[str, Any],
    timer: CheckpointTimer,
) -> None:
    directory = path.parent / f".{path.name}.recording"
    checkpoints = Checkpoints(directory, keep=1)
    init_key, key = jax.random.split(jax.random.key(recipe["seed"]))
    start, begin, _ = resume(program, checkpoints, init_key)
    timer.begin(start * recipe["num_envs"] * recipe["chunks"][1])
    begin = begin._replace(params=jax.tree.map(jnp.copy, params))  # the state will be donated
    num_chunks, num_steps = recipe["chunks"]
    writer = open_for_recording(path, spec, recipe["num_envs"], recipe, provenance)
    with (
        ChunkWriter(writer, "policy", start, start * num_steps) as chunks,
        progress(f"record {path.name}", num_chunks * num_steps, start * num_steps) as advance,
    ):
        for done, state, _ in collect(program, begin, key, range(start, num_chunks), chunks):
            timer.work_done()
            advance(num_steps)
            if timer.is_due():
                chunks.flush()
                checkpoints.save(done, {"state": state._replace(params=())}, {})
                timer.saved(done * num_steps * recipe["num_envs"])
        chunks.complete()
    checkpoints.close()
    shutil.rmtree(directory, ignore_errors=True)
