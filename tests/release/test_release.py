"""Releases: one version, workflows, and types that a user's project can use."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["hatch"]["version"] == {"path": "offmarl/_version.py"}


def test_the_changelog_leaves_room_for_what_comes():
    headings = re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=str)
def test_workflows_have_the_least_rights(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        writes = {k for k, v in job.get("permissions", {}).items() if v == "write"}
        assert writes <= {"id-token", "pages"} and "timeout-minutes" in job


USER = '''"""A user's project."""

from pathlib import Path

import jax
import offmarl
from offmarl import envs, vault
from offmarl.types import EnvSpec


def mean_return(path: Path) -> float | None:
    data = vault.open_vault(path)
    reveal_type(data.num_steps)
    return data.episodes.mean_return


def sizes(path: str) -> tuple[int, int]:
    dataset = offmarl.open(path)
    replay = dataset.replay(batch=32, length=20)
    batch = replay.sample(jax.random.key(0))
    reveal_type(batch)
    spec: EnvSpec = dataset.spec
    return spec.num_agents, batch.action.shape[0]


def play(name: str) -> bool:
    env = envs.make(name, time_limit=5)
    reveal_type(env)
    _, timestep = env.reset(jax.random.key(0))
    try:
        offmarl.load_policy("runs/none")
    except offmarl.errors.RunError as error:
        print(error)
    return bool(timestep.last)
'''
WRONG = 'import offmarl\n\nspec: int = offmarl.open("a.vlt").spec\n'


@pytest.mark.nightly
def test_pyright_accepts_a_users_project_in_strict_mode(tmp_path):
    pytest.importorskip("pyright", reason="needs pip install 'offmarl[dev]'")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(WRONG)
    settings = {"typeCheckingMode": "strict", "include": ["."], "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    if not process.stdout.startswith("{"):
        pytest.skip(f"pyright cannot be run here: {process.stderr[-200:]}")
    diagnostics = json.loads(process.stdout)["generalDiagnostics"]
    errors = [d for d in diagnostics if d["severity"] == "error"]
    assert [Path(d["file"]).name for d in errors] == ["wrong.py"], errors
    assert 'Type of "batch" is "Sequence"' in str(diagnostics)
    assert 'Type of "env" is "Environment"' in str(diagnostics)
