"""Stands for programs and the hub in the processes of tasks: a training copies a finished run.

The directory of ``TEMPLATE`` has the run.
"""

import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

from offmarl.benchmark import CellsWork, read_plan
from offmarl.errors import OptionError
from offmarl.hub import pulling

ENTRY = "tests.benchmark.stub:make"

FAILS = 13
"""Value of the option ``hidden`` with which the training fails by an error of the user."""


def make(arguments):
    plan, out = arguments
    pulling.pull = pull
    return CellsWork(read_plan(plan, Path(out)), run)


def pull(name):
    return SimpleNamespace(paths={"Good": vault(Path("pulled") / name)})


def run(kind, name, options):
    options = dict(options)
    out = Path(options.pop("out"))
    if kind == "recorder":
        slowly(options)
        tiers = options["tiers"].split(",")
        vaults = [{"tier": tier, "path": vault(out / f"{name}-{tier}")} for tier in tiers]
        return SimpleNamespace(data={"vaults": vaults})
    if options.get("hidden") == FAILS:
        raise OptionError("a message in the log")
    return train(name, options, out)


def train(program, options, out):
    template = Path(os.environ["TEMPLATE"])
    shutil.copytree(template, out, dirs_exist_ok=True)
    record = json.loads((out / "run.json").read_text())
    record |= {"program": program, "args": options}
    text = (out / "marl_eval.json").read_text().replace('"template', f'"{program}')
    (out / "marl_eval.json").write_text(text)
    (out / "run.json").write_text(json.dumps(record))


def vault(path):
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


def slowly(options):
    """Record until a cell of another dataset has been trained, if the seed asks for it."""
    home = Path(os.environ["TEMPLATE"]).parent
    end = time.monotonic() + 60
    while options.get("seed") == 1 and not any(home.glob("out/cells/two--*")):
        assert time.monotonic() < end, "no cell of the other dataset was trained meanwhile"
        time.sleep(0.01)
