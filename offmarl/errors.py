"""The exceptions that offmarl raises for problems that users can fix.

A message says what is wrong, with what, and what to do. The command line prints only the message; a
traceback is a bug in offmarl.
"""

import difflib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn


class OffmarlError(Exception):
    """A problem that a user can fix; the base of all of offmarl's exceptions."""


class VaultError(OffmarlError):
    """A vault cannot be created, read or written."""


class VaultNotFoundError(VaultError):
    """No vault exists at the path."""


class VaultExistsError(VaultError):
    """A vault cannot be created at a path that exists already."""


class VaultFormatError(VaultError):
    """The data at the path is not a vault, or is inconsistent."""


class ChecksumError(OffmarlError):
    """Data differs from what was written or published: its checksum is wrong."""


class VaultChecksumError(VaultFormatError, ChecksumError):
    """A part of a vault differs from what was written: its checksum is wrong."""


class VaultLayoutError(VaultFormatError):
    """The arrays of a vault, which may be intact, are not those of multi-agent experience.

    `offmarl.vault.Dataset.read` may still read them.
    """


class VaultLockedError(VaultError):
    """Another process is writing to the vault."""


class VaultConflictError(VaultError):
    """A program that does not use the lock changed the vault while a writer was open."""


class VaultFullError(VaultError):
    """A commit does not fit on the disk, in the quota or in the file size limit."""


class ShapeError(OffmarlError):
    """Data and program differ in shapes, number of agents or kind of action."""


class InvalidValueError(OffmarlError):
    """A record contains a value that no environment or policy can produce, such as NaN."""


class UnknownNameError(OffmarlError):
    """No environment, tier, baseline or other object has this name."""


class OptionError(OffmarlError):
    """An option has an invalid value."""


class CardError(OffmarlError):
    """A dataset's card is invalid."""


class HubError(OffmarlError):
    """A dataset cannot be pulled from, or pushed to, the hub."""


class HubUnreachableError(HubError):
    """No hub answers, or offline mode is on."""


class HubChecksumError(HubError, ChecksumError):
    """The data received differs from what was published."""


class MissingExtraError(OffmarlError):
    """An optional package is needed and not installed."""


class PluginError(OffmarlError):
    """An installed package provides something to offmarl that cannot be imported."""


class ExpressionError(OptionError):
    """A condition on episodes is invalid, or needs something that the data does not record."""


class RunError(OffmarlError):
    """A run cannot be started, resumed or loaded."""


class NumericsError(RunError):
    """A run cannot go on with threads, devices or options of JAX that change last digits."""


class NotFiniteError(RunError):
    """What a run has learned is not finite: training stopped there, or its policy is refused."""


class NotLearnedError(RunError):
    """A recorder has no policy that is good enough for a tier, or two tiers are alike."""


class ProcessLostError(RunError):
    """Another process of a run on several machines ended, and so did this one."""


class CheckpointError(RunError):
    """A checkpoint is damaged.

    Attributes
    ----------
    reason
        The damage that was found.
    """

    def __init__(self, path: Path, reason: str, advice: str = ""):
        advice = advice or (
            "delete it and repeat the command of its run, which continues from the previous "
            "checkpoint, or starts again if there is none."
        )
        super().__init__(f"checkpoint {path} is damaged ({reason}): {advice}")
        self.reason = reason


class Stopped(KeyboardInterrupt):
    """A signal stopped a program that saves its work. Like Ctrl-C, this is not an `OffmarlError`.

    Attributes
    ----------
    signum
        The signal: SIGINT (Ctrl-C) or SIGTERM.
    """

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.signum = signum


def raise_stopped(signum: int, _frame: object) -> NoReturn:
    """Handle a signal by raising `Stopped`, so that what is half written is removed."""
    raise Stopped("stopped: repeat the command to finish it.", signum)


_REPEAT_SECONDS = 0.05


_hook_is_set = False


def repeat_lost_interrupts() -> None:
    """Repeat a Ctrl-C whose exception Python discards.

    An exception in a callback of the garbage collector, such as JAX's, or in a finaliser is printed
    and discarded, and a program that has not yet installed its own handler would run on.
    """
    global _hook_is_set
    if _hook_is_set:
        return
    _hook_is_set, before = True, sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) == "Event loop is closed":
            return  # another write of a checkpoint that failed and was reported
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            before(unraisable)
            return
        # Later, because a signal in this function would be discarded, too.
        signum = getattr(unraisable.exc_value, "signum", signal.SIGINT)
        repeat = threading.Timer(_REPEAT_SECONDS, os.kill, (os.getpid(), signum))
        repeat.daemon = True
        repeat.start()

    sys.unraisablehook = hook


def unknown_name(kind: str, name: str, known: Iterable[str], see: str = "") -> UnknownNameError:
    """Return the error for an unknown name, with the closest known names.

    Parameters
    ----------
    kind
        The kind of object, in the singular, such as "environment" or "tier".
    name
        The unknown name.
    known
        The names that exist.
    see
        A command that lists them.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    listing = f"{', '.join(names[:10])} ..." if len(names) > 20 else f"{', '.join(names)}."
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"known: {listing}" if names else "none exist."
    more = f" See `{see}`." if see else ""
    return UnknownNameError(f"no {kind} named {name!r}: {hint}{more}")


def raise_together(errors: Sequence[OffmarlError]) -> None:
    """Raise the first error with the messages of all, a line each; do nothing without errors."""
    if errors:
        errors[0].args = ("\n".join(dict.fromkeys(map(str, errors))),)
        raise errors[0]
