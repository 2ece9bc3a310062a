"""Data-quality warnings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

from offmarl.report.accumulators import ContinuousActions, DiscreteActions
from offmarl.report.contents import Survey
from offmarl.types import flatten_tree
from offmarl.vault import Dataset
from offmarl.vault.compat import LIMIT_UNKNOWN, MEANINGS, sentences
from offmarl.vault.transform.lineage import sources_of

_MOST_GROUPS = 6
"""Groups of agents that are listed; the rest are counted."""


def data_warnings(found: Survey) -> list[str]:
    """Return a sentence for each unusual or unknown property of a dataset."""
    if not found.vault.num_steps:
        return ["The vault holds no steps."]
    return [
        *_of_recording(found),
        *_of_episodes(found),
        *_of_rewards(found),
        *_of_actions(found),
        *_of_views(found),
        *_of_coverage(found),
    ]


def warnings_by_dataset(surveys: Mapping[str, Survey]) -> list[tuple[str, str]]:
    """Return the warnings of several datasets, each with the datasets that it applies to.

    The first item of a pair is empty if there is one dataset only.
    """
    about: dict[str, list[str]] = {}
    for name, one in surveys.items():
        for text in data_warnings(one):
            about.setdefault(text, []).append(name)
    return [(_names(named, len(surveys)), text) for text, named in about.items()]


def _names(some: Sequence[str], count: int) -> str:
    if count == 1:
        return ""
    return "all" if len(some) == count else ", ".join(some)


def _of_recording(found: Survey) -> Iterator[str]:
    vault = found.vault
    if not vault.native:
        yield "Another program wrote the vault, without checksums to verify it against."
    for start, stop in vault.unverified:
        yield (
            f"Steps {start:,} to {stop:,} were appended by another program, without checksums or "
            "final observations."
        )
    if vault.provenance.get("complete") is False:
        yield "The recording was stopped before it was complete."
    for quirk in vault.quirks:
        yield f"{_sentence(quirk)}: {MEANINGS[quirk]}."
    yield from sentences(vault.provenance.get("faults"))
    if vault.spec.time_limit is None and _limit_was_unknown(vault.provenance):
        yield (
            f"{_sentence(LIMIT_UNKNOWN)}: the longest episodes of the source data are all "
            "flagged as terminated; if this is a time limit, make the vault again with "
            "--time-limit."
        )


def _limit_was_unknown(provenance: Mapping[str, Any]) -> bool:
    """Whether a vault was made from data that needs a time limit and was read without one."""
    return any(
        LIMIT_UNKNOWN in one.get("quirks", ()) or _limit_was_unknown(one.get("provenance", {}))
        for one in sources_of(provenance)
    )


def _of_episodes(found: Survey) -> Iterator[str]:
    episodes = found.episodes
    for cause, words in (
        ("cut", "were cut off, by the end of the recording or before a fault"),
        ("open", "continue beyond the end of the data"),
    ):
        count = int((episodes.cause == cause).sum())
        if count == len(episodes.cause):
            yield f"All episodes {words}. No episode is complete, so no return is reported."
        elif count:
            yield (
                f"{count:,} of {len(episodes.cause):,} episodes {words}; the returns exclude them."
            )
    unknown = int((episodes.truncated & (episodes.final < 0)).sum())
    if unknown:
        yield (
            f"{unknown:,} truncated episodes have no final observation, so their last step cannot "
            "be bootstrapped."
        )
    if resets := _ends_that_begin(found.vault):
        yield (
            f"{resets:,} episodes end with the observation that the next one begins with: the "
            "environment may have reset in its own step."
        )
    if episodes.without_return:
        yield (
            f"{episodes.without_return:,} complete episodes have no finite return; the returns "
            "exclude them."
        )
    for team, returns in found.team_returns.items():
        if len(returns) > 1 and np.ptp(returns) == 0:
            of = f" of {team}" if len(found.team_returns) > 1 else ""
            yield f"All episodes have the same return{of}, {returns[0]:.4g}."


def _ends_that_begin(vault: Dataset) -> int:
    """Return how many final observations, of up to a thousand, are the next episode's first."""
    table = vault.episodes
    follows = (table.final[:-1] >= 0) & (table.row[:-1] == table.row[1:])
    some = np.flatnonzero(follows)[:1000]
    if vault.is_remote or not len(some):
        return 0
    last = table.start[some] + table.length[some] - 1
    views = (
        vault.final_views(table.final[some]),
        vault.window_transitions(table.row[some + 1], table.start[some + 1], 1).view,
        vault.window_transitions(table.row[some], last, 1).view,
    )
    final, begin, before = (
        np.concatenate(
            [np.reshape(leaf, (len(some), -1)) for leaf in flatten_tree(view.observation).values()],
            axis=1,
        )
        for view in views
    )
    return int(((final == begin).all(1) & (final != before).any(1)).sum())


