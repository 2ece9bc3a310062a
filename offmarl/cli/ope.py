"""``offmarl ope``: estimate what policies are worth from recorded episodes alone."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl.cli.output import Report, records
from offmarl.cli.parse import AT_LEAST_ONE, refuse_unused
from offmarl.config import PositiveInt
from offmarl.ope.options import Options
from offmarl.paths import distinct_paths
from offmarl.terminal import interval
from offmarl.tracking import progress

if TYPE_CHECKING:
    from offmarl.ope.ranking import Candidate


def ope(
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN..."), AT_LEAST_ONE] = (),
    *,
    vault: str,
    methods: tuple[Literal["tabular", "local", "fqe", "wis"], ...] = (),
    act: Literal["as-trained", "greedy", "sample"] = "as-trained",
    checkpoints: Literal["last", "all"] = "last",
    options: Options = Options(),  # noqa: B008 - frozen
    env: str | None = None,
    eval_episodes: PositiveInt | None = None,
    time_limit: int | None = None,
    program: Annotated[tuple[Path, ...], arg(metavar="[PATH ...]")] = (),
) -> Report:
    """Estimate the returns of trained policies from a dataset, without the environment.

    Where the runs were evaluated in an environment, or with --env, the order of the estimates,
    which are discounted, is compared with that of the returns, which are not.

    Parameters
    ----------
    runs
        Directories of runs, as `offmarl train` writes them, or names of policies that `offmarl pull
        --policy` downloaded. The seeds of a run count as repetitions of one setting.
    vault
        Dataset of recorded episodes, best one that the policies did not learn from.
    methods
        Estimates to make, by default the first of tabular, local and fqe that the data allow, and
        wis. tabular: play in the recorded steps, where their views recur. local: the data's return
        and the advantages of the actions that a policy prefers. fqe: fitted Q evaluation. wis:
        per-decision weighted importance sampling. For local and wis, a clone of the data's policies
        gives the probabilities of actions that were not recorded.
    act
        How the policies act. greedy: they take the best action. sample: they sample actions.
        as-trained: as in the runs' own evaluations.
    checkpoints
        Which checkpoints of each run are evaluated; all: those of its evaluations that the run kept
        (train --keep all; a recorder keeps all).
    options
        How they are evaluated.
    env
        Environment in which the policies are also played, as in `offmarl evaluate`, so that their
        returns there stand beside the estimates in place of those of the runs.
    eval_episodes
        Number of episodes for each policy there; by default 320, or 32 in a PettingZoo environment.
    time_limit
        For a vault of another program that flags the time limit as a termination: the limit.
    program
        Python files of the programs that trained the runs, for programs that are not offmarl's. The
        files' code is run.
    """
    if env is None:
        refuse_unused("without --env no policy is played", eval_episodes=eval_episodes is not None)
    from offmarl.hub.policies import run_named  # takes a while to import, as the others do
    from offmarl.ope import estimate
    from offmarl.ope.ranking import candidates_of, compare_candidates
    from offmarl.vault import open_vault

    dataset = open_vault(vault, time_limit=time_limit)
    directories = distinct_paths(map(run_named, runs))
    candidates = [candidate for run in directories for candidate in candidates_of(run, checkpoints)]
    policies = _load(candidates, act, program)
    returns = _returns(env, policies, dataset, eval_episodes)
    try:
        estimates = estimate(policies, dataset, options, methods or None, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "stopped: nothing is kept of an evaluation that was stopped. The same command starts "
            "anew; --methods fqe and fewer --updates or --episodes take less time."
        ) from None
    draws = {label: bool(x.policy.draws(x.params)) for label, x in policies.items()}
    data = {
        "vault": dataset.path,
        "digest": dataset.known_digest(),
        "gamma": options.gamma,
        "env": env,
        **compare_candidates(estimates, candidates, draws, act, returns),
    }
    return Report(data, Group(*view(data)))


def _returns(
    env: str | None, policies: Mapping[str, Any], dataset: Any, episodes: int | None
) -> dict[str, Any] | None:
    """Play policies in an environment of the user's choice."""
    from offmarl.cli.policies import play
    from offmarl.programs.runs.evaluate import environment_for

    if env is None or (environment := environment_for(env, dataset)) is None:
        return None
    (returns,) = play(environment, policies, episodes, [0] * len(policies)).values()
    return returns


