"""``offmarl cat``, ``filter``, ``sample``, ``split``, ``slice``, ``dedup`` and ``recode``."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from offmarl import vault
from offmarl.cli.output import Report, table
from offmarl.errors import OptionError
from offmarl.statistics import spread
from offmarl.tracking import progress

Source = Annotated[str, Positional, arg(metavar="VAULT")]
Out = Annotated[str, arg(aliases=["-o"], metavar="VAULT")]
Codec = Literal["raw", "zstd"]
TimeLimit = Annotated[int | None, arg(metavar="STEPS")]


def cat(
    sources: Annotated[
        tuple[str, ...], Positional, arg(metavar="VAULT...", help_behavior_hint="(required)")
    ],
    out: Out,
    codec: Codec | None = None,
    time_limit: TimeLimit = None,
) -> Report:
    """Join vaults into one.

    They must be of one environment, and are joined in the order given.

    Parameters
    ----------
    sources
        The vaults. Policies of different recordings get ids of their own.
    out
        The vault to make.
    codec
        raw or zstd; by default that of the first source.
    time_limit
        For vaults of other programs that flag the time limit as a termination: the limit.
    """
    made = vault.cat(sources, out, codec=codec, time_limit=time_limit, progress=progress)
    return _report([made])


def filter(
    source: Source,
    condition: Annotated[str, Positional, arg(metavar="CONDITION")],
    out: Out,
    by: Literal["episodes", "steps"] = "episodes",
    codec: Codec | None = None,
) -> Report:
    """Select the episodes or steps of a vault that meet a condition.

    Parameters
    ----------
    source
        A vault.
    condition
        Made of and, or, not, parentheses, comparisons (< <= > >= == != in), arithmetic and p90 (the
        90th percentile over complete episodes), over return (mean over agents), length, policy,
        program, tier, source, seed, cause, terminated, truncated, complete (the environment ended
        it, not the recording), row and index.
    out
        The vault to make.
    by
        steps keeps the stretches of steps that the condition holds for; it can also ask for the
        reward of a step (mean over agents), and which step of its episode it is (step).
    codec
        raw or zstd; by default that of the source.
    """
    return _report([vault.filter(source, condition, out, by=by, codec=codec, progress=progress)])


def sample(
    source: Source,
    out: Out,
    steps: Annotated[float | None, arg(metavar="NUMBER")] = None,
    episodes: Annotated[float | None, arg(metavar="NUMBER")] = None,
    top: Annotated[str | None, arg(metavar="PERCENT")] = None,
    match_returns: bool = False,
    like: Annotated[str | None, arg(metavar="VAULT")] = None,
    seed: int = 0,
    codec: Codec | None = None,
) -> Report:
    """Draw some of a vault's episodes, or take the best.

    Parameters
    ----------
    source
        A vault.
    out
        The vault to make.
    steps
        How many steps, such as 1e5; the last episode is cut short.
    episodes
        How many episodes.
    top
        The best of the complete episodes by return, such as 10%.
    match_returns
        Draw equally from each tenth of the returns, which keeps their distribution.
    like
        Match the returns of this vault instead; without a number, draw as many as can be matched.
    seed
        Decides everything random.
    codec
        raw or zstd; by default that of the source.
    """
    made = vault.sample(
        source,
        out,
        steps=_whole("steps", steps),
        episodes=_whole("episodes", episodes),
        top=_fraction(top),
        match_returns=like or match_returns,
        seed=seed,
        codec=codec,
        progress=progress,
    )
    return _report([made])


def split(
    source: Source,
    out: Out,
    fractions: tuple[float, ...] = (),
    validation: float | None = None,
    seed: int = 0,
    codec: Codec | None = None,
) -> Report:
    """Split episodes into training, validation and test sets.

    Parameters
    ----------
    source
        A vault.
    out
        NAME.vlt, which will hold train, validation, and test if there are three fractions.
    fractions
        Of the episodes, such as .8 .1 .1; by default .9 .1.
    validation
        The fraction for validation; the rest is for training.
    seed
        Decides everything random.
    codec
        raw or zstd; by default that of the source.
    """
    if fractions and validation is not None:
        raise OptionError("give --fractions or --validation, not both.")
    held_out = 0.1 if validation is None else validation
    shares = fractions or (1 - held_out, held_out)
    parts = vault.split(source, out, fractions=shares, seed=seed, codec=codec, progress=progress)
    return _report(parts.values())


def slice(
    source: Source,
    out: Out,
    start: int | None = None,
    stop: int | None = None,
    by: Literal["episodes", "steps"] = "episodes",
    codec: Codec | None = None,
) -> Report:
    """Take an interval of a vault's episodes, or of its time.

    Parameters
    ----------
    source
        A vault.
    out
        The vault to make.
    start
        The first, counted from 0; negative numbers count from the end.
    stop
        The one after the last.
    by
        steps counts the time steps of every row, and cuts the episodes that run there.
    codec
        raw or zstd; by default that of the source.
    """
    made = vault.slice(source, out, start=start, stop=stop, by=by, codec=codec, progress=progress)
    return _report([made])


def dedup(source: Source, out: Out, codec: Codec | None = None) -> Report:
    """Remove duplicate episodes.

    Parameters
    ----------
    source
        A vault.
    out
        The vault to make.
    codec
        raw or zstd; by default that of the source.
    """
    return _report([vault.dedup(source, out, codec=codec, progress=progress)])


def recode(
    source: Source,
    out: Out,
    codec: Codec | None = None,
    chunk_steps: int | None = None,
    layout: Literal["rows", "stream"] = "rows",
    time_limit: TimeLimit = None,
) -> Report:
    """Store a vault with another codec, other chunks, or in one row.

    Parameters
    ----------
    source
        A vault.
    out
        The vault to make.
    codec
        raw to learn from, zstd to distribute; by default that of the source.
    chunk_steps
        Steps of one row that are stored together.
    layout
        rows keeps those of the source; stream puts all episodes end to end in one, as programs for
        OG-MARL's vaults expect.
    time_limit
        For a vault of another program that flags the time limit as a termination: the limit.
    """
    made = vault.recode(
        source,
        out,
        codec=codec,
        chunk_steps=chunk_steps,
        layout=layout,
        time_limit=time_limit,
        progress=progress,
    )
    return _report([made])


def _whole(name: str, value: float | None) -> int | None:
    """Read a number of things, which may be written as 1e5."""
    if value is not None and value != round(value):
        raise OptionError(f"--{name} is a whole number, such as 100000 or 1e5: got {value}.")
    return None if value is None else round(value)


def _fraction(text: str | None) -> float | None:
    """Read a percentage."""
    if text is None:
        return None
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError as error:
        raise OptionError(f"--top is a percentage, such as 10%, or 0.1: got {text}.") from error


def _report(made: Iterable[vault.Vault]) -> Report:
    """Describe the new vaults and their sources."""
    facts = [_facts(one) for one in made]
    columns = ["path", "steps", "episodes", "incomplete", "mean return", "of"]
    rows = [
        [
            *(f[name] for name in columns[:4]),
            f["return"].get("mean"),
            _of(f["lineage"]),
        ]
        for f in facts
    ]
    return Report({"vaults": facts}, table(columns, rows))


def _facts(made: vault.Vault) -> dict[str, Any]:
    return {
        "path": made.path,
        "steps": made.num_steps,
        "episodes": len(made.episodes.row),
        "incomplete": made.episodes.incomplete,
        "return": spread(made.episodes.complete_returns),
        "length": spread(made.episodes.length),
        "lineage": made.provenance["lineage"],
    }


def _of(lineage: dict[str, Any]) -> str:
    """Return how many episodes there were."""
    return f"{sum(source['episodes'] for source in lineage['sources']):,}"
