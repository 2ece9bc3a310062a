"""Populations of sides that oppose one another: their members, payoffs and matches as one work.

What learns a member is a subclass, such as that of ``recorders/psro.py``. The result is one run,
whose steps are the numbers of members, and the vault of their matches for each seed.
"""

import json
import shutil
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from offmarl import envs, tracking
from offmarl._compiling import pinned
from offmarl.checkpoint import Checkpoints
from offmarl.config import PositiveInt, Role, Seed, SeedCount, Validated, option
from offmarl.envs.base import Wrapper
from offmarl.envs.sides import Seat, TeamPolicy, compose, population, rest_of
from offmarl.equilibria import Meta, meta_strategy, require_constant_sum
from offmarl.errors import OptionError, RunError
from offmarl.evaluation import require_time_limit, returns_by_team
from offmarl.launch import Work
from offmarl.paths import local
from offmarl.programs.program import recorded
from offmarl.programs.recording.record import record_policy
from offmarl.programs.recording.sides import described, joint_policy
from offmarl.programs.registry import Origin
from offmarl.programs.runs.compiling import keep_compiled_programs
from offmarl.programs.runs.evaluate import play_policy
from offmarl.programs.runs.finite import require_finite
from offmarl.programs.runs.identity import differences, environment_source, fingerprint, made_from
from offmarl.programs.runs.trained import Built, stacked
from offmarl.teams import Team, find_side, name_of_side, teams_of
from offmarl.types import ArrayTree, EnvSpec, Policy

POPULATION_FILE = "population.json"
"""File of a run: the table of payoffs, and the meta-strategy of each of its sizes."""

RESPOND, PLAY = range(2)
"""Purposes of random keys."""


@dataclass(frozen=True)
class PopulationArgs(Validated):
    """Arguments of populations."""

    env: str = option("classic/rps", Role.CASE)
    """Environment: a name that `offmarl envs` lists, or code of your own as path/to/file.py:FACTORY
    or package.module:FACTORY."""
    side: str = ""
    """In an environment of one team: the agents of one side, such as agent_0; the others are the
    other side. By default each of several teams is a side."""
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


def sides_of(spec: EnvSpec, side: str) -> tuple[Team, ...]:
    """Return the sides that oppose one another; `OptionError` if there is only one."""
    if side:
        own = find_side(spec, side)
        rest = rest_of(spec, own)
        return own, Team(name_of_side(spec, rest), rest)
    if len(teams := teams_of(spec)) == 1:
        raise OptionError(
            f"{spec.name} has one team, and members respond to those of other sides: give --side "
            f"with some of its agents, such as {name_of_side(spec, (0,))}."
        )
    return teams


def pair_policy(spec: EnvSpec, sides: Sequence[Team], policies: Sequence[Policy]) -> Policy:
    """Return a policy for all agents; its parameters are those of a member of each side."""
    each = zip(sides, policies, strict=True)
    return compose(spec, [Seat(side.agents, own, side.agents) for side, own in each])


class Block(NamedTuple):
    """A part of the work, which needs those of its seed in earlier phases."""

    phase: int
    seed: int
    what: Literal["response", "payoffs", "matches"]
    which: tuple[int, ...] = ()
    """The number and side of a response; the members, one of each side, that the payoffs are of."""


def blocks_of(args: PopulationArgs, num_sides: int) -> Iterator[Block]:
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


