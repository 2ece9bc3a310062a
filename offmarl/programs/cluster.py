"""The processes of a run on several machines: how they join, agree and end.

Every process runs the same program, each on its own devices, and `offmarl.programs.runs.sharding`
divides the arrays over all of them. The first process (number 0) reads and writes all files of the
run; the others get from it what they need to begin, and keep nothing. Without several processes,
the functions here do nothing.
"""

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding
from numpy.typing import NDArray

from offmarl._arrays import is_key
from offmarl._mesh import spec
from offmarl._version import __version__
from offmarl.config import DeviceArgs, Role, with_role
from offmarl.errors import OffmarlError, OptionError, ProcessLostError, RunError
from offmarl.tracking import to_json
from offmarl.types import ArrayTree

T = TypeVar("T")
TreeT = TypeVar("TreeT")


def seconds_of(variable: str, default: int) -> int:
    """Return a time from an environment variable."""
    text = os.environ.get(variable, "")
    if text and not (text.isdecimal() and int(text)):
        raise OptionError(f"{variable} is a whole number of seconds, such as 60, not {text!r}.")
    return int(text or default)


JOIN_SECONDS = seconds_of("OFFMARL_JOIN_SECONDS", 120)
"""How long a process waits for the others at the start."""

HEARTBEAT_SECONDS = seconds_of("OFFMARL_HEARTBEAT_SECONDS", 60)
"""How long a process may be silent before JAX ends the others."""

AUTO = "auto"
"""Value of ``--coordinator`` that leaves everything to JAX."""


# ---------------------------------------------------------------------------------- joining


def join(args: DeviceArgs) -> None:
    """Join the other processes of a run, if the arguments name a coordinator.

    Call it before JAX is used; a second call does nothing. All processes must have the arguments in
    common, except for the paths of files. `OptionError` if they differ, or the processes do not
    find one another.
    """
    if args.coordinator is None:
        for name in ("processes", "process"):
            if getattr(args, name) is not None:
                raise OptionError(f"--{name} needs --coordinator HOST:PORT: give both.")
        return
    if jax.distributed.is_initialized():
        return
    _check(args)
    if args.coordinator != AUTO and args.process is not None:
        _find_coordinator(args.coordinator, is_other=args.process > 0)
    _keep_output_apart()
    _initialize(args)
    if jax.process_index():
        os.environ["OFFMARL_QUIET"] = "1"  # process 0 shows the progress


def _check(args: DeviceArgs) -> None:
    host, _, port = str(args.coordinator).rpartition(":")
    if args.coordinator != AUTO and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise OptionError(
            f"--coordinator {args.coordinator} is not HOST:PORT: give the address of process 0, "
            "such as 10.0.0.1:1234, or auto."
        )
    if args.processes is None or args.process is None:
        return
    if args.process >= args.processes:
        raise OptionError(
            f"--process {args.process} does not exist among --processes {args.processes}: they "
            f"have the numbers from 0 to {args.processes - 1}."
        )


def _find_coordinator(address: str, is_other: bool) -> None:
    """Wait until the coordinator answers; for process 0, nothing may answer at its address."""
    host, _, port = address.rpartition(":")
    end, reason = time.monotonic() + JOIN_SECONDS, ""
    while is_other and time.monotonic() < end:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(0.2)
    if is_other:
        raise OptionError(
            f"--coordinator {address} did not answer within {JOIN_SECONDS} s ({reason}): start "
            "process 0 on that machine with the same address, and check that the port is open."
        )
    with suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        raise OptionError(
            f"--coordinator {address}: another program answers there, perhaps a second process 0: "
            "start each process with its own --process, or choose another port."
        )


def _facts(args: DeviceArgs) -> dict[str, Any]:
    """Return what the processes must have in common, for JSON; of a path, the name of the file."""
    program = Path(str(sys.modules[type(args).__module__].__file__)).stem
    names = [x.name for x in fields(args) if x.name not in with_role(type(args), Role.LOCAL)]
    facts = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    facts |= {"--processes": jax.process_count() if args.processes is None else args.processes}
    facts |= {"the program": program, "the version of offmarl": __version__}
    facts |= {"the version of JAX": jax.__version__}
    shared = {name: x.name if isinstance(x, Path) else x for name, x in facts.items()}
    plain: dict[str, Any] = json.loads(to_json(shared))
    return plain


