"""Our estimates and percentile intervals beside rliable's, and our JSON in marl-eval's reader.

rliable and marl-eval do not install with current NumPy and pandas, so they have an environment of
their own, and this program is run twice:

    python benchmarks/rliable_intervals.py ours FILE.json [RUN]
    OTHER/bin/python benchmarks/rliable_intervals.py theirs FILE.json

The first writes scores and our numbers; the second prints both beside each other. With the
directory of a run, the second also reads its ``marl_eval.json``. The environment of the second:

    pip install numpy==1.26.4 pandas==2.1.4 scipy==1.11.4 arch==6.2.0 seaborn==0.12.2 rliable==1.2.0
    pip install --no-deps id-marl-eval==0.0.4 colorama
"""

import json
import sys
from pathlib import Path

import numpy as np

RESAMPLES = 20_000


def scores() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "ten seeds, six tasks": draw.normal(0.5, 0.2, (10, 6)),
        "five seeds, one task": draw.normal(0.5, 0.2, (5, 1)),
        "skewed": draw.lognormal(-1, 0.8, (10, 4)),
    }


def ours(path: Path, run: str | None) -> None:
    from offmarl import statistics

    intervals = {}
    for name, values in scores().items():
        intervals[name] = {}
        for estimate in (statistics.iqm, statistics.mean, statistics.median):
            low, high = statistics.bootstrap_interval(
                estimate, values, seed=0, resamples=RESAMPLES, method="percentile"
            )
            intervals[name][estimate.__name__] = [float(estimate(values)), float(low), float(high)]
    path.write_text(json.dumps({"numbers": intervals, "run": run}))


def theirs(path: Path) -> None:
    from rliable import library, metrics

    estimates = {
        "iqm": metrics.aggregate_iqm,
        "mean": metrics.aggregate_mean,
        "median": metrics.aggregate_median,
    }
    document = json.loads(path.read_text())
    print("| scores | estimate | ours | rliable |\n|---|---|---|---|")
    np.random.seed(1)  # noqa: NPY002 - rliable draws from it
    for name, values in scores().items():
        for kind, function in estimates.items():
            points, intervals = library.get_interval_estimates(
                {"x": values}, lambda x, function=function: np.array([function(x)]), reps=RESAMPLES
            )
            low, high = intervals["x"][:, 0]
            interval = "{:.4f} [{:.4f}, {:.4f}]".format(*document["numbers"][name][kind])
            print(
                f"| {name} | {kind} | {interval} | {points['x'][0]:.4f} [{low:.4f}, {high:.4f}] |"
            )
    if document["run"]:
        read_by_marl_eval(Path(document["run"]))


def read_by_marl_eval(run: Path) -> None:
    from marl_eval.utils.data_processing_utils import (
        create_matrices_for_rliable,
        data_process_pipeline,
    )

    raw = json.loads((run / "marl_eval.json").read_text())
    processed = data_process_pipeline(raw_data=raw, metrics_to_normalize=[])
    (environment,) = raw
    matrices = create_matrices_for_rliable(processed, environment, [])
    print(f"marl-eval read {run}: {json.dumps(processed['extra'], default=str)[:300]}")
    print({key: {k: v.shape for k, v in matrix.items()} for key, matrix in matrices[0].items()})


if __name__ == "__main__":
    if sys.argv[1] == "ours":
        ours(Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    else:
        theirs(Path(sys.argv[2]))
