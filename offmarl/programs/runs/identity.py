"""What a result was made from, as JSON: of runs, searches, recordings and tasks.

``docs/runs.md`` has the table of what makes an old result invalid.
"""

import hashlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from offmarl import envs
from offmarl._version import __version__
from offmarl.config import Role, with_role
from offmarl.errors import NumericsError
from offmarl.launch.local import threads
from offmarl.programs.program import Args, OnlineArgs
from offmarl.programs.registry import ProgramOrigin
from offmarl.types import ArrayTree, release_difference

MAY_DIFFER = (
    "offmarl",
    "versions",
    "hardware",
    "numerics",
    "file",
    "settings",
    "given",
    "resolved",
    "devices",
    "processes",
    "shards",
    *(f"args.{name}" for kind in (Args, OnlineArgs) for name in with_role(kind, Role.TRACED)),
)
"""Entries that may differ when a run is resumed: the versions, the machine, which arguments were
given and where the others came from, the paths of the program, of vaults and of the run that it
starts from (checksums identify them), the time limit (``spec`` has the one in use), what a recorder
records after the training, and the devices. `require_same_numerics` and `sharding.check_shards`
compare what changes last digits while it is unfinished."""

_SET_BACK = {
    "threads": "PJRT_NPROC={}",
    "xla_flags": "XLA_FLAGS='{}'",
    "devices": "JAX_NUM_CPU_DEVICES={}",
}
"""How a user sets entries of `numerics` back; others are JAX's options in capitals."""

_OPTIONS = (
    "jax_default_matmul_precision",
    "jax_disable_jit",
    "jax_disable_most_optimizations",
    "jax_high_dynamic_range_gumbel",
    "jax_random_seed_offset",
)
"""Options of JAX that change results and are left to the user; `offmarl._compiling.pinned` has the
others."""

_HARMLESS = re.compile(r"--xla_(dump_|force_host_platform|cpu_multi_thread_eigen|.*timeout)")


def made_from(
    origin: ProgramOrigin, env: Any, source: Mapping[str, Any], devices: int = 1
) -> dict[str, Any]:
    """Return what a program's results depend on beside its arguments.

    ``env`` is an environment of any kind, or None. ``source`` has the digests of the data and of
    what the program starts from.
    """
    code = {"program": origin.name, "file": origin.file, "sha256": origin.sha256}
    about = {"offmarl": __version__, **machine(devices), **code, **source}
    if env is None:
        return about
    if package := env.spec.package:
        about["versions"] |= [package.split(" ", 1)]
    return about | environment_source(env.spec.name)


def environment_source(name: str) -> dict[str, dict[str, str]]:
    """Return what a record or recipe says of the code of an environment made in this process.

    Without the file's path, and without the package, which is in the spec. Empty for environments
    of offmarl.
    """
    entries, excluded = envs.source(name), ("file", "package")
    source = {key: value for key, value in entries.items() if key not in excluded}
    return {"environment_source": source} if source else {}


def machine(devices: int = 1) -> dict[str, Any]:
    """Return the machine, the packages that compute on it, and `numerics`."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    device = jax.local_devices()[0]
    hardware = {
        "device": device.device_kind,
        "devices": jax.local_device_count(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }
    versions = {"python": platform.python_version()} | {name: version(name) for name in packages}
    return {"versions": versions, "hardware": hardware, "numerics": numerics(devices)}


def numerics(devices: int | None = None) -> dict[str, Any]:
    """Return the settings that change last digits and can be set back; see ``docs/runs.md``.

    With the threads and the ``devices`` of a CPU for programs that learn.
    """
    options = {name: value for name in _OPTIONS if (value := getattr(jax.config, name, None))}
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not _HARMLESS.match(flag)]
    options |= {"xla_flags": " ".join(sorted(flags))} if flags else {}
    if devices is None or jax.default_backend() != "cpu":
        return options
    # XLA divides loops over its threads, and compiles programs for several devices in another way.
    return options | {
        "threads": max(threads(), jax.local_device_count()),
        "devices": min(devices, 2),
    }


def require_same_numerics(place: Path, recorded: Mapping[str, Any] | None, now: Any) -> None:
    """Raise `NumericsError` if work that began with some `numerics` would continue with others."""
    if not (changes := differences(recorded or {}, now if recorded else {})):
        return
    values = ", ".join(f"{name} {theirs!r}, not {ours!r}" for name, theirs, ours in changes)
    how = " ".join(
        _SET_BACK.get(name, f"{name.upper()}={{}}").format("" if theirs is None else theirs)
        for name, theirs, _ in changes
    )
    raise NumericsError(
        f"{place} was begun with {values}, which changes the last digits of what JAX computes: set "
        f"{how} to go on, or choose another --out."
    )


def _processor() -> str:
    """Return the name of the processor, on Linux from /proc/cpuinfo."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def differences(
    theirs: Any, ours: Any, ignored: Sequence[str] = (), path: str = ""
) -> list[tuple[str, Any, Any]]:
    """Return where two JSON objects differ: the path of each entry, and both values.

    ``ignored`` are paths that are not compared. Of the environment's package (``spec.package``) a
    release that only mends faults is no difference.
    """
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return [
            difference
            for key in sorted(theirs.keys() | ours.keys())
            if (full := f"{path}.{key}" if path else key) not in ignored
            for difference in differences(theirs.get(key), ours.get(key), ignored, full)
        ]
    if path == "spec.package" and not release_difference(str(theirs or ""), str(ours or "")):
        return []
    return [] if theirs == ours else [(path, theirs, ours)]


def fingerprint(tree: ArrayTree) -> str:
    """Return a SHA-256 of the names and contents of a tree's arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
