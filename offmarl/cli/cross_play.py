"""``offmarl cross-play``: play policies with partners that they were not trained with."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl.cli.ope import directory_of
from offmarl.cli.output import Report, check_file
from offmarl.cli.parse import AT_LEAST_ONE
from offmarl.cli.tasks import Divided
from offmarl.report.tables import Section
from offmarl.statistics import ENOUGH_RUNS, MIN_RUNS
from offmarl.terminal import bars, interval, number
from offmarl.tracking import plain, write_output

if TYPE_CHECKING:
    from offmarl.programs.cross_play import CrossPlayWork

_FEW = 6
"""Most columns of a heat map that have numbers."""
_ESTIMATED = ("self_play", "cross_play", "gap")
_WAYS = {"greedy": "best actions", "sampled": "sampled actions"}


def cross_play(
    runs: Annotated[tuple[str, ...], Positional, arg(metavar="RUN..."), AT_LEAST_ONE] = (),
    partners: Annotated[tuple[str, ...], AT_LEAST_ONE] | None = None,
    env: str | None = None,
    side: str | None = None,
    eval_episodes: int = 128,
    seed: int = 0,
    html: Path | None = None,
    program: Annotated[tuple[Path, ...], arg(metavar="[PATH ...]")] = (),
) -> Divided:
    """Play policies with partners that they were not trained with.

    Every pair plays in both seat orders. The same command continues after a stop, and shows a
    finished table again.

    Parameters
    ----------
    runs
        Policies: a run's directory for all of its seeds, RUN@SEED, RUN@SEED/STEP, the name of a
        pulled policy, random, scripted, or path/to/file.py:FUNCTION.
    partners
        Policies that they meet, named likewise; by default they meet one another.
    env
        Environment to play in; by default that of the first run.
    side
        Agents, joined by commas, for which one of a pair acts while the other one acts for the
        rest; by default the first, or the side that the first run learned.
    eval_episodes
        Number of episodes for each pair and seat order.
    seed
        Random seed of the episodes.
    html
        Write a self-contained page here.
    program
        Python files of the programs that trained the runs, for programs that are not offmarl's. The
        files' code is run.
    """
    from offmarl.hub.policies import locate_players  # takes a while to import, as the next does
    from offmarl.programs.cross_play import CrossPlayWork

    check_file(html, "--html", "page.html")
    policies, partner_policies = ([*map(locate_players, names)] for names in (runs, partners or ()))
    work = CrossPlayWork(policies, partner_policies, env, side, eval_episodes, seed, program)
    return Divided(work, lambda _: _report(work, html))


def _report(work: Any, html: Path | None) -> Report:
    """Report a table of policies, and write its page."""
    from offmarl.programs.cross_play import scores

    names, seats = [member.name for member in work.members], (work.side.name, work.rest.name)
    data: dict[str, Any] = {
        "directory": work.path,
        "env": work.env.spec.name,
        "episodes": work.episodes,
        "policies": [names[index] for index in work.scored],
        "partners": [names[index] for index in work.partners],
        "notes": [*_notes(work)],
        "page": html,
    }
    for acting, table in work.tables().items():
        of = work.scored, work.partners, work.dependent
        data[acting] = summary = scores(table[..., 0], names, *of)
        for key, values in zip(("returns", "standard_errors"), table.T, strict=True):
            orders = zip(seats, (values.T, values), strict=True)
            summary[key] = {seat: plain(x[work.scored][:, work.partners]) for seat, x in orders}
    by_way = {_WAYS[x]: [_map(data, x), *_sections(data, x)] for x in work.modes}
    if html:
        from offmarl.report import pages

        write_output(html, pages.render("cross_play.html", data=data, shown=by_way, ways=_WAYS))
    parts: list[Any] = [part for sections in by_way.values() for part in sections]
    if data["partners"] != data["policies"]:
        parts.append(f"partners: {', '.join(data['partners'])}")
    return Report(data, Group(*parts, *data["notes"], *([f"wrote {html}"] if html else [])))


def _notes(work: "CrossPlayWork") -> Iterator[str]:
    num_partners = len({*work.partners} - {*work.scored})
    if work.dependent:
        yield "No intervals: members of a population (--pbt) have replaced one another."
    elif len(work.scored) < MIN_RUNS:
        yield f"Intervals need at least {MIN_RUNS} policies: train more seeds."
    elif len(work.scored) < ENOUGH_RUNS:
        yield f"Intervals over fewer than {ENOUGH_RUNS} policies cover less often than 95%."
    if 0 < num_partners < MIN_RUNS:
        yield f"Intervals hold for these partners: fewer than {MIN_RUNS} are no sample of partners."
    if alone := [member.name for member in work.members if not all(member.seats)]:
        yield f"They act for one side only, without self-play: {', '.join(alone)}."


def _map(data: Mapping[str, Any], acting: str) -> Section:
    """Return a heat map of all pairs; among themselves, the columns are the other seat order."""
    orders = [*data[acting]["returns"].items()]
    values = [x for _, returns in orders for row in returns for x in row if x is not None]
    low, high = min(values), max(values)
    columns = orders[:1] if data["policies"] == data["partners"] else orders
    few = len(data["partners"]) * len(columns) <= _FEW

    width = max(len(number(x)) for x in values)

    def cell(x: float | None) -> str:
        shade = " " if x is None else bars([x], low, high)
        return f"{number(x):>{width}} {shade}  " if few else shade

    ends = [f"{bars([x], low, high)} {number(x)}" for x in (low, high)]
    title = f"Returns, {_WAYS[acting]}, beside each partner in order: {' to '.join(ends)}"
    short = _short(data)
    rows = [
        [short(name), *("".join(map(cell, returns[line])) for _, returns in columns)]
        for line, name in enumerate(data["policies"])
    ]
    return Section(title, ["policy", *(f"as {seat}" for seat, _ in columns)], rows)


def _sections(data: Mapping[str, Any], acting: str) -> Iterator[Section]:
    """Yield the means over policies, and the scores of each policy."""
    scores, short = data[acting], _short(data)
    rows = [[x.replace("_", "-"), interval(*scores[x].values())] for x in _ESTIMATED]
    rows += [[x.replace("_", " "), number(scores[x])] for x in ("worst", "best_response_share")]
    yield Section("Mean over policies [95% interval over policies]", ["", "return"], rows)
    columns = [key.replace("_", " ") for key in scores["policies"][0]]
    yield Section(
        "Each policy", columns, [[*map(short, row.values())] for row in scores["policies"]]
    )


def _short(data: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return a function that removes the policies' common directory from a name."""
    directory = directory_of([*data["policies"], *data["partners"]])
    return lambda x: x.removeprefix(f"{directory}/") if isinstance(x, str) and directory else x
