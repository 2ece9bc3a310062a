"""The episode table: the position, the return and the end of each episode.

Episodes follow one another on the time axis of each row. A table is a structured array with one
record for each episode. A second table has one record for each row, its unfinished episode, so that
a block of steps can be scanned without the steps before it.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from offmarl._imports import import_optional
from offmarl.config import check_seed
from offmarl.errors import OptionError, ShapeError, VaultFormatError
from offmarl.teams import Team, by_team, largest_return, names_by_team, policy_columns
from offmarl.types import EnvSpec

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

OPEN, TERMINATED, TRUNCATED, CUT = range(4)
CAUSES = np.array(["open", "terminated", "truncated", "cut"])
"""How an episode ended: "open", not before the end of the data; "terminated" or "truncated" by the
environment; "cut" by the recording."""

Table = np.ndarray
"""A structured array of `dtype`, ``(M,)``."""


class Episodes(NamedTuple):
    """All M episodes of a vault, ordered by row and start.

    An episode is complete if the environment ended it, by termination or by a limit of its own. An
    episode that the recording cut off, or that is unfinished at the end of the data, is incomplete,
    and its return is partial. Mean returns, percentiles and distributions use `complete_returns`;
    report the number of `incomplete` ones with them.

    Where agents are in several teams, each episode has a return for each team: `team_returns`,
    `complete_team_returns` and `mean_returns`. The properties for a single return then raise
    `ShapeError`.
    """

    row: Int[np.ndarray, "M"]
    start: Int[np.ndarray, "M"]
    """Index of the first step on the time axis."""
    length: Int[np.ndarray, "M"]
    """Steps."""
    returns: Float[np.ndarray, "M N"]
    """Undiscounted sum of each agent's rewards."""
    terminated: Bool[np.ndarray, "M"]
    truncated: Bool[np.ndarray, "M"]
    """Truncated for at least one agent; never true together with ``terminated``."""
    cause: np.ndarray[Any, np.dtype[np.str_]]
    """One of `CAUSES` each."""
    policy_ids: Int[np.ndarray, "M N"]
    """The policy of each agent in the first step; -1 where unknown."""
    final: Int[np.ndarray, "M"]
    """Index into the vault's final views, or -1."""
    teams: tuple[Team, ...]
    """The teams of the agents, from `offmarl.teams.teams_of`."""

    def take(self, which: Any) -> "Episodes":
        """Return some episodes, chosen by an index or a mask."""
        return self.of_columns((column[which] for column in self.columns), self.teams)

    @property
    def columns(self) -> tuple[Any, ...]:
        """The fields that have an entry for each episode, in order."""
        return tuple(self)[:-1]

    @classmethod
    def of_columns(cls, columns: Iterable[Any], teams: tuple[Team, ...]) -> "Episodes":
        """Make a table of its `columns`."""
        return cls._make((*columns, teams))

    @classmethod
    def joined(cls, parts: Sequence["Episodes"]) -> "Episodes":
        """Join the tables of several vaults, one after the other."""
        columns = zip(*(part.columns for part in parts), strict=True)
        return cls.of_columns(map(np.concatenate, columns), parts[0].teams)

    @property
    def policy_id(self) -> Int[np.ndarray, "M"]:
        """The policy of the first agent in the first step; -1 where unknown."""
        return self.policy_ids[:, 0]

    @property
    def complete(self) -> Bool[np.ndarray, "M"]:
        """Episodes that the environment ended."""
        return np.isin(self.cause, CAUSES[[TERMINATED, TRUNCATED]])

    @property
    def episode_returns(self) -> Float[np.ndarray, "M"]:
        """The mean over agents of each episode's return; `ShapeError` for several teams."""
        if len(self.teams) > 1:
            raise ShapeError(
                f"episodes of {len(self.teams)} teams have no single return: use the return of "
                f"{' or '.join(self.returns_by_name)} (Episodes.team_returns in Python)."
            )
        return self.team_returns[:, 0]

    @property
    def team_returns(self) -> Float[np.ndarray, "M teams"]:
        """The mean over the agents of each team, of each episode's return."""
        return np.stack(by_team(self.returns, self.teams), 1)

    @property
    def returns_by_name(self) -> dict[str, Float[np.ndarray, "M"]]:
        """The `team_returns`: "return", or "return_TEAM" for each of several teams."""
        names = names_by_team("return", self.teams)
        return dict(zip(names, self.team_returns.T, strict=True))

    @property
    def scored(self) -> Bool[np.ndarray, "M"]:
        """Complete episodes with finite returns."""
        return self.complete & np.isfinite(self.team_returns).all(1)

    @property
    def largest_return(self) -> float:
        """The `offmarl.teams.largest_return` of complete episodes; of all where none is complete.

        Only finite ones count.
        """
        counts = self.scored if self.scored.any() else np.isfinite(self.team_returns).all(1)
        return float(largest_return(self.returns[counts], self.teams))

    @property
    def complete_returns(self) -> Float[np.ndarray, "K"]:
        """The `episode_returns` of those that are `scored`; `ShapeError` for several teams."""
        return self.episode_returns[self.scored]

    @property
    def complete_team_returns(self) -> dict[str, Float[np.ndarray, "K"]]:
        """The returns of the episodes that are `scored`, by the name of the team."""
        pairs = zip(self.teams, self.team_returns[self.scored].T, strict=True)
        return {team.name: returns for team, returns in pairs}

    @property
    def mean_return(self) -> float | None:
        """Mean of the `complete_returns`; None if there are none."""
        returns = self.complete_returns
        return float(returns.mean()) if len(returns) else None

    @property
    def mean_returns(self) -> dict[str, float | None]:
        """Means of the `complete_team_returns`, by team; None where there are none."""
        items = self.complete_team_returns.items()
        return {name: float(values.mean()) if len(values) else None for name, values in items}

    @property
    def incomplete(self) -> int:
        """Number of episodes that the recording cut off, or that are unfinished at the end."""
        return int((~self.complete).sum())

    @property
    def without_return(self) -> int:
        """Number of complete episodes without a finite return."""
        return int((self.complete & ~self.scored).sum())

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the table as a pandas data frame; see `to_arrow` for the columns.

        Each entry of ``returns`` and ``policy_ids`` is an array, and ``cause`` is categorical.

        Raises
        ------
        MissingExtraError
            pandas or PyArrow is not installed.
        """
        import_optional("pandas", "tables")
        return self.to_arrow().to_pandas()

    def to_polars(self) -> "polars.DataFrame":
        """Return the table as a Polars data frame; see `to_arrow` for the columns.

        ``returns`` and ``policy_ids`` are array columns, and ``cause`` an enumeration.

        Raises
        ------
        MissingExtraError
            Polars or PyArrow is not installed.
        """
        pl = import_optional("polars", "tables")
        return pl.from_arrow(self.to_arrow()).cast({"cause": pl.Enum(CAUSES.tolist())})

    def to_arrow(self) -> "pyarrow.Table":
        """Return the table as an Arrow table, whose row i is episode i.

        =============== ======================= ==============================================
        row             int64                   row of the vault: the parallel environment
        start           int64                   first step on the time axis of the row
        length          int64                   steps
        episode_return  double                  mean over agents of ``returns``; for several teams
                                                a column for each, such as episode_return_evaders
        returns         fixed_size_list<double> each agent's undiscounted sum of rewards
        complete        bool                    the environment ended it, not the recording
        terminated      bool                    it terminated
        truncated       bool                    it was truncated, by the environment or a cut
        cause           dictionary<string>      open, terminated, truncated or cut
        policy_id       int64                   first agent's policy of the first step; -1: unknown
        policy_ids      fixed_size_list<int64>  each agent's policy of the first step; -1: unknown
        final           int64                   number of its final view; -1 if there is none
        =============== ======================= ==============================================

        Raises
        ------
        MissingExtraError
            PyArrow is not installed.
        """
        pa = import_optional("pyarrow", "tables")
        agents = self.returns.shape[1]
        number = (self.cause[:, None] == CAUSES).argmax(1).astype(np.int8)

        def of_agents(values: Any) -> Any:
            return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), agents)

        return pa.table(
            {
                "row": self.row,
                "start": self.start,
                "length": self.length,
                **{f"episode_{name}": values for name, values in self.returns_by_name.items()},
                "returns": of_agents(self.returns),
                "complete": self.complete,
                "terminated": self.terminated,
                "truncated": self.truncated,
                "cause": pa.DictionaryArray.from_arrays(number, CAUSES.tolist()),
                "policy_id": self.policy_id,
                "policy_ids": of_agents(self.policy_ids),
                "final": self.final,
            }
        )


class Signals(NamedTuple):
    """The arrays that an episode table is computed from."""

    reward: Float[np.ndarray, "B T N"]
    terminated: Bool[np.ndarray, "B T N"]
    truncated: Bool[np.ndarray, "B T N"]
    policy_ids: Int[np.ndarray, "B T N"]

    @property
    def last(self) -> Bool[np.ndarray, "B T"]:
        """Steps that ended an episode, for all agents."""
        return (self.terminated | self.truncated).all(-1)


def dtype(num_agents: int, num_ids: int) -> np.dtype[Any]:
    """Return the packed type of a table's records, with the policy ids of the first agents."""
    return np.dtype(
        [
            ("row", "<i4"),
            ("start", "<i8"),
            ("length", "<i8"),
            ("returns", "<f8", (num_agents,)),
            ("cause", "u1"),
            ("policy_ids", "<i4", (num_ids,)),
            ("final", "<i8"),
        ]
    )


