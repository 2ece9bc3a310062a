"""``offmarl compare``: compare the results of runs."""

from pathlib import Path
from typing import Annotated

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl import report as reports
from offmarl.cli.output import Report, as_is, check_file, write_page
from offmarl.errors import RunError
from offmarl.report.figures import KINDS
from offmarl.statistics import Reference


def compare(
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = (),
    html: Path | None = None,
    figure: Path | None = None,
    latex: Path | None = None,
    markdown: Path | None = None,
    csv: Path | None = None,
    references: Annotated[
        tuple[tuple[str, float, float], ...], arg(metavar="[ENV RANDOM EXPERT ...]")
    ] = (),
    program: Annotated[tuple[Path, ...], arg(metavar="[PATH ...]")] = (),
    pool_settings: bool = False,
    baseline: str | None = None,
) -> Report:
    """Compare runs: IQM with intervals, profiles, a figure, a page.

    The last policies are compared, by their final evaluations: greedy policies with greedy ones,
    sampled policies with sampled ones. The best checkpoints stand beside them. Runs that are not
    finished are left out, and named.

    Parameters
    ----------
    runs
        Directories of runs, as `offmarl train` writes them; or the directory of a benchmark, which
        stands for all of its finished cells. Also JSON files of marl-eval's layout, as Mava,
        OG-MARL and BenchMARL write them.
    html
        Write a self-contained page here, with an episode of each run whose environment can be
        drawn.
    figure
        Write the figure here, as PNG, PDF or SVG.
    latex
        Write the tables of scores and differences here, for the package booktabs; - prints them in
        place of the report, as for the next two.
    markdown
        Write the same tables here in Markdown.
    csv
        Write the scores here: a line for each dataset, method and way to act.
    references
        Mean returns of random play and of an expert in an environment; returns are normalised so
        that these are 0 and 1. By default those of the datasets that offmarl can record again.
    program
        Python files of the programs that trained the runs, for programs that are not offmarl's. A
        page shows episodes of these runs only if their files are given; the files' code is run.
    pool_settings
        Summarise a program over datasets although it was trained with other settings on one than on
        another, for example because they were tuned for each.
    baseline
        The program, or the name of a run in the tables, that others are compared with in pairs of
        runs of one seed; by default bc. Greedy policies are compared with greedy ones.
    """
    if not runs:
        raise RunError("no runs to compare: give the directory of at least one run.")
    check_file(html, "--html", "comparison.html")
    check_file(figure, "--figure", "comparison.png", KINDS)
    files = {"latex": latex, "markdown": markdown, "csv": csv}
    written = {name: path for name, path in files.items() if path and str(path) != "-"}
    for name, path in written.items():
        check_file(path, f"--{name}", f"table.{name}")
    from offmarl.hub.card import references as recorded  # takes a while to import

    given = {env: Reference(random, expert) for env, random, expert in references}
    compared = reports.compare_runs(runs, recorded(), given, pool_settings, baseline)
    if figure:
        reports.save(reports.figure_comparison(compared.comparison, compared.curves), figure)
    if html:
        from offmarl.report import pages

        write_page(html, pages.comparison_page(compared, program))
    texts = {name: getattr(compared, name)() for name, path in files.items() if path}
    for name, path in written.items():
        write_page(path, texts.pop(name))
    if texts:
        return Report(compared.data(), as_is("\n".join(texts.values()).rstrip("\n")))
    said = [f"wrote {path}" for path in (html, figure, *written.values()) if path]
    return Report(compared.data(), Group(*compared.sections, *compared.notes, *said))
