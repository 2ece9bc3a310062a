"""Cores and variables of processes that run side by side on one machine."""

import os
from pathlib import Path

_SINGLE_THREADED = "--xla_cpu_multi_thread_eigen=false"


def own_cores() -> list[int]:
    """Return the numbers of the cores that this process may use; of all, where that is unknown."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return [*range(os.cpu_count() or 1)]


def threads() -> int:
    """Return the number of threads that XLA computes with on a CPU, if there are not more devices.

    It is that of the cores of this process, unless a variable of XLA's says otherwise.
    """
    asked = os.environ.get("PJRT_NPROC") or os.environ.get("NPROC") or ""
    return int(asked) if asked.isdecimal() and int(asked) else len(own_cores())


def core_groups(count: int | None) -> list[tuple[int, ...]]:
    """Return the cores of each process that runs side by side with the others."""
    cores = own_cores()
    count = count or (1 if _has_accelerator() else len(cores))
    if count > len(cores):
        return [(-1 - place,) for place in range(count)]
    return [tuple(cores[place::count]) for place in range(count)]


def environment(cores: tuple[int, ...]) -> dict[str, str]:
    """Return the variables of a process; on one core, XLA needs no threads of its own."""
    flags = os.environ.get("XLA_FLAGS", "")
    alone = {"XLA_FLAGS": f"{flags} {_SINGLE_THREADED}".strip()} if len(cores) == 1 else {}
    return {name: x for name, x in os.environ.items() if name != "OFFMARL_QUIET"} | alone


def bind(pid: int, cores: tuple[int, ...]) -> None:
    """Let a process run on its cores only, where the system can do that."""
    if cores[0] >= 0 and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, cores)


def _has_accelerator() -> bool:
    """Whether JAX may find an accelerator; to ask JAX would take its memory."""
    wanted = os.environ.get("JAX_PLATFORMS", "") != "cpu"
    return wanted and any(any(Path("/dev").glob(name)) for name in ("nvidia[0-9]*", "accel*"))