def none_running(rows: int, kind: np.dtype[Any], start: int = 0) -> Table:
    """Return the table of unfinished episodes for rows whose next step, ``start``, begins one."""
    table = np.zeros(rows, kind)
    table["row"] = np.arange(rows)
    table["start"] = start
    table["policy_ids"] = table["final"] = -1
    return table


def scan(running: Table, begin: int, signals: Signals) -> tuple[Table, Table]:
    """Divide a block of steps into episodes that end in it and episodes that continue.

    Rewards are added in the order of time, so returns have the same bits for any division into
    blocks.
    """
    reward, last = signals.reward, signals.last
    rows, _, num_agents = reward.shape
    row, time = np.nonzero(last)
    ends = last.sum(1)
    goes_on = np.cumsum(ends + 1) - 1
    first = goes_on - ends

    table = np.zeros(len(row) + rows, running.dtype)
    table["row"] = np.repeat(np.arange(rows), ends + 1)
    table["final"] = -1
    is_end = np.ones(len(table), bool)
    is_end[goes_on] = False
    table["start"][np.flatnonzero(is_end) + 1] = begin + time + 1
    table["start"][first] = running["start"]

    segment = first[:, None] + np.cumsum(last, 1) - last
    of_step = np.concatenate([first, segment.ravel()])
    table["length"] = np.bincount(segment.ravel(), minlength=len(table))
    table["length"][first] += running["length"]
    for agent in range(num_agents):
        weights = np.concatenate([running["returns"][:, agent], reward[..., agent].ravel()])
        table["returns"][:, agent] = np.bincount(of_step, weights, len(table))

    table["policy_ids"] = _first_policies(table, begin, signals.policy_ids)
    going = running["length"] > 0
    table["policy_ids"][first[going]] = running["policy_ids"][going]
    by_limit = (signals.truncated & ~signals.terminated)[row, time].any(-1)
    table["cause"][is_end] = np.where(by_limit, TRUNCATED, TERMINATED)
    return table[is_end], table[goes_on]


