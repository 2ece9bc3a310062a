"""Data-quality warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool

from offmarl.report.actions import ContinuousActions, DiscreteActions
from offmarl.report.contents import Survey
from offmarl.vault.compat import LIMIT_UNKNOWN, MEANINGS
from offmarl.vault.transform.policy_ids import sources_of

_MOST_GROUPS = 6
"""Groups of agents that are told apart; the rest is summed up."""


def findings(found: Survey) -> list[str]:
    """Return, a sentence each, what is unusual or not known; nothing where all is as it should."""
    if not found.vault.num_steps:
        return ["It holds no steps yet."]
    return [
        *_of_recording(found),
        *_of_episodes(found),
        *_of_rewards(found),
        *_of_actions(found),
        *_of_views(found),
        *_of_coverage(found),
    ]


def _of_recording(found: Survey) -> Iterator[str]:
    vault = found.vault
    if not vault.native:
        yield "It was written by another program, so there are no checksums to compare it with."
    for start, stop in vault.unverified:
        yield (
            f"Steps {start:,} to {stop:,} were appended by another program, without checksums or "
            "final observations."
        )
    if vault.provenance.get("complete") is False:
        yield "Its recording was stopped before it was complete."
    for quirk in vault.quirks:
        yield f"{_sentence(quirk)}: {MEANINGS[quirk]}."
    if vault.spec.time_limit is None and _limit_was_unknown(vault.provenance):
        yield (
            f"{_sentence(LIMIT_UNKNOWN)}: the longest episodes of its source data are all "
            "flagged as terminated; if that is a time limit, make it again with --time-limit."
        )


def _limit_was_unknown(provenance: Mapping[str, Any]) -> bool:
    """Whether a vault was made of data that needs a time limit and was read without."""
    return any(
        LIMIT_UNKNOWN in one.get("quirks", ()) or _limit_was_unknown(one.get("provenance", {}))
        for one in sources_of(provenance)
    )


def _of_episodes(found: Survey) -> Iterator[str]:
    episodes = found.episodes
    for cause, words in (
        ("cut", "were cut short when the recording ended"),
        ("open", "run on at the end of the data"),
    ):
        count = int((episodes.cause == cause).sum())
        if count == len(episodes.cause):
            yield f"All of its episodes {words}. No episode is complete, so no return is reported."
        elif count:
            yield f"{count:,} of {len(episodes.cause):,} episodes {words}: not among the returns."
    unknown = int((episodes.truncated & (episodes.final < 0)).sum())
    if unknown:
        yield (
            f"{unknown:,} truncated episodes have no final observation, so their last step cannot "
            "be bootstrapped."
        )
    if episodes.without_return:
        yield (
            f"{episodes.without_return:,} complete episodes have no finite return: not among the "
            "returns."
        )
    if len(found.returns) > 1 and np.ptp(found.returns) == 0:
        yield f"Every episode returned the same, {found.returns[0]:.4g}."


def _of_rewards(found: Survey) -> Iterator[str]:
    rewards = found.rewards
    if rewards.ranges.not_finite.any():
        yield f"Rewards that are not finite: {int(rewards.ranges.not_finite.sum()):,}."
    if not rewards.nonzero_steps:
        yield "No reward was ever paid."
    elif rewards.nonzero_steps < 0.05 * found.vault.num_steps:
        share = rewards.nonzero_steps / found.vault.num_steps
        yield f"Rewards are sparse: {share:.2%} of the steps pay any."


def _of_actions(found: Survey) -> Iterator[str]:
    actions, alive = found.actions, max(int(found.alive.sum()), 1)
    if isinstance(actions, ContinuousActions):
        if actions.ranges.not_finite.any():
            count = int(actions.ranges.not_finite.sum())
            yield f"Values of actions that are not finite: {count:,}."
        if (np.fmax(actions.ranges.high, -actions.ranges.low) > 1).any():
            low, high = np.nanmin(actions.ranges.low), np.nanmax(actions.ranges.high)
            yield f"Values of actions are not all in [-1, 1], but from {low:.4g} to {high:.4g}."
        share = actions.at_bounds.sum() / max(int(actions.ranges.finite.sum()), 1)
        if share > 0.1:
            yield f"{share:.1%} of the values of actions are at a bound or beyond."
        return
    if illegal := int(actions.illegal.sum()):
        yield f"Actions taken although they were illegal: {illegal:,} ({illegal / alive:.2%})."
    yield from _never_taken(actions)


def _never_taken(actions: DiscreteActions) -> Iterator[str]:
    never = (actions.legal > 0) & (actions.taken == 0)
    if never.any():
        yield f"Actions that were legal and never taken: {_columns(never)}."


def _of_views(found: Survey) -> Iterator[str]:
    observations, spec = found.observations, found.spec
    used = np.ones(observations.low.shape, bool)
    if spec.observation_sizes is not None:
        used = np.arange(spec.observation_size) < np.array(spec.observation_sizes)[:, None]
    bad = observations.not_finite > 0
    if bad.any():
        count = int(observations.not_finite.sum())
        yield f"Observations that are not finite: {count:,}, in features {_columns(bad)}."
    if (constant := observations.constant & used).any():
        yield f"Features of the observation that never change: {_columns(constant)}."
    if found.state.not_finite.any():
        yield f"The state is not always finite, in features {_runs(found.state.not_finite > 0)}."
    if (constant := found.state.constant).any():
        yield f"Features of the state that never change: {_runs(constant)}."


def _of_coverage(found: Survey) -> Iterator[str]:
    if found.coverage.states > 0.9 * found.vault.num_steps > 90:
        yield (
            "Hardly any state recurs, so that coverage, which counts what is the same to the last "
            "bit, says little."
        )


def _columns(chosen: Bool[np.ndarray, "N C"]) -> str:
    """Name columns, by agent where agents differ: "2, 4-7 (agent 0), 3 (agents 1-3)"."""
    groups: dict[str, list[int]] = {}
    for agent, columns in enumerate(chosen):
        if columns.any():
            groups.setdefault(_runs(columns), []).append(agent)
    if len(groups) == 1 and len(next(iter(groups.values()))) == len(chosen):
        return next(iter(groups))
    named = [f"{columns} ({_agents(agents, len(chosen))})" for columns, agents in groups.items()]
    others = len(named) - _MOST_GROUPS
    return ", ".join(named[:_MOST_GROUPS]) + (f", and {others} more groups" if others > 0 else "")


def _agents(agents: Iterable[int], count: int) -> str:
    chosen = np.isin(np.arange(count), list(agents))
    return f"agent{'s' if chosen.sum() > 1 else ''} {_runs(chosen)}"


def _runs(chosen: Bool[np.ndarray, "n"]) -> str:
    """Name the places where something holds: "2, 4-7"."""
    edges = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    spans = zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1, strict=True)
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
