"""How often intervals over few seeds cover the truth, over recorded distributions of scores.

    python benchmarks/coverage.py [--repeats 4000]
    python benchmarks/coverage.py --record SEEDS     records the distributions again (minutes)

The distributions in `scores.json` are final scores of many training seeds: those of a baseline
whose scores are close to normal, of one with skewed scores, and of one that finds one of two
outcomes, or neither.
Each repeat draws n of the scores and asks whether the interval of their interquartile mean contains
that of all. Nominal is 95%; 93 to 97 are aimed at.

percentile: the plain bootstrap, as rliable. expanded: `offmarl.statistics.bootstrap_interval` by
default. hesterberg: the same with the factor sqrt(n / (n - 1)). bca: bias-corrected and
accelerated. studentized: bootstrap-t. t: Student's t for the mean, asked about the mean. trimmed:
Student's t for the trimmed mean with winsorised variance (Tukey and McLaughlin).
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from offmarl.statistics import expanded_tail, iqm

SCORES = Path(__file__).with_name("scores.json")
RESAMPLES = 2000
TAIL = 0.025

RUNS = {
    "normal": ("bc", "swarm/coverage-2:time_limit=20", "sampled", {"updates": 100}),
    "skewed": (
        *("iql_cql", "probe/memory", "greedy"),
        {"updates": 100, "learning_rate": 3e-3, "cql_weight": 0.3},
    ),
    "bimodal": ("maicq", "probe/match", "greedy", {"updates": 30, "learning_rate": 3e-3}),
}
"""Program, environment, way of acting and arguments of each recorded distribution."""


def resampled(scores: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return resamples of each repeat, ``(repeats, resamples, n)``."""
    repeats, n = scores.shape
    index = draw.integers(n, size=(repeats, RESAMPLES, n))
    return np.take_along_axis(scores[:, None], index, axis=2)


def middle(x: np.ndarray) -> np.ndarray:
    return iqm(x[..., None])


def at(estimates: np.ndarray, tails: np.ndarray) -> np.ndarray:
    """Return quantiles of each row, at the tails of each row."""
    ordered = np.sort(estimates, axis=1)
    place = tails * (ordered.shape[1] - 1)
    below = np.floor(place).astype(int)
    above = np.minimum(below + 1, ordered.shape[1] - 1)
    low, high = (np.take_along_axis(ordered, i[:, None], 1)[:, 0] for i in (below, above))
    return low + (place - below) * (high - low)


