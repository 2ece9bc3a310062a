"""Tasks of Ray: on this machine, or on the cluster whose address is given."""

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from offmarl._imports import import_optional
from offmarl.errors import RunError
from offmarl.launch.local import Ended, reason
from offmarl.launch.task import Call, State, run_task

_RESOURCES = ("num_cpus", "num_gpus", "memory", "resources")


class RayLauncher:
    """Runs tasks as Ray tasks, which Ray itself starts again if their processes die.

    Parameters
    ----------
    workers
        Number of CPUs of a cluster that is started on this machine; by default all.
    most_deaths
        Number of deaths after which a task is given up.
    options
        ``address`` of a running cluster (by default that of ``RAY_ADDRESS``, or a new cluster on
        this machine), and the resources of a task: ``num_cpus``, ``num_gpus``, ``memory``.

    Raises
    ------
    MissingExtraError
        Ray is not installed.
    RunError
        There is no cluster at the address.
    """

    retries = True

    def __init__(self, workers: int | None, most_deaths: int, options: Mapping[str, Any]):
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
        retried = {"max_retries": most_deaths - 1, "retry_exceptions": True}
        self._task = self._ray.remote(**{"num_cpus": 1, **retried, **resources})(_run)
        self._running: dict[Any, int] = {}

    def start(self, calls: Sequence[Call]) -> None:
        """Submit tasks; what they share is put into the object store once."""
        for call in calls:
            self._running[self._task.remote(call)] = call.number

    def poll(self, seconds: float) -> list[Ended]:
        """Wait until tasks end, or for some time; return those that ended."""
        if not self._running:
            return []
        done, _ = self._ray.wait([*self._running], num_returns=1, timeout=seconds)
        return [self._ended(reference) for reference in done]

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
        for reference in self._running:
            self._ray.cancel(reference, force=False)

    def close(self) -> None:
        """Disconnect; a cluster that was started here ends."""
        self._ray.shutdown()


def _run(call: Call) -> State:
    """Run a task in a process of Ray, which serves several tasks."""
    state = run_task(call)
    if state == "crashed":
        raise RuntimeError(f"task {call.number} crashed: see {call.log}")
    return state
