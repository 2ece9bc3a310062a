"""``offmarl report``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Group
from rich.text import Text
from tyro.conf import Positional, arg

from offmarl.cli import dataset_page, dataset_tables
from offmarl.cli.output import Report, spread, table
from offmarl.errors import OffmarlError, OptionError, VaultError
from offmarl.report import page
from offmarl.report.contents import LENGTHS, Survey, survey
from offmarl.report.dataset_figures import Surveys
from offmarl.report.findings import findings
from offmarl.tracking import progress
from offmarl.vault import Dataset
from offmarl.vault.open import open_source, place_of
from offmarl.vault.system import errors_of

_MOST_FRAMES = 100


def report(
    vaults: Annotated[tuple[str, ...], Positional, arg(metavar="VAULT...")] = (),
    html: Path | None = None,
    time_limit: int | None = None,
) -> Report:
    """Describe the contents of datasets: figures, coverage, episodes.

    Parameters
    ----------
    vaults
        Vaults of any program, in directories, archives or buckets; one that stops at .vlt stands
        for all the datasets in it.
    html
        Write a self-contained page here, with figures, and with episodes where they can be played
        again.
    time_limit
        For vaults of other programs that flag the time limit as a termination: the limit.
    """
    if html and html.is_dir():
        raise OptionError(f"{html} is a directory: give the page a name, as {html / 'page.html'}.")
    found = [open_source(path, time_limit=time_limit) for path in dict.fromkeys(_each(vaults))]
    if not found:
        raise VaultError("there is nothing to report on: give the path of one vault or more.")
    surveys = {name: survey(one, progress) for name, one in _named(found).items()}
    if len(vaults) == 1:  # all there is, in no order that anybody asked for
        surveys = dict(sorted(surveys.items(), key=lambda item: _mean_return(item[1])))
    if html:
        html.parent.mkdir(parents=True, exist_ok=True)
        text = dataset_page.write(surveys, _films(surveys))
        html.write_text(text)
    return Report(
        {"vaults": {name: _data(one) for name, one in surveys.items()}, "page": html},
        Group(*_view(surveys), *([f"wrote {html}"] if html else [])),
    )


def _each(paths: Iterable[str]) -> Iterator[Any]:
    """Return paths, for one of several datasets theirs."""
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


def _mean_return(found: Survey) -> float:
    mean = found.episodes.mean_return
    return -np.inf if mean is None else mean


def _view(surveys: Surveys) -> Iterator[Any]:
    sections = [
        dataset_tables.glance(surveys),
        dataset_tables.rewards(surveys),
        *dataset_tables.actions(surveys),
        dataset_tables.coverage(surveys),
    ]
    for title, columns, rows in sections:
        yield table(columns, rows, title)
    if known := dataset_page.notes(surveys):
        yield Text("Worth knowing", style="bold")
        yield from (Text(f"  {name}: {text}" if name else f"  {text}") for name, text in known)


def _films(surveys: Surveys) -> list[str]:
    """Return the worst, median and best episodes of each dataset, where they can be drawn."""
    shown, unseen = [], []
    for name, one in surveys.items():
        try:
            shown += list(_watched(name, one))
        except OffmarlError as error:
            unseen.append((name, str(error)))
    title = page.heading("Episodes to watch")
    return [
        title,
        *([page.films(shown)] if shown else []),
        *([page.notes(unseen)] if unseen else []),
    ]


def _watched(name: str, found: Survey) -> Iterator[tuple[bytes, str]]:
    """Draw a few episodes; `OffmarlError` if the environment is unknown or cannot be drawn."""
    if not found.spec.name:
        raise OptionError("the environment of the dataset is unknown, so no episode can be drawn.")
    whole = np.flatnonzero(found.episodes.scored)
    if not len(whole):
        raise OptionError("there is no complete episode to draw.")
    from offmarl import envs  # brings in JAX
    from offmarl.report import animation, replaying

    env = envs.make(found.spec.name)
    order = whole[np.argsort(found.returns, kind="stable")]
    chosen = {"worst": order[0], "median": order[(len(order) - 1) // 2], "best": order[-1]}
    with progress(f"draw {name}", len(chosen)) as advance:
        for rank, number in chosen.items():
            watched = replaying.replay(env, found.vault, int(number))
            value = found.episodes.episode_returns[number]
            gif = animation.to_gif(watched, -(-len(watched.scenes) // _MOST_FRAMES))
            yield gif, f"{name}, {rank}: episode {number}, return {value:.4g}"
            advance(1)


def _data(found: Survey) -> Mapping[str, Any]:
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
        "findings": findings(found),
        "episodes": len(found.episodes.row),
        "incomplete": found.episodes.incomplete,
        "episodes_without_return": found.episodes.without_return,
        "ends": dict(zip(causes.tolist(), counts.tolist(), strict=True)),
        "return": spread(found.returns),
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
    """Return a record's fields by name, and those of the records in it."""
    fields = record._asdict().items()
    return {name: _plain(x) if hasattr(x, "_asdict") else x for name, x in fields}