def percentile(scores: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    low, high = np.quantile(middle(resampled(scores, draw)), [TAIL, 1 - TAIL], axis=1)
    return low, high


def expanded(scores: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    tail = expanded_tail(TAIL, scores.shape[1])
    low, high = np.quantile(middle(resampled(scores, draw)), [tail, 1 - tail], axis=1)
    return low, high


def hesterberg(scores: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    n = scores.shape[1]
    tail = ndtr(stdtrit(n - 1, TAIL) * np.sqrt(n / (n - 1)))
    low, high = np.quantile(middle(resampled(scores, draw)), [tail, 1 - tail], axis=1)
    return low, high


def bca(scores: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    estimates, estimate = middle(resampled(scores, draw)), middle(scores)
    share = (estimates < estimate[:, None]).mean(1) + (estimates == estimate[:, None]).mean(1) / 2
    bias = ndtri(np.clip(share, 1e-3, 1 - 1e-3))
    n = scores.shape[1]
    left_out = np.stack([middle(np.delete(scores, i, 1)) for i in range(n)], 1)
    gap = left_out.mean(1, keepdims=True) - left_out
    spread = (gap**2).sum(1) ** 1.5
    skew = np.divide((gap**3).sum(1), 6 * spread, out=np.zeros_like(bias), where=spread > 0)

    def moved(z: float) -> np.ndarray:
        return ndtr(bias + (bias + z) / (1 - skew * (bias + z)))

    ends = (moved(ndtri(TAIL)), moved(ndtri(1 - TAIL)))
    return at(estimates, ends[0]), at(estimates, ends[1])


def trimmed_error(scores: np.ndarray) -> np.ndarray:
    """Return the standard error of the interquartile mean, by the winsorised variance."""
    ordered = np.sort(scores, axis=-1)
    n = ordered.shape[-1]
    cut = n // 4
    winsorised = np.clip(ordered, ordered[..., cut, None], ordered[..., n - 1 - cut, None])
    return winsorised.std(-1, ddof=1) / ((1 - 2 * cut / n) * np.sqrt(n))


def trimmed(scores: np.ndarray, _draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    n = scores.shape[1]
    half = stdtrit(n - 2 * (n // 4) - 1, 1 - TAIL) * trimmed_error(scores)
    return middle(scores) - half, middle(scores) + half


def studentized(scores: np.ndarray, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    drawn, estimate = resampled(scores, draw), middle(scores)
    error, scores_error = trimmed_error(drawn), trimmed_error(scores)
    pivot = np.where(
        error > 0, (middle(drawn) - estimate[:, None]) / np.where(error > 0, error, 1), 0
    )
    low, high = np.quantile(pivot, [TAIL, 1 - TAIL], axis=1)
    return estimate - high * scores_error, estimate - low * scores_error


def student(scores: np.ndarray, _draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    n = scores.shape[1]
    half = stdtrit(n - 1, 1 - TAIL) * scores.std(1, ddof=1) / np.sqrt(n)
    return scores.mean(1) - half, scores.mean(1) + half


Interval = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]
METHODS: dict[str, Interval] = {
    "percentile": percentile,
    "expanded": expanded,
    "hesterberg": hesterberg,
    "bca": bca,
    "studentized": studentized,
    "trimmed": trimmed,
    "t": student,
}


def coverage(
    population: np.ndarray, n: int, method: str, repeats: int, seed: int = 0
) -> tuple[float, float]:
    """Return how often the interval covers the truth, and its mean width."""
    draw = np.random.default_rng(seed)
    truth = population.mean() if method == "t" else middle(population)
    covered, width, block = 0, 0.0, 200
    for _ in range(repeats // block):
        scores = draw.choice(population, (block, n))
        low, high = METHODS[method](scores, draw)
        # Rounding must not decide where all scores of the data are equal.
        covered += int(((low <= truth + 1e-9) & (truth - 1e-9 <= high)).sum())
        width += float((high - low).sum())
    return covered / (repeats // block * block), width / (repeats // block * block)


def record(seeds: int) -> dict[str, list[float]]:
    """Train the baselines of `RUNS`, and return the final score of each seed."""
    from offmarl import envs, tracking
    from offmarl.networks import PolicyConfig, make_policy
    from offmarl.programs import record_policy, registry
    from offmarl.report import final_evaluation

    rows = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, (program, env_name, acting, options) in RUNS.items():
            env, path = envs.make(env_name), Path(directory) / f"{name}.vlt"
            policy = make_policy(PolicyConfig("random"), env.spec)
            record_policy(env, policy, (), path / "random", steps=2048, num_envs=16)
            module = registry.load("baseline", program)
            sizes = {
                "hidden": 8,
                "length": 3 if env_name.startswith("probe") else 10,
                "batch_size": 16,
            }
            arguments = sizes | {"seeds": seeds, "batching": "vmap", "final_episodes": 32}
            run = module.main(
                module.Args(
                    vault=path / "random",
                    out=Path(directory) / "runs" / name,
                    eval_every=10**6,
                    eval_episodes=2,
                    **arguments,
                    **options,
                )
            )
            acted = tracking.acting_of(tracking.read_run(run))
            metric = tracking.RETURN if acting == acted else tracking.OTHER_RETURN[acting]
            rows[name] = [float(x.mean()) for x in final_evaluation(run)[metric].values()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=4000)
    parser.add_argument("--record", type=int)
    args = parser.parse_args()
    if args.record:
        text = json.dumps({k: [round(x, 6) for x in v] for k, v in record(args.record).items()})
        SCORES.write_text(text + "\n")
    print("| distribution | n | " + " | ".join(METHODS) + " |")
    print("|---" * (len(METHODS) + 2) + "|")
    for name, scores in json.loads(SCORES.read_text()).items():
        for n in (3, 5, 10):
            cells = []
            for method in METHODS:
                share, width = coverage(np.array(scores), n, method, args.repeats)
                cells.append(f"{100 * share:.1f} ({width:.3g})")
            print(f"| {name} | {n} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
