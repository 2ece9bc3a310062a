"""``offmarl report`` and ``compare``: describe datasets, and compare runs."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Group
from rich.text import Text
from tyro.conf import Positional, arg

from offmarl import report as reports
from offmarl.cli.output import Report, table
from offmarl.errors import OffmarlError, OptionError, RunError, ShapeError, VaultError
from offmarl.programs.registry import file_of_run
from offmarl.report import page, run_page, tables
from offmarl.report.comparison import Comparison, Row
from offmarl.report.contents import LENGTHS, Survey, survey
from offmarl.report.curves import Curves
from offmarl.report.dataset_figures import Surveys
from offmarl.report.run_scores import Data, Runs
from offmarl.report.tables import Section
from offmarl.report.warnings import data_warnings, warnings_by_dataset
from offmarl.statistics import ENOUGH_RUNS, MIN_RUNS, Reference, spread
from offmarl.teams import only_or_all
from offmarl.terminal import number, plot
from offmarl.tracking import RETURN, RUN_FILE, acting_of, labelled, progress, read_run
from offmarl.vault import Dataset
from offmarl.vault.files import errors_of
from offmarl.vault.open import open_source, place_of

_MOST_FRAMES = 100


def report(
    vaults: Annotated[tuple[str, ...], Positional, arg(metavar="VAULT...")] = (),
    html: Path | None = None,
    env: str | None = None,
    time_limit: int | None = None,
) -> Report:
    """Describe the contents of datasets: figures, coverage, episodes; or a run.

    Parameters
    ----------
    vaults
        Vaults of any program, in directories, archives or buckets; a path that ends in .vlt stands
        for all the vaults in it. Or the directory of one run, whose learning curves are shown.
    html
        Write a self-contained page here, with figures, and with animated episodes if the
        environment can play them again.
    env
        Environment that plays the episodes again; by default the one that each dataset was recorded
        in. Code of your own is given as path/to/file.py:FACTORY or package.module:FACTORY.
    time_limit
        For vaults of other programs that flag the time limit as a termination: the limit.
    """
    if html and html.is_dir():
        raise OptionError(f"{html} is a directory: give a file name, such as {html / 'page.html'}.")
    if env and not html:
        raise OptionError("--env plays episodes again for a page: give --html, too.")
    if runs := [Path(path) for path in vaults if (Path(path) / RUN_FILE).is_file()]:
        return _run_report(runs, vaults, html)
    found = [open_source(path, time_limit=time_limit) for path in dict.fromkeys(_each(vaults))]
    if not found:
        raise VaultError("no vaults to report on: give the path of at least one vault.")
    played_in = _environment(env, found) if env else None
    surveys = {name: survey(one, progress) for name, one in _named(found).items()}
    if len(vaults) == 1:  # one path may stand for several vaults: sort them by return
        surveys = dict(sorted(surveys.items(), key=lambda item: _mean_return(item[1])))
    if html:
        html.parent.mkdir(parents=True, exist_ok=True)
        text = page.dataset_page(surveys, _episode_films(surveys, played_in))
        html.write_text(text)
    return Report(
        {"vaults": {name: _survey_data(one) for name, one in surveys.items()}, "page": html},
        Group(*_view(surveys), *([f"wrote {html}"] if html else [])),
    )


def _run_report(runs: Sequence[Path], given: Sequence[str], html: Path | None) -> Report:
    """Describe a run: where its arguments came from, and its learning curves."""
    if len(given) > 1:
        raise OptionError(
            f"report describes vaults or a single run: give {runs[0]} alone, or compare runs with "
            "`offmarl compare`."
        )
    described = run_page.describe(runs[0])
    if html:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(run_page.run_page(described))
    shown = [table(columns, rows, title) for title, columns, rows in described.sections()]
    for name, curve in described.evaluations().items():
        drawn = plot(curve.steps.tolist(), curve.mean.tolist())
        shown += [Text(f"{reports.UNITS[name]} by step", style="bold"), Text(drawn)]
    data = {"run": runs[0], "record": described.record, "page": html}
    data |= {"curves": {name: curve.data() for name, curve in described.curves.items()}}
    return Report(data, Group(*shown, *([f"wrote {html}"] if html else [])))


def _each(paths: Iterable[str]) -> Iterator[Any]:
    """Return the paths of vaults; those inside, for a path that holds several."""
    for path in paths:
        location = place_of(path)
        with errors_of(location.path):
            inside = [] if location.is_vault() else location.vaults()
        yield from inside or [location.path]


def _named(vaults: Sequence[Dataset]) -> dict[str, Dataset]:
    """Give each vault its shortest distinguishing name."""
    if len(vaults) > 1 and len({one.name for one in vaults}) == 1:
        names = [one.uid for one in vaults]
    else:
        names = [f"{one.name}/{one.uid}" for one in vaults]
    if len(set(names)) < len(vaults):
        names = [str(one.path) for one in vaults]
    return dict(zip(names, vaults, strict=True))


def _environment(name: str, vaults: Iterable[Dataset]) -> Any:
    """Make the environment that the user named, for all vaults.

    Raises
    ------
    ShapeError
        It has other sizes than a vault.
    """
    from offmarl import envs  # imports JAX

    env = envs.make(name)
    for vault in vaults:
        if difference := vault.spec.difference(env.spec, extras=False):
            raise ShapeError(
                f"{vault.path} and {name} differ in {difference}: give the environment that the "
                "dataset was recorded in."
            )
    return env


def _mean_return(found: Survey) -> float:
    """Return what datasets are sorted by: the return of the first team."""
    mean = next(iter(found.episodes.mean_returns.values()))
    return -np.inf if mean is None else mean


def _view(surveys: Surveys) -> Iterator[Any]:
    sections = [
        tables.glance(surveys),
        tables.rewards(surveys),
        *tables.actions(surveys),
        tables.coverage(surveys),
    ]
    for title, columns, rows in sections:
        yield table(columns, rows, title)
    if known := warnings_by_dataset(surveys):
        yield Text("Warnings", style="bold")
        yield from (Text(f"  {name}: {text}" if name else f"  {text}") for name, text in known)


def _episode_films(surveys: Surveys, env: Any | None) -> list[str]:
    """Return the worst, median and best episode of each dataset that can be drawn."""
    shown, unseen = [], []
    for name, one in surveys.items():
        try:
            shown += list(_watched(name, one, env))
        except OffmarlError as error:
            unseen.append((name, str(error)))
    return _episodes_section(shown, unseen)


def _episodes_section(
    shown: Sequence[tuple[bytes, str]], unseen: Sequence[tuple[str, str]]
) -> list[str]:
    """Return the films, and the reasons for those that are missing."""
    return [
        page.heading("Episodes"),
        *([page.films(shown)] if shown else []),
        *([page.notes(unseen)] if unseen else []),
    ]


def _watched(name: str, found: Survey, env: Any | None) -> Iterator[tuple[bytes, str]]:
    """Draw a few episodes; `OffmarlError` if the environment is unknown or cannot be drawn."""
    if env is None and not found.spec.name:
        raise OptionError("the environment of the dataset is unknown, so no episode can be drawn.")
    whole = np.flatnonzero(found.episodes.scored)
    if not len(whole):
        raise OptionError("no episode is complete, so none is drawn.")
    from offmarl import envs  # imports JAX
    from offmarl.report import render, replay_render

    env = envs.make_for(found.spec) if env is None else env
    returns = found.episodes.team_returns  # episodes are ranked by those of the first team
    order = whole[np.argsort(returns[whole, 0], kind="stable")]
    chosen = {"worst": order[0], "median": order[(len(order) - 1) // 2], "best": order[-1]}
    with progress(f"draw {name}", len(chosen)) as advance:
        for rank, episode in chosen.items():
            watched = replay_render.replay(env, found.vault, int(episode))
            teams = (team.name for team in found.episodes.teams)
            value = only_or_all(dict(zip(teams, returns[episode], strict=True)))
            gif = render.to_gif(watched, -(-len(watched.scenes) // _MOST_FRAMES))
            yield gif, f"{name}, {rank}: episode {episode}, return {number(value)}"
            advance(1)


def _survey_data(found: Survey) -> Mapping[str, Any]:
    vault = found.vault
    causes, counts = np.unique(found.episodes.cause, return_counts=True)
    return {
        "path": vault.path,
        "env": found.spec.name,
        "spec": found.spec.to_json(),
        "native": vault.native,
        "quirks": vault.quirks,
        "rows": vault.rows,
        "steps": vault.num_steps,
        "bytes": vault.num_bytes,
        "digest": found.digest,
        "unverified": vault.unverified,
        "warnings": data_warnings(found),
        "episodes": len(found.episodes.row),
        "incomplete": found.episodes.incomplete,
        "episodes_without_return": found.episodes.without_return,
        "ends": dict(zip(causes.tolist(), counts.tolist(), strict=True)),
        "return": only_or_all({team: spread(x) for team, x in found.team_returns.items()}),
        "length": spread(found.lengths),
        "rewards": _plain(found.rewards),
        "actions": _plain(found.actions),
        "observations": _plain(found.observations),
        "state": _plain(found.state),
        "alive": found.alive,
        "coverage": {"saco": found.saco, **_plain(found.coverage)},
        "windows": [_plain(found.windows(length)) for length in LENGTHS],
        "provenance": vault.provenance,
    }


def _plain(record: Any) -> dict[str, Any]:
    """Return a record as a dictionary, and the records in it, too."""
    fields = record._asdict().items()
    return {name: _plain(x) if hasattr(x, "_asdict") else x for name, x in fields}


# --------------------------------------------------------------------------------- compare


def compare(
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = (),
    html: Path | None = None,
    figure: Path | None = None,
    references: Annotated[
        tuple[tuple[str, float, float], ...], arg(metavar="[ENV RANDOM EXPERT ...]")
    ] = (),
    program: Annotated[tuple[Path, ...], arg(metavar="[PATH ...]")] = (),
    pool_settings: bool = False,
) -> Report:
    """Compare runs: IQM with intervals, profiles, a figure, a page.

    The last policies are compared, by their final evaluations: greedy policies with greedy ones,
    sampled policies with sampled ones. The best checkpoints stand beside them.

    Parameters
    ----------
    runs
        Directories of runs, as `offmarl train` writes them.
    html
        Write a self-contained page here, with an episode of each run whose environment can be
        drawn.
    figure
        Write the figure here, as PNG, PDF or SVG.
    references
        Mean returns of random play and of an expert in an environment; returns are normalised so
        that these are 0 and 1. By default those of the datasets that offmarl can record again.
    program
        Python files of the programs that trained the runs, for programs that are not offmarl's. A
        page shows episodes of these runs only if their files are given; the files' code is run.
    pool_settings
        Summarise a program over datasets although it was trained with other settings on one than on
        another, for example because they were tuned for each.
    """
    if not runs:
        raise RunError("no runs to compare: give the directory of at least one run.")
    metric = reports.metric_of(runs)
    found = reports.read_runs(runs, metric, pool_settings)
    known = _known(references) if metric == RETURN else {}
    by_dataset = {
        name: known[data.environment]
        for name, data in found.data.items()
        if data.environment in known
    }
    comparison = reports.compare(found.scores, by_dataset, metric, found.best)
    curves = reports.read_curves(found.directories, metric)
    sections, notes = (
        list(tables.comparison_tables(comparison)),
        list(_notes(comparison, found, metric, pool_settings)),
    )
    if curves:
        sections.append(tables.learning_curves(curves))
    if metric != RETURN:
        sections.append(_losses(runs))
    if figure:
        reports.save(reports.figure_comparison(comparison), figure)
    if html:
        html.parent.mkdir(parents=True, exist_ok=True)
        drawn = _comparison_figures(comparison, curves)
        html.write_text(_comparison_page(drawn, sections, notes, runs, program))
    written = [f"wrote {path}" for path in (html, figure) if path]
    shown = (table(columns, rows, title) for title, columns, rows in sections)
    data = _comparison_data(comparison, found, notes) | {"curves": _curve_data(curves)}
    return Report(data, Group(*shown, *notes, *written))


def _known(given: Iterable[tuple[str, float, float]]) -> dict[str, Reference]:
    """Return the reference returns by environment; ``given`` ones override known ones."""
    from offmarl.hub.card import references  # takes a while to import

    return references() | {env: Reference(random, expert) for env, random, expert in given}


def _notes(comparison: Comparison, found: Runs, metric: str, pool_settings: bool) -> Iterator[str]:
    """Describe the normalisation and what is missing."""
    scales = {found.data[name].environment: one for name, one in comparison.references.items()}
    for env, reference in scales.items():
        yield (
            f"Returns in {env} are normalised: 0 is random play ({number(reference.random)}), 1 is "
            f"the expert ({number(reference.expert)})."
        )
    raw = dict.fromkeys(
        data.environment for name, data in found.data.items() if name not in comparison.references
    )
    if metric == RETURN and raw:
        given = " ".join(f"{env} RANDOM EXPERT" for env in raw)
        yield (
            f"The reference returns of {', '.join(raw)} are unknown, so returns there are not "
            f"normalised: give them with --references {given}."
            + ("" if comparison.pooled else " Without them the datasets are not summarised.")
        )
    yield from _caveats(comparison, found, pool_settings)


def _caveats(comparison: Comparison, found: Runs, pool_settings: bool) -> Iterator[str]:
    """Point out equal names, other settings, how policies acted, and too few seeds."""
    names = [data.name for data in found.data.values()]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"Several datasets or environments are named {name}: each is compared separately."
    for program, settings in found.settings.items():
        yield (
            f"{program} was trained with other settings on one dataset than on another "
            f"({', '.join(settings)}): "
            + (
                "its runs are summarised together, because --pool-settings was given."
                if pool_settings
                else "such runs are not summarised together, unless --pool-settings is given."
            )
        )
    yield from _about_acting(comparison)
    if any(row.best for rows in comparison.datasets.values() for row in rows):
        yield (
            "Best checkpoint: the best evaluation of each seed, chosen by half of its episodes and "
            "scored by the other half. To choose it takes the environment, so it is no result of "
            "offline training."
        )
    few = min(len(runs) for one in comparison.scores.values() for runs in one.values())
    if few < MIN_RUNS:
        yield f"Intervals need at least {MIN_RUNS} seeds."
    if few < ENOUGH_RUNS:
        yield (
            f"warning: some runs have {few} seed{'s' if few > 1 else ''}. Below {ENOUGH_RUNS} "
            "seeds, intervals cover less often than 95%, and a difference may be chance."
        )


def _about_acting(comparison: Comparison) -> Iterator[str]:
    """Say which rows are the headline, and which policies have no greedy evaluation."""
    rows = [row for found in comparison.datasets.values() for row in found]
    if any(not row.headline for row in rows):
        yield (
            "Headline: the last policy's best actions (greedy). Sampled actions are compared with "
            "sampled ones."
        )
    entries = dict.fromkeys(row.entry for row in rows)
    for entry in entries:
        if entry.acting == "sampled" and entry._replace(acting="greedy") not in entries:
            yield (
                f"{entry.label} was not evaluated greedily, so it is compared only with other "
                "sampled policies."
            )


def _losses(runs: Iterable[Path]) -> Section:
    """Return the final training metrics of runs that were not evaluated in an environment."""
    rows = [
        [str(path), ", ".join(f"{name} {number(value)}" for name, value in last.items())]
        for path, last in ((path, reports.last_metrics(path)) for path in runs)
    ]
    return Section("Final training metrics, mean over seeds", ["run", "metrics"], rows)


def _comparison_figures(comparison: Comparison, curves: Curves) -> list[str]:
    scores = (
        "Left: the mean return of each seed, and the IQM over seeds. Hollow markers and dashed "
        "lines: sampled actions. Bands and bars: 95% intervals."
    )
    learning = "Learning curves: mean over seeds. Bands: 95% intervals; thin lines: seeds."
    drawn = [page.image(reports.figure_comparison(comparison), scores)]
    if curves:
        drawn.append(page.image(reports.figure_curves(curves, comparison.unit), learning))
    return drawn


def _curve_data(curves: Curves) -> dict[str, Any]:
    return {
        dataset: {entry.label: curve.data() for entry, curve in found.items()}
        for dataset, found in curves.items()
    }


def _comparison_page(
    figures: Sequence[str],
    sections: Iterable[Section],
    notes: Iterable[str],
    runs: Sequence[Path],
    programs: Sequence[Path],
) -> str:
    body = [*figures]
    for title, columns, rows in sections:
        body += [page.heading(title), page.table(columns, [map(number, row) for row in rows])]
    body += [
        page.notes(("", note) for note in notes),
        *_run_films(runs, programs),
        page.heading("Runs"),
        page.table(["run", "program", "data", "digest", "settings"], map(_run, runs)),
    ]
    return page.document("Comparison of runs", body)


def _run_films(runs: Sequence[Path], programs: Sequence[Path]) -> list[str]:
    """Return an episode of each run's first seed, if its environment can be drawn.

    Warns of each run whose program is in a file that the user did not give.
    """
    from offmarl.cli import policies
    from offmarl.programs import load_policy
    from offmarl.report import render

    shown, unseen = [], []
    for directory in runs:
        file = file_of_run(directory, programs)  # an error if one of them does not exist
        try:
            loaded = load_policy(directory, program=file)
        except OffmarlError as error:
            unseen.append((str(directory), str(error)))
            if read_run(directory).get("file"):
                warnings.warn(f"the page shows no episode of {directory}: {error}", stacklevel=1)
            continue
        try:
            watched = policies.watch(policies.make_environment(loaded), loaded, seed=0)
        except OffmarlError as error:  # the environment is not installed, or cannot be drawn
            unseen.append((str(directory), str(error)))
            continue
        name = labelled(loaded.name, acting_of(read_run(directory)))
        shown.append((render.to_gif(watched), f"{name}: {directory}"))
    return _episodes_section(shown, unseen)


def _run(directory: Path) -> list[str]:
    run = read_run(directory)
    settings = ", ".join(f"{key}={value}" for key, value in run["args"].items())
    data = [str(run.get("vault") or ""), str(run.get("vault_digest") or "")[:12]]
    return [str(directory), run["program"], *data, settings]


def _comparison_data(comparison: Comparison, found: Runs, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "datasets": {
            dataset: {row.entry.label: _row_data(row) for row in rows}
            for dataset, rows in comparison.datasets.items()
        },
        "data": {
            name: _source_data(data, comparison.references.get(name))
            for name, data in found.data.items()
        },
        "overall": {row.entry.label: _row_data(row) for row in comparison.overall},
        "probability_of_improvement": {
            first.label: {second.label: value._asdict() for second, value in row.items()}
            for first, row in comparison.improvement.items()
        },
        "notes": notes,
    }


def _row_data(row: Row) -> Mapping[str, Any]:
    return {
        "algorithm": row.entry.algorithm,
        "acting": row.entry.acting,
        "runs": row.runs,
        "iqm": row.iqm._asdict(),
        "normalised": row.normalised._asdict() if row.normalised else None,
        "mean": row.mean,
        "median": row.median,
        "headline": row.headline,
        "best_checkpoint": row.best._asdict() if row.best else None,
    }


def _source_data(data: Data, reference: Reference | None) -> dict[str, Any]:
    return {**data._asdict(), "references": reference._asdict() if reference else None}
