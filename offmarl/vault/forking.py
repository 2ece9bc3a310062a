"""Keeps TensorStore out of forked processes, in which its first call would end the process.

TensorStore's threads do not survive a fork. A process that was forked from one that used
TensorStore can therefore only read what the other prepared: see `Dataset.prepare_fork`.
"""

import os
from pathlib import PurePath

from offmarl.errors import VaultError

_user: list[int] = []
"""The process that used TensorStore first: this one, or the one that this was forked from."""


def is_forked() -> bool:
    """Whether this process was forked from one that had used TensorStore."""
    return bool(_user) and _user[0] != os.getpid()


def use_tensorstore(path: PurePath) -> None:
    """Note that this process uses TensorStore."""
    if not _user:
        _user.append(os.getpid())
    elif is_forked():
        raise VaultError(
            f"{path} cannot be read in a forked process, because TensorStore's threads do not "
            "survive a fork: start the process with spawn or forkserver, for example "
            "DataLoader(..., multiprocessing_context='spawn')."
        )
