"""Runs that draw from mixtures, by weights and by priorities: arguments, seeds, resuming."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

import offmarl
from offmarl import tracking, vault
from offmarl.checkpoint import Checkpoints
from offmarl.cli.parse import parse
from offmarl.errors import OptionError, RunError
from offmarl.programs import DatasetStatistics, registry
from offmarl.programs.runs import training
from offmarl.programs.runs.drawing import open_data
from offmarl.programs.runs.training import CheckpointTimer
from offmarl.types import Discrete, EnvSpec
from tests.runs import metrics_of
from tests.vault.experience import make, written

qmix = registry.load("baseline", "qmix_cql")
bc = registry.load("baseline", "bc")

ENV = "probe/observation"
OPTIONS = {
    "seeds": 2,
    "updates": 20,
    "eval_every": 20,
    "eval_episodes": 4,
    "final_episodes": 4,
    "batch_size": 4,
    "length": 2,
    "hidden": 4,
}


@pytest.fixture(scope="module")
def parts(random_data: Callable[[str], Path], tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("parts") / "data.vlt"
    vaults = vault.split(random_data(ENV), place, fractions=(0.5, 0.5))
    return {name: part.path for name, part in vaults.items()}


def train(program: Any, data: Any, out: Path, **changes: Any) -> Path:
    options = OPTIONS | ({"mixer_embed": 4, "cql_samples": 2} if program is qmix else {}) | changes
    return program.main(program.Args(vault=data, out=out, **options))


def content(run: Path) -> tuple[list[Any], list[np.ndarray]]:
    leaves = [
        leaf for seed in (0, 1) for leaf in jax.tree.leaves(offmarl.load_policy(run, seed).params)
    ]
    return metrics_of(run), [np.asarray(leaf) for leaf in leaves]


def same(run: Path, other: Path) -> None:
    (metrics, leaves), (other_metrics, other_leaves) = content(run), content(other)
    assert metrics == other_metrics
    chex.assert_trees_all_equal(leaves, other_leaves)


def close(run: Path, other: Path) -> None:
    """XLA compiles the two separately, so the last bits differ; the batches are equal."""
    chex.assert_trees_all_close(content(run)[1], content(other)[1], rtol=1e-4, atol=1e-6)


class Interrupt(Exception):
    pass


def interrupted(monkeypatch, update: int, start: Callable[[], Any]) -> None:
    """Run until there is a checkpoint after some update, and stop there."""
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointTimer, "is_due", lambda self: True)
        save = Checkpoints.save

        def saved(self: Checkpoints, step: int, *rest: Any) -> None:
            save(self, step, *rest)
            if step >= update:
                raise Interrupt

        patch.setattr(Checkpoints, "save", saved)
        with pytest.raises(Interrupt):
            start()


@pytest.mark.slow
def test_priorities_resume_to_the_same_bits(random_data, tmp_path: Path, monkeypatch) -> None:
    data, again = random_data(ENV), tmp_path / "again"
    reference = train(qmix, data, tmp_path / "whole", prioritise=0.6)
    interrupted(monkeypatch, 13, lambda: train(qmix, data, again, prioritise=0.6))
    train(qmix, data, again, prioritise=0.6)
    same(reference, again)


@pytest.mark.nightly
@pytest.mark.parametrize("batching", ["map", "vmap"])
def test_each_seed_has_its_own_priorities(random_data, tmp_path: Path, batching: str) -> None:
    data = random_data(ENV)
    both = train(qmix, data, tmp_path / "both", prioritise=0.6, batching=batching)
    second = train(qmix, data, tmp_path / "one", prioritise=0.6, seeds=1, seed=1)
    rows = [row for row in metrics_of(both) if row["seed"] == 1]
    for row, alone in zip(rows, metrics_of(second), strict=True):
        for name, value in alone.items():
            np.testing.assert_allclose(row[name], value, rtol=1e-3, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"weight": "return"},
        pytest.param({}, marks=pytest.mark.nightly),
        pytest.param({"weight": "length", "env": "none"}, marks=pytest.mark.nightly),
    ],
)
def test_a_mixture_is_trained_on_and_resumed(
    parts, tmp_path: Path, monkeypatch, options: dict[str, Any]
) -> None:
    shares = {str(parts["train"]): 0.7, str(parts["validation"]): 0.3}
    runs = {}
    for replay in ("device", "stream"):
        runs[replay] = train(bc, shares, tmp_path / replay, replay=replay, **options)
    close(runs["device"], runs["stream"])
    again = tmp_path / "again"
    interrupted(monkeypatch, 5, lambda: train(bc, shares, again, **options))
    train(bc, shares, again, **options)
    same(runs["device"], again)
    record = json.loads((again / tracking.RUN_FILE).read_text())
    assert [entry["share"] for entry in record["vaults"]] == [0.7, 0.3]
    digests = [vault.open_vault(path).digest() for path in shares]
    assert [entry["digest"] for entry in record["vaults"]] == digests
    assert record["vault"] == "data/train+validation"
    assert ("weights_digest" in record) == bool(options)


@pytest.mark.slow
def test_another_mixture_is_another_run(parts, tmp_path: Path, monkeypatch) -> None:
    def start(share: float, **options: Any) -> None:
        shares = {str(parts["train"]): share, str(parts["validation"]): 1.0}
        train(bc, shares, tmp_path / "run", **options)

    interrupted(monkeypatch, 1, lambda: start(2.0))
    with pytest.raises(RunError, match="other shares of the same vaults"):
        start(3.0)
    with pytest.raises(RunError, match=r"args\.weight None, not 'return'"):
        start(2.0, weight="return")


def test_another_order_of_blocks_is_another_run(random_data, tmp_path: Path, monkeypatch) -> None:
    """An older run has batches by blocks in another order, and does not record its seed."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "learn", stop)
    with pytest.raises(KeyboardInterrupt):
        train(bc, random_data(ENV), tmp_path, replay="blocks")
    path = tmp_path / tracking.RUN_FILE
    record = json.loads(path.read_text())
    del record["block_seed"]
    path.write_text(json.dumps(record))
    with pytest.raises(RunError, match="block_seed None, not 0"):
        train(bc, random_data(ENV), tmp_path, replay="blocks")


