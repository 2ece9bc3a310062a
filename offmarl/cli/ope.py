"""``offmarl ope``: estimate what policies are worth from recorded episodes alone."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from rich.console import Group
from tyro.conf import Positional, arg

from offmarl.cli.output import Report, table
from offmarl.errors import RunError
from offmarl.paths import distinct
from offmarl.terminal import interval
from offmarl.tracking import (
    EVALUATED,
    METRICS_FILE,
    OTHER_RETURN,
    RETURN,
    acting_of,
    progress,
    read,
    read_run,
)

if TYPE_CHECKING:  # they import JAX, which --help does without
    from offmarl.ope import Estimates, TuningCurve, Value

_SHOWN_EPISODES = (1, 2, 5, 10, 20, 50, 100, 200)
"""Points of the tuning curve in the table; the JSON has all."""

_RANKS = (1, 3, 5)
"""k of regret@k."""


class Candidate(NamedTuple):
    """A policy of a run."""

    run: Path
    seed: int
    step: int | None
    """Number of its checkpoint; None for the last."""

    @property
    def setting(self) -> str:
        """What is chosen between: the run, and the checkpoint. Its seeds are repetitions."""
        return str(self.run) if self.step is None else f"{self.run}, step {self.step}"

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.setting}, seed {self.seed}"


def ope(
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = (),
    *,
    vault: str,
    methods: tuple[Literal["fqe", "wis", "dr"], ...] = (),
    act: Literal["as-trained", "greedy", "sample"] = "as-trained",
    checkpoints: Literal["last", "all"] = "last",
    gamma: float = 0.99,
    horizon: Literal["episode", "infinite"] = "episode",
    mixer: bool = False,
    episodes: int | None = None,
    updates: int = 15_000,
    members: int = 5,
    hidden: int = 256,
    seed: int = 0,
    time_limit: int | None = None,
    program: Annotated[tuple[Path, ...], arg(metavar="[PATH ...]")] = (),
) -> Report:
    """Estimate the returns of trained policies from a dataset, without the environment.

    Where the runs were evaluated in an environment, the order of the estimates, which are
    discounted, is compared with that of the returns, which are not.

    Parameters
    ----------
    runs
        Directories of runs, as `offmarl train` writes them, or names of policies that `offmarl pull
        --policy` downloaded. The seeds of a run count as repetitions of one setting.
    vault
        Dataset of recorded episodes, best one that the policies did not learn from.
    methods
        Estimates to make, by default those that the data allow. fqe: fitted Q evaluation. wis:
        per-decision weighted importance sampling; it needs recorded probabilities of actions. dr:
        doubly robust, the critics of fqe corrected by importance sampling.
    act
        How the policies act. greedy: they take the best action. sample: they sample actions.
        as-trained: as in the runs' own evaluations.
    checkpoints
        Which checkpoints of each run are evaluated; all: those of its evaluations that the run kept
        (train --keep all).
    gamma
        Discount of rewards.
    horizon
        episode: count the rewards up to the time limit, as returns do. infinite: also those that
        would follow.
    mixer
        Factorise the critics of fqe: agents' values, mixed as in QMIX.
    episodes
        Largest number of episodes to use, evenly spread over the data; by default all.
    updates
        Gradient updates of the critics.
    members
        Critics that learn from resampled episodes, for the intervals of fqe; fewer than 3
        for none.
    hidden
        Width of the critics' layers. Narrow critics take policies that differ from the data's for
        better than they are.
    seed
        Random seed.
    time_limit
        For a vault of another program that flags the time limit as a termination: the limit.
    program
        Python files of the programs that trained the runs, for programs that are not offmarl's. The
        files' code is run.
    """
    if not runs:
        raise RunError("no runs to evaluate: give the directory of at least one run.")
    from offmarl.hub.policies import run_named  # takes a while to import, as the others do
    from offmarl.ope import Options, estimate
    from offmarl.vault import open_vault

    options = Options(
        gamma=gamma,
        horizon=horizon,
        episodes=episodes,
        mixer=mixer,
        updates=updates,
        members=members,
        hidden=hidden,
        seed=seed,
    )
    dataset = open_vault(vault, time_limit=time_limit)
    named = distinct(map(run_named, runs))
    candidates = [one for run in named for one in _candidates(run, checkpoints)]
    policies = _load(candidates, act, program)
    found = estimate(policies, dataset, options, methods or None, progress)
    draws = {label: _draws(policy) for label, policy in policies.items()}
    returns = {
        one.label: known
        for one in candidates
        if (known := _returns(one, act, draws[one.label])) is not None
    }
    data = _data(found, candidates, returns, draws, options.seed)
    about = {
        "vault": dataset.path,
        "digest": dataset.known_digest(),
        "gamma": gamma,
        "horizon": horizon,
    }
    data = {**about, **data}
    return Report(data, Group(*_view(found, data)))


# ---------------------------------------------------------------------------------- policies


def _candidates(run: Path, checkpoints: str) -> list[Candidate]:
    """Return the policies of a run: of its last checkpoint, or of all."""
    seeds = read_run(run)["seeds"]
    if checkpoints == "last":
        return [Candidate(run, seed, None) for seed in seeds]
    from offmarl.checkpoint import Checkpoints  # imports JAX
    from offmarl.tracking import CHECKPOINTS

    steps = Checkpoints(run / CHECKPOINTS).steps()
    if not steps:
        raise RunError(f"{run} has no checkpoint: give the directory of a finished run.")
    # Others are those that a stopped run resumes from.
    evaluated = {
        row["step"] for row in read(run / METRICS_FILE) if not row.keys().isdisjoint(EVALUATED)
    }
    steps = [step for step in steps if step in evaluated] or steps
    return [Candidate(run, seed, step) for step in steps for seed in seeds]


def _load(candidates: Sequence[Candidate], act: str, programs: Sequence[Path]) -> dict[str, Any]:
    """Load the policies by label; those of one run have the same functions."""
    from offmarl.programs import load_policy
    from offmarl.programs.registry import file_of_run

    greedy = None if act == "as-trained" else act == "greedy"
    loaded: dict[str, Any] = {}
    first: dict[Path, Any] = {}
    for one in candidates:
        file = file_of_run(one.run, programs)
        policy = load_policy(one.run, one.seed, greedy, file, step=one.step)
        shared = first.setdefault(one.run, policy)
        loaded[one.label] = replace(policy, policy=shared.policy)
    return loaded


def _draws(policy: Any) -> bool:
    """Whether a policy draws its actions."""
    found: bool = policy.policy.draws(policy.params)
    return found


def _returns(one: Candidate, act: str, draws: bool) -> Float[np.ndarray, "episodes"] | None:
    """Return the returns of a policy's evaluation in its run; None if there was none.

    They are those of the way it acts, at the step of its checkpoint. One that never draws its
    actions has the same returns if it is asked to sample them.
    """
    record = read_run(one.run)
    own = acting_of(record)
    asked = {"greedy": "greedy", "sample": "sampled" if draws else own}.get(act, own)
    metric = RETURN if asked == own else OTHER_RETURN["greedy" if own == "sampled" else "sampled"]
    rows = [
        row
        for row in read(one.run / METRICS_FILE)
        if row["seed"] == one.seed and isinstance(row.get(metric), list)
    ]
    if one.step is not None:
        rows = [row for row in rows if row["step"] == one.step]
    return np.array(rows[-1][metric], float) if rows else None


# ---------------------------------------------------------------------------------- results


def _data(
    found: "Estimates",
    candidates: Sequence[Candidate],
    returns: Mapping[str, Float[np.ndarray, "episodes"]],
    draws: Mapping[str, bool],
    seed: int,
) -> dict[str, Any]:
    """Return everything but the dataset, for JSON."""
    settings: dict[str, list[str]] = {}
    for one in candidates:
        settings.setdefault(one.setting, []).append(one.label)
    means = {label: float(x.mean()) for label, x in returns.items()}
    finite = {label: x for label, x in returns.items() if np.isfinite(x).all()}
    known = {label: means[label] for label in finite}
    return {
        "episodes": found.episodes,
        "data_return": found.data._asdict(),
        "policies": {
            one.label: {
                **{
                    method: _value(values.get(one.label)) for method, values in found.values.items()
                },
                "effective_sample_size": found.effective.get(one.label),
                "true_return": means.get(one.label),
            }
            for one in candidates
        },
        "chosen": {
            method: choice
            for method, values in found.values.items()
            if (choice := _choice(values, settings, known)) is not None
        },
        "ranking": {method: _ranking(values, known) for method, values in found.values.items()}
        if len(known) > 1
        else {},
        "tuning": _tuning(finite, seed) if len(known) > 1 else None,
        "notes": (
            *found.notes,
            *_acting(candidates, draws),
            *_not_finite(found, returns.keys() - finite.keys()),
            *_unknown([one.label for one in candidates], returns.keys()),
        ),
    }


def _acting(candidates: Sequence[Candidate], draws: Mapping[str, bool]) -> Iterator[str]:
    """Tell which runs' policies sample their actions, if others take the best ones."""
    sampled = dict.fromkeys(str(one.run) for one in candidates if draws[one.label])
    if sampled and not all(draws.values()):
        yield (
            f"Policies of {', '.join(sampled)} sample their actions, and the others take the best "
            "ones: --act greedy compares like with like."
        )


