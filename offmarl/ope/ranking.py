"""How well estimates order policies whose returns are known."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from offmarl.checkpoint import Checkpoints
from offmarl.errors import RunError, ShapeError
from offmarl.ope.estimation import Estimates, Method
from offmarl.statistics import Estimate
from offmarl.tracking import (
    CHECKPOINTS,
    EVALUATED,
    METRICS_FILE,
    OTHER_RETURN,
    POLICIES,
    RETURN,
    acting_of,
    as_dicts,
    read,
    read_run,
)

_RANKS = (1, 3, 5)
"""k of regret@k."""

Estimated = Mapping[Method, Mapping[str, Estimate]]
"""Estimates by method and policy, as in `offmarl.ope.Estimates`."""


class Candidate(NamedTuple):
    """A policy of a run."""

    run: Path
    seed: int
    step: int | None
    """Its checkpoint: an update, or a recorder's environment step; None for the last."""

    @property
    def setting(self) -> str:
        """The option of a choice: the run and the checkpoint. Its seeds are repetitions."""
        return str(self.run) if self.step is None else f"{self.run}, step {self.step}"

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.setting}, seed {self.seed}"


def candidates_of(run: Path, checkpoints: str) -> list[Candidate]:
    """Return the policies of a run: of its last checkpoint, or of all."""
    seeds = read_run(run)["seeds"]
    if checkpoints == "last":
        return [Candidate(run, seed, None) for seed in seeds]
    steps = Checkpoints(run / CHECKPOINTS).steps()
    if not steps:
        raise RunError(f"{run} has no checkpoint: give the directory of a finished run.")
    # Others are those that a stopped run resumes from. A recorder keeps the policies of all
    # evaluations, by environment steps.
    keeps_all = (run / POLICIES).is_dir()
    evaluated = {
        row["step"]
        for row in read(run / METRICS_FILE)
        if not row.keys().isdisjoint(EVALUATED) and (keeps_all or row["step"] in steps)
    }
    return [Candidate(run, seed, step) for step in sorted(evaluated) or steps for seed in seeds]


def _returns(candidate: Candidate, act: str, draws: bool) -> Float[np.ndarray, "episodes"] | None:
    """Return the returns of a policy's evaluation in its run; None if there was none.

    They are those of the way it acts, at the step of its checkpoint. One that never draws its
    actions has the same returns if it is asked to sample them.
    """
    usual = acting_of(read_run(candidate.run))
    way = {"greedy": "greedy", "sample": "sampled" if draws else usual}.get(act, usual)
    metric = RETURN if way == usual else OTHER_RETURN["greedy" if usual == "sampled" else "sampled"]
    evaluations = [
        row[metric]
        for row in read(candidate.run / METRICS_FILE)
        if row["seed"] == candidate.seed
        and candidate.step in (None, row["step"])
        and isinstance(row.get(metric), list)
    ]
    return np.array(evaluations[-1], float) if evaluations else None


def compare_candidates(
    estimates: Estimates,
    candidates: Sequence[Candidate],
    draws: Mapping[str, bool],
    act: str,
    played: Mapping[str, Float[np.ndarray, "_"]] | None = None,
) -> dict[str, Any]:
    """Compare the estimates of candidates with returns, of their runs unless ``played``, for JSON.

    ``draws`` says by label which sample their actions, and ``act`` how they were asked to act:
    greedy, sample, or as-trained.
    """
    returns, settings = {}, dict[str, list[str]]()
    for policy in candidates:
        settings.setdefault(policy.setting, []).append(policy.label)
        sample = played[policy.label] if played else _returns(policy, act, draws[policy.label])
        if sample is not None:
            returns[policy.label] = sample
    comparison = compare_with_returns(estimates.values, settings, returns)
    return {
        "episodes": estimates.episodes,
        "data_return": as_dicts(estimates.data),
        "data_return_by_fqe": estimates.check,
        "policies": {
            label: {
                **{name: as_dicts(x.get(label)) for name, x in estimates.values.items()},
                "effective_sample_size": estimates.effective.get(label),
                "true_return": float(returns[label].mean()) if label in returns else None,
            }
            for label in (policy.label for policy in candidates)
        },
        "order": {method: _order(estimates, method) for method in estimates.values},
        **comparison,
        "notes": (*estimates.notes, *notes(candidates, draws, returns), *comparison["notes"]),
    }


def _order(estimates: Estimates, method: Method) -> dict[str, Any]:
    """Return the ranks that policies may have, and the differences of the better to the worse."""
    ranks = estimates.ranks(method)
    labels = sorted(ranks, key=lambda label: -estimates.values[method][label].value)
    differences = [
        {"policies": pair, **as_dicts(estimates.difference(method, *pair))}
        for pair in combinations(labels, 2)
    ]
    return {"ranks": ranks, "differences": differences}


def notes(
    candidates: Sequence[Candidate], draws: Mapping[str, bool], returns: Mapping[str, Any]
) -> Iterator[str]:
    """Tell which policies sample their actions, if others do not, and which have no return."""
    sampled = dict.fromkeys(str(x.run) for x in candidates if draws[x.label])
    if sampled and not all(draws.values()):
        yield (
            f"Policies of {', '.join(sampled)} sample their actions, and the others take the best "
            "ones: --act greedy compares like with like."
        )
    for candidate in candidates:
        if returns and candidate.label not in returns:
            yield (
                f"{candidate.label} is left out of the order: its run has no return "
                "of it, acting in this way."
            )