def _of_rewards(found: Survey) -> Iterator[str]:
    rewards = found.rewards
    if rewards.ranges.not_finite.any():
        yield f"Rewards that are not finite: {int(rewards.ranges.not_finite.sum()):,}."
    if not rewards.nonzero_steps:
        yield "All rewards are zero."
    elif rewards.nonzero_steps < 0.05 * found.vault.num_steps:
        share = rewards.nonzero_steps / found.vault.num_steps
        yield f"Rewards are sparse: {share:.2%} of the steps have one."


def _of_actions(found: Survey) -> Iterator[str]:
    actions, alive = found.actions, max(int(found.alive.sum()), 1)
    if isinstance(actions, ContinuousActions):
        if actions.ranges.not_finite.any():
            count = int(actions.ranges.not_finite.sum())
            yield f"Values of actions that are not finite: {count:,}."
        if (np.fmax(actions.ranges.high, -actions.ranges.low) > 1).any():
            low, high = np.nanmin(actions.ranges.low), np.nanmax(actions.ranges.high)
            yield f"Values of actions are not all in [-1, 1]: from {low:.4g} to {high:.4g}."
        share = actions.at_bounds.sum() / max(int(actions.ranges.finite.sum()), 1)
        if share > 0.1:
            yield f"{share:.1%} of the values of actions are at a bound or beyond."
        return
    if illegal := int(actions.illegal.sum()):
        yield f"Illegal actions taken: {illegal:,} ({illegal / alive:.2%})."
    yield from _never_taken(actions)


def _never_taken(actions: DiscreteActions) -> Iterator[str]:
    never = (actions.legal > 0) & (actions.taken == 0)
    if never.any():
        yield f"Legal actions that were never taken: {_columns(never)}."


def _of_views(found: Survey) -> Iterator[str]:
    observations, spec = found.observations, found.spec
    seen = [*spec.observation_leaves] if spec.observation else None
    states = [*spec.state_leaves] if spec.global_state else None
    used = np.ones(observations.low.shape, bool)
    if spec.is_vector and spec.observation_sizes is not None:
        used = np.arange(spec.observation_size) < np.array(spec.observation_sizes)[:, None]
    bad = observations.not_finite > 0
    if bad.any():
        count = int(observations.not_finite.sum())
        yield f"Observed values that are not finite: {count:,}, in features {_columns(bad, seen)}."
    if (constant := observations.constant & used).any():
        yield f"Constant features of the observation: {_columns(constant, seen)}."
    if found.state.not_finite.any():
        bad = found.state.not_finite > 0
        yield f"The state is not always finite, in features {_runs(bad, states)}."
    if (constant := found.state.constant).any():
        yield f"Constant features of the state: {_runs(constant, states)}."


def _of_coverage(found: Survey) -> Iterator[str]:
    if found.coverage.states > 0.9 * found.vault.num_steps > 90:
        yield (
            "Few states occur twice, so coverage, which compares states bit by bit, says little."
        )


def _columns(chosen: Bool[np.ndarray, "N C"], names: Sequence[str] | None = None) -> str:
    """List columns, by agent if agents differ: "2, 4-7 (agent 0), 3 (agents 1-3)"."""
    groups: dict[str, list[int]] = {}
    for agent, columns in enumerate(chosen):
        if columns.any():
            groups.setdefault(_runs(columns, names), []).append(agent)
    if len(groups) == 1 and len(next(iter(groups.values()))) == len(chosen):
        return next(iter(groups))
    named = [f"{columns} ({_agents(agents, len(chosen))})" for columns, agents in groups.items()]
    others = len(named) - _MOST_GROUPS
    return ", ".join(named[:_MOST_GROUPS]) + (f", and {others} more groups" if others > 0 else "")


def _agents(agents: Iterable[int], count: int) -> str:
    chosen = np.isin(np.arange(count), list(agents))
    return f"agent{'s' if chosen.sum() > 1 else ''} {_runs(chosen)}"


def _runs(chosen: Bool[np.ndarray, "n"], names: Sequence[str] | None = None) -> str:
    """List the indices that are true as ranges: "2, 4-7"; or their names, those of leaves."""
    if names:
        return ", ".join(name or "all" for name, one in zip(names, chosen, strict=True) if one)
    edges = np.diff(chosen.astype(np.int8), prepend=0, append=0)
    spans = zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1, strict=True)
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
