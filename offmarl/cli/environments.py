"""``offmarl envs``."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rich.console import Group
from tyro.conf import Positional, arg

from offmarl import envs as registry
from offmarl.cli.output import Report, check_file, grid, table
from offmarl.cli.parse import refuse_unused
from offmarl.config import NonNegative
from offmarl.envs.catalogue import EnvInfo
from offmarl.envs.registry import options_of
from offmarl.terminal import number
from offmarl.types import Discrete, EnvSpec

_NUM_ENVS = 64

_TRAITS = ("partial", "adversarial", "heterogeneous", "communication", "mask")

_SHORT: dict[str | None, str] = {
    None: "?",
    "vector": "vec",
    "discrete": "disc",
    "continuous": "cont",
    "native": "own",
    "concatenated": "joint",
}

_NO_STATE = "none: programs use the observations of all agents"

_HINT = """\
sees, acts: vectors, grids (images of integers or booleans) or trees (named arrays); discrete or \
continuous actions. P: partial observability, A: adversarial, H: heterogeneous agents, C: \
communication, M: action mask. state: the environment's own, or all observations jointly. ?: \
unknown. needs: pip install 'offmarl[envs]', [games] or [mabrax].
A capital letter in a name stands for a number of your choice, a word in capitals for one of the \
values that `offmarl envs NAME` lists. Options follow a colon, as in \
swarm/coverage-8:time_limit=20, and `offmarl envs swarm/coverage-8` lists them.
Your own environments: path/to/file.py:FACTORY or package.module:FACTORY; `offmarl new env NAME` \
writes a file to start from."""


def envs(
    name: Annotated[str, Positional, arg(metavar="[NAME]")] = "",
    seconds: NonNegative = 1.0,
    picture: Path | None = None,
) -> Report:
    """List the environments, or describe, measure and draw one.

    Parameters
    ----------
    name
        An environment, such as swarm/coverage-8, path/to/file.py:FACTORY or package.module:FACTORY;
        or a prefix of names, to list only these environments.
    seconds
        Minimum time for measuring an environment's speed.
    picture
        File for a picture, if the environment can be drawn; the agents follow its scripted
        controller if it has one, and act at random otherwise. A .png shows one instant, a .gif an
        episode.
    """
    families = registry.describe()
    matches = {family: about for family, about in families.items() if family.startswith(name)}
    if matches and (name not in families or families[name].choices):
        why = f"{name or 'all'} lists several environments"
        refuse_unused(why, picture=picture, seconds=seconds != 1)  # the default
        return _list(matches)
    if picture is not None:
        from offmarl.report.render import KINDS  # imports JAX and Matplotlib

        check_file(picture, "--picture", "picture.gif", KINDS)
    return _describe(name, seconds, picture)


def _list(families: Mapping[str, EnvInfo]) -> Report:
    columns = ["name", "agents", "sees", "acts", *(t[0].upper() for t in _TRAITS), "state", "needs"]
    rows = []
    for name, about in families.items():
        marks = ["✓" if trait in about.traits else "" for trait in _TRAITS]
        kinds = [_SHORT.get(x, str(x)) for x in (about.observation, about.action, about.state)]
        rows.append([name, about.agents or "?", *kinds[:2], *marks, kinds[2], about.extra])
    (only, *others) = families.values()
    tail = _HINT if others or not only.choices else f"one of: {', '.join(only.choices)}"
    described = {name: asdict(about) for name, about in families.items()}
    return Report({"environments": described}, Group(tail, "", table(columns, rows)))


def _describe(name: str, seconds: float, picture: Path | None) -> Report:
    about = registry.info(name)
    env = registry.make(name)
    if picture is not None:
        from offmarl.report import render

        render.draw(env, picture)
    steps = _speed(env, seconds)
    speed = f"{number(round(steps))} steps per second, in {_NUM_ENVS} environments"
    hint = "--picture FILE.gif draws an episode" if hasattr(env, "scene") else "it cannot be drawn"
    view = {
        "environment": name,
        "": about.summary,
        **_in_words(env.spec),
        "traits": ", ".join(about.traits) or ("none" if about.action else "unknown"),
        "speed": f"{speed} with random actions",
        "picture": picture or hint,
        "options": _options(name),
    }
    data = {
        "spec": env.spec.to_json(),
        "about": asdict(about),
        "steps_per_second": steps,
        "picture": picture,
    }
    return Report(data, grid(view))


def _options(name: str) -> str:
    """Return the options that may follow the name, with their defaults."""
    simple = (bool, int, float, str)
    options = (
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        if isinstance(value, simple)
        else key
        for key, value in options_of(name).items()
    )
    return ", ".join(options) or "none"


def _in_words(spec: EnvSpec) -> dict[str, str]:
    kind = "actions" if isinstance(spec.action, Discrete) else "numbers in [-1, 1]"
    names = f": {', '.join(spec.agents)}" if spec.agents else ""
    return {
        "agents": f"{spec.num_agents}{names}",
        "observation": _sized(spec.observation_text, spec.observation_sizes),
        "action": f"{_sized(number(spec.action_size), spec.action_sizes)} {kind}",
        "state": f"{spec.state_text} ({spec.state})" if spec.state_size else _NO_STATE,
        "reward": f"of the {spec.reward}" if spec.reward == "team" else "individual",
        "time limit": "none" if spec.time_limit is None else f"{number(spec.time_limit)} steps",
    }


def _sized(size: str, sizes: tuple[int, ...] | None) -> str:
    return size + (f" (by agent: {', '.join(map(str, sizes))})" if sizes else "")


def _speed(env: Any, seconds: float) -> float:
    """Measure the steps per second of a random policy."""
    import jax

    from offmarl._compiling import jit_rarely_run, quickly
    from offmarl.networks import PolicyConfig, make_policy
    from offmarl.programs.runs.compiling import keep_compiled_programs
    from offmarl.rollout import init_rollout, rollout

    keep_compiled_programs()
    policy = make_policy(PolicyConfig("random"), env.spec)
    env = registry.autoreset(env)
    num_steps = 64
    begin = jax.jit(
        lambda key: init_rollout(env, policy, key, _NUM_ENVS), compiler_options=quickly()
    )
    act = jit_rarely_run()(lambda state, key: rollout(env, policy, (), state, key, num_steps))
    state, steps, *_ = act(begin(jax.random.key(0)), jax.random.key(0))  # compiles
    steps.last.block_until_ready()
    start, rounds, elapsed = time.perf_counter(), 0, 0.0
    while not rounds or elapsed < seconds:
        state, steps, *_ = act(state, jax.random.key(rounds))
        steps.last.block_until_ready()
        rounds, elapsed = rounds + 1, time.perf_counter() - start
    return rounds * num_steps * _NUM_ENVS / elapsed
