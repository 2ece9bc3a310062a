"""Cross-play: the returns of policies that were trained apart and act together.

One policy acts for some agents of a team, and a partner for the rest. The parameters of both are
data of one compiled program: a table of any number of policies is compiled once, and the device
holds the parameters of two policies at a time. A block of the work is a row of the table.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float
from scipy.special import stdtrit

from offmarl import records, tracking
from offmarl._compiling import pinned
from offmarl._version import __version__
from offmarl.config import PositiveInt, check_rules, check_seed
from offmarl.envs import Environment
from offmarl.envs.sides import Seat, compose, one_of, rest_of
from offmarl.errors import OptionError, RunError
from offmarl.launch import Work
from offmarl.paths import local, safe_path
from offmarl.programs.recording.sides import environment_of, members_of, names_in, run_of
from offmarl.programs.registry import file_of_run
from offmarl.programs.runs.compiling import keep_compiled_programs
from offmarl.programs.runs.evaluate import play_policy
from offmarl.programs.runs.identity import environment_source
from offmarl.statistics import MIN_RUNS, Estimate, standard_error
from offmarl.teams import Team, find_side, name_of_side, teams_of
from offmarl.tracking import Acting
from offmarl.types import ArrayTree, EnvSpec, Policy


class Member(NamedTuple):
    """A policy that meets others."""

    name: str
    ways: Mapping[Acting, Policy]
    """Policy of all agents by acting; both are equal if it draws no actions or its name decides."""
    params: ArrayTree
    seats: tuple[bool, bool]
    """Whether it can act for the side, and for the rest."""


class CrossPlayWork(Work):
    """A table of policies against policies, of which each row is a block.

    ``policies`` and ``partners`` are names as `offmarl.programs.recording.sides` has them, but RUN
    names all seeds; the rest are the options of ``offmarl cross-play``. `OptionError` if no policy
    meets another one, if one has a weight or agents that choose after one another, or if the
    environment has several teams or one agent.
    """

    def __init__(
        self,
        policies: Sequence[str],
        partners: Sequence[str] = (),
        env: str | None = None,
        side: str | None = None,
        episodes: int = 128,
        seed: int = 0,
        programs: Sequence[Path] = (),
    ):
        check_rules("eval_episodes", PositiveInt, episodes)
        self.env, self.side, self.rest = _environment((*policies, *partners), env, side)
        self.episodes, self._seed, self._programs = episodes, check_seed(seed), programs
        self._pool: dict[str, Member] = {}
        populations: dict[Path, set[str]] = {}
        self.scored = self._numbers(policies, populations)
        self.partners = self._numbers(partners, populations) if partners else self.scored
        self.dependent = any(len(members) > 1 for members in populations.values())
        self.members = [*self._pool.values()]
        ways = [member.ways for member in self.members]
        self._policies = (*dict.fromkeys(policy for way in ways for policy in way.values()),)
        self._meet = self._meeting()
        draws = any(way["greedy"] != way["sampled"] for way in ways)
        self.modes: tuple[Acting, ...] = ("greedy", "sampled") if draws else ("greedy",)
        name = self.env.spec.name
        about: dict[str, Any] = {"environment": name, **environment_source(name)}
        about |= {"policies": [[member.name, x] for x, member in self._pool.items()]}
        about |= {"scored": self.scored, "partners": self.partners, "side": self.side.name}
        about |= {"episodes": episodes, "seed": seed, "offmarl": __version__}
        sha256 = hashlib.sha256(json.dumps(tracking.plain(about)).encode()).hexdigest()
        path = Path("runs") / safe_path(name, option="--env") / f"cross-play-{sha256[:8]}"
        super().__init__("cross-play", local(path), about, len(self.members))

    def _numbers(self, sources: Sequence[str], populations: dict[Path, set[str]]) -> list[int]:
        """Load the policies of some names; return their numbers, the same for the same policy.

        Members of runs with ``--pbt`` are added to ``populations``.
        """
        numbers = []
        for source, (name, weight) in ((x, entry) for x in sources for entry in names_in(x)):
            if weight != 1:
                raise OptionError(f"{source} has a weight, but pairs count alike: leave it out.")
            run = run_of(name)
            args = tracking.read_run(local(run[0]))["args"] if run else {}
            seat = self.rest if args.get("side") == self.rest.name else self.side
            full_name = f"{name}@*" if run and run[1] is None else name
            file = file_of_run(local(run[0]), self._programs) if run else None
            best, samplers = (
                members_of(full_name, self.env, seat, greedy=x, program=file) for x in (True, False)
            )
            if run and args.get("pbt"):
                members = populations.setdefault(local(run[0]), set())
                members |= {member.name for member in best}
            for greedy, sampled in zip(best, samplers, strict=True):
                full = f"{run[0]}{greedy.name.removeprefix(local(run[0]).name)}" if run else name
                about = (greedy.about.get(x, "") for x in ("policy", "parameters", "acting"))
                content = " ".join(about) + greedy.about.get("sha256", "")
                if content not in self._pool:
                    draws = run and sampled.policy.draws(sampled.params)
                    both = greedy.policy, (sampled if draws else greedy).policy
                    self._pool[content] = self._member(full, both, greedy.params, greedy.agents)
                numbers.append([*self._pool].index(content))
        return [*dict.fromkeys(numbers)]

    def _member(
        self, name: str, pair: Sequence[Policy], params: ArrayTree, agents: tuple[int, ...]
    ) -> Member:
        """Return a policy that acts for all agents."""
        spec = self.env.spec
        if pair[0].joint:
            raise OptionError(
                f"the agents of {name} choose after one another, so it has no seat beside a "
                "partner: give policies whose agents act on their own."
            )
        seats = agents != self.rest.agents, agents != self.side.agents
        if not all(seats):
            pair, params = [compose(spec, [Seat(agents, x, agents)]) for x in pair], (params,)
        params = jax.tree.map(np.asarray, params)
        return Member(name, {"greedy": pair[0], "sampled": pair[1]}, params, seats)

    def _meeting(self) -> Bool[np.ndarray, "M M"]:
        """Return which policy of the side meets which one of the rest; each also meets itself."""
        diagonal = np.eye(len(self.members), dtype=bool)
        meet = diagonal.copy()
        meet[np.ix_(self.scored, self.partners)] = True
        side, rest = np.array([member.seats for member in self.members]).T
        meet = (meet | meet.T) & side[:, None] & rest
        if not (meet & ~diagonal).any():
            raise OptionError(
                f"there is no pair to play among {', '.join(x.name for x in self.members)}: "
                "give several runs, a run of several seeds, or --partners."
            )
        return meet

    @pinned()
    def run(self, block: int) -> None:
        """Play one policy, for the side, with each of its partners."""
        keep_compiled_programs()
        members = range(len(self.members))
        row = {x: [self._play(block, partner, x) for partner in members] for x in self.modes}
        tracking.write_json(self.row(block), row)

    def _play(self, member: int, partner: int, acting: Acting) -> tuple[float, float]:
        """Return the mean return of a pair, and its standard error; NaN where they are unknown."""
        if not self._meet[member, partner]:
            return np.nan, np.nan
        policy = _pair(self.env.spec, self.side.agents, self.rest.agents, self._policies)
        params = tuple(self._params(self.members[number], acting) for number in (member, partner))
        # Episodes are drawn anew for each policy of the side, so that intervals hold their chance.
        key = jax.random.fold_in(jax.random.key(self._seed), member)
        returns = play_policy(self.env, policy, self.episodes, params, key)[:, 0].astype(float)
        return returns.mean(), float(standard_error(returns))

    def _params(self, member: Member, acting: Acting) -> tuple[np.int32, tuple[ArrayTree, ...]]:
        """Return the parameters of `_pair` for a policy; those of the others are not used."""
        params = (
            next(other.params for other in (member, *self.members) if policy in other.ways.values())
            for policy in self._policies
        )
        return np.int32(self._policies.index(member.ways[acting])), tuple(params)

    def row(self, block: int) -> Path:
        """Return the file of a row. The directory's name says what it was made from."""
        return self.path / f"row-{block}.json"

    def is_done(self, block: int) -> bool:
        """Return whether a row is played."""
        return self.row(block).exists()

    def tables(self) -> dict[Acting, Float[np.ndarray, "M M 2"]]:
        """Return mean returns and their standard errors; NaN for those that did not meet.

        Rows are policies that act for the side, columns those that act for the rest.
        """
        rows = [self._read(self.row(block)) for block in range(len(self.members))]
        return {acting: np.stack([row[acting] for row in rows]) for acting in self.modes}

    def _read(self, file: Path) -> dict[Acting, Float[np.ndarray, "M 2"]]:
        data = records.parse(file.read_bytes(), str(file), RunError)
        try:
            row = {acting: np.array(data[acting], float) for acting in self.modes}
        except (KeyError, TypeError, ValueError):
            row = {}
        if any(cells.shape != (len(self.members), 2) for cells in row.values()) or not row:
            raise RunError(f"{file} is not the row of a table of these policies: delete it.")
        return row


