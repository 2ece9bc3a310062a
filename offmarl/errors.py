"""The exceptions a user of offmarl can meet.

Every message says what was wrong, with what, and what to do about it. The command line prints the
message alone; a traceback means a defect of ours.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path


class OffmarlError(Exception):
    """Something a user can put right; the parent of all of offmarl's own exceptions."""


class VaultError(OffmarlError):
    """A vault cannot be created, read or written as asked."""


class VaultNotFoundError(VaultError):
    """There is nothing at the path."""


class VaultExistsError(VaultError):
    """A vault would be created where something is already."""


class VaultFormatError(VaultError):
    """What is there is not a vault, or its parts contradict one another."""


class ChecksumError(OffmarlError):
    """Data is not what was written or published: its checksum is wrong."""


class VaultChecksumError(VaultFormatError, ChecksumError):
    """A part of a vault is not what was written: its checksum is wrong."""


class VaultLayoutError(VaultFormatError):
    """A vault, perhaps undamaged, whose arrays are not those of multi-agent experience.

    `offmarl.vault.Dataset.read` may still read them.
    """


class VaultLockedError(VaultError):
    """Another process is writing to the vault."""


class VaultConflictError(VaultError):
    """A program that knows no lock changed the vault under an open writer."""


class VaultFullError(VaultError):
    """The disk, the quota or the file size limit left no room for a commit."""


class ShapeError(OffmarlError):
    """Data and program do not fit: other shapes, other numbers of agents, other kinds of action."""


class InvalidValueError(OffmarlError):
    """A record contains a value that no environment or policy can produce, such as NaN."""


class UnknownNameError(OffmarlError):
    """A name that nothing is registered under: an environment, a tier, a baseline."""


class OptionError(OffmarlError):
    """An option has a value that it cannot have."""


class CardError(OffmarlError):
    """A dataset's card is not as a card must be."""


class HubError(OffmarlError):
    """A dataset cannot be pulled from, or pushed to, the hub as asked."""


class HubUnreachableError(HubError):
    """No hub answers, or offline mode is on."""


class HubChecksumError(HubError, ChecksumError):
    """What arrived is not what was published."""


class MissingExtraError(OffmarlError):
    """A package that is not among offmarl's own dependencies is asked for, and not installed."""


class PluginError(OffmarlError):
    """An installed package provides something to offmarl that cannot be imported."""


class ExpressionError(OffmarlError):
    """A condition on episodes cannot be understood, or asks for what the data does not tell."""


class RunError(OffmarlError):
    """A training run cannot be started, resumed or loaded as asked."""


class CheckpointError(RunError):
    """A checkpoint is damaged: it does not hold what was saved.

    Attributes
    ----------
    reason
        What was found.
    """

    def __init__(self, path: Path, reason: str, advice: str = ""):
        advice = advice or (
            "delete it and repeat the command of its run, which goes on from the checkpoint before "
            "it, or from the beginning where there is none."
        )
        super().__init__(f"checkpoint {path} is damaged ({reason}): {advice}")
        self.reason = reason


class Stopped(KeyboardInterrupt):
    """A signal stopped a program that saves its work; no `OffmarlError`, as Ctrl-C is none.

    Attributes
    ----------
    signum
        The signal: SIGINT (Ctrl-C) or SIGTERM.
    """

    def __init__(self, message: str, signum: int):
        super().__init__(message)
        self.signum = signum


def unknown_name(kind: str, name: str, known: Iterable[str], see: str = "") -> UnknownNameError:
    """Build the error for an unknown name, with the nearest known ones.

    Parameters
    ----------
    kind
        What was asked for, in the singular: "environment", "tier", "baseline".
    name
        The name as given.
    known
        The names that exist.
    see
        A command that lists them, if there is one.
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    some = f"{', '.join(names[:10])} ..." if len(names) > 20 else f"{', '.join(names)}."
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    else:
        hint = f"known: {some}" if names else "there are none at all."
    more = f" See `{see}`." if see else ""
    return UnknownNameError(f"there is no {kind} named {name!r}: {hint}{more}")