def _unknown(policies: Sequence[str], returns: Set[str]) -> Iterator[str]:
    """Name the policies that were not evaluated in an environment, if others were."""
    for label in policies:
        if returns and label not in returns:
            yield (
                f"{label} is left out of the order and the tuning curve: its run has no return of "
                "it, acting in this way."
            )


def _not_finite(found: "Estimates", returns: Set[str]) -> Iterator[str]:
    """Name the policies that rankings and choices leave out."""
    where = {"its return": returns}
    for method, values in found.values.items():
        where[f"its estimate by {method}"] = {
            label for label, one in values.items() if not one.finite
        }
    for what, labels in where.items():
        for label in sorted(labels):
            yield f"{label} is left out of choices and rankings: {what} is not finite."


def _value(value: "Value | None") -> dict[str, Any] | None:
    return None if value is None else value._asdict()


def _choice(
    values: Mapping[str, "Value"], settings: Mapping[str, list[str]], means: Mapping[str, float]
) -> dict[str, Any] | None:
    """Return the setting with the best mean estimate over its seeds.

    None if there is only one, or if a policy has no estimate. Settings with an estimate that is not
    finite are left out. Where returns are known, also what the choice earns and the best would.
    """
    every = [label for labels in settings.values() for label in labels]
    if len(settings) < 2 or any(label not in values for label in every):
        return None
    settings = {
        setting: labels
        for setting, labels in settings.items()
        if all(values[label].finite for label in labels)
    }
    if not settings:
        return None

    def mean(of: Mapping[str, float], labels: Iterable[str]) -> float:
        return float(np.mean([of[label] for label in labels]))

    estimates = {label: value.value for label, value in values.items()}
    scores = {setting: mean(estimates, labels) for setting, labels in settings.items()}
    best = max(scores, key=lambda setting: scores[setting])
    choice: dict[str, Any] = {"setting": best, "estimate": scores[best]}
    if means and all(label in means for labels in settings.values() for label in labels):
        known = {setting: mean(means, labels) for setting, labels in settings.items()}
        choice |= {"true_return": known[best], "best_true_return": max(known.values())}
    return choice


