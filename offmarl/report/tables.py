"""Tables for the terminal and for pages, and those of datasets."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import RenderableType

from offmarl._html import html_table
from offmarl.report.accumulators import ContinuousActions, DiscreteActions
from offmarl.report.contents import LENGTHS, Survey, Surveys
from offmarl.statistics import spread
from offmarl.teams import only_or_all
from offmarl.terminal import interval, number, one_line, spread_line, table
from offmarl.types import Discrete, EnvSpec
from offmarl.vault.format.column_statistics import Ranges


class Score(NamedTuple):
    """An estimate in a cell, with its interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None
    bold: bool = False
    """Shown as * in the terminal and on pages."""
    signed: bool = False
    """Whether a value above 0 has its sign."""

    @property
    def texts(self) -> tuple[str, str]:
        """The value and its interval as text; the latter is empty without one."""
        value, _, ends = interval(self.value, self.low, self.high).partition(" ")
        return "+" * (self.signed and self.value > 0) + value, ends

    def __str__(self) -> str:
        return " ".join(filter(None, [*self.texts, "*" * self.bold]))


class Section(NamedTuple):
    """A table with its title; its first column names the rows.

    Cells are numbers, texts, `Score`, and None for an empty one.
    """

    title: str
    columns: Sequence[str]
    rows: list[list[Any]]

    def __rich__(self) -> RenderableType:
        """Return it for the terminal."""
        return table(self.columns, self.rows, self.title)

    def _repr_html_(self) -> str:
        return html_table(self.columns, (map(number, row) for row in self.rows), self.title)


def to_markdown(sections: Iterable[Section]) -> str:
    """Return tables in Markdown, under their titles if there are several."""

    def cell(content: Any) -> str:
        if isinstance(content, Score) and content.bold:
            value, ends = content.texts
            return f"**{value} {ends}**" if ends else f"**{value}**"
        return one_line(number(content)).replace("|", "\\|")

    def lines(section: Section) -> str:
        rows = [section.columns, ["---"] + ["---:"] * (len(section.columns) - 1), *section.rows]
        return "".join(f"| {' | '.join(map(cell, row))} |\n" for row in rows)

    return _joined(sections, lines, lambda title: f"**{title}**\n\n")


def to_latex(sections: Iterable[Section]) -> str:
    """Return tables for the package booktabs, under comments if there are several."""

    def cell(content: Any) -> str:
        if isinstance(content, int | float):
            return number(content).replace("-", "$-$")  # a hyphen is shorter
        if not isinstance(content, Score):
            return "".join(_SPECIAL.get(char, char) for char in one_line(number(content)))
        value, ends = (text.replace("-", "$-$") for text in content.texts)
        value = f"\\textbf{{{value}}}" if content.bold else value
        return f"{value} {{\\scriptsize {ends}}}" if ends else value

    def tabular(section: Section) -> str:
        rows = (" & ".join(map(cell, row)) for row in [section.columns, *section.rows])
        # After the end of a row, [ and * would begin an option.
        head, *body = ("{}" * row.startswith(("[", "*")) + f"{row} \\\\\n" for row in rows)
        return (
            f"\\begin{{tabular}}{{l{'r' * (len(section.columns) - 1)}}}\n\\toprule\n{head}"
            f"\\midrule\n{''.join(body)}\\bottomrule\n\\end{{tabular}}\n"
        )

    return _joined(sections, tabular, lambda title: f"% {title}\n")


_SPECIAL = {**{char: f"\\{char}" for char in "&%$#_{}"}, "\\": r"\textbackslash{}"}
_SPECIAL |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau"
_SPECIAL |= {  # pdflatex has no Greek letters in text
    letter: f"\\ensuremath{{\\{name}}}"
    for letter, name in zip(
        "αβγδεζηθικλμνξπρστυφχψω", f"{_GREEK} upsilon phi chi psi omega".split(), strict=True
    )
}


def _joined(
    sections: Iterable[Section], write: Callable[[Section], str], title: Callable[[str], str]
) -> str:
    parts = [*sections]
    return "\n".join(title(one_line(x.title)) * (len(parts) > 1) + write(x) for x in parts)


def to_csv(section: Section) -> str:
    """Return a table in CSV; a column of scores has two more, of the ends of their intervals."""
    columns: dict[str, list[Any]] = {}
    cells = [[row[place] for row in section.rows] for place in range(len(section.columns))]
    for name, column in zip(section.columns, cells, strict=True):
        scored = any(isinstance(cell, Score) for cell in column)
        for place, end in enumerate(("", "_low", "_high")[: 3 if scored else 1]):
            columns[name.lower().replace(" ", "_") + end] = [
                cell[place] if isinstance(cell, Score) else cell for cell in column
            ]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerows([columns, *zip(*columns.values(), strict=True)])
    return file.getvalue()