def _environment(
    sources: Sequence[str], env: str | None, side: str | None
) -> tuple[Environment, Team, Team]:
    """Return the environment, the side that a policy acts for, and the rest."""
    environment, runs = environment_of(sources, env)
    if len(teams := teams_of(environment.spec)) > 1:
        raise OptionError(
            f"cross-play is that of agents of one team, and {environment.spec.name} has the teams "
            f"{', '.join(team.name for team in teams)}: record them with `offmarl record "
            "--policy`, or measure them with `offmarl exploitability`."
        )
    trained = runs[0]["args"].get("side") if runs else None
    learner = find_side(environment.spec, side or trained or name_of_side(environment.spec, (0,)))
    rest = rest_of(environment.spec, learner)
    return environment, learner, Team(name_of_side(environment.spec, rest), rest)


@lru_cache(maxsize=16)
def _pair(
    spec: EnvSpec, side: tuple[int, ...], rest: tuple[int, ...], policies: tuple[Policy, ...]
) -> Policy:
    """Return one of some policies for the side, and one for the rest.

    Its parameters are for each of the two ``(which, params of each policy)``.
    """

    def member(number: int) -> Policy:
        def act(params: ArrayTree, *inputs: Any) -> Any:
            return policies[number].act(params[number], *inputs)

        return policies[number]._replace(act=act)

    member_policy = one_of(tuple(map(member, range(len(policies)))))
    agents = tuple(range(spec.num_agents))
    return compose(spec, [Seat(side, member_policy, agents), Seat(rest, member_policy, agents)])