def _first_policies(table: Table, begin: int, policy_ids: Int[np.ndarray, "B T N"]) -> Any:
    steps, num_ids = policy_ids.shape[1], table["policy_ids"].shape[1]
    time = table["start"] - begin
    inside = ((time >= 0) & (time < steps))[:, None]
    ids = policy_ids[table["row"], np.clip(time, 0, steps - 1), :num_ids]
    return np.where(inside, ids, -1)


def attach_finals(
    episodes: Table,
    begin: int,
    row: Int[np.ndarray, "F"],
    time: Int[np.ndarray, "F"],
    first: int,
) -> Table:
    """Assign final views to the episodes that ended in a block."""
    ends = zip(episodes["row"], episodes["start"] + episodes["length"] - 1 - begin, strict=True)
    episode_of = {end: episode for episode, end in enumerate(ends)}
    episodes = episodes.copy()
    for number, end in enumerate(zip(row.tolist(), time.tolist(), strict=True), first):
        if end not in episode_of:
            raise ShapeError(
                f"a final view was given for row {end[0]}, step {end[1]} of this chunk, where no "
                "episode ends or which has a final view already: give at most one for each step "
                "whose `last` is true."
            )
        episodes["final"][episode_of.pop(end)] = number
    return episodes


def with_known_causes(table: Table) -> Table:
    """Return a table that was read; `VaultFormatError` if an episode ends for an unknown reason."""
    if (worst := table["cause"].max(initial=0)) >= len(CAUSES):
        raise VaultFormatError(f"the episode table has the unknown cause {worst} of an end.")
    return table


def are_contiguous(table: Table, length: int, rows: int) -> bool:
    """Whether the episodes of each row cover its ``length`` steps without gaps."""
    order = np.lexsort((table["start"], table["row"]))
    row, start, steps = (table[name][order] for name in ("row", "start", "length"))
    ends = start + steps
    first = np.diff(row, prepend=-1) != 0
    before = np.where(first, 0, np.roll(ends, 1))
    last = np.roll(first, -1)
    return bool(
        (steps > 0).all()
        and (start == before).all()
        and (ends[last] == length).all()
        and row[first].tolist() == list(range(rows if length else 0))
    )


