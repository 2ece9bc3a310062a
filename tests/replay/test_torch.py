"""PyTorch's data loaders over a vault, with and without workers."""

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import chex
import jax
import ml_dtypes
import numpy as np
import pytest

import offmarl
from offmarl.errors import MissingExtraError, OptionError, VaultChecksumError
from offmarl.testing import experience
from offmarl.types import ArraySpec, Discrete, EnvSpec, map_tree
from offmarl.vault import Dataset
from tests.vault.experience import written
from tests.vault.test_integrity import flip

from .memory import at, sample
from .test_device import write

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader  # noqa: E402

from offmarl.replay.torch import to_tensors  # noqa: E402
from tests.children import python  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*fork")  # of threads, which workers never use


def same(ours: Any, theirs: Any) -> None:
    """Whether tensors are these arrays, bit by bit."""
    assert type(ours) is type(theirs)
    map_tree(lambda x, y: np.testing.assert_array_equal(x.numpy(), np.asarray(y)), ours, theirs)


def loader(data: Any, workers: int = 2, context: str = "fork", **options: Any) -> Any:
    if workers:
        options |= {"multiprocessing_context": context}
    return DataLoader(data, num_workers=workers, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_a_stream(dataset: Dataset, workers: int) -> None:
    data = dataset.torch_batches(8, 5, seed=3, start=2, epochs=1)
    with dataset.stream(8, 5, seed=3, start=2, epochs=1) as stream:
        for ours, theirs in zip(loader(data, workers, batch_size=None), stream, strict=True):
            same(ours, theirs)
    assert len(data) == len(loader(data, workers, batch_size=None))


def test_remote_batches_are_those_of_a_stream_too(dataset: Dataset, monkeypatch) -> None:
    monkeypatch.setattr(Dataset, "is_remote", True)
    with dataset.stream(8, 5, to="torch", seed=3, epochs=1) as stream:
        for ours, theirs in zip(
            loader(dataset.torch_batches(8, 5, seed=3, epochs=1), 0, batch_size=None),
            stream,
            strict=True,
        ):
            same(ours, theirs)


def test_endless_batches_are_those_of_the_device(dataset: Dataset) -> None:
    data = dataset.torch_batches(8, 5, seed=3)
    replay, key = dataset.replay(8, 5), jax.random.key(3)
    for step, batch in zip(range(5), loader(data, batch_size=None), strict=False):
        same(batch, sample(replay, jax.random.fold_in(key, step)))
    with pytest.raises(TypeError, match="without an end"):
        len(data)
    with pytest.raises(OptionError, match="cannot start at -1"):
        dataset.torch_batches(8, 5, start=-1)


def test_tensors_keep_every_type_and_share_memory(tmp_path: Path) -> None:
    dtypes = ("uint8", "int8", "int16", "uint16", "int32", "bool", "float16", "bfloat16", "float32")
    leaves = {name: ArraySpec((3,), name) for name in dtypes}
    spec = EnvSpec("", 2, 0, 4, Discrete(2), observation=leaves, extras={"cost": ArraySpec(())})
    steps, finals = experience(spec, 1, 30, 0, 5.0)
    dataset = written(tmp_path / "typed.vlt", (steps, finals), spec=spec)
    items, windows = dataset.window_items(4)[3], dataset.torch_windows(4)[3]
    for name, tensor in windows.view.observation.items():
        array = items.view.observation[name]
        assert (str(tensor.dtype), tensor.shape) == (f"torch.{name}", array.shape)
        ours, theirs = tensor.to(torch.float64).numpy(), array.astype(np.float64)
        np.testing.assert_array_equal(ours, theirs)
    assert windows.extras["cost"].shape == (4,)
    array = np.zeros(3, ml_dtypes.bfloat16)
    to_tensors({"a": array})["a"][1] = 2.0
    assert array[1] == 2.0


@pytest.mark.parametrize("workers", [0, 2])
def test_windows_in_any_order_of_the_loader(dataset: Dataset, workers: int) -> None:
    windows = dataset.torch_windows(5, burn_in=2, return_to_go=1.0)
    replay = dataset.replay(1, 5, burn_in=2, return_to_go=1.0)
    assert len(windows) == replay.num_slots
    shuffle = {"shuffle": True, "generator": torch.Generator().manual_seed(1)}
    batches = [*loader(windows, workers, batch_size=64, **shuffle)]
    assert [len(batch.mask) for batch in batches] == [64] * 4 + [len(windows) - 256]
    everything = map_tree(lambda *leaves: torch.cat(leaves), *batches)
    order = np.lexsort((everything.time[:, 0], everything.episode[:, 0]))
    expected = at(replay, np.arange(len(windows)))
    same(map_tree(lambda leaf: leaf[order], everything), expected)


def test_single_windows_and_their_default_collation(dataset: Dataset) -> None:
    windows = dataset.torch_windows(5)
    window = windows[-1]
    about = f"{dataset.path}: {len(windows):,} of 5 steps"
    assert repr(windows) == f"<TorchWindows of {about}>"
    assert repr(dataset.window_items(3, burn_in=2)) == f"<WindowItems of {about}>"
    assert window.view.observation.shape == (6, *dataset[0].transition.view.observation.shape[1:])
    batch = torch.utils.data.default_collate([windows[0], windows[7], window])
    same(batch, dataset.window_items(5).gather([0, 7, len(windows) - 1]))
    same(windows[-len(windows)], dataset.window_items(5)[0])
    for number in (len(windows), -len(windows) - 1):
        with pytest.raises(IndexError, match=f"window {number} was requested"):
            windows[number]


def test_no_batch_is_lost_or_repeated_and_workers_may_persist(dataset: Dataset) -> None:
    data = dataset.torch_batches(8, 5, epochs=1, drop_last=True)
    persistent = loader(data, batch_size=None, persistent_workers=True)
    first, second = ([batch.time[:, 0] for batch in persistent] for _ in range(2))
    assert len(first) == len(data) == len(dataset.torch_windows(5)) // 8
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours, theirs)


