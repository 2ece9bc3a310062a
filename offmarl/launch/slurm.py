"""Tasks as an array of jobs of SLURM, submitted by submitit."""

import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from offmarl._imports import import_optional
from offmarl.errors import OptionError, RunError
from offmarl.launch.task import Call, run_task

_ASK_SECONDS = 2.0
"""How often SLURM is asked which jobs it has."""
_LOST_SECONDS = 10.0
"""How long the result of a job that SLURM no longer has may take to appear in a shared directory.
"""
_GENERAL = ("timeout_min", "mem_gb", "cpus_per_task", "gpus_per_node", "nodes")
"""Parameters that submitit has for all kinds of clusters; those of SLURM begin with ``slurm_``."""
_COMMANDS = ("sbatch", "srun", "squeue", "scancel")
_PREEMPTION = signal.SIGUSR2
"""The signal that submitit lets SLURM send some time before it ends a job."""
_TIMEOUTS = 10_000
"""How often a task that has reached its time limit is requeued."""
_MINUTES = 240
"""Default time limit of a task. A task that reaches it is requeued, and continues."""
_MOST = 1_000
"""Default number of tasks that run at the same time, if there is room for them."""


class _Requeued:
    """Runs a task; when SLURM preempts it or its time is over, submitit queues it again.

    submitit ignores SIGTERM, which SLURM sends for `scancel` and before it takes the machine away,
    and ends the process at the signal of a preemption. Here the task saves a checkpoint at either.
    After SIGTERM it ends without a result, so that SLURM decides whether the job is queued again.
    """

    def __call__(self, call: Call) -> None:
        """Run the task."""
        requeue = signal.getsignal(_PREEMPTION)
        received: list[int] = []

        def stop(signum: int, _frame: FrameType | None) -> None:
            received.append(signum)
            signal.raise_signal(signal.SIGINT)

        for signum in (_PREEMPTION, signal.SIGTERM):
            signal.signal(signum, stop)
        if run_task(call) == "stopped" and received:
            if signal.SIGTERM in received:
                raise SystemExit(128 + signal.SIGTERM)
            if callable(requeue):
                requeue(_PREEMPTION, None)

    def checkpoint(self, call: Call) -> Any:
        """Return what continues the task."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, call)


class _Job(NamedTuple):
    """A job of submitit, which has ended if it has a result, or if SLURM no longer has it."""

    job: Any
    lost: Callable[[str], bool]

    def done(self) -> bool:
        """Whether the job has ended."""
        return self.job.paths.result_pickle.exists() or self.lost(self.job.job_id)

    def exception(self) -> BaseException | None:
        """Return how the task died; None if it ended by itself."""
        if self.job.paths.result_pickle.exists():
            error: BaseException | None = self.job.exception()
            return error
        return RunError(f"job {self.job.job_id} of SLURM ended without a result")


class SlurmLauncher:
    """Submits tasks as job arrays; options are parameters of submitit, such as partition.

    submitit writes the scripts, starts Python in the jobs, and requeues jobs that were preempted.
    """

    def __init__(
        self, directory: Path, name: str, workers: int | None, options: Mapping[str, Any]
    ) -> None:
        self._submitit: Any = import_optional("submitit", "slurm")
        for command in _COMMANDS:
            if shutil.which(command) is None:
                raise RunError(
                    f"{command} is not on the PATH, so SLURM cannot be used from here: run the "
                    "command on a login node of the cluster, or choose --launcher local or ray."
                )
        self._submitted = directory / "slurm-jobs.txt"
        # Results are pickles: one that was in the directory before must not count as a job's.
        self._executor = self._submitit.AutoExecutor(
            directory / "slurm" / secrets.token_hex(8),
            slurm_max_num_timeout=_TIMEOUTS,
            cluster="slurm",
        )
        self._update(name, workers, options)
        self._jobs: list[_Job] = []
        self._active: set[str] = set()
        self._asked = 0.0
        self._left: dict[str, float] = {}
        """When SLURM no longer had a job."""

    def _update(self, name: str, workers: int | None, options: Mapping[str, Any]) -> None:
        parameters = {key if key in _GENERAL else f"slurm_{key}": x for key, x in options.items()}
        defaults = {
            "name": name,
            "timeout_min": _MINUTES,
            "slurm_array_parallelism": workers or _MOST,
            # Files of the current directory must not stand in for modules of others.
            "slurm_setup": ["export PYTHONSAFEPATH=1"],
        }
        try:
            self._executor.update_parameters(**{**defaults, **parameters})
        except (NameError, TypeError, ValueError) as error:
            raise OptionError(f"--launcher-option: submitit refuses it: {error}") from None

    def submit(self, calls: Sequence[Call]) -> list[_Job]:
        """Submit tasks as one array; `RunError` if SLURM still runs tasks of an earlier launch."""
        if not self._jobs:  # not sooner: another launch may be running
            self._refuse_running()
        try:
            jobs = self._executor.map_array(_Requeued(), calls)
        except Exception as error:  # of `sbatch`: submitit raises errors of several types
            raise RunError(f"SLURM did not accept the tasks: {error}") from None
        with self._submitted.open("a") as file:
            file.writelines(f"{job.job_id}\n" for job in jobs)
        self._active |= {job.job_id for job in jobs}
        submitted = [_Job(job, self._is_lost) for job in jobs]
        self._jobs += submitted
        return submitted

    def _is_lost(self, job: str) -> bool:
        """Whether SLURM no longer has a job, so that its result should have appeared."""
        if time.monotonic() - self._asked > _ASK_SECONDS:
            self._active = _active({job.job.job_id for job in self._jobs})
            self._asked = time.monotonic()
        if job in self._active:
            self._left.pop(job, None)
            return False
        return self._asked - self._left.setdefault(job, self._asked) >= _LOST_SECONDS

    def cancel(self) -> None:
        """Cancel the jobs. SLURM sends SIGTERM first, upon which tasks save checkpoints."""
        if jobs := sorted({job.job.job_id.partition("_")[0] for job in self._jobs}):
            subprocess.run(["scancel", *jobs], check=False, capture_output=True)

    def close(self) -> None:
        """Forget the jobs; those that run go on."""
        if self._jobs and all(job.done() for job in self._jobs):
            self._submitted.unlink(missing_ok=True)

    def _refuse_running(self) -> None:
        if not self._submitted.exists():
            return
        earlier = set(self._submitted.read_text().split())
        if active := sorted({job.partition("_")[0] for job in earlier & _active(earlier)}):
            raise RunError(
                f"SLURM still has tasks of an earlier launch: wait for job {', '.join(active)}, or "
                f"cancel it with `scancel {' '.join(active)}`, and repeat the command."
            )
        self._submitted.unlink()


def _active(jobs: set[str]) -> set[str]:
    """Return which jobs SLURM has, waiting or running; all of them if it does not answer."""
    command = ["squeue", "--noheader", "--array", "--format=%i", "--states=PD,R,CG,CF,S,RQ"]
    answer = subprocess.run(command, check=False, capture_output=True, text=True)
    return jobs & set(answer.stdout.split()) if answer.returncode == 0 else jobs