def glance(surveys: Surveys) -> Section:
    """Return the size and quality of each dataset."""
    columns = ["dataset", "episodes", "steps", "return", "min", "max", "mean length", "SACo"]
    return _by_dataset("Overview", columns, surveys, _overview_row)


def identity(surveys: Surveys) -> Section:
    """Return the properties of the datasets, with a column for each."""
    facts = [_facts(survey) for survey in surveys.values()]
    if len(surveys) > 1:
        facts = [fact | {"digest": f"{fact['digest'][:12]}…"} for fact in facts]
    rows = [[name, *(fact[name] for fact in facts)] for name in facts[0]]
    return Section("Properties", ["", *surveys], rows)


def rewards(surveys: Surveys) -> Section:
    """Return the distribution of rewards, and how sparse they are."""
    columns = ["dataset", "nonzero steps", "mean", "std", "min", "max", "episodes with return 0"]
    return _by_dataset("Rewards", columns, surveys, _rewards)


def actions(surveys: Surveys) -> Iterator[Section]:
    """Return statistics of actions: a table of discrete ones, and a table of continuous ones."""
    columns = ["illegal", "legal on average", "entropy (bits)", "joint entropy"]
    columns += ["total correlation", "joint actions"]
    for kind, names, cells in (
        (DiscreteActions, columns, _choices),
        (ContinuousActions, ["mean", "std", "min", "max", "at a bound", "usable"], _values),
    ):
        if group := {k: v for k, v in surveys.items() if isinstance(v.actions, kind)}:
            yield _by_dataset("Actions", ["dataset", *names], group, cells)


def coverage(surveys: Surveys) -> Section:
    """Return how many different states and actions each dataset contains."""
    alike = len({(survey.spec.name, survey.spec.state_size) for survey in surveys.values()}) == 1
    most = max(survey.coverage.pairs for survey in surveys.values()) if alike else 0
    columns = ["dataset", "SACo", "distinct pairs", "relative", "distinct states"]
    columns += ["local pairs", "pairs seen once"]

    def cells(survey: Survey) -> list[Any]:
        counts = survey.coverage
        pairs, once = counts.pairs, int(counts.repeats[counts.repeats[:, 0] == 1, 1].sum())
        about = "" if counts.exact else "about "
        return [
            _saco(survey),
            f"{about}{number(pairs)}",
            percent(pairs, most),
            f"{about}{number(counts.states)}",
            percent(counts.local_pairs, counts.local_steps),
            percent(once, pairs),
        ]

    return _by_dataset("Coverage", columns, surveys, cells)


def windows(surveys: Surveys) -> Section:
    """Return the training windows of several lengths."""
    columns = ["dataset", "length", "windows", "slots empty", "episodes shorter", "hold several"]
    rows = []
    for name, survey in surveys.items():
        for entry in map(survey.windows, LENGTHS):
            shares = [
                percent(entry.padded, 1),
                percent(entry.short_episodes, len(survey.episodes.row)),
            ]
            rows.append([name, entry.length, entry.total, *shares, percent(entry.crossing, 1)])
    return Section("Training windows", columns, rows)


def describe_agents(spec: EnvSpec) -> str:
    """Return the number of agents and the kind of their actions, as text."""
    if isinstance(spec.action, Discrete):
        kind = f"{spec.action_size} actions"
    else:
        kind = f"a continuous action of {spec.action_size}"
    return f"{spec.num_agents} agent{'s, each' if spec.num_agents > 1 else ''} with {kind}"


# Texts of charts for readers who cannot see them.


def returns_line(survey: Survey) -> str:
    """Return the mean and range of the returns, of each team if there are several, as text."""
    texts = {team: spread_line(spread(x)) or "none" for team, x in survey.team_returns.items()}
    return number(only_or_all(texts))


def lengths_line(survey: Survey) -> str:
    """Return the mean and range of the lengths of episodes, as text."""
    return spread_line(spread(survey.lengths)) or "none"


def agents_line(survey: Survey) -> str:
    """Return the mean return of the first agents, as text."""
    returns = survey.episodes.returns[survey.episodes.scored]
    means = returns.mean(0) if len(returns) else np.zeros(0)
    text = ", ".join(f"{mean:.3g}" for mean in means[:8])
    return f"means {text}{' and more' if len(means) > 8 else ''}"


def extremes(ranges: Ranges) -> str:
    """Return the range of features and how many are constant, as text."""
    if not ranges.finite.any():
        return "no finite values"
    low, high = np.nanmin(ranges.low), np.nanmax(ranges.high)
    constant = int(ranges.constant.sum())
    return f"from {low:.3g} to {high:.3g}, {constant} of {ranges.low.size} features constant"


