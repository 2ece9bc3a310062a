"""PSRO: populations of responses to one another, for opposing sides.

Each side has a population. In an iteration, every side learns a response to the others' members,
which are drawn by a meta-strategy for each episode; the responses become members, and the table of
payoffs of all members is played on (policy-space response oracles, Lanctot et al. 2017, arXiv
1711.00832). The oracle that learns a response is another recorder. The meta-strategies are

- ``last``: the newest member. This is self-play in turns;
- ``uniform``: all members alike. This is fictitious self-play (Heinrich et al. 2015);
- ``nash``: a Nash equilibrium of the table, for two sides that share a constant sum;
- ``cce``: the marginals of a coarse correlated equilibrium, of the largest sum of payoffs;
- ``alpha-rank``: those of the stationary distribution of alpha-rank in the limit of infinite alpha.

Members are the steps of one run, ``RUN@SEED/NUMBER``, and act for all agents: ``RUN@0/3`` is the
third response of every side, and ``RUN@0/0`` has not learned. ``population.json`` in the run has
the table, and the meta-strategy of each of its sizes. The members' matches are one vault, in which
all pairs meet equally often.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray
from rich.console import Console, Group

from offmarl import cli, envs, settings, tracking
from offmarl._compiling import pinned, quickly
from offmarl.checkpoint import Checkpoints
from offmarl.cli import tasks
from offmarl.cli.output import as_is
from offmarl.config import (
    PositiveInt,
    Role,
    Seed,
    SeedCount,
    Validated,
    option,
    read_values,
)
from offmarl.envs.base import Wrapper
from offmarl.envs.sides import (
    Seat,
    TeamPolicy,
    compose,
    play_side,
    population,
    rest_of,
    without_others,
)
from offmarl.equilibria import Meta, meta_strategy, require_constant_sum
from offmarl.errors import OptionError, RunError
from offmarl.evaluation import require_time_limit
from offmarl.launch import Share, Work, join_work
from offmarl.paths import local, path_text
from offmarl.programs import Hyperparameters, OnlineArgs, Program, hyperparameters
from offmarl.programs.best_responses import require_learner
from offmarl.programs.program import recorded_args
from offmarl.programs.recording.online import Recorded, describe_vault, summarise
from offmarl.programs.recording.record import check_recipe, chunks_of, record_policy
from offmarl.programs.recording.recorder import fold_key, label_of, run_directory
from offmarl.programs.recording.sides import describe_policies, joint_policy
from offmarl.programs.registry import ProgramOrigin, load_origin
from offmarl.programs.runs.compiling import keep_compiled_programs
from offmarl.programs.runs.evaluate import play_policy
from offmarl.programs.runs.finite import require_finite
from offmarl.programs.runs.identity import environment_source, fingerprint, made_from
from offmarl.programs.runs.loop import build, collect, online_schedule
from offmarl.programs.runs.policy import load_policy
from offmarl.programs.runs.run import open_run
from offmarl.programs.runs.trained import Built, builder_of, stack_seeds
from offmarl.rollout import meet_others
from offmarl.statistics import standard_error
from offmarl.teams import Team, find_side, name_of_side, spec_of, teams_of
from offmarl.types import ArrayTree, EnvSpec, Policy

POPULATION_FILE = "population.json"
"""File of a run: the table of payoffs, and the meta-strategy of each of its sizes."""

RESPOND, PLAY = range(2)
"""Purposes of random keys."""

_SHARED = [field.name for field in fields(OnlineArgs)]
"""Arguments of all recorders, which are no options of the oracle's own."""

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(Validated):
    """Arguments of PSRO."""

    env: str = option("classic/rps", Role.CASE)
    """Environment: a name that `offmarl envs` lists, or code of your own as path/to/file.py:FACTORY
    or package.module:FACTORY."""
    side: str = ""
    """In an environment of one team: the agents of one side, such as agent_0; the others are the
    other side. By default each of several teams is a side."""
    oracle: str = "ippo"
    """The recorder that learns responses, such as ippo, mappo, iql or qmix."""
    oracle_option: tuple[str, ...] = ()
    """Options of the oracle's own as KEY=VALUE, such as learning_rate=3e-4 network=recurrent; by
    default those of offmarl's settings for the environment, which the run records."""
    response_steps: PositiveInt = 61_440
    """Environment steps in which a response learns."""
    meta: Meta = "nash"
    """How the members that a response meets are drawn: last (self-play), uniform (fictitious
    self-play), nash (zero-sum games of two sides), cce or alpha-rank."""
    iterations: PositiveInt = 9
    """Responses that each side learns. One more member of its population has not learned."""
    num_envs: PositiveInt = 32
    """Number of environments that run side by side."""
    episodes: PositiveInt = 1024
    """Episodes of each entry of the table of payoffs."""
    steps: PositiveInt = 100_000
    """Environment steps of matches to record for each seed."""
    out: Path = option(Path("vaults"), Role.CASE | Role.FREE | Role.LOCAL)
    """Directory for the vaults, ENV.vlt/psro-ORACLE-META-SEED, and the run, ENV.run/..., too."""
    seeds: SeedCount = option(1, Role.CASE)
    """Number of independent populations, which share compiled programs."""
    seed: Seed = option(0, Role.CASE)
    """The first of the seeds."""