class PopulationWork(Work):
    """Members of each side, the table of their payoffs, and their matches.

    ``built`` is what the learner of members builds for each of ``sides_of(spec, args.side)``.
    """

    def __init__(self, program: str, label: str, args: PopulationArgs, built: Sequence[Built]):
        env, name = envs.make(args.env), envs.short_name(args.env)
        require_time_limit(env.spec)
        self.env, self.args, self.built = env, args, built
        self.sides = sides_of(env.spec, args.side)
        self.policies = [one.program.policy(one.program.greedy) for one in built]
        self.seeds = [*range(args.seed, args.seed + args.seeds)]
        self.parts = [*blocks_of(args, len(self.sides))]
        self._program, self._members = program, dict[tuple[int, int, int], TeamPolicy]()
        label = "-".join([label, args.meta, *filter(None, args.side.split(","))])
        self.vaults = {x: local(args.out) / f"{name}.vlt" / f"{label}-{x}" for x in self.seeds}
        last = f"-to-{self.seeds[-1]}" if args.seeds > 1 else ""
        path = local(args.out) / f"{name}.run" / f"{label}-{args.seed}{last}"
        self.about = {"args": tracking.plain(recorded(args) | {"env": name})}
        identity = self.about | environment_source(env.spec.name)
        super().__init__(f"record {path.name}", path, identity, len(self.parts))

    @abstractmethod
    def learn(self, seed: int, number: int, side: int, key: PRNGKeyArray) -> ArrayTree:
        """Return the parameters of a response to members of lower numbers; 0 has not learned."""

    def label(self, block: int) -> str:
        """Return the name of a block in messages."""
        _, seed, what, which = self.parts[block]
        return f"{what} {'-'.join(map(str, which))} of seed {seed}"

    def needs(self, block: int) -> list[int]:
        """Return the blocks of the same seed in earlier phases."""
        phase, seed, *_ = self.parts[block]
        earlier = enumerate(self.parts[:block])
        return [x for x, other in earlier if other.seed == seed and other.phase < phase]

    @pinned()
    def run(self, block: int) -> None:
        """Learn a response, play an entry of the table, or record the matches."""
        keep_compiled_programs()
        _, seed, what, which = self.parts[block]
        if what == "response":
            self._respond(seed, *which)
        elif what == "payoffs":
            self._play(seed, *which)
        else:
            self._record(seed)

    # ------------------------------------------------------------------------------ blocks

    def _respond(self, seed: int, number: int, side: int) -> None:
        """Learn a member, and keep it."""
        checkpoints = Checkpoints(self._responses(seed, side))
        if number in checkpoints.steps():
            return
        key = self._key(seed, RESPOND, number, side)
        params = jax.device_get(self.learn(seed, number, side, key))
        require_finite(params, f"response {number} of {self.sides[side].name} in {self.path}")
        checkpoints.save(number, {"policy": params}, {})

    def member(self, seed: int, number: int, side: int) -> TeamPolicy:
        """Return a member of a side."""
        if (seed, number, side) not in self._members:
            like, run = {"policy": self.built[side].policy}, self.path.name
            tree, _ = Checkpoints(self._responses(seed, side)).restore(like, number)
            params = jax.tree.map(np.asarray, tree["policy"])
            about: dict[str, Any] = {"policy": self._program, "run": run}
            about |= {"seed": seed, "step": str(number), "parameters": fingerprint(params)}
            agents, name = self.sides[side].agents, f"{run}@{seed}/{number}"
            found = TeamPolicy(self.policies[side], params, agents, name, about)
            self._members[seed, number, side] = found
        return self._members[seed, number, side]

    def _play(self, seed: int, *profile: int) -> None:
        """Play an entry of the table of payoffs."""
        spec, args = self.env.spec, self.args
        side_of = {agent: x for x, side in enumerate(self.sides) for agent in side.agents}
        teams = tuple(side_of[agent] for agent in range(spec.num_agents))
        env = _Sided(self.env, replace(spec, teams=teams, team_names=None))
        policy = pair_policy(spec, self.sides, self.policies)
        params = tuple(self.member(seed, x, side).params for side, x in enumerate(profile))
        key = self._key(seed, PLAY, *profile)
        found = play_policy(env, policy, args.episodes, None, params, key)
        returns = returns_by_team(env.spec, found).astype(float)
        if args.meta == "nash":
            require_constant_sum(returns.T, spec.name)
        file, errors = self._entry(seed, profile), returns.std(0) / max(len(returns) - 1, 1) ** 0.5
        file.parent.mkdir(parents=True, exist_ok=True)
        entry = {"returns": returns.mean(0), "standard_errors": errors}
        tracking.write_json(file, tracking.plain(entry))

    def table(
        self, seed: int, size: int, what: str = "returns"
    ) -> Float[np.ndarray, "sides *members"]:
        """Return the mean returns of the sides' first members, or their ``standard_errors``."""
        shape = (size,) * len(self.sides)
        files = (self._entry(seed, profile) for profile in np.ndindex(*shape))
        entries = [json.loads(file.read_text())[what] for file in files]
        return np.moveaxis(np.reshape(entries, (*shape, len(self.sides))), -1, 0)

    def strategies(self, seed: int, size: int) -> list[Float[np.ndarray, "size"]]:
        """Return the meta-strategy of the sides' first members."""
        return meta_strategy(self.args.meta, self.table(seed, size))

    def _record(self, seed: int) -> None:
        """Record matches of all members with one another."""
        numbers, args = range(self.args.iterations + 1), self.args
        players = {
            own.name: population(self.env.spec, [self.member(seed, x, side) for x in numbers])
            for side, own in enumerate(self.sides)
        }
        about = {"program": self._program, "tier": "matches", "run": self.path.name} | self.about
        about |= {"policies": described(players, 0)}
        policy, params = joint_policy(self.env, players)
        place = self.vaults[seed], args.steps, args.num_envs, seed
        record_policy(self.env, policy, params, *place, about)

    # ------------------------------------------------------------------------------ result

    def is_complete(self) -> bool:
        """Whether the run exists; `RunError` if it has other arguments."""
        found = tracking.recorded(self.path)
        for name, theirs, ours in differences({**self.about, **found}["args"], self.about["args"]):
            raise RunError(
                f"{self.path} holds a run with {name} {theirs!r}, not {ours!r}: choose another "
                "directory with --out, or give the arguments of that run."
            )
        return bool(found.get("complete"))

    def join(self) -> None:
        """Write the run: its members, payoffs and meta-strategies."""
        shutil.rmtree(self.path, ignore_errors=True)
        size, sides, policy = self.args.iterations + 1, range(len(self.sides)), None
        for number in range(size):
            each = [
                tuple(self.member(x, number, side).params for side in sides) for x in self.seeds
            ]
            policy = {"policy": stacked(each)}
            Checkpoints(self.path / tracking.POLICIES).save(number, policy, {})
        assert policy is not None
        Checkpoints(self.path / tracking.CHECKPOINTS).save(size - 1, policy, {})
        found = {
            str(seed): {
                "returns": self.table(seed, size),
                "standard_errors": self.table(seed, size, "standard_errors"),
                "strategies": [self.strategies(seed, x + 1) for x in range(size)],
            }
            for seed in self.seeds
        }
        about = {"sides": [side.name for side in self.sides], "episodes": self.args.episodes}
        tracking.write_json(self.path / POPULATION_FILE, tracking.plain(about | {"seeds": found}))
        record = made_from(Origin(self._program, None, None), self.env, {}) | self.about
        record |= {"kind": "recorder", "seeds": self.seeds, "spec": self.env.spec.to_json()}
        record |= {"greedy": self.built[0].program.greedy, "vault": None, "complete": True}
        tracking.write_json(self.path / tracking.RUN_FILE, record)

    def mixtures(self) -> dict[int, dict[str, str]]:
        """Return the final mixture of each side, as options name it, by seed."""
        found = json.loads((self.path / POPULATION_FILE).read_text())

        def named(seed: int, weights: Sequence[float]) -> str:
            kept = [(number, x) for number, x in enumerate(weights) if x >= 1e-6]
            return "+".join(f"{self.path}@{seed}/{number}:{x:.6f}" for number, x in kept)

        return {
            seed: {
                side: named(seed, weights)
                for side, weights in zip(
                    found["sides"], found["seeds"][str(seed)]["strategies"][-1], strict=True
                )
            }
            for seed in self.seeds
        }

    def _responses(self, seed: int, side: int) -> Path:
        return self.directory / "blocks" / f"{seed}-{side}"

    def _entry(self, seed: int, profile: tuple[int, ...]) -> Path:
        return self.directory / "blocks" / f"{seed}-payoffs" / "-".join(map(str, profile))

    def _key(self, seed: int, *parts: int) -> PRNGKeyArray:
        key = jax.random.key(seed)
        for part in parts:
            key = jax.random.fold_in(key, part)
        return key
