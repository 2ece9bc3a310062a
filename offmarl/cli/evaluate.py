"""``offmarl evaluate``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from rich.console import Group
from tyro.conf import Positional

from offmarl.cli.output import Report, interval, spread, table
from offmarl.report import estimate
from offmarl.tracking import progress, read_run


def evaluate(
    run: Positional[Path],
    env: str | None = None,
    episodes: int = 320,
    seed: int = 0,
    sample: bool = False,
) -> Report:
    """Play episodes with the policy of each training seed.

    Parameters
    ----------
    run
        Directory of a run.
    env
        Environment to play in; by default the one of the run's data.
    episodes
        Number of episodes for each training seed.
    seed
        Decides everything random in the episodes.
    sample
        Draw actions as in training, rather than always take the best.
    """
    record = read_run(run)
    name = env or record["spec"]["name"]
    returns = _play(run, record["seeds"], name, episodes, seed, greedy=not sample)
    title = f"{record['program']} of {run} in {name}: returns"
    return returns_report(title, {"run": run, "env": name}, returns)


def _play(
    run: Path, seeds: list[int], name: str, episodes: int, seed: int, greedy: bool
) -> dict[int, np.ndarray]:
    import jax

    from offmarl import envs, evaluation

    environment = envs.make(name)
    policies = [evaluation.load_policy(run, trained, greedy) for trained in seeds]
    policy = policies[0].policy

    @jax.jit
    def play(params: Any) -> Any:
        key = jax.random.key(seed)
        return evaluation.evaluate(environment, policy, params, key, episodes).returns

    returns = {}
    with progress("evaluate", len(seeds)) as advance:
        for trained, loaded in zip(seeds, policies, strict=True):
            returns[trained] = np.asarray(play(loaded.params))
            advance(1, f"return {returns[trained].mean():.2f}")
    return returns


def returns_report(
    title: str, about: Mapping[str, Any], returns: Mapping[int, Float[np.ndarray, "episodes"]]
) -> Report:
    """Report the returns of the policies of a run's training seeds."""
    rows = [
        {"seed": trained, "episodes": len(values), **spread(values)}
        for trained, values in returns.items()
    ]
    iqm = estimate(np.array([values.mean() for values in returns.values()]))
    view = Group(
        table(list(rows[0]), [row.values() for row in rows], title),
        f"IQM over seeds [95% interval]: {interval(*iqm)}",
    )
    return Report({**about, "seeds": rows, "iqm": iqm._asdict()}, view)
