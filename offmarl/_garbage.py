"""How often Python collects garbage: rarely while a command starts, then as it does by default.

To trace a program makes millions of objects, few of them garbage. Python's threshold, 700 objects,
takes a tenth of the time before the first update. Afterwards cycles of objects may hold large
arrays, which must not wait long to be freed.
"""

import gc

_before: list[tuple[int, int, int]] = []


def collect_rarely() -> None:
    """Collect garbage rarely, until `collect_as_before` is called."""
    if not _before:
        _before.append(gc.get_threshold())
        gc.set_threshold(50_000, 20, 50)


def collect_as_before() -> None:
    """Undo `collect_rarely`, if it was called."""
    while _before:
        gc.set_threshold(*_before.pop())
