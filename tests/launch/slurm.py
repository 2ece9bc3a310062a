"""A stand-in for SLURM's commands, which runs the jobs of arrays on this machine.

``install`` writes ``sbatch``, ``srun``, ``squeue`` and ``scancel`` into a directory for the PATH.
Like SLURM, ``squeue`` lists a job until its process has ended, however it ended.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path


def install(directory: Path) -> None:
    """Write the commands into ``directory``; jobs are files in ``directory/jobs``."""
    (directory / "jobs").mkdir(parents=True)
    for name in ("sbatch", "srun", "squeue", "scancel"):
        script = directory / name
        words = f"{sys.executable} {__file__} {name} {directory}"
        script.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        script.chmod(0o755)


def sbatch(jobs: Path, file: str) -> None:
    array = re.search(r"#SBATCH --array=0-(\d+)", Path(file).read_text())
    number = 1 + len({path.name.partition("_")[0] for path in jobs.parent.glob("all/*")})
    (jobs.parent / "all").mkdir(exist_ok=True)
    (jobs.parent / "all" / str(number)).touch()
    names = [f"{number}_{i}" for i in range(int(array[1]) + 1)] if array else [str(number)]
    for name in names:
        (jobs / name).touch()
        env = {"SLURM_JOB_ID": name.replace("_", "9"), "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
        env |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "1"}
        if array:
            env |= dict(
                zip(("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"), name.split("_"), strict=True)
            )
        else:
            env["SLURM_JOB_ID"] = name
        subprocess.Popen(
            ["sh", "-c", f"bash {file} > /dev/null 2>&1; rm -f {jobs / name}"],
            env=os.environ | env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    sys.stdout.write(f"Submitted batch job {number}\n")


def srun(_jobs: Path, *words: str) -> None:
    while words[0].startswith("-"):
        words = words[1:] if words[0] == "--unbuffered" or "=" in words[0] else words[2:]
    os.execvp(words[0], words)


def squeue(jobs: Path, *_options: str) -> None:
    sys.stdout.write("".join(f"{path.name}\n" for path in sorted(jobs.iterdir())))


def scancel(jobs: Path, *numbers: str) -> None:
    process = subprocess.run(
        ["ps", "-ww", "-eo", "pgid,args"], check=True, capture_output=True, text=True
    )
    for line in process.stdout.splitlines():
        for number in numbers:
            if re.search(rf"rm -f {jobs}/{number}(_|$)", line):
                os.killpg(int(line.split()[0]), signal.SIGTERM)
    for path in jobs.iterdir():
        if path.name.partition("_")[0] in numbers:
            path.unlink()


if __name__ == "__main__":
    command, where, *rest = sys.argv[1:]
    {"sbatch": sbatch, "srun": srun, "squeue": squeue, "scancel": scancel}[command](
        Path(where) / "jobs", *rest
    )
