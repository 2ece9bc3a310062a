"""What ``offmarl report`` says of datasets in tables, on the terminal and on the page."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from offmarl.cli.output import number, spread
from offmarl.report.actions import ContinuousActions, DiscreteActions
from offmarl.report.contents import LENGTHS, Survey
from offmarl.report.dataset_figures import Surveys
from offmarl.types import Discrete, EnvSpec


class Section(NamedTuple):
    """A table with its title; its first column names the rows."""

    title: str
    columns: Sequence[str]
    rows: list[list[Any]]


def glance(surveys: Surveys) -> Section:
    """Return what is asked first: how much there is, and how good it is."""
    columns = ["dataset", "episodes", "steps", "return", "min", "max", "mean length", "SACo"]
    return _by_dataset("At a glance", columns, surveys, _glance)


def identity(surveys: Surveys) -> Section:
    """Return what the datasets are; a column each."""
    facts = [_facts(one) for one in surveys.values()]
    if len(surveys) > 1:
        facts = [fact | {"digest": f"{fact['digest'][:12]}…"} for fact in facts]
    rows = [[name, *(fact[name] for fact in facts)] for name in facts[0]]
    return Section("What they are" if len(surveys) > 1 else "What it is", ["", *surveys], rows)


def rewards(surveys: Surveys) -> Section:
    """Return what was paid, and how rarely."""
    columns = ["dataset", "steps that pay", "mean", "std", "min", "max", "episodes that return 0"]
    return _by_dataset("Rewards", columns, surveys, _rewards)


def actions(surveys: Surveys) -> Iterator[Section]:
    """Return how the agents of each dataset acted, discrete and continuous ones apart."""
    discrete = {k: v for k, v in surveys.items() if isinstance(v.actions, DiscreteActions)}
    if discrete:
        columns = ["dataset", "illegal ones", "legal on average", "bits each", "bits jointly"]
        columns += ["total correlation", "joint actions"]
        yield _by_dataset("Actions", columns, discrete, _choices)
    continuous = {k: v for k, v in surveys.items() if isinstance(v.actions, ContinuousActions)}
    if continuous:
        columns = ["dataset", "mean", "std", "min", "max", "at a bound", "usable"]
        yield _by_dataset("Actions", columns, continuous, _values)


def coverage(surveys: Surveys) -> Section:
    """Return how much of what can be seen and done is there."""
    alike = len({(one.spec.name, one.spec.state_size) for one in surveys.values()}) == 1
    most = max(one.coverage.pairs for one in surveys.values()) if alike else 0
    columns = ["dataset", "SACo", "distinct pairs", "relative", "distinct states"]
    columns += ["each agent's own", "pairs seen once"]

    def cells(found: Survey) -> list[Any]:
        told = found.coverage
        pairs, once = told.pairs, int(told.repeats[told.repeats[:, 0] == 1, 1].sum())
        about = "" if told.exact else "about "
        return [
            _saco(found),
            f"{about}{number(pairs)}",
            percent(pairs, most),
            f"{about}{number(told.states)}",
            percent(told.local_pairs, told.local_steps),
            percent(once, pairs),
        ]

    return _by_dataset("Coverage", columns, surveys, cells)


def windows(surveys: Surveys) -> Section:
    """Return what windows of several lengths there would be to train on."""
    columns = ["dataset", "length", "windows", "steps padded", "episodes shorter", "would cross"]
    rows = []
    for name, found in surveys.items():
        for told in map(found.windows, LENGTHS):
            shares = [
                percent(told.padded, 1),
                percent(told.short_episodes, len(found.episodes.row)),
            ]
            rows.append([name, told.length, told.total, *shares, percent(told.crossing, 1)])
    return Section("Windows to train on", columns, rows)


def in_words(spec: EnvSpec) -> str:
    """Return who acts, and how."""
    if isinstance(spec.action, Discrete):
        kind = f"{spec.action_size} actions"
    else:
        kind = f"a continuous action of {spec.action_size}"
    return f"{spec.num_agents} agent{'s, each' if spec.num_agents > 1 else ''} with {kind}"


def spread_line(values: Any) -> str:
    """Return what to say of a set of numbers."""
    told = spread(values)
    return "mean {mean:.4g}, from {min:.4g} to {max:.4g}".format(**told) if told else "none"


def ends(found: Survey) -> str:
    """Return how many episodes ended in which way."""
    causes, counts = np.unique(found.episodes.cause, return_counts=True)
    return ", ".join(f"{number(int(n))} {cause}" for cause, n in zip(causes, counts, strict=True))


def percent(part: float, whole: float) -> str:
    """Return a share; nothing of nothing."""
    return f"{100 * part / whole:.4g}%" if whole else ""


def _by_dataset(
    title: str, columns: list[str], surveys: Surveys, cells: Callable[[Survey], list[Any]]
) -> Section:
    return Section(title, columns, [[name, *cells(one)] for name, one in surveys.items()])


def _glance(found: Survey) -> list[Any]:
    returns, lengths = spread(found.returns), spread(found.lengths)
    mean = _plus_minus(**returns) if returns else None
    extremes = [returns.get("min"), returns.get("max"), lengths.get("mean")]
    return [len(found.episodes.row), found.vault.num_steps, mean, *extremes, _saco(found)]


def _plus_minus(mean: float, std: float, **_: float) -> str:
    return f"{mean:.4g}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{std:.3g}"


def _saco(found: Survey) -> str | None:
    return None if found.saco is None else f"{found.saco:.4g}"


def _facts(found: Survey) -> dict[str, str]:
    vault, spec = found.vault, found.spec
    size = vault.num_bytes
    policies = len(set(found.episodes.policy_id.tolist()) - {-1})
    acted = int(found.alive.sum())
    return {
        "vault": f"{vault.name}.vlt/{vault.uid}",
        "environment": spec.name or "unknown",
        "agents": in_words(spec),
        "observation, state": f"{spec.observation_size}, {spec.state_size} ({spec.state})",
        "rewards": "the same for all agents" if found.rewards.alike else "each agent its own",
        "episodes": ends(found),
        "steps": f"{number(vault.num_steps)} in {_rows(vault.rows)}",
        "size": "unknown" if size is None else f"{number(size / 1e6)} MB",
        "agents alive": percent(acted, vault.num_steps * spec.num_agents),
        "policies": number(policies) if policies else "unknown",
        "log-probabilities": percent(found.log_probs, acted) if found.log_probs else "unknown",
        "checked": _checked(found),
        "digest": found.digest,
    }


def _rows(count: int) -> str:
    return f"{number(count)} rows" if count > 1 else "one row"


def _checked(found: Survey) -> str:
    if not found.vault.native:
        return "no checksums: another program wrote it"
    partly = ", but for what another program appended" if found.vault.unverified else ""
    return f"agrees with its checksums{partly}"


def _rewards(found: Survey) -> list[Any]:
    told, ranges = found.rewards, found.rewards.ranges
    if not ranges.finite.any():
        return [None] * 6
    spreads = [ranges.mean.mean(), np.sqrt((ranges.std**2).mean())]
    values = [*spreads, np.nanmin(ranges.low), np.nanmax(ranges.high)]
    zero = percent(int((found.returns == 0).sum()), len(found.returns))
    return [percent(told.nonzero_steps, found.vault.num_steps), *map(float, values), zero]


def _choices(found: Survey) -> list[Any]:
    told = found.actions
    if not isinstance(told, DiscreteActions) or not told.steps.any():
        return [None] * 6
    alive, joint = int(told.steps.sum()), found.coverage.joint_entropy
    always = alive == found.vault.num_steps * found.spec.num_agents
    apart = float(told.entropy.sum())
    return [
        percent(int(told.illegal.sum()), alive),
        percent(int(told.legal.sum()), alive * found.spec.num_actions),
        float(told.entropy.mean()),
        joint,
        max(0.0, apart - joint) if joint is not None and always else None,
        found.coverage.joint_actions,
    ]


def _values(found: Survey) -> list[Any]:
    told = found.actions
    if not isinstance(told, ContinuousActions) or not told.ranges.finite.any():
        return [None] * 6
    ranges, count = told.ranges, int(told.ranges.finite.sum())
    mean = float((ranges.mean * ranges.finite).sum() / count)
    squares = (ranges.std**2 + ranges.mean**2) * ranges.finite
    std = float(np.sqrt(max(squares.sum() / count - mean**2, 0.0)))
    return [
        *(mean, std, float(np.nanmin(ranges.low)), float(np.nanmax(ranges.high))),
        percent(int(told.at_bounds.sum()), count),
        percent(int(told.legal.sum()), int(told.steps.sum()) * found.spec.action_size),
    ]
