"""Scores of baselines on datasets, read from ``benchmarks/separation`` and ``benchmarks/six``."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from offmarl import statistics
from offmarl.hub import card as catalogue
from offmarl.statistics import Estimate, Reference

FOLDERS = {name: Path(__file__).parents[1] / "benchmarks" / name for name in ("separation", "six")}
"""Chosen cells on the recordings of the cards, and all cells of the plan ``six``."""


@dataclass(frozen=True)
class Score:
    """Returns of one baseline on one recording, over all seeds that were measured."""

    dataset: str
    """Name and tier, such as "LBF medium"."""
    env: str
    digest: str
    """Digest of the recording, which says whether it is that of a card."""
    baseline: str
    seeds: int
    updates: int
    best: Estimate
    """Return of the best actions: interquartile mean over seeds, with a 95% interval."""
    sampled: Estimate | None
    """The same of sampled actions, if the baseline has them."""
    sources: tuple[str, ...]
    """Files that hold the runs."""

    @property
    def reference(self) -> Reference | None:
        """Returns of random play and of the expert, if a card of the environment states them."""
        return _references().get(self.env)

    @property
    def normalised(self) -> Estimate | None:
        """The returns of the best actions, from random play (0) to the expert (1)."""
        if (reference := self.reference) is None:
            return None
        ends = [np.nan if value is None else value for value in self.best]
        return Estimate(*map(float, statistics.normalise(np.array(ends), reference)))


@cache
def _references() -> dict[str, Reference]:
    """Return the returns of random play and of the expert, by the name of the environment."""
    recipes = {card.name: card.recipe for card in catalogue.cards() if card.recipe}
    return {
        recipe.env or name.partition("/")[2]: Reference(recipe.random, recipe.expert)
        for name, recipe in recipes.items()
    }


@cache
def scores(folder: str = "separation") -> tuple[Score, ...]:
    """Return the scores: datasets in alphabetical order, each with its best baseline first."""
    cells: dict[tuple[str, str, str], list[tuple[Path, Mapping[str, Any]]]] = {}
    for path in sorted(FOLDERS[folder].glob("*.json")):
        cell = json.loads(path.read_text())
        options = {k: v for k, v in cell["options"].items() if k not in ("seed", "seeds")}
        key = cell["digest"], cell["baseline"], json.dumps(options, sort_keys=True)
        cells.setdefault(key, []).append((path, cell))
    all_scores = [_score(list(group)) for group in cells.values()]
    return tuple(sorted(all_scores, key=lambda score: (score.dataset, -score.best.value)))


def _score(group: list[tuple[Path, Mapping[str, Any]]]) -> Score:
    """Return the score of the runs of a baseline with the same options on the same data."""
    last = {row["seed"]: row for _, cell in group for row in cell["metrics.jsonl"]}
    cell = group[0][1]
    sampled = [row for row in last.values() if "sampled_episode_return" in row]
    return Score(
        cell["dataset"],
        cell["run.json"]["spec"]["name"],
        cell["digest"],
        cell["baseline"],
        len(last),
        cell["options"]["updates"],
        _estimate(last.values(), "episode_return"),
        _estimate(sampled, "sampled_episode_return") if sampled else None,
        tuple(path.name for path, _ in group),
    )


def _estimate(rows: Iterable[Mapping[str, Any]], name: str) -> Estimate:
    """Return what `offmarl compare` does; a row has the returns of equal parts of the episodes."""
    runs = np.array([np.mean(row[name]) for row in rows])
    return statistics.estimate(statistics.iqm, runs[:, None])


def on_recording(digest: str | None) -> list[Score]:
    """Return the scores on the recording with a digest, best first."""
    return [score for score in scores() if score.digest == digest]


def text(value: Estimate | None) -> str:
    """Return a return with its interval."""
    if value is None:
        return "–"
    if value.low is None or value.high is None:
        return f"{value.value:,.3g}"
    largest = max(abs(value.value), abs(value.high))
    places = 2 if largest < 0.01 else max(0, 2 - int(np.floor(np.log10(largest))))
    low, high = f"{value.low:,.{places}f}", f"{value.high:,.{places}f}"
    return f"{value.value:,.{places}f} [{low},\u00a0{high}]"  # the interval stays in one line


HEADINGS = ["baseline", "best actions", "sampled actions", "seeds"]


def row(score: Score) -> list[object]:
    """Return a line of a table, with `HEADINGS`."""
    return [score.baseline, text(score.best), text(score.sampled), score.seeds]
