"""Tasks of Ray: on this machine, or on the cluster whose address is given."""

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from offmarl._imports import import_optional
from offmarl.errors import OptionError, RunError
from offmarl.launch.task import Call, run_task

_MOST = 1_000
"""Default number of tasks that are submitted at the same time."""


class RayLauncher:
    """Runs tasks as Ray tasks; a thread waits for each.

    Options are the ``address`` of a running cluster (by default that of ``RAY_ADDRESS``, or a new
    cluster on this machine), and those of a Ray task, such as ``num_gpus``.
    """

    def __init__(
        self, directory: Path, name: str, workers: int | None, options: Mapping[str, Any]
    ) -> None:
        del directory, name
        # Ray hides accelerators from tasks without num_gpus, and gives tasks low priority.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
        self._ray: Any = import_optional("ray", "ray")
        address = options.get("address") or os.environ.get("RAY_ADDRESS")
        resources = {name: x for name, x in options.items() if name != "address"}
        # The launch itself restarts tasks whose processes die.
        of_task = {"num_cpus": 1, "max_retries": 0, **resources}
        try:
            self._task = self._ray.remote(**of_task)(run_task)
        except (TypeError, ValueError, OverflowError) as error:
            raise OptionError(f"--launcher-option: Ray refuses it: {error}") from None
        started = {} if address else {"num_cpus": workers, "include_dashboard": False}
        try:
            with warnings.catch_warnings():
                # JAX warns about forks; Ray's start other programs at once.
                warnings.filterwarnings("ignore", ".*fork", RuntimeWarning)
                self._ray.init(
                    address=address, log_to_driver=False, logging_level="ERROR", **started
                )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(
                f"Ray cannot be reached at {address or 'this machine'}: {error}"
            ) from None
        if not address:
            self._check_room(resources)
        self._threads = ThreadPoolExecutor(workers or _MOST)
        self._running: list[Any] = []

    def _check_room(self, resources: Mapping[str, Any]) -> None:
        """Raise `OptionError` for resources that a cluster of this machine does not have."""
        capacity = self._ray.cluster_resources()
        for name, key in (("num_cpus", "CPU"), ("num_gpus", "GPU"), ("memory", "memory")):
            if (amount := resources.get(name, 0)) > (most := capacity.get(key, 0)):
                self.close()
                raise OptionError(
                    f"--launcher-option {name}={amount:,}: the cluster that is started on this "
                    f"machine has {most:,.0f}. Ask for less, give more --jobs, or give the "
                    "address of a larger cluster."
                )

    def submit(self, calls: Sequence[Call]) -> list["Future[None]"]:
        """Submit tasks, or queue them here if as many run as may."""
        return [self._threads.submit(self._run, call) for call in calls]

    def _run(self, call: Call) -> None:
        reference = self._task.remote(call)
        self._running.append(reference)
        try:
            self._ray.get(reference)
        finally:
            self._running.remove(reference)

    def cancel(self) -> None:
        """Interrupt the running tasks, which save checkpoints, and drop the others."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for reference in [*self._running]:
            self._ray.cancel(reference, force=False)

    def close(self) -> None:
        """Disconnect; a cluster that was started here ends."""
        self._ray.shutdown()