def _ranking(values: Mapping[str, "Value"], means: Mapping[str, float]) -> dict[str, Any]:
    """Return how well a method orders the policies that it evaluated."""
    from offmarl.ope import rank_correlation, regret

    labels = [x for x in values if values[x].finite and x in means]
    estimates = np.array([values[label].value for label in labels])
    returns = np.array([means[label] for label in labels])
    return {
        "policies": len(labels),
        "spearman": rank_correlation(estimates, returns),
        "regret": {str(k): regret(estimates, returns, k) for k in _RANKS if k <= len(labels)},
    }


def _tuning(returns: Mapping[str, Float[np.ndarray, "episodes"]], seed: int) -> dict[str, Any]:
    """Return the tuning curve of a search in the environment among the policies."""
    import jax

    from offmarl.ope import tuning_curve

    count = min(map(len, returns.values()))
    curve = tuning_curve(
        np.stack([values[:count] for values in returns.values()]), jax.random.key(seed)
    )
    return curve._asdict()


def _view(found: "Estimates", data: Mapping[str, Any]) -> Iterable[Any]:
    """Return the tables."""
    from offmarl.ope import TuningCurve

    methods = list(found.values)
    weighted = bool(found.effective)
    known = any(one["true_return"] is not None for one in data["policies"].values())
    directory = _directory_of(data["policies"])
    columns = [
        "policy",
        *(f"{method} [95% interval]" for method in methods),
    ]
    actual = "return" if data["gamma"] == 1 else "return, not discounted"
    columns += [*(["effective episodes"] if weighted else []), *([actual] if known else [])]
    rows = []
    for label, one in data["policies"].items():
        cells = [one[method] and interval(*one[method].values()) for method in methods]
        size, value = one["effective_sample_size"], one["true_return"]
        short = label.removeprefix(f"{directory}/" if directory else "")
        rows.append([short, *cells, *([size] if weighted else []), *([value] if known else [])])
    discounted = "" if data["gamma"] == 1 else f", discounted by {data['gamma']:g}"
    title = f"Estimated from {found.episodes:,} episodes{discounted}; their own return is "
    if directory:
        yield f"Policies in {directory}"
    yield table(columns, rows, title + interval(*found.data))
    if data["ranking"]:
        yield table(
            ["method", "policies", "rank correlation", *(f"regret@{k}" for k in _RANKS)],
            [
                [
                    method,
                    one["policies"],
                    one["spearman"],
                    *map(one["regret"].get, map(str, _RANKS)),
                ]
                for method, one in data["ranking"].items()
            ],
            "Order of the estimates against the returns in the environment",
        )
    for method, choice in data["chosen"].items():
        yield f"chosen by {method}: {choice['setting']}" + (
            f" (return {choice['true_return']:.4g}; the best has {choice['best_true_return']:.4g})"
            if "true_return" in choice
            else ""
        )
    if data["tuning"]:
        yield _tuning_table(TuningCurve(**data["tuning"]))
    yield from data["notes"]


def _directory_of(labels: Iterable[str]) -> str:
    """Return the directory that all policies are in, or "" if there is none."""
    parents = [os.path.dirname(label) for label in labels]  # noqa: PTH120 - keeps "./" and "../"
    try:
        return os.path.commonpath(parents).rstrip("/")
    except ValueError:  # some are absolute, and some are not
        return ""


def _tuning_table(curve: "TuningCurve") -> Any:
    shown = [n for n in _SHOWN_EPISODES if n <= len(curve.episodes)]
    return table(
        ["episodes played", "return of the choice", "95% of searches"],
        [
            [n, float(curve.mean[n - 1]), f"{curve.low[n - 1]:.4g} to {curve.high[n - 1]:.4g}"]
            for n in shown
        ],
        "Without estimates: a search in the environment among these policies",
    )
