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
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from pathlib import Path
from shlex import quote
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from rich.console import Console, Group

from offmarl import cli, envs, tracking
from offmarl._compiling import quickly
from offmarl.cli import tasks
from offmarl.cli.output import as_is
from offmarl.config import PositiveInt, changed, read_values
from offmarl.envs.sides import Side, play_side, population, slot
from offmarl.errors import OptionError
from offmarl.launch import Share, join_work
from offmarl.programs import Hyperparameters, OnlineArgs, Program, hyperparameters
from offmarl.programs.program import recorded
from offmarl.programs.recording.collecting import collect
from offmarl.programs.recording.online import Recorded, describe, summarise
from offmarl.programs.registry import Origin, load_origin
from offmarl.programs.responses import PopulationArgs, PopulationWork, pair_policy, sides_of
from offmarl.programs.runs.loop import build, online_schedule
from offmarl.programs.runs.trained import Built, builder_of
from offmarl.rollout import meet
from offmarl.teams import spec_of
from offmarl.types import ArrayTree, EnvSpec

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(PopulationArgs):
    """Arguments of PSRO."""

    oracle: str = "ippo"
    """The recorder that learns responses, such as ippo, mappo, iql or qmix."""
    oracle_option: tuple[str, ...] = ()
    """Options of the oracle's own as KEY=VALUE, such as learning_rate=3e-4 network=recurrent."""
    response_steps: PositiveInt = 61_440
    """Environment steps in which a response learns."""


def oracle_of(args: Args) -> tuple[Callable[..., Program], OnlineArgs]:
    """Return the oracle's ``make``, and its arguments."""
    module = load_origin("recorder", Origin(args.oracle, None, None), Path())
    if not issubclass(module.Args, OnlineArgs):
        raise OptionError(f"--oracle {args.oracle} learns no response: give one such as ippo.")
    given, shared = dict(map(_option, args.oracle_option)), [one.name for one in fields(OnlineArgs)]
    given = read_values(module.Args, given, "--oracle-option", refused=shared)
    sizes = {"total_steps": args.response_steps, "num_envs": args.num_envs, "evaluations": 1}
    oracle = module.Args(env=args.env, **sizes, **given)
    if getattr(oracle, "capacity", 0) is None:
        oracle = changed(oracle, capacity=oracle.default_capacity)
    return module.make, oracle


def _option(pair: str) -> tuple[str, Any]:
    name, equals, value = pair.partition("=")
    if not equals:
        raise OptionError(f"--oracle-option {pair} is not KEY=VALUE.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


# ---------------------------------------------------------------------------------- program


def oracles(spec: EnvSpec, args: Args) -> list[Built]:
    """Return what the oracle builds for each side."""
    about = {"kind": "recorder", "program": args.oracle, "file": None, "sha256": None}
    about |= {"args": tracking.plain(recorded(oracle_of(args)[1]))}
    build_for = builder_of(about, Path(args.oracle))
    return [build_for(spec_of(spec, side.agents)) for side in sides_of(spec, args.side)]


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:  # noqa: ARG001
    """Build the program whose policy acts by one member of each side; it has no updates."""
    built, hyper = oracles(spec, args), hyperparameters(oracle_of(args)[1])

    def init(key: PRNGKeyArray, _hyper: Hyperparameters) -> tuple[ArrayTree, ...]:
        return tuple(one.program.policy_params(one.program.init(key, hyper)) for one in built)

    return Program(
        init,
        (),
        lambda greedy: pair_policy(
            spec, sides_of(spec, args.side), [one.program.policy(greedy) for one in built]
        ),
        lambda state: state,
        greedy=built[0].program.greedy,
    )


# ---------------------------------------------------------------------------------- responses


class Responses(PopulationWork):
    """Populations of responses to the meta-strategies of the members before them."""

    args: Args

    def __init__(self, args: Args):
        self._make, self._oracle = oracle_of(args)
        built = oracles(envs.make(args.env).spec, args)
        super().__init__("psro", f"psro-{args.oracle}", args, built)

    def learn(self, seed: int, number: int, side: int, key: PRNGKeyArray) -> ArrayTree:
        """Return the parameters of a response; that of number 0 has not learned."""
        hyper, (init_key, key) = hyperparameters(self._oracle), jax.random.split(key)
        if number == 0:
            program = self.built[side].program
            return program.policy_params(program.init(init_key, hyper))
        env = self._against(seed, number, side)
        blank = slot(env)
        program = build(self._make, env.spec, self._oracle, blank, lambda: cast(Hashable, blank))
        state = meet(env, jax.jit(program.init, compiler_options=quickly())(init_key, hyper))
        schedule = online_schedule(program, self._oracle)
        *_, (_, (state,), _) = collect(program, [state], [hyper], [key], schedule, 0, [None])
        return program.policy_params(state)

    def _against(self, seed: int, number: int, side: int) -> Side:
        """Return the environment of a side, whose opponents are drawn by the meta-strategy.

        Their populations have the size of the last iteration, with weights of 0 for members to
        come, so that one program is compiled for all iterations.
        """
        weights, size, others = self.strategies(seed, number), self.args.iterations, {}
        for place, other in enumerate(self.sides):
            members = [self.member(seed, x if x < number else 0, place) for x in range(size)]
            padded = [*weights[place], *np.zeros(size - number)]
            others[other.name] = population(self.env.spec, members, padded)
        del others[self.sides[side].name]
        return play_side(self.env, self.sides[side].name, others)


# ---------------------------------------------------------------------------------- main


def work(args: Args) -> Responses:
    """Return the work, which `offmarl record psro --tasks` divides."""
    return Responses(args)


def main(args: Args) -> Recorded:
    """Learn the populations, and record their matches."""
    own = work(args)
    tasks.run_task(own, Share(0, 1))
    outcome = "recorded" if join_work(own) else "complete already, nothing was changed"
    rows = [{"seed": seed, **describe(own.vaults[seed], "matches")} for seed in own.seeds]
    data, view = summarise(own.path, rows, outcome)
    mixtures = own.mixtures()
    lines = [
        quote(f"{side}={mixture}")
        for by_side in mixtures.values()
        for side, mixture in by_side.items()
    ]
    if len(own.sides) == 2 and not args.side:
        lines.append(f"\nNext: offmarl exploitability {' '.join(lines[:2])}")
    return Recorded(
        data | {"mixtures": mixtures}, Group(view, "\nFinal mixtures:", *map(as_is, lines))
    )


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
