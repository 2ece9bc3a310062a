"""Pull from a loopback hub until killed, and print the number of bytes received.

Usage: killed.py CARDS NAME COUNTER
"""

import sys
from pathlib import Path

from offmarl import hub
from offmarl.hub import card as catalogue
from offmarl.hub import client

cards, name, counter = sys.argv[1:]
catalogue.directory = lambda: Path(cards)
total = 0
stream = client.stream


def counted(*args):
    global total  # noqa: PLW0603
    for block in stream(*args):
        total += len(block)
        Path(counter).write_text(str(total))
        yield block


client.stream = counted
hub.pull(name)