def to_episodes(
    table: Table, teams: tuple[Team, ...], cause: UInt8[np.ndarray, "M"] | None = None
) -> Episodes:
    """Return a table as plain arrays, ordered by row and start."""
    order = np.lexsort((table["start"], table["row"]))
    cause = (table["cause"] if cause is None else cause)[order]
    ids, agents = table["policy_ids"][order].astype(np.int64), np.arange(table["returns"].shape[1])
    if len(agents) > ids.shape[1]:  # only that of the first agent, for its whole team
        first = next(team for team in teams if 0 in team.agents)
        ids = np.where(np.isin(agents, first.agents), ids, -1)
    return Episodes(
        row=table["row"][order].astype(np.int64),
        start=table["start"][order],
        length=table["length"][order],
        returns=table["returns"][order],
        terminated=cause == TERMINATED,
        truncated=(cause == TRUNCATED) | (cause == CUT),
        cause=CAUSES[cause],
        policy_ids=ids,
        final=table["final"][order],
        teams=teams,
    )


def policies_by(episodes: Episodes, spec: EnvSpec, column: str) -> Int[np.ndarray, "M"]:
    """Return the policy of each episode in a column such as ``policy_agent_0``."""
    columns = policy_columns(spec)
    if column not in columns:
        raise OptionError(f"{column!r} has no policies: give one of {', '.join(columns)}.")
    return episodes.policy_ids[:, columns[column]]


PARTS = {2: ("train", "validation"), 3: ("train", "validation", "test")}
"""Names of the parts that episodes are split into, by their number."""


def shares(fractions: Iterable[float] | None, validation: float | None) -> list[float]:
    """Return the shares of the parts that episodes are split into."""
    if fractions is not None and validation is not None:
        raise OptionError("give --fractions or --validation, not both.")
    held_out = 0.1 if validation is None else validation
    part_shares = [1 - held_out, held_out] if fractions is None else list(fractions)
    if len(part_shares) not in PARTS or min(part_shares) <= 0 or abs(sum(part_shares) - 1) > 1e-6:
        raise OptionError(
            f"fractions are two (train, validation) or three (and test), above 0, and sum to 1: "
            f"got {' '.join(f'{share:g}' for share in part_shares) or 'none'}."
        )
    return part_shares


def split(
    count: int,
    shares: Sequence[float],
    seed: int,
    path: object,
    policies: Int[np.ndarray, "M"] | None = None,
    unit: str = "episodes",
) -> dict[str, Int[np.ndarray, "K"]]:
    """Divide episodes at random; return the numbers of each part, in random order.

    With ``policies``, the policies are divided, and all episodes of a policy stay together.
    """
    if policies is not None:
        values, index = np.unique(policies, return_inverse=True)
        divided = split(len(values), shares, seed, path, unit="policies")
        return {name: np.flatnonzero(np.isin(index, part)) for name, part in divided.items()}
    edges = np.round(np.cumsum(shares)[:-1] * count).astype(int)
    parts = np.split(shuffle_episodes(count, seed), edges)
    for name, part in zip(PARTS[len(shares)], parts, strict=True):
        if not len(part):
            raise OptionError(
                f"{name} would be empty: {path} has {count} {unit}, to be split "
                f"{' : '.join(f'{share:g}' for share in shares)}."
            )
    return dict(zip(PARTS[len(shares)], parts, strict=True))


def hold_out(
    count: int, fraction: float, path: object
) -> tuple[Int[np.ndarray, "K"], Int[np.ndarray, "H"]]:
    """Divide episodes at random, deterministically; see `offmarl.vault.Dataset.hold_out`."""
    num_train = min(round((1 - fraction) * count), count - 1) if 0 < fraction < 1 else 0
    if num_train < 1:
        raise OptionError(
            f"a fraction of {fraction:g} of the {count} episodes of {path} cannot be held out: "
            "give one above 0 and below 1 that leaves an episode to learn from."
        )
    order = shuffle_episodes(count, seed=0)
    return np.sort(order[:num_train]), np.sort(order[num_train:])


def shuffle_episodes(count: int, seed: int) -> Int[np.ndarray, "M"]:
    """Return the numbers of ``count`` episodes in random order."""
    return np.random.default_rng(check_seed(seed)).permutation(count)