def _initialize(args: DeviceArgs) -> None:
    address = None if args.coordinator == AUTO else args.coordinator
    late = (
        f"--coordinator {args.coordinator}: the processes did not join within {JOIN_SECONDS} s: "
        "start all of them, each with its own --process and with the same --processes."
    )
    try:
        jax.distributed.initialize(
            address,
            args.processes,
            args.process,
            initialization_timeout=JOIN_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
        _compare(args)
        jax.devices()  # the processes tell one another their devices
    except ValueError as error:
        missing = "--processes N and --process I"
        missing = missing if address else f"--coordinator HOST:PORT, {missing}"
        raise OptionError(
            f"--coordinator {args.coordinator}: no cluster such as SLURM has started this process, "
            f"so something is missing ({error}): start it with `srun`, or give {missing}."
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise OptionError(f"{late} ({_first_line(error)})") from None


def _compare(args: DeviceArgs) -> None:
    """Raise `OptionError` in all processes if one was started with other facts than process 0."""
    from orbax.checkpoint import multihost

    client, process = multihost.get_jax_distributed_client(), args.process
    process = jax.process_index() if process is None else process
    client.key_value_set(f"offmarl/started/{process}", json.dumps(_facts(args)))
    client.wait_at_barrier("offmarl/started", 1000 * JOIN_SECONDS)
    entries = client.key_value_dir_get("offmarl/started/")
    started = {int(key.rpartition("/")[2]): json.loads(text) for key, text in entries}
    for number, facts in sorted(started.items()):
        for name in sorted(started[0].keys() | facts.keys()):
            theirs, first = facts.get(name), started[0].get(name)
            if theirs != first:
                # Together, because the end of process 0 would abort the others.
                jax.distributed.shutdown()  # type: ignore[no-untyped-call]
                raise OptionError(
                    f"{name} is {theirs!r} in process {number} and {first!r} in process 0: give "
                    "all processes the same command, except for --process."
                )


def _keep_output_apart() -> None:
    """Lead what libraries print on standard output to standard error, as Gloo does on CPUs.

    The standard output of Python stays where it was: programs may read it, as with ``--json``.
    """
    with suppress(OSError, ValueError):  # it is no file, as in notebooks
        if sys.stdout.fileno() == 1:
            sys.stdout.flush()
            stdout = os.dup(1)
            os.dup2(2, 1)
            sys.stdout = os.fdopen(stdout, "w", buffering=1)


# ---------------------------------------------------------------------------------- ending

_OWN_FAULTS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
"""Beginnings of errors of this process itself, such as a device without memory left."""


@contextmanager
def ends_with_others(run: Path) -> Iterator[None]:
    """Name the directory that a run continues from if the loss of another process ends this one.

    The next exchange with a lost process fails, or JAX misses its heartbeat and aborts this one.
    After an error, the process ends without the end of JAX, which would wait for the others.
    """
    if jax.process_count() == 1:
        yield
        return
    advice = (
        f"Start all processes again with the same commands: {run} continues from its last "
        "checkpoint."
    )
    try:
        yield
    except Exception as error:
        for callback in ((os._exit, 1), (sys.stdout.flush,)):  # the last one is called first
            atexit.register(*callback)
        is_exchange = isinstance(error, jax.errors.JaxRuntimeError)
        if not is_exchange or str(error).startswith(_OWN_FAULTS):
            raise
        reason = f"an exchange with another process failed ({_first_line(error)})"
        raise ProcessLostError(f"{reason}. {advice}") from None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


# ---------------------------------------------------------------------------------- agreeing


def is_first() -> bool:
    """Return whether this process, such as the only one, reads and writes the run's files."""
    return jax.process_index() == 0


def from_first(value: T) -> T:
    """Return the value of the first process: JSON that may differ between the processes."""
    return on_first(lambda: value)


def on_first(make: Callable[[], T]) -> T:
    """Call a function in the first process, and return its result, JSON, in all of them."""
    if jax.process_count() == 1:
        return make()
    text, raised = b"", None
    if is_first():
        try:
            text = to_json({"value": make()}).encode()
        except OffmarlError as error:
            raised, text = error, to_json({"error": str(error)}).encode()
    (size,) = _from_first(np.array([len(text)], np.int32))
    reply = json.loads(_from_first(np.frombuffer(text.ljust(size), np.uint8)).tobytes())
    if raised is not None:
        raise raised
    if "error" in reply:
        raise RunError(f"process 0 ended: {reply['error']}")
    value: T = reply["value"]
    return value


_MOST_BYTES = 2**26
"""Size of the pieces in which arrays are sent, each of which takes as much memory of a device."""


def arrays_from_first(tree: ArrayTree) -> ArrayTree:
    """Return the arrays of the first process, as NumPy has them; elsewhere only shapes count."""
    return tree if jax.process_count() == 1 else jax.tree.map(_leaf_from_first, tree)


def _leaf_from_first(leaf: Any) -> Any:
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    if is_key(leaf):
        numbers = jax.random.key_data
        data = _leaf_from_first(jax.eval_shape(numbers, leaf) if is_shape else numbers(leaf))
        return jax.random.wrap_key_data(jnp.asarray(data))
    return _from_first(np.zeros(leaf.shape, leaf.dtype) if is_shape else np.asarray(leaf))


def _from_first(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of the first process; elsewhere only its shape and type count."""
    sent, broadcast = array.reshape(-1).view(np.uint8), multihost_utils.broadcast_one_to_all
    starts = range(0, sent.size, _MOST_BYTES)
    pieces = [np.asarray(broadcast(sent[x : x + _MOST_BYTES]), np.uint8) for x in starts]
    return np.concatenate([sent[:0], *pieces]).view(array.dtype).reshape(array.shape)


def load_on_first(load: Callable[[], TreeT], like: TreeT) -> TreeT:
    """Load arrays in the first process, and return them in all; ``like`` has their shapes."""
    trees: list[TreeT] = []
    on_first(lambda: trees.append(load()))
    shared: TreeT = arrays_from_first(trees[0] if trees else like)
    return shared


def any_process(flag: bool) -> bool:
    """Return whether a flag is true in any process; all must call it."""
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def agree(due: bool, signum: int | None, calls: int = 0) -> tuple[bool, int | None, int]:
    """Return whether any process wants to save, its signal, and the first process's ``calls``."""
    wishes = np.array([due, signum or 0, calls], np.int32)
    dues, signals, numbers = multihost_utils.process_allgather(wishes).T
    return bool(dues.any() or signals.any()), int(signals.max()) or None, int(numbers[0])


def check_same(name: str, value: Any, advice: str) -> None:
    """Raise `RunError` in all processes where a value differs from that of the first process."""
    if any_process(from_first(value) != json.loads(to_json(value))):
        raise RunError(f"{name} differs between the processes: {advice}")


# ---------------------------------------------------------------------------------- arrays


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """Put an array on the devices of a sharding, some of which other processes may have.

    Each process has the whole array, or the array is on these devices already.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(leaf, sharding)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        return _move_to(sharding)(leaf)
    if is_key(leaf):
        data = put(jax.random.key_data(leaf), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def gather_all(tree: TreeT) -> TreeT:
    """Return arrays that this process has as a whole; all processes must call it."""
    arrays: TreeT = jax.tree.map(_gathered_leaf, tree)
    return arrays


def _gathered_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    if not leaf.is_fully_replicated:
        shared = NamedSharding(leaf.sharding.mesh, spec())  # type: ignore[attr-defined]
        leaf = _move_to(shared)(leaf)
    return leaf.addressable_data(0)


@cache
def _move_to(sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    """Return a compiled function that moves an array between the devices of all processes."""
    move: Callable[[jax.Array], jax.Array] = jax.jit(lambda array: array, out_shardings=sharding)
    return move