def ends_line(survey: Survey) -> str:
    """Return how many episodes ended by each cause, as text."""
    counts = Counter(survey.episodes.cause.tolist())
    return ", ".join(f"{number(count)} {cause}" for cause, count in counts.items())


def percent(part: float, whole: float) -> str:
    """Format part/whole as a percentage; empty if whole is 0."""
    return f"{100 * part / whole:.4g}%" if whole else ""


def _by_dataset(
    title: str, columns: list[str], surveys: Surveys, cells: Callable[[Survey], list[Any]]
) -> Section:
    return Section(title, columns, [[name, *cells(survey)] for name, survey in surveys.items()])


def _overview_row(survey: Survey) -> list[Any]:
    returns = {team: spread(values) for team, values in survey.team_returns.items()}
    text = "{mean:.4g}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{std:.3g}"
    means = {team: text.format(**values) if values else None for team, values in returns.items()}
    least, most = ({team: x.get(end) for team, x in returns.items()} for end in ("min", "max"))
    length = spread(survey.lengths).get("mean")
    counts = [len(survey.episodes.row), survey.vault.num_steps]
    cells = [only_or_all(means), only_or_all(least), only_or_all(most)]
    return [*counts, *cells, length, _saco(survey)]


def _saco(survey: Survey) -> str | None:
    return None if survey.saco is None else f"{survey.saco:.4g}"


def _facts(survey: Survey) -> dict[str, str]:
    vault, spec = survey.vault, survey.spec
    size, rows = vault.num_bytes, f"{number(vault.rows)} rows" if vault.rows > 1 else "one row"
    policies = len(vault.policy_ids)
    acted = int(survey.alive.sum())
    return {
        "vault": f"{vault.name}.vlt/{vault.uid}",
        "environment": spec.name or "unknown",
        "agents": describe_agents(spec),
        "observation, state": f"{spec.observation_text}, {spec.state_text} ({spec.state})",
        "rewards": "shared by all agents" if survey.rewards.alike else "individual",
        "episodes": ends_line(survey),
        "steps": f"{number(vault.num_steps)} in {rows}",
        "size": "unknown" if size is None else f"{number(size / 1e6)} MB",
        "agents alive": percent(acted, vault.num_steps * spec.num_agents),
        "policies": number(policies) if policies else "unknown",
        "log-probabilities": percent(survey.log_probs, acted) if survey.log_probs else "unknown",
        "checked": _checked(survey),
        "digest": survey.digest,
    }


def _checked(survey: Survey) -> str:
    if not survey.vault.native:
        return "no checksums, because another program wrote the vault"
    partly = ", except for steps that another program appended" if survey.vault.unverified else ""
    return f"agrees with its checksums{partly}"


def _rewards(survey: Survey) -> list[Any]:
    rewards, ranges = survey.rewards, survey.rewards.ranges
    if not ranges.finite.any():
        return [None] * 6
    low, high, mean, std = ranges.pooled()[:4]  # of all agents together
    zero = only_or_all(
        {team: percent(int((x == 0).sum()), len(x)) for team, x in survey.team_returns.items()}
    )
    return [
        percent(rewards.nonzero_steps, survey.vault.num_steps),
        *map(float, (mean, std, low, high)),
        zero,
    ]


_STEPS_OF_ONE = 10
"""Least steps for each distinct joint action at which their entropy is given."""


def _choices(survey: Survey) -> list[Any]:
    actions = survey.actions
    if not isinstance(actions, DiscreteActions) or not actions.steps.any():
        return [None] * 6
    alive, coverage = int(actions.steps.sum()), survey.coverage
    # With few steps for each joint action, entropies of samples are too small.
    sampled = survey.vault.num_steps >= _STEPS_OF_ONE * coverage.joint_actions
    joint = coverage.joint_entropy if sampled else None
    always = alive == survey.vault.num_steps * survey.spec.num_agents
    apart = float(actions.entropy.sum())
    return [
        percent(int(actions.illegal.sum()), alive),
        percent(int(actions.legal.sum()), alive * survey.spec.num_actions),
        float(actions.entropy.mean()),
        joint,
        max(0.0, apart - joint) if joint is not None and always else None,
        coverage.joint_actions,
    ]


def _values(survey: Survey) -> list[Any]:
    actions = survey.actions
    if not isinstance(actions, ContinuousActions) or not actions.ranges.finite.any():
        return [None] * 6
    low, high, mean, std, count, _ = actions.ranges.pooled()
    return [
        *map(float, (mean, std, low, high)),
        percent(int(actions.at_bounds.sum()), int(count)),
        percent(int(actions.legal.sum()), int(actions.steps.sum()) * survey.spec.action_size),
    ]
