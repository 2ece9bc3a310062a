"""Recording of policies that do not learn: random, scripted or trained, one for each team."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from offmarl import envs
from offmarl._lock import hold_lock
from offmarl.config import NonNegative, PositiveInt, RecordingArgs, Role, option
from offmarl.envs import Environment
from offmarl.envs.sides import TeamPolicy
from offmarl.launch.work import launch_lock
from offmarl.paths import safe_path
from offmarl.programs.cluster import is_first, join, on_first
from offmarl.programs.recording.online import Recorded, describe_vault, summarise, summary_elsewhere
from offmarl.programs.recording.record import Recording
from offmarl.programs.recording.sides import (
    describe_policies,
    environment_of,
    identify_policies,
    joint_policy,
    policies_by_side,
)
from offmarl.programs.runs.evaluate import play_policy
from offmarl.teams import find_side, teams_of
from offmarl.vault import open_vault

_EVALUATE = 1000
"""Number that `jax.random.fold_in` makes the key of evaluations with. Small numbers give the keys
of `split`, which recordings draw from."""


@dataclass(frozen=True)
class FixedArgs(RecordingArgs):
    """Arguments that all recorders of fixed policies share."""

    env: str = "swarm/coverage-3"
    """Environment to record in: a name that `offmarl envs` lists, or code of your own as
    path/to/file.py:FACTORY or package.module:FACTORY."""
    steps: PositiveInt = 100_000
    """Environment steps to record."""
    eval_episodes: PositiveInt = 64
    """Episodes that are played on other seeds than those recorded, for the returns in the vault's
    provenance."""
    checkpoint_seconds: NonNegative = option(30.0, Role.RARE)
    """Seconds between checkpoints; Ctrl-C and SIGTERM save one before the program stops."""

    @property
    def policies(self) -> Sequence[str]:
        """The policies that are recorded, as `record_fixed` takes them."""
        return ("random",)


@dataclass(frozen=True)
class PolicyArgs(FixedArgs):
    """Arguments of the recording of policies by their names."""

    env: str = ""
    """Environment to record in: a name that `offmarl envs` lists, or code of your own as
    path/to/file.py:FACTORY or package.module:FACTORY; by default that of the first run."""
    policy: tuple[str, ...] = ("scripted",)
    """One policy for all agents, or SIDE=POLICY for each team or agent: the name of a scripted
    policy of the environment; random; path/to/file.py:FUNCTION, where FUNCTION(env) returns an
    offmarl.types.Policy of all agents without parameters; or RUN, RUN@SEED/STEP or RUN@* with the
    directory of a run, whose policy acts as in its training. Each episode draws one of several that
    are joined by +, with weights as in RUN@*+random:2."""

    @property
    def policies(self) -> Sequence[str]:
        """The policies."""
        return self.policy


def record_fixed(args: FixedArgs) -> Recorded:
    """Record fixed policies, and return what was recorded.

    The vault is ``<out>/<env>.vlt/<name>-<seed>``, where the name is that of the policy, or of the
    sides' policies in order, such as ``scripted-vs-random``. After a kill at any instant, the same
    call resumes from the last checkpoint and ends with the data of an uninterrupted call.
    """
    recording = fixed_recording(args)
    on_first(lambda: _refuse_launched(recording.path))
    return recorded_summary(recording.path, recording.record())


def _refuse_launched(path: Path) -> None:
    """Raise `RunError` if tasks are recording the vault."""
    if (lock := launch_lock(path)).exists():
        with hold_lock(lock, path, take_over=True):
            pass


def recorded_summary(path: Path, fresh: bool) -> Recorded:
    """Describe a recording that this call completed, or that was complete before."""
    if not is_first():
        return summary_elsewhere(path)
    outcome = "recorded" if fresh else "complete already, nothing was changed"
    tier = open_vault(path).provenance.get("tier", path.name)
    return summarise(path.parent, [describe_vault(path, tier)], outcome)


def fixed_recording(args: FixedArgs) -> Recording:
    """Return what `record_fixed` records, without recording it.

    Takes the parameters of `record_fixed`, and raises the same errors of policies.
    """
    join(args)
    env = envs.make(args.env) if args.env else environment_of(args.policies)[0]
    place = envs.short_name(args.env or env.spec.name)
    env = envs.record_states(env) if args.env_states else env
    players = policies_by_side(args.policies, env, range(env.spec.num_agents))
    policy, params = joint_policy(env, players)
    title = "-vs-".join(dict.fromkeys(player.name.replace("/", "-") for player in players.values()))
    # A vault whose name has an @, which begins a revision, or a comma cannot be published.
    plain = title.replace("@", "-").replace(",", "-")
    name = args.name or f"{safe_path(plain, option='--policy')}-{args.seed}"

    def provenance() -> dict[str, Any]:
        about = _about(env, players, args)
        return {"program": title, "tier": title, "policies": about}

    return Recording(
        env,
        policy,
        params,
        args.out / f"{place}.vlt" / name,
        args.steps,
        args.num_envs,
        args.seed,
        provenance,
        args.checkpoint_seconds,
        args.devices,
        identity={"seed": args.seed, "policies": identify_policies(players)},
    )


def _about(
    env: Environment, players: Mapping[str, TeamPolicy], args: FixedArgs
) -> list[dict[str, Any]]:
    """Describe the policies; those without populations with their team's mean on fresh seeds."""
    entries = describe_policies(players, 0)
    if len(entries) > len(players):
        return entries
    key = jax.random.fold_in(jax.random.key(args.seed), _EVALUATE)
    policy, params = joint_policy(env, players)
    returns = play_policy(env, policy, args.eval_episodes, params, key).mean(0)
    teams = zip(teams_of(env.spec), returns, strict=True)
    means = {x: float(mean) for team, mean in teams for x in team.agents}
    return [
        entry | {"return": means[find_side(env.spec, side).agents[0]]}
        for entry, side in zip(entries, players, strict=True)
    ]
