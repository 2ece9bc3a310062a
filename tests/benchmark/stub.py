"""Stands for the command line in the processes of tasks: a training is a copy of a finished run.

The directory of ``TEMPLATE`` has the run.
"""

import json
import os
import shutil
import time
import tomllib
from pathlib import Path

from offmarl.benchmark import CellsWork, read_plan
from offmarl.errors import OptionError

ENTRY = "tests.benchmark.stub:make"

FAILS, BUG = 13, 5
"""Values of the option ``hidden``: its training fails by an error of the user, or by a bug."""


def make(arguments):
    plan, out = arguments
    return CellsWork(read_plan(plan, Path(out)), call)


def call(command):
    verb, name, *rest = command
    if verb == "pull":
        if name.startswith("unknown"):
            raise OptionError("no hub has it.")
        return {"paths": {"Good": vault(Path("pulled") / name)}}
    given = dict(zip(rest[::2], rest[1::2], strict=False))
    options, out = tomllib.loads(Path(given["--config"]).read_text()), Path(given["--out"])
    if verb == "record":
        slowly(options)
        tiers = options["tiers"].split(",")
        return {"vaults": [{"tier": one, "path": vault(out / f"{name}-{one}")} for one in tiers]}
    misfortune(options.get("hidden"))
    train(name, options, out)
    return {}


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


def misfortune(hidden):
    if hidden == FAILS:
        raise OptionError("a message in the log")
    if hidden == BUG:
        raise ValueError("a bug of the program")
