"""Exceptions that Python cannot raise: a Ctrl-C is repeated, so that it is not lost."""

import os
import signal
import sys
import threading
from typing import Any

_SECONDS = 0.05


def repeat_lost() -> None:
    """Repeat a Ctrl-C whose exception Python discards.

    An exception in a callback of the garbage collector, such as JAX's, or in a finaliser is printed
    and discarded, and a program that has not yet installed its own handler would run on.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) == "Event loop is closed":
            return  # another write of a checkpoint that failed and was reported
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            before(unraisable)
            return
        # Later, because a signal in this function would be discarded, too.
        repeat = threading.Timer(_SECONDS, os.kill, (os.getpid(), signal.SIGINT))
        repeat.daemon = True
        repeat.start()

    sys.unraisablehook = hook