def compare_with_returns(
    values: Estimated,
    settings: Mapping[str, Sequence[str]],
    returns: Mapping[str, Float[np.ndarray, "_"]],
) -> dict[str, Any]:
    """Choose between settings by estimates, and compare the estimates with known returns, for JSON.

    Policies whose estimates or returns are not finite are left out; ``notes`` name them.

    - ``chosen``, by method: the ``setting`` with the best mean ``estimate`` over its policies.
      Where all returns are known, also the ``true_return`` that it has and the
      ``best_true_return``. Methods that did not evaluate all policies are left out.
    - ``ranking``, by method: the number of ``policies``, their rank correlation ``spearman``,
      ``regret`` by k, and the mean ``chance_regret`` of a random policy. Empty if fewer than two
      returns are known.

    Parameters
    ----------
    values
        Estimates by method and policy.
    settings
        Options of the choice, each with its policies, such as the seeds of a run.
    returns
        Returns of episodes of the policies for which they are known.
    """
    finite = {label: x for label, x in returns.items() if np.isfinite(x).all()}
    means = {label: float(x.mean()) for label, x in finite.items()}
    choices = {method: _choice(x, settings, means) for method, x in values.items()}
    ranking = {}
    if len(means) > 1:
        ranking = {method: _ranking(x, means) for method, x in values.items()}
    return {
        "chosen": {method: choice for method, choice in choices.items() if choice},
        "ranking": ranking,
        "notes": (*_not_finite(values, sorted(returns.keys() - finite.keys())),),
    }


def _choice(
    values: Mapping[str, Estimate],
    settings: Mapping[str, Sequence[str]],
    means: Mapping[str, float],
) -> dict[str, Any] | None:
    """Return the setting with the best mean estimate; None if some policy has no estimate."""
    all_labels = {label for labels in settings.values() for label in labels}
    finite = {
        setting: labels
        for setting, labels in settings.items()
        if all(values[label].finite for label in labels if label in values)
    }
    if len(settings) < 2 or all_labels - values.keys() or not finite:
        return None

    def scores(of: Mapping[str, float]) -> dict[str, float]:
        return {
            setting: float(np.mean([of[label] for label in labels]))
            for setting, labels in finite.items()
        }

    estimates = scores({label: value.value for label, value in values.items()})
    best = max(estimates, key=lambda setting: estimates[setting])
    choice: dict[str, Any] = {"setting": best, "estimate": estimates[best]}
    if means and means.keys() >= {label for labels in finite.values() for label in labels}:
        truth = scores(means)
        choice |= {"true_return": truth[best], "best_true_return": max(truth.values())}
    return choice


def _ranking(values: Mapping[str, Estimate], means: Mapping[str, float]) -> dict[str, Any]:
    """Return how well a method orders the policies that it evaluated."""
    labels = [x for x in values if values[x].finite and x in means]
    estimates = np.array([values[label].value for label in labels])
    returns = np.array([means[label] for label in labels])
    return {
        "policies": len(labels),
        "spearman": rank_correlation(estimates, returns),
        "regret": {str(k): regret(estimates, returns, k) for k in _RANKS if k <= len(labels)},
        "chance_regret": float(returns.max() - returns.mean()) if labels else None,
    }


def _not_finite(values: Estimated, without_return: Sequence[str]) -> Iterator[str]:
    """Name the policies that rankings and choices leave out."""
    gaps = {"its return": without_return}
    for method, policies in values.items():
        gaps[f"its estimate by {method}"] = sorted(x for x in policies if not policies[x].finite)
    for quantity, labels in gaps.items():
        for label in labels:
            yield f"{label} is left out of choices and rankings: {quantity} is not finite."


def rank_correlation(
    estimates: Float[np.ndarray, "P"], returns: Float[np.ndarray, "_"]
) -> float | None:
    """Return Spearman's rank correlation of estimates with known returns.

    Equal values share the mean of their ranks. None for fewer than three policies, or if all
    estimates or all returns are equal.

    Raises
    ------
    ShapeError
        There are not as many estimates as returns.
    """
    estimates, returns = _checked(estimates, returns)
    if len(estimates) < 3 or np.ptp(estimates) == 0 or np.ptp(returns) == 0:
        return None
    from scipy.stats import spearmanr  # slow to import

    return float(spearmanr(estimates, returns).statistic)


def regret(estimates: Float[np.ndarray, "P"], returns: Float[np.ndarray, "_"], k: int = 1) -> float:
    """Return regret@k: what is lost by trying only the k policies with the best estimates.

    The best return of all policies minus the best among these k, in the unit of the returns (Fu et
    al. 2021, arXiv 2103.16596). Of policies with equal estimates the worse are tried first.

    Raises
    ------
    ShapeError
        There are not as many estimates as returns, or not k of them.
    """
    estimates, returns = _checked(estimates, returns)
    if not 1 <= k <= len(estimates):
        raise ShapeError(f"regret@{k} of {len(estimates)} policies: give 1 to {len(estimates)}.")
    tried = np.lexsort((returns, -estimates))[:k]
    return float(returns.max() - returns[tried].max())


def _checked(
    estimates: Float[np.ndarray, "P"], returns: Float[np.ndarray, "_"]
) -> tuple[Float[np.ndarray, "P"], Float[np.ndarray, "P"]]:
    estimates, returns = np.asarray(estimates, float), np.asarray(returns, float)
    if estimates.ndim != 1 or estimates.shape != returns.shape:
        raise ShapeError(
            f"estimates {estimates.shape} and returns {returns.shape}: give one of each for every "
            "policy."
        )
    if not np.isfinite([estimates, returns]).all():
        raise ShapeError(
            "an estimate or a return is not finite: leave its policy out of the order."
        )
    return estimates, returns