def oracle_of(args: Args) -> tuple[Callable[..., Program], OnlineArgs]:
    """Return the oracle's ``make``, and its arguments."""
    module, options = _module(args), dict(map(_option, args.oracle_option))
    options = read_values(module.Args, options, "--oracle-option", refused=_SHARED)
    sizes = {"total_steps": args.response_steps, "num_envs": args.num_envs, "evaluations": 1}
    oracle = module.Args(env=args.env, **sizes, **options)
    return module.make, oracle


def with_settings(args: Args, run: Path) -> Args:
    """Return arguments whose options of the oracle include those of offmarl's settings files.

    A run records them, and keeps those that it has begun with, even if the files change.
    """
    if tracking.is_run(run):
        options = tracking.read_run(run)["args"]["oracle_option"]
    else:
        packaged = settings.origins_of(_module(args).Args.for_env(args.env)).settings
        values = {name: x.value for name, x in packaged.items() if name not in _SHARED}
        options = [f"{name}={json.dumps(value)}" for name, value in tracking.plain(values).items()]
    given = [_option(pair)[0] for pair in args.oracle_option]
    added = [pair for pair in options if _option(pair)[0] not in given]
    return replace(args, oracle_option=(*args.oracle_option, *added))


def _module(args: Args) -> ModuleType:
    """Import the oracle; `OptionError` if it does not learn."""
    module = load_origin("recorder", ProgramOrigin(args.oracle, None, None), Path())
    require_learner(module, args.oracle)
    return module


