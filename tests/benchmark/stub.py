"""Stands for the command line: copies a finished run to where a cell's run belongs, at once.

A program whose options have ``hidden = 13`` fails; with ``hidden = 7`` it waits for a signal, as
long as there is no file "go" beside the template.
"""

import json
import os
import shutil
import signal
import sys
import time
import tomllib
from pathlib import Path

TEMPLATE = Path(os.environ["TEMPLATE"])


def train(program: str, config: Path, out: Path) -> None:
    options = tomllib.loads(config.read_text())
    if options.get("hidden") == 13:
        sys.exit("a message in the log")
    if options.get("hidden") == 7 and not (TEMPLATE.parent / "go").exists():
        signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
        (TEMPLATE.parent / "waiting").touch()
        time.sleep(60)
    shutil.copytree(TEMPLATE, out, dirs_exist_ok=True)
    record = json.loads((out / "run.json").read_text())
    record |= {"program": program, "args": options}
    text = (out / "marl_eval.json").read_text().replace('"template', f'"{program}')
    (out / "marl_eval.json").write_text(text)
    (out / "run.json").write_text(json.dumps(record))


def record(program: str, config: Path, out: Path) -> None:
    options = tomllib.loads(config.read_text())
    tiers = options["tiers"].split(",")
    vaults = [{"tier": tier, "path": str(out / f"{program}-{tier}")} for tier in tiers]
    print(json.dumps({"vaults": vaults}))


if __name__ == "__main__":
    verb, name, *rest = sys.argv[1:]
    if verb == "pull":
        print(json.dumps({"paths": {"Good": f"pulled/{name}"}}))
    else:
        run = {"train": train, "record": record}[verb]
        run(name, Path(rest[rest.index("--config") + 1]), Path(rest[rest.index("--out") + 1]))
