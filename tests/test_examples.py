"""The examples run as files, from another directory, and as notebooks."""

import re
import shutil
from pathlib import Path

import pytest

from tests.children import python

EXAMPLES = Path(__file__).parents[1] / "examples"


def copied(name: str, directory: Path) -> str:
    """Copy an example to another directory, as a reader does."""
    return shutil.copy(EXAMPLES / name, directory / name).name


@pytest.mark.slow
def test_published_data(random_data, tmp_path):
    output = python(
        copied("published_data.py", tmp_path), random_data("probe/observation"), cwd=tmp_path
    )
    assert output.startswith("cross-entropy: 0.693 at first, 0.6")


@pytest.mark.slow
def test_jax_environment(tmp_path):
    output = python(copied("jax_environment.py", tmp_path), cwd=tmp_path)
    assert "places: [3 1] rewards: [0. 0.]" in output and "places: [2 2] rewards: [1. 1.]" in output
    assert "example/meet:time_limit=8 mean return of random play: 1." in output


@pytest.mark.nightly
def test_rware(tmp_path):
    pytest.importorskip("jumanji", reason="needs pip install 'offmarl[envs]'")
    output = python(copied("rware.py", tmp_path), cwd=tmp_path)
    assert "mappo-0-random mean return: " in output and "mappo-0-replay mean return: " in output
    assert (tmp_path / "rware" / "report.html").exists()


@pytest.mark.nightly
def test_other_policies(tmp_path):
    output = python(copied("other_policies.py", tmp_path), cwd=tmp_path)
    assert "function mean return: " in output and "flax mean return: " in output


@pytest.mark.nightly
def test_pettingzoo_torch(tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch")
    output = python(copied("pettingzoo_torch.py", tmp_path), cwd=tmp_path)
    assert "mean return recorded: 9.9" in output
    assert "mean return of the clone's best actions: 10.0" in output


@pytest.mark.nightly
def test_torch_bc(tmp_path):
    """Five of six actions can be predicted, and the clone makes no random ones."""
    pytest.importorskip("torch", reason="needs PyTorch")
    output = python(copied("torch_bc.py", tmp_path), cwd=tmp_path)
    numbers = dict(re.findall(r"(mean return [a-z ]+|agreement on [a-z -]+): (-?[0-9.]+)", output))
    assert float(numbers["mean return recorded"]) == pytest.approx(-22.7, abs=0.1)
    assert 80 <= float(numbers["agreement on held-out episodes"]) <= 87
    assert float(numbers["mean return of the clone"]) > -13


@pytest.mark.nightly
def test_own_baseline(random_data, tmp_path):
    train = ["-m", "offmarl", "train", copied("own_baseline.py", tmp_path)]
    data = ["--vault", random_data("probe/observation"), "--out", "run"]
    python(*train, *data, "--updates", 300, "--final-episodes", 16, cwd=tmp_path)
    evaluate = ["-m", "offmarl", "evaluate", "run", "--program", "own_baseline.py"]
    output = python(*evaluate, "--eval-episodes", 16, "--json", cwd=tmp_path)
    assert '"mean": 1.0' in output


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_a_notebook_runs(name, random_data, tmp_path, monkeypatch):
    if name == "rware":
        pytest.importorskip("jumanji", reason="needs pip install 'offmarl[envs]'")
    if "torch" in name:
        pytest.importorskip("torch", reason="needs PyTorch")
    nbclient = pytest.importorskip("nbclient", reason="needs pip install 'offmarl[dev]'")
    from docs import examples

    shutil.copytree(random_data("probe/observation"), tmp_path / "data.vlt/main")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    notebook = examples.read(EXAMPLES / f"{name}.py")
    for cell in notebook.cells:
        cell.source = cell.source.replace("og_marl/smac_v1/3m/Good", "data.vlt")
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources
    )
    client.execute()