def test_statistics_of_a_mixture_count_by_share(parts) -> None:
    datasets = {name: vault.open_vault(path) for name, path in parts.items()}
    alone = [DatasetStatistics(data).observation_moments() for data in datasets.values()]
    mixed = offmarl.mix({datasets["train"]: 0.9, datasets["validation"]: 0.1})
    statistics = DatasetStatistics(mixed)
    mean = 0.9 * alone[0].mean + 0.1 * alone[1].mean
    np.testing.assert_allclose(statistics.observation_moments().mean, mean, rtol=1e-5)
    second = sum(s * (x.std**2 + x.mean**2) for s, x in zip((0.9, 0.1), alone, strict=True))
    np.testing.assert_allclose(
        statistics.observation_moments().std, np.sqrt(second - mean**2), rtol=1e-4, atol=1e-3
    )
    counts = [DatasetStatistics(data).returns() for data in datasets.values()]
    np.testing.assert_array_equal(statistics.returns(), np.concatenate(counts))


def test_statistics_of_a_mixture_count_agents_by_how_long_they_live(tmp_path) -> None:
    """Agent 1 lives in one of four steps, and sees 9 where agent 0 sees 1."""
    spec = EnvSpec("", 2, 1, 0, Discrete(2))
    datasets = []
    for name in "ab":
        steps, _ = make(spec, rows=1, steps=40, end_every=1e9)
        view = steps.view
        alive = np.stack([np.ones((1, 40), bool), np.arange(40)[None] % 4 == 0], -1)
        seen = np.broadcast_to(np.array([[1.0], [9.0]], "f4"), view.observation.shape)
        view = view._replace(observation=seen, alive=alive)
        datasets.append(
            written(tmp_path / f"{name}.vlt", (steps._replace(view=view), None), spec=spec)
        )
    for data in (datasets[0], offmarl.mix(datasets), offmarl.mix(dict.fromkeys(datasets, 1.0))):
        moments = DatasetStatistics(data).observation_moments()
        np.testing.assert_allclose(moments.mean, (4 * 1 + 1 * 9) / 5, rtol=1e-5)


# ---------------------------------------------------------------------------------- arguments


def test_vaults_on_the_command_line(parts) -> None:
    first, second = map(str, parts.values())
    single = parse(bc.Args, "train bc", "", ["--vault", first])
    assert single.vault == Path(first)
    several = parse(bc.Args, "train bc", "", ["--vault", f"{first}=0.7", f"{second}=2.1"])
    assert open_data(several).shares == pytest.approx((0.25, 0.75))
    alone = dataclasses.replace(several, vault=first)
    assert open_data(alone).path == Path(first)


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (qmix, {"prioritise": 0.6, "replay": "stream"}, "give --replay device"),
        (bc, {"prioritise": 0.6}, "computes no temporal-difference errors"),
        (bc, {"weight_temperature": 0.5}, "--weight-temperature needs --weight"),
        (bc, {"weight": "speed"}, "no column 'speed'"),
    ],
)
def test_arguments_that_do_not_fit_leave_no_run(parts, tmp_path, program, options, message) -> None:
    with pytest.raises(OptionError, match=message):
        train(program, parts["train"], tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_shares_that_do_not_fit(parts) -> None:
    first, second = map(str, parts.values())
    for vaults, message in (
        ((f"{first}=1", second), "has no share: give PATH=SHARE for each"),
        ((first, first), "is given twice"),
        ((f"{first}=1", f"{second}=-1"), "cannot have a share of -1"),
    ):
        with pytest.raises(OptionError, match=message):
            open_data(bc.Args(vault=vaults))
