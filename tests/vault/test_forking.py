"""Processes forked from one that uses TensorStore: they read what it prepared, or say why not."""

import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import OffmarlError, VaultChecksumError, VaultError
from offmarl.vault import Dataset

from . import damage
from .damage import flip
from .experience import make
from .test_stock import to_stock, write_stock

pytestmark = pytest.mark.filterwarnings("ignore:.*fork")  # of threads, which the child never uses

FORK = multiprocessing.get_context("fork")


def in_fork(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a forked process, and return its result or raise its error."""
    ours, theirs = FORK.Pipe(duplex=False)

    def answer() -> None:
        try:
            theirs.send(function(*arguments))
        except OffmarlError as error:
            theirs.send(error)

    child = FORK.Process(target=answer)
    child.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError:
        result = None
    child.join()
    assert child.exitcode == 0
    if isinstance(result, OffmarlError):
        raise result
    return result


def everything(dataset: Dataset) -> list[Any]:
    rows, starts = np.array([1, 0, 1, 1]), np.array([0, 30, 7, 32])
    length = dataset.length
    return [
        dataset.windows(rows, starts, 20),
        dataset.transitions(3, length),
        dataset.read(),
        [*dataset.blocks()],
        dataset.finals if dataset.native else None,
        dataset.episodes,
        dataset[-2].transition.reward,
        dataset.final_views(np.array([2, 0, 2])) if dataset.native else None,
    ]


@pytest.fixture
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    kind: str = request.param
    path = damage.record(tmp_path / "v.vlt" / "a", codec="zstd" if "zstd" in kind else "raw")
    if kind == "stock":
        path = tmp_path / "stock.vlt" / "a"
        write_stock(path, to_stock(make(rows=3, steps=70)[0]))
    return vault.open_vault(path)


@pytest.mark.parametrize(
    "dataset", ["raw", "zstd", "zstd with many finals", "stock"], indirect=True
)
def test_a_forked_process_reads_what_was_prepared(
    dataset: Dataset, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offmarl.vault.read.arrays._UNBACKED_STEPS", 0)  # lengths are checked
    if "many" in request.node.name:
        monkeypatch.setattr(Dataset, "_final_bytes", 0)
    dataset.prepare_fork()
    contents = in_fork(everything, dataset)
    np.testing.assert_equal(contents, everything(vault.open_vault(dataset.path)))


@pytest.mark.parametrize("dataset", ["raw"], indirect=True)
def test_what_was_not_prepared_is_an_error(dataset: Dataset) -> None:
    message = "cannot be read in a forked process.*multiprocessing_context='spawn'"
    for use in (everything, lambda data: vault.open_vault(data.path)):
        with pytest.raises(VaultError, match=message):
            in_fork(use, dataset)


@pytest.mark.parametrize("dataset", ["raw", "zstd"], indirect=True)
def test_a_forked_process_compares_checksums(dataset: Dataset) -> None:
    flip(dataset.path, "rewards./0.2.0", offset=20)
    dataset = vault.open_vault(dataset.path)
    dataset.prepare_fork()
    expected = VaultChecksumError if dataset.manifest.schema.codec == "raw" else VaultError
    with pytest.raises(expected, match="rewards"):
        in_fork(everything, dataset)


@pytest.mark.parametrize("dataset", ["raw"], indirect=True)
def test_an_archive_cannot_be_read_in_a_forked_process(dataset: Dataset, tmp_path: Path) -> None:
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", dataset.path.parent)
    inside = vault.open_vault(Path(packed) / "a")
    inside.prepare_fork()
    with pytest.raises(VaultError, match="cannot be read in a forked process"):
        in_fork(everything, inside)
