"""``offmarl compare``: compare the results of runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl import report as reports
from offmarl.cli.output import Report, as_is, check_file
from offmarl.cli.parse import refuse_unused
from offmarl.report.figures import KINDS
from offmarl.statistics import Reference
from offmarl.tracking import write_output


@dataclass(frozen=True)
class Files:
    """Files that a comparison is written to."""

    html: Path | None = None
    """Write a self-contained page here, with an episode of each run whose environment can be drawn.
    """
    figure: Path | None = None
    """Write the figure here, as PNG, PDF or SVG."""
    latex: Path | None = None
    """Write the tables of scores and differences here, for the package booktabs; - prints them in
    place of the report, as for the next two."""
    markdown: Path | None = None
    """Write the same tables here in Markdown."""
    csv: Path | None = None
    """Write the scores here: a line for each dataset, method and way to act."""

    def check(self) -> None:
        """Raise `OptionError` for the first file that cannot be written."""
        check_file(self.html, "--html", "comparison.html")
        check_file(self.figure, "--figure", "comparison.png", KINDS)
        for name, path in self._tables().items():
            if str(path) != "-":
                check_file(path, f"--{name}", f"table.{name}")

    def write(self, compared: reports.ComparedRuns, program: Sequence[Path]) -> Report:
        """Write the files, and report the comparison or the tables that are printed instead."""
        if self.figure:
            figure = reports.figure_comparison(compared.comparison, compared.curves)
            reports.save(figure, self.figure)
        if self.html:
            from offmarl.report import pages

            write_output(self.html, pages.comparison_page(compared, program))
        lines, printed = [f"wrote {path}" for path in (self.html, self.figure) if path], []
        for name, path in self._tables().items():
            text = getattr(compared, name)()
            if str(path) == "-":
                printed.append(as_is(text.rstrip("\n")))
            else:
                write_output(path, text)
                lines.append(f"wrote {path}")
        parts = printed or [*compared.sections, *compared.notes, *lines]
        return Report(compared.data(), Group(*parts))

    def _tables(self) -> dict[str, Path]:
        paths = {"latex": self.latex, "markdown": self.markdown, "csv": self.csv}
        return {name: path for name, path in paths.items() if path}


def compare(
    runs: Annotated[tuple[Path, ...], Positional, arg(metavar="RUN...")] = (),
    references: Annotated[
        tuple[tuple[str, float, float], ...], arg(metavar="[ENV RANDOM EXPERT ...]")
    ] = (),
    program: Annotated[tuple[Path, ...], arg(metavar="[PATH ...]")] = (),
    pool_settings: bool = False,
    baseline: str | None = None,
    files: Files = Files(),
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
    files
        Where to write the comparison.
    """
    files.check()
    if files.html is None:
        refuse_unused("without --html there is no page of episodes", program=program)
    from offmarl.hub.card import references as recorded  # takes a while to import

    by_env = {env: Reference(random, expert) for env, random, expert in references}
    compared = reports.compare_runs(runs, recorded(), by_env, pool_settings, baseline)
    return files.write(compared, program)
