"""Programs as scripts: ``python baselines/bc.py``."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    script.relative_to(ROOT).as_posix()
    for directory in ("baselines", "recorders")
    for script in sorted((ROOT / directory).glob("[a-z]*.py"))
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_its_program(script, tmp_path, monkeypatch, capsys):
    """It acts as ``offmarl`` with the same arguments: here, it names the missing one."""
    flags = ["--vault", "absent.vlt"] if script.startswith("baselines") else ["--env", "absent/x"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit) as error:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert error.value.code in (1, 2)
    assert "absent" in capsys.readouterr().err