# ---------------------------------------------------------------------------------- scores


def scores(
    mean: Float[np.ndarray, "M M"],
    names: Sequence[str],
    scored: Sequence[int],
    partners: Sequence[int],
    dependent: bool = False,
) -> dict[str, Any]:
    """Return the scores of policies and partners in a table of mean returns, for JSON.

    A pair counts with the mean of both seats; one that met in one seat only, with that one. The
    diagonal is self-play and no part of cross-play. The share of the best response is what a policy
    gets beside its partners, divided by what the best of the table gets beside each of them, the
    partner itself included; None if that is not positive. Intervals are over policies; there are
    none if they are ``dependent``, as the members of a population.
    """
    pair = np.where(np.isnan(mean), mean.T, np.where(np.isnan(mean.T), mean, (mean + mean.T) / 2))
    apart = np.where(np.eye(len(mean), dtype=bool), np.nan, pair)

    def play(left_out: int | None) -> Float[np.ndarray, "3"]:
        rows, columns = ([x for x in numbers if x != left_out] for numbers in (scored, partners))
        self_play, cross_play = pair[rows, rows], np.array([_mean(apart[x, columns]) for x in rows])
        return np.array([_mean(self_play), _mean(cross_play), _mean(self_play - cross_play)])

    def row(number: int) -> dict[str, Any]:
        columns = [x for x in partners if np.isfinite(apart[number, x])]
        worst = min(columns, key=lambda x: apart[number, x], default=None)
        best = sum(np.nanmax(pair[:, x]) for x in columns)
        return {
            "policy": names[number],
            "self_play": pair[number, number],
            "cross_play": _mean(apart[number, columns]),
            "worst": np.nan if worst is None else apart[number, worst],
            "worst_partner": None if worst is None else names[worst],
            "best_response_share": apart[number, columns].sum() / best if best > 0 else np.nan,
        }

    rows = [row(number) for number in scored]
    samples = [] if dependent else [scored, [x for x in partners if x not in scored]]
    statistics = _over_policies(play, *samples)
    means = {x: _mean([cells[x] for cells in rows]) for x in ("worst", "best_response_share")}
    estimates = zip(("self_play", "cross_play", "gap"), statistics, strict=True)
    table = {name: estimate._asdict() for name, estimate in estimates} | means | {"policies": rows}
    plain: dict[str, Any] = tracking.plain(table)
    return plain


def _over_policies(
    statistics: Callable[[int | None], Float[np.ndarray, "K"]], *samples: Sequence[int]
) -> list[Estimate]:
    """Return statistics, given without a policy of a number, with 95% intervals over policies.

    The cells of a row or column share a policy, so an interval over cells would be too narrow. Each
    policy in turn is left out with its row and column (the delete-one jackknife; Arvesen 1969 has
    it for statistics of pairs). The first sample are the policies, and another one is that of their
    partners, who count as fixed if they are fewer than `MIN_RUNS`.
    """
    values = statistics(None)
    large = [sample for sample in samples if min(len(sample), len(samples[0])) >= MIN_RUNS]
    variance = sum((len(x) - 1) * np.var([*map(statistics, x)], axis=0) for x in large)
    halves = np.sqrt(variance) * stdtrit(min(map(len, large), default=1) - 1, 0.975)
    ends = np.stack([values, values - halves, values + halves], axis=1).tolist()
    return [Estimate(*(end if np.isfinite(end).all() else end[:1])) for end in ends]


def _mean(values: Any) -> float:
    """Return the mean of the finite values; NaN if there is none."""
    finite = np.array(values)[np.isfinite(values)]
    return float(finite.mean()) if finite.size else np.nan