def _option(pair: str) -> tuple[str, Any]:
    name, equals, value = pair.partition("=")
    if not equals:
        raise OptionError(f"--oracle-option {pair} is not KEY=VALUE.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def sides_of(spec: EnvSpec, side: str) -> tuple[Team, ...]:
    """Return the sides that oppose one another; `OptionError` if there is only one."""
    if side:
        team = find_side(spec, side)
        rest = rest_of(spec, team)
        return team, Team(name_of_side(spec, rest), rest)
    if len(teams := teams_of(spec)) == 1:
        raise OptionError(
            f"{spec.name} has one team, and members respond to those of other sides: give --side "
            f"with some of its agents, such as {name_of_side(spec, (0,))}."
        )
    return teams


# ---------------------------------------------------------------------------------- program


def oracles(spec: EnvSpec, args: Args) -> list[Built]:
    """Return the oracle's built program for each side."""
    about = {"kind": "recorder", "program": args.oracle, "file": None, "sha256": None}
    about |= {"args": tracking.plain(recorded_args(oracle_of(args)[1]))}
    build_for = builder_of(about, Path(args.oracle))
    return [build_for(spec_of(spec, side.agents)) for side in sides_of(spec, args.side)]


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:  # noqa: ARG001
    """Build the program whose policy acts by one member of each side; it has no updates."""
    built, hyper = oracles(spec, args), hyperparameters(oracle_of(args)[1])

    def init(key: PRNGKeyArray, _hyper: Hyperparameters) -> tuple[ArrayTree, ...]:
        return tuple(x.program.policy_params(x.program.init(key, hyper)) for x in built)

    def policy(greedy: bool) -> Policy:
        pairs = zip(sides_of(spec, args.side), built, strict=True)
        return compose(
            spec, [Seat(side.agents, x.program.policy(greedy), side.agents) for side, x in pairs]
        )

    return Program(init, (), policy, lambda state: state, greedy=built[0].program.greedy)


# ---------------------------------------------------------------------------------- responses


class Block(NamedTuple):
    """A part of the work, which needs those of its seed in earlier phases."""

    phase: int
    seed: int
    kind: Literal["response", "payoffs", "matches"]
    indices: tuple[int, ...] = ()
    """Number and side of a response; or for payoffs the number of the member of each side."""


def blocks_of(args: Args, num_sides: int) -> Iterator[Block]:
    """Yield the blocks in an order in which they can be run."""
    size, seeds = args.iterations + 1, range(args.seed, args.seed + args.seeds)
    for number in range(size):
        for seed, side in product(seeds, range(num_sides)):
            yield Block(2 * number, seed, "response", (number, side))
        for seed, profile in product(seeds, np.ndindex(*(number + 1,) * num_sides)):
            if max(profile) == number:
                yield Block(2 * number + 1, seed, "payoffs", profile)
    for seed in seeds:
        yield Block(2 * size, seed, "matches")


@dataclass(frozen=True)
class _Sided(Wrapper):
    """An environment whose teams are the sides."""

    spec: EnvSpec


class Responses(Work):
    """The members of each side, the table of their payoffs, and their matches."""

    def __init__(self, args: Args):
        path = local(run_directory(args, program := f"psro-{args.oracle}-{args.meta}"))
        args = with_settings(args, path)
        self._make, self._oracle = oracle_of(args)
        env, name = envs.make(args.env), envs.short_name(args.env)
        require_time_limit(env.spec)
        self.env, self.args, self.built = env, args, oracles(env.spec, args)
        self.sides = sides_of(env.spec, args.side)
        if args.meta == "nash" and (len(self.sides) != 2 or env.spec.reward == "team"):
            shared = np.array([[0.0, 1.0]] * len(self.sides))  # returns that all sides share
            require_constant_sum(shared, env.spec.name)
        self._policies = [oracle.program.policy(oracle.program.greedy) for oracle in self.built]
        self.seeds = [*range(args.seed, args.seed + args.seeds)]
        self.parts = [*blocks_of(args, len(self.sides))]
        self._members = dict[tuple[int, int, int], TeamPolicy]()
        self._learned = False
        place, label = path.parent.with_suffix(".vlt"), label_of(program, args)
        self.vaults = {seed: place / f"{label}-{seed}" for seed in self.seeds}
        self._about = {"args": tracking.plain(recorded_args(args) | {"env": name})}
        identity = self._about | environment_source(env.spec.name)
        super().__init__(f"record {path.name}", path, identity, len(self.parts))

    def label(self, block: int) -> str:
        """Return the name of a block in messages."""
        _, seed, kind, indices = self.parts[block]
        return f"{kind} {'-'.join(map(str, indices))} of seed {seed}"

    def needs(self, block: int) -> list[int]:
        """Return the blocks of the same seed in earlier phases."""
        phase, seed, *_ = self.parts[block]
        earlier = enumerate(self.parts[:block])
        return [x for x, other in earlier if other.seed == seed and other.phase < phase]

    @pinned()
    def run(self, block: int) -> None:
        """Learn a response, play an entry of the table, or record the matches."""
        keep_compiled_programs()
        _, seed, kind, indices = self.parts[block]
        ways: dict[str, Callable[..., None]]
        ways = {"response": self._respond, "payoffs": self._play, "matches": self._record}
        ways[kind](seed, *indices)

    def _respond(self, seed: int, number: int, side: int) -> None:
        """Learn a member, and keep it; that of number 0 has not learned."""
        checkpoints = self._responses(seed, side)
        if number in checkpoints.steps():
            return
        hyper, program = hyperparameters(self._oracle), self.built[side].program
        init_key, key = jax.random.split(fold_key(seed, RESPOND, number, side))
        if number == 0:
            state = program.init(init_key, hyper)
        else:
            env = self._against(seed, number, side)
            blank: Any = without_others(env)
            program = build(self._make, env.spec, self._oracle, blank, lambda: blank)
            state = meet_others(
                env, jax.jit(program.init, compiler_options=quickly())(init_key, hyper)
            )
            schedule = online_schedule(program, self._oracle)
            *_, (_, (state,), _) = collect(program, [state], [hyper], [key], schedule, 0, [None])
        params = jax.device_get(program.policy_params(state))
        require_finite(params, f"response {number} of {self.sides[side].name} in {self.path}")
        checkpoints.save(number, {"policy": params}, {})

    def _against(self, seed: int, number: int, side: int) -> envs.Environment:
        """Return the environment of a side, whose opponents are drawn by the meta-strategy.

        Their populations have the size of the last iteration, with weights of 0 for members to
        come, so that one program is compiled for all iterations.
        """
        weights, size, opponents = self.strategies(seed, number), self.args.iterations, {}
        for place, team in enumerate(self.sides):
            members = [self.member(seed, x if x < number else 0, place) for x in range(size)]
            padded = [*weights[place], *np.zeros(size - number)]
            opponents[team.name] = population(self.env.spec, members, padded)
        del opponents[self.sides[side].name]
        return play_side(self.env, self.sides[side].name, opponents)

    def member(self, seed: int, number: int, side: int) -> TeamPolicy:
        """Return a member of a side."""
        if (seed, number, side) not in self._members:
            run, like = self.path.name, {"policy": self.built[side].policy}
            if self._is_learned():
                params = load_policy(self.path, seed, step=number).params[side]
            else:
                params = self._responses(seed, side).restore(like, number)[0]["policy"]
            params = jax.tree.map(np.asarray, params)
            about: dict[str, Any] = {"policy": "psro", "run": run}
            about |= {"seed": seed, "step": str(number), "parameters": fingerprint(params)}
            agents, name = self.sides[side].agents, f"{run}@{seed}/{number}"
            member = TeamPolicy(self._policies[side], params, agents, name, about)
            self._members[seed, number, side] = member
        return self._members[seed, number, side]

    def _play(self, seed: int, *profile: int) -> None:
        """Play an entry of the table of payoffs."""
        spec, args = self.env.spec, self.args
        side_of = {agent: x for x, side in enumerate(self.sides) for agent in side.agents}
        teams = tuple(side_of[agent] for agent in range(spec.num_agents))
        env = _Sided(self.env, replace(spec, teams=teams, team_names=None))
        numbered = zip(self.sides, profile, strict=True)
        players = {team.name: self.member(seed, x, n) for n, (team, x) in enumerate(numbered)}
        policy, params = joint_policy(self.env, players)
        key = fold_key(seed, PLAY, *profile)
        returns = play_policy(env, policy, args.episodes, params, key).astype(float)
        if args.meta == "nash":
            require_constant_sum(returns.T, spec.name)
        file = self._entry(seed, profile)
        file.parent.mkdir(parents=True, exist_ok=True)
        entry = {"returns": returns.mean(0), "standard_errors": standard_error(returns)}
        tracking.write_json(file, tracking.plain(entry))

    def table(
        self, seed: int, size: int, key: str = "returns"
    ) -> Float[np.ndarray, "sides *members"]:
        """Return the mean returns of the sides' first members, or their ``standard_errors``."""
        shape = (size,) * len(self.sides)
        files = (self._entry(seed, profile) for profile in np.ndindex(*shape))
        entries = np.array([json.loads(file.read_text())[key] for file in files], float)
        return np.moveaxis(np.reshape(entries, (*shape, len(self.sides))), -1, 0)

    def strategies(self, seed: int, size: int) -> list[Float[np.ndarray, "size"]]:
        """Return the meta-strategy of the sides' first members."""
        return meta_strategy(self.args.meta, self.table(seed, size))

    def _record(self, seed: int) -> None:
        """Record matches of all members with one another."""
        numbers, args = range(self.args.iterations + 1), self.args
        players = {
            team.name: population(self.env.spec, [self.member(seed, x, side) for x in numbers])
            for side, team in enumerate(self.sides)
        }
        about = {"program": "psro", "tier": "matches", "run": self.path.name} | self._about
        about |= {"policies": describe_policies(players, 0)}
        policy, params = joint_policy(self.env, players)
        place = self.vaults[seed], args.steps, args.num_envs, seed
        record_policy(self.env, policy, params, *place, about)

    def is_complete(self) -> bool:
        """Return whether the run and the matches exist; `RunError` if they have other arguments."""
        return self._is_learned() and all(map(self._is_recorded, self.seeds))

    def is_done(self, block: int) -> bool:
        """Return whether a block is complete; of a run, all but matches that are missing."""
        _, seed, kind, _ = self.parts[block]
        if not self._is_learned():
            return super().is_done(block)
        return kind != "matches" or self._is_recorded(seed)

    def _is_learned(self) -> bool:
        if not self._learned and (self.path / tracking.RUN_FILE).exists():
            self._learned = open_run(self.path, self._run_record()).complete
        return self._learned

    def _is_recorded(self, seed: int) -> bool:
        size = [*chunks_of(self.args.steps, self.args.num_envs)]
        recipe = {"env": self.env.spec.name, "num_envs": self.args.num_envs, "chunks": size}
        record = check_recipe(self.vaults[seed], recipe, partly=True)
        return bool(record.get("complete"))

    def join(self) -> None:
        """Write the run: its members, payoffs and meta-strategies."""
        shutil.rmtree(self.path, ignore_errors=True)
        size, sides = self.args.iterations + 1, range(len(self.sides))
        for number in range(size):
            params = [[self.member(x, number, side).params for side in sides] for x in self.seeds]
            policy = {"policy": stack_seeds([*map(tuple, params)])}
            Checkpoints(self.path / tracking.POLICIES).save(number, policy, {})
        Checkpoints(self.path / tracking.CHECKPOINTS).save(size - 1, policy, {})
        by_seed = {
            str(seed): {
                "returns": self.table(seed, size),
                "standard_errors": self.table(seed, size, "standard_errors"),
                "strategies": [self.strategies(seed, x + 1) for x in range(size)],
            }
            for seed in self.seeds
        }
        about = {"sides": [side.name for side in self.sides], "episodes": self.args.episodes}
        tracking.write_json(self.path / POPULATION_FILE, tracking.plain(about | {"seeds": by_seed}))
        tracking.write_json(self.path / tracking.RUN_FILE, self._run_record() | {"complete": True})

    def _run_record(self) -> dict[str, Any]:
        record = made_from(ProgramOrigin("psro", None, None), self.env, {}) | self._about
        record |= {"kind": "recorder", "seeds": self.seeds, "spec": self.env.spec.to_json()}
        return record | {"greedy": self.built[0].program.greedy, "vault": None}

    def _responses(self, seed: int, side: int) -> Checkpoints:
        return Checkpoints(self.directory / "blocks" / f"{seed}-{side}")

    def _entry(self, seed: int, profile: tuple[int, ...]) -> Path:
        return self.directory / "blocks" / f"{seed}-payoffs" / "-".join(map(str, profile))


# ---------------------------------------------------------------------------------- main


def work(args: Args) -> Responses:
    """Return the work, which `offmarl record psro --tasks` divides."""
    return Responses(args)


def final_mixtures(run: Path) -> dict[int, dict[str, str]]:
    """Return the last meta-strategy of each side, as options name it, by seed."""
    record = tracking.read_json(run, POPULATION_FILE)

    def named(seed: str, weights: Sequence[float]) -> str:
        support = [(number, x) for number, x in enumerate(weights) if x >= 1e-6]
        return "+".join(f"{path_text(run)}@{seed}/{number}:{x:.6f}" for number, x in support)

    try:
        return {
            int(seed): {
                side: named(seed, weights)
                for side, weights in zip(record["sides"], entry["strategies"][-1], strict=True)
            }
            for seed, entry in record["seeds"].items()
        }
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise RunError(
            f"{run / POPULATION_FILE} is damaged: remove {run}, and repeat the command."
        ) from None


def main(args: Args) -> Recorded:
    """Learn the populations, and record their matches."""
    job, outcome = work(args), "complete already, nothing was changed"
    if not job.is_complete():
        tasks.run_task(job, Share(0, 1))
        join_work(job)
        outcome = "recorded"
    rows = [{"seed": seed, **describe_vault(job.vaults[seed], "matches")} for seed in job.seeds]
    for row in rows:
        row["path"] = path_text(Path(row["path"]))
    data, view = summarise(Path(path_text(job.path)), rows, outcome)
    mixtures = final_mixtures(job.path)
    lines = [quote(f"{side}={x}") for mixture in mixtures.values() for side, x in mixture.items()]
    if len(job.sides) == 2 and not args.side:
        lines.append(f"\nTo measure them: offmarl exploitability {' '.join(lines[:2])}")
    return Recorded(
        data | {"mixtures": mixtures}, Group(view, "\nFinal mixtures:", *map(as_is, lines))
    )


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