def test_resumed_batches(dataset: Dataset) -> None:
    data = dataset.torch_batches(8, 5, seed=1)
    batches = [batch for _, batch in zip(range(6), loader(data, batch_size=None), strict=False)]
    state = json.loads(json.dumps(data.state(2)))
    for ours, theirs in zip(dataset.torch_batches(8, 5, **state), batches[2:], strict=False):
        same(ours, map_tree(lambda leaf: leaf.numpy(), theirs))


@pytest.mark.slow
def test_parts_and_mixtures(dataset: Dataset, tmp_path: Path) -> None:
    parts = dataset.split(validation=0.3)
    for part in parts.values():
        batches = loader(part.torch_batches(16, 5, epochs=1), batch_size=None)
        numbers = torch.cat([batch.episode.ravel() for batch in batches])
        assert set(numbers.tolist()) == set(part.numbers.tolist())
    write(tmp_path / "other.vlt", np.random.default_rng(1).random((2, 40)) < 0.2)
    mixed = offmarl.mix({dataset: 3.0, offmarl.open(tmp_path / "other.vlt"): 1.0})
    data = mixed.torch_batches(8, 5, weights="length")
    with mixed.stream(8, 5, weights="length", to="numpy") as stream:
        for _, ours, theirs in zip(range(4), loader(data, batch_size=None), stream, strict=False):
            same(ours, theirs)
    with pytest.raises(OptionError, match="mixture"):
        mixed.torch_windows(5)


def test_pickles_open_the_vault_again(dataset: Dataset, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(dataset.path.parents[1])
    relative = offmarl.open(f"{dataset.path.parent.name}/{dataset.path.name}")
    pickled = pickle.dumps([relative.torch_windows(5), relative.torch_batches(8, 5, seed=2)])
    monkeypatch.chdir(tmp_path)
    windows, batches = pickle.loads(pickled)
    same(windows[3], dataset.window_items(5)[3])
    with dataset.stream(8, 5, seed=2, to="numpy") as stream:
        same(next(iter(batches)), next(stream))


def test_an_error_in_a_worker_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "data.vlt" / "main"
    write(path, np.random.default_rng(0).random((3, 90)) < 0.15)
    flip(path, "rewards./0.0.0", offset=20)
    data = offmarl.open(path).torch_batches(64, 5)
    with pytest.raises(VaultChecksumError, match=r"(?s)worker process 0.*rewards.*episode"):
        next(iter(loader(data, batch_size=None)))


@pytest.mark.slow
def test_a_missing_pytorch_is_named(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "offmarl.replay.torch", raising=False)
    monkeypatch.delitem(vars(offmarl.replay), "TorchWindows", raising=False)
    with pytest.raises(MissingExtraError, match=r"torch is not .* 'offmarl\[torch\]'"):
        dataset.torch_windows(5)


SPAWNED = """
import sys
from torch.utils.data import DataLoader
import numpy, offmarl

def without_jax(worker):
    assert "jax" not in sys.modules

if __name__ == "__main__":
    dataset = offmarl.open(sys.argv[1])
    options = {"num_workers": 2, "multiprocessing_context": "spawn"}
    data = dataset.torch_batches(16, 5, seed=3, epochs=1)
    loader = DataLoader(data, batch_size=None, worker_init_fn=without_jax, **options)
    batches = [batch.episode.numpy() for batch in loader]
    windows = DataLoader(dataset.torch_windows(5), batch_size=16, **options)
    numpy.savez(sys.argv[2], *batches, *(batch.episode.numpy() for batch in windows))
    assert "jax" not in sys.modules
"""


@pytest.mark.nightly
def test_spawned_workers(dataset: Dataset, tmp_path: Path) -> None:
    """They import neither the caller's state nor JAX."""
    (tmp_path / "spawned.py").write_text(SPAWNED)
    python("spawned.py", dataset.path, "found.npz", cwd=tmp_path)
    results = [*np.load(tmp_path / "found.npz").values()]
    with dataset.stream(16, 5, to="numpy", seed=3, epochs=1) as stream:
        expected = [batch.episode for batch in stream]
    items = dataset.window_items(5)
    numbers = np.arange(len(items))
    expected += [items.gather(part).episode for part in np.split(numbers, numbers[16::16])]
    chex.assert_trees_all_equal(results, expected)


INTERRUPTED = """
import os, sys, time
from torch.utils.data import DataLoader
import offmarl

if __name__ == "__main__":
    data = offmarl.open(sys.argv[1]).torch_batches(16, 5)
    for number, batch in enumerate(DataLoader(data, batch_size=None, num_workers=2)):
        if number == 3:
            print("running", flush=True)
        time.sleep(0.01)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_program_leaves_no_workers(
    dataset: Dataset, tmp_path: Path, sign: signal.Signals
) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(INTERRUPTED))
    program = subprocess.Popen(
        [sys.executable, "program.py", str(dataset.path)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert program.stdout is not None and program.stdout.readline() == "running\n"
    os.kill(program.pid, sign)
    assert program.wait(timeout=60) != 0
    program.stdout.close()
    deadline = time.monotonic() + 30  # workers look for their parent every 5 s
    while _processes_of(program.pid):
        assert time.monotonic() < deadline, "workers are still running"
        time.sleep(0.1)


def _processes_of(session: int) -> list[str]:
    process = subprocess.run(
        ["ps", "-o", "pid=", "--sid", str(session)], capture_output=True, text=True, check=False
    )
    return process.stdout.split()