def _load(candidates: Sequence["Candidate"], act: str, programs: Sequence[Path]) -> dict[str, Any]:
    """Load the policies by label; those of one run have the same functions."""
    from offmarl.programs import load_policy
    from offmarl.programs.registry import file_of_run

    greedy = None if act == "as-trained" else act == "greedy"
    policies: dict[str, Any] = {}
    first: dict[Path, Any] = {}
    for candidate in candidates:
        file = file_of_run(candidate.run, programs)
        policy = load_policy(candidate.run, candidate.seed, greedy, file, step=candidate.step)
        shared = first.setdefault(candidate.run, policy)
        policies[candidate.label] = replace(policy, policy=shared.policy)
    return policies


# ---------------------------------------------------------------------------------- tables


def view(data: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the tables and the notes of the results."""
    discounted = "" if data["gamma"] == 1 else f", discounted by {data['gamma']:g}"
    title = f"Estimated from {data['episodes']:,} episodes{discounted}; their own return is "
    checked = data["data_return_by_fqe"]
    by_fqe = "" if checked is None else f", by fqe {checked:.4g}"
    if directory := directory_of(data["policies"]):
        yield f"Policies in {directory}"
    yield records(
        _policies(data, directory), title + interval(*data["data_return"].values()) + by_fqe
    )
    rows = [
        {
            "method": method,
            "policies": ranking["policies"],
            "rank correlation": ranking["spearman"],
            **{f"regret@{k}": ranking["regret"].get(str(k)) for k in (1, 3, 5)},
            "regret@1 by chance": ranking["chance_regret"],
        }
        for method, ranking in data["ranking"].items()
        if ranking["policies"]
    ]
    if rows:
        yield records(rows, "Order of the estimates against the returns in the environment")
    if len(data["policies"]) > 1:
        yield "Ranks such as 1-3: the policy cannot be told from others, and may have any of these."
    inside = re.compile(rf"(?<![\w./-]){re.escape(directory)}/") if directory else None
    yield from (inside.sub("", note) if inside else note for note in data["notes"])
    for method, choice in data["chosen"].items():
        yield f"chosen by {method}: {choice['setting']}" + (
            f" (return {choice['true_return']:.4g}; the best has {choice['best_true_return']:.4g})"
            if "true_return" in choice
            else ""
        )


def _policies(data: Mapping[str, Any], directory: str) -> list[dict[str, Any]]:
    """Return the rows of the policies, without the columns that are empty for all of them."""
    actual = "return" if data["gamma"] == 1 else "return, not discounted"
    optional = {"effective_sample_size": "effective episodes", "true_return": actual}
    keys = {
        key for key in optional if any(row[key] is not None for row in data["policies"].values())
    }
    rows = [*data["policies"].values()]
    empty = {key for key in rows[0] if all(row[key] is None for row in rows)}
    return [
        {
            "policy": label.removeprefix(f"{directory}/" if directory else ""),
            **{
                f"{key} [95% interval]": value and interval(*value.values())
                for key, value in row.items()
                if key not in optional and key not in empty
            },
            **{
                f"rank by {method}": "-".join(
                    map(str, dict.fromkeys(order["ranks"].get(label, ())))
                )
                for method, order in data["order"].items()
                if method not in empty
            },
            **{name: row[key] for key, name in optional.items() if key in keys},
        }
        for label, row in data["policies"].items()
    ]


def directory_of(labels: Iterable[str]) -> str:
    """Return the directory that all policies are in, or "" if there is none."""
    parents = [os.path.dirname(label) for label in labels]  # noqa: PTH120 - keeps "./" and "../"
    try:
        return os.path.commonpath(parents).rstrip("/")
    except ValueError:  # some are absolute, and some are not
        return ""
