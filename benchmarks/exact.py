"""Two problems whose best return is known exactly: every method, with what theory predicts.

The data were published with AlberDICE (see ../shared/data/README.md). In both, the agents must
choose one of several good ways to act together, and independent imitation mixes them:

    xor      One state, 50 rounds. The data hold (0, 0), which earns 0, and (0, 1) and (1, 0), which
             earn 1, each in a third of the rounds; (1, 1) would earn -2. The best return is 50.
    bridge   Two agents pass each other on a bridge for one. The data hold six ways to do it, of
             three returns: -1.2355, -1.2591 and -1.2904, on average -1.2620. In 259 of 500 episodes
             both begin to the right, in 241 to the left; if each goes its own way, they stand face
             to face for all 50 steps, which costs -15.81 where they begin, and -15.90 if they do so
             after a step.

A prediction says which returns the best actions may have, by the arguments in `METHODS`, which were
written down before the runs, for the published updates (``--settings reference``). A seed is right
if its return is within 0.02 of one of them::

    python benchmarks/exact.py
    python benchmarks/exact.py --methods alberdice bc --problems bridge --seeds 5

Runs that are complete are not repeated, and a stopped one continues. Beside the returns of the best
actions stand those of sampled ones, where the policy has them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from offmarl import envs, tracking, vault
from offmarl.errors import UnknownNameError
from offmarl.programs import registry
from offmarl.report import final_returns

FILES = {"xor": "xor_00_02_20", "bridge": "bridge_optimal"}
TOLERANCE = 0.02
BEST = {"xor": 50.0, "bridge": -1.2355}
WAYS = (-1.2355, -1.2591, -1.2904)
STUCK = (-15.8114, -15.8979)
"""The agents stand face to face for all steps: where they begin, or a cell further."""


@dataclass(frozen=True)
class Args:
    data: Path = Path(__file__).parents[2] / "shared" / "data" / "alberdice"
    """Directory of the published files."""
    out: Path = Path("runs/exact")
    """Directory for the vaults and the runs."""
    methods: tuple[str, ...] = ()
    """Methods to run; by default all that this version has."""
    problems: tuple[str, ...] = ("xor", "bridge")
    """Problems to solve."""
    seeds: int = 5
    """Training seeds of each run."""
    updates: int = 2_000
    """Updates of each run."""


class Method(NamedTuple):
    """The options of a method that are not the shared ones, and what it should reach."""

    options: dict[str, Any]
    xor: tuple[float, ...] | str
    """Returns that the best actions may have, or why there is no prediction."""
    bridge: tuple[float, ...] | str
    why: str


SHARED: dict[str, Any] = {
    "network": "feedforward",  # observations of both problems hold the whole state
    "learning_rate": 3e-3,
    "schedule": "linear",
    "hidden": 32,
    "length": 16,
    "batch_size": 16,
}

METHODS = {
    "bc": Method(
        {},
        (0.0,),
        (-1.2904,),
        "Each agent imitates its own most frequent action: 0 in two thirds of the rounds; on the "
        "bridge both go right, and then the way that most episodes take, the worst.",
    ),
    "iql_cql": Method(
        {},
        (0.0,),
        (-1.2904,),
        "Action 1 earns 0.5 more against the data's other agent, but a penalty of weight 3 keeps "
        "the values near the data's frequencies: as BC.",
    ),
    "qmix_cql": Method(
        {},
        (0.0,),
        (-1.2904, *STUCK),
        "The penalty prefers joint actions in the data, and a monotonic Q_tot can only do so by "
        "ranking action 0 first; on the bridge it keeps to the data's frequencies, as BC, or the "
        "two first ways tie, and noise decides for each agent alone.",
    ),
    "qmix_bcq": Method(
        {},
        (-100.0,),
        (*WAYS, *STUCK),
        "Both actions of both agents are frequent enough to be allowed, and a monotonic Q_tot that "
        "fits the data is largest at (1, 1), which the data lack. On the bridge the two first ways "
        "tie, and noise decides for each agent alone.",
    ),
    "maicq": Method(
        {},
        (-100.0,),
        WAYS,
        "Each agent imitates what its own value prefers: action 1, for both. On the bridge both "
        "directions are worth the same, so the more frequent one wins for both.",
    ),
    "cfcql": Method(
        {},
        (0.0,),
        (-1.2904, -1.2355),
        "The counterfactual penalty, of weight 50, decreases the value of (1, 1) more than the "
        "rewards increase it, so action 0 ranks first. On the bridge a monotonic Q_tot can only "
        "prefer one joint first step by ranking it first for both agents. Both steps are almost "
        "as frequent. After each of them one agent alone decides, and the penalty keeps it at the "
        "data's frequencies: after right, right the worst way is the most frequent one, after "
        "left, left the best.",
    ),
    "omiga": Method(
        {},
        (0.0,),
        (-1.2904,),
        "With α = 10 an advantage of 1 changes a weight by a tenth: as BC.",
    ),
    "comadice": Method(
        {"value_temperature": 0.05},
        (50.0,),
        (-1.2355, STUCK[0]),
        "The joint weights remove what is worse than the best, so that each agent imitates the "
        "best ways alone. Their two modes are as frequent as each other, up to the draw: best "
        "actions coordinate by that chance, the same for both agents; sampled ones do not. On the "
        "bridge the exact weights make the first steps 250.3 to 249.7, so that errors of the "
        "networks may part the agents; after it the best way has the majority.",
    ),
    "mac_flow": Method(
        {"hidden": 64, "layers": 2, "critic_hidden": 64, "flow_steps": 5},
        (0.0,),
        (-1.2904, STUCK[0]),
        "A sum of values that fits the data is largest at (1, 1), which the data lack. But values "
        "are divided by their mean size, about 5 after 1,500 updates, so that imitation outweighs "
        "them, and action 0 is the most frequent one. On the bridge the worst way is the most "
        "frequent one, and its disadvantage of 0.05 is a tenth of the mean value; what tells the "
        "values of the first steps apart is noise, which may part the agents.",
    ),
    "madt": Method(
        {},
        "0 in 8 rounds; then it aims for more than a round can earn",
        (-1.2355,),
        "It imitates the episodes that reach the best return, in which each agent's actions have "
        "one majority. With a return of G to earn in n rounds, an agent of XOR chooses action 1 "
        "with the probability G / 2n, so that action 0 is the best one until n is G, which is 42.",
    ),
    "alberdice": Method(
        {
            "scale_rewards": True,
            "normalise": ("observation",),
            "hidden": 64,
            "batch_size": 32,
            "alpha_start": 1.0,
            "alpha_end": 0.1,
            "gradient_penalty": 0.0,
        },
        (50.0,),
        (-1.2355,),
        "Each agent in turn answers to what the other does today.",
    ),
    "oryx": Method(
        {},
        (50.0,),
        (-1.2355,),
        "Agents act one after another, and see the actions before theirs.",
    ),
}


def installed(name: str) -> bool:
    """Whether this version has a method."""
    try:
        registry.load("baseline", name)
    except UnknownNameError:
        return False
    return True


def vault_of(problem: str, args: Args) -> Path:
    """Import the published file of a problem, once."""
    path = args.out / f"{problem}.vlt"
    if not path.exists():
        source = args.data / f"{FILES[problem]}.npz"
        vault.import_dataset(source, path, env_spec=envs.make(f"classic/{problem}").spec)
    return path


def run(name: str, problem: str, args: Args) -> Path:
    """Train a method on a problem and return the directory of the run."""
    program = registry.load("baseline", name)
    out = args.out / problem / name
    options = SHARED | METHODS[name].options
    made = program.Args.for_env(
        "",
        settings="reference",
        vault=vault_of(problem, args),
        out=out,
        seeds=args.seeds,
        batching="vmap",
        updates=args.updates,
        eval_every=args.updates,
        eval_episodes=1,
        final_episodes=64,
        checkpoint_seconds=10.0,
        **options,
    )
    directory: Path = program.main(made)
    return directory


class Result(NamedTuple):
    """The returns of a method on a problem, one for each seed."""

    method: str
    problem: str
    predicted: tuple[float, ...] | str
    greedy: list[float]
    sampled: list[float]

    @property
    def right(self) -> int | None:
        """How many seeds are as predicted; None without a prediction."""
        if isinstance(self.predicted, str):
            return None
        gaps = np.abs(np.subtract.outer(self.greedy, self.predicted)).min(-1)
        return int((gaps <= TOLERANCE).sum())


def results(args: Args) -> Iterator[Result]:
    for name in args.methods or filter(installed, METHODS):
        for problem in args.problems:
            directory = run(name, problem, args)
            acts = tracking.read_run(directory).get("greedy", True)
            other = tracking.SAMPLED_RETURN if acts else tracking.GREEDY_RETURN
            found = [
                [float(np.mean(returns)) for returns in final_returns(directory, metric).values()]
                for metric in (tracking.RETURN, other)
            ]
            greedy, sampled = found if acts else reversed(found)
            yield Result(name, problem, getattr(METHODS[name], problem), greedy, sampled)


def row(result: Result) -> list[str]:
    digits = 4 if result.problem == "bridge" else 1
    predicted = result.predicted
    text = predicted if isinstance(predicted, str) else " or ".join(map(str, predicted))
    numbers = " ".join(f"{value:.{digits}f}" for value in result.greedy)
    sampled = f"{np.mean(result.sampled):.{digits}f}" if result.sampled else ""
    right = "" if result.right is None else f"{result.right} of {len(result.greedy)}"
    best = sum(abs(value - BEST[result.problem]) <= TOLERANCE for value in result.greedy)
    return [result.problem, result.method, text, numbers, right, f"{best}", sampled]


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    table = Table("problem", "method", "predicted", "best actions, by seed", "as predicted")
    table.add_column("best")
    table.add_column("sampled, mean")
    for result in results(args):
        print(json.dumps(result._asdict() | {"as_predicted": result.right}), flush=True)
        table.add_row(*row(result))
    Console(width=160).print(table)
    for name in args.methods or filter(installed, METHODS):
        print(f"{name}: {METHODS[name].why}")


if __name__ == "__main__":
    main()
