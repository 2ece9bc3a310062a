"""How programs are compiled: the devices of a CPU, XLA's options, and the cache on disk."""

import os
import warnings
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from offmarl import paths
from offmarl._ahead import COMPILING, in_thread
from offmarl._compiling import pinned
from offmarl.launch.local import threads

# ---------------------------------------------------------------------------------- cores


def use_cores(seeds: int, batching: str) -> None:
    """Split the CPU into devices for JAX, one for each seed if there are as many cores.

    ``--devices`` counts as so many seeds.

    Two cores train four seeds 1.5 times as fast as one device does, up to last digits. The
    command line calls this before JAX starts; later it has no effect, and neither has it after the
    user has set the number (``JAX_NUM_CPU_DEVICES``). Seeds under `jax.vmap` stay on one device,
    because the bits of their results depend on how many are computed side by side.
    """
    config: Any = jax.config
    flags = os.environ.get("XLA_FLAGS", "")
    is_set = config.jax_num_cpu_devices >= 0 or "host_platform_device_count" in flags
    if batching != "vmap" and not is_set:
        with suppress(RuntimeError):  # JAX has started
            config.update("jax_num_cpu_devices", min(seeds, threads()))


# ---------------------------------------------------------------------------------- compilation


def compile_ahead(function: Any, *args: Any) -> "Future[None]":
    """Compile a jitted function for some arguments in a thread; then its call finds the program.

    Wait for the future before the call, which otherwise compiles it, too.
    """
    shapes = jax.tree.map(_shape, args)

    def work() -> None:
        with pinned():
            function.lower(*shapes).compile()

    return in_thread(work, COMPILING)


def _shape(leaf: Any) -> Any:
    """Return what compilation needs of an array, which may be donated meanwhile."""
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = leaf.sharding if leaf.committed else None
    weak = getattr(leaf, "weak_type", False)
    struct: Any = jax.ShapeDtypeStruct
    return struct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def keep_compiled_programs() -> None:
    """Turn on JAX's persistent compilation cache, in ``~/.cache/offmarl/compiled``.

    ``XDG_CACHE_HOME`` replaces ``~/.cache``; a user without a home directory has no cache. A cache
    that was chosen with ``JAX_COMPILATION_CACHE_DIR`` or `jax.config` is not changed, and
    ``OFFMARL_COMPILATION_CACHE=off`` turns offmarl's off. Programs call this when they run;
    importing `offmarl` does not.
    """
    # A killed process leaves an incomplete entry. JAX warns and compiles the program again.
    entry = "Error (reading|writing) persistent compilation cache entry"
    warnings.filterwarnings("ignore", entry)
    config: Any = jax.config
    directory = paths.cache_directory("compiled")
    is_off = paths.is_off("OFFMARL_COMPILATION_CACHE")
    if directory is None or is_off or config.jax_compilation_cache_dir:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:  # the home directory is not writable: programs are compiled each time
        return
    config.update("jax_compilation_cache_dir", str(directory))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    config.update("jax_compilation_cache_max_size", 2 * 2**30)
    reset_cache()  # JAX decides at its first compilation whether to use a cache
