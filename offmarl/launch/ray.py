"""Tasks of Ray: on this machine, or on the cluster whose address is given."""

import os
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from offmarl._imports import import_optional
from offmarl.errors import OptionError, RunError
from offmarl.launch.local import Ended, reason
from offmarl.launch.task import Call, State, run_task

_NUMBERS = ("num_cpus", "num_gpus", "memory")
_RESOURCES = (*_NUMBERS, "resources")


class RayLauncher:
    """Runs tasks as Ray tasks, which Ray itself starts again if their processes die.

    Parameters
    ----------
    workers
        Number of tasks at the same time, and of CPUs of a cluster that is started on this machine;
        by default as many as there is room for.
    most_deaths
        Number of deaths after which a task is given up.
    options
        ``address`` of a running cluster (by default that of ``RAY_ADDRESS``, or a new cluster on
        this machine), and the resources of a task: ``num_cpus``, ``num_gpus``, ``memory``.

    Raises
    ------
    MissingExtraError
        Ray is not installed.
    OptionError
        An option is unknown or has a wrong value, or a cluster that is started on this machine
        never has room for a task.
    RunError
        There is no cluster at the address.
    """

    retries = True

    def __init__(self, workers: int | None, most_deaths: int, options: Mapping[str, Any]):
        _check(options)
        # Ray hides accelerators from tasks without num_gpus, and gives tasks low priority.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
        self._ray: Any = import_optional("ray", "ray")
        address = options.get("address") or os.environ.get("RAY_ADDRESS")
        started = {} if address else {"num_cpus": workers, "include_dashboard": False}
        try:
            with warnings.catch_warnings():
                # JAX warns about forks; those of Ray start other programs at once.
                warnings.filterwarnings("ignore", ".*fork", RuntimeWarning)
                self._ray.init(
                    address=address, log_to_driver=False, logging_level="ERROR", **started
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(
                f"Ray cannot be reached at {address or 'this machine'}: {error}"
            ) from None
        self.at_once = int(self._ray.cluster_resources().get("CPU", 1))
        resources = {name: options[name] for name in _RESOURCES if name in options}
        if not address:
            self._check_room(resources)
        retried = {"max_retries": most_deaths - 1, "retry_exceptions": True}
        self._task = self._ray.remote(**{"num_cpus": 1, **retried, **resources})(_run)
        self._most = workers
        self._waiting: deque[Call] = deque()
        self._running: dict[Any, int] = {}

    def _check_room(self, resources: Mapping[str, Any]) -> None:
        """Refuse tasks that a cluster of this machine alone never has room for."""
        here = self._ray.cluster_resources()
        for name, key in (("num_cpus", "CPU"), ("num_gpus", "GPU"), ("memory", "memory")):
            if (asked := resources.get(name, 0)) > (most := here.get(key, 0)):
                self.close()
                raise OptionError(
                    f"--launcher-option {name}={asked:,}: the cluster that is started on this "
                    f"machine has {most:,.0f}. Ask for less, give more --jobs, or give the "
                    "address of a larger cluster."
                )

    def start(self, calls: Sequence[Call]) -> None:
        """Submit tasks, or queue them here if as many run as may."""
        self._waiting.extend(calls)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._waiting and (self._most is None or len(self._running) < self._most):
            call = self._waiting.popleft()
            self._running[self._task.remote(call)] = call.number

    def poll(self, seconds: float) -> list[Ended]:
        """Wait until tasks end, or for some time; return those that ended."""
        if not self._running:
            return []
        done, _ = self._ray.wait([*self._running], num_returns=1, timeout=seconds)
        ended = [self._ended(reference) for reference in done]
        self._hand_out()
        return ended

    def _ended(self, reference: Any) -> Ended:
        index = self._running.pop(reference)
        try:
            self._ray.get(reference)
        except self._ray.exceptions.TaskCancelledError:
            return Ended(index)
        except self._ray.exceptions.RayError as error:
            return Ended(index, reason(error))
        return Ended(index)

    def cancel(self) -> None:
        """Interrupt the running tasks, which save checkpoints, and drop the others."""
        self._waiting.clear()
        for reference in self._running:
            self._ray.cancel(reference, force=False)

    def close(self) -> None:
        """Disconnect; a cluster that was started here ends."""
        self._ray.shutdown()


def _check(options: Mapping[str, Any]) -> None:
    """Refuse options that Ray would not see, or would not understand."""
    known = ("address", *_RESOURCES)
    for name, value in options.items():
        if name not in known:
            raise OptionError(
                f"--launcher-option: the launcher ray has no {name!r}, but {', '.join(known)}."
            )
        if name in _NUMBERS and not (isinstance(value, int | float) and 0 <= value < float("inf")):
            raise OptionError(f"--launcher-option {name} must be a number: got {value!r}.")


def _run(call: Call) -> State:
    """Run a task in a process of Ray, which serves several tasks."""
    state = run_task(call)
    if state == "crashed":
        raise RuntimeError(f"task {call.number} crashed: see {call.log}")
    return state
