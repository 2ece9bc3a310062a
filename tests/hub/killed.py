"""Pull from a loopback hub until killed, and print the number of bytes received.

Usage: killed.py CARDS NAME COUNTER PART
"""

import sys
from pathlib import Path

from offmarl import hub
from offmarl.hub import card as catalogue
from offmarl.hub import client, install

cards, name, counter, part = sys.argv[1:]
catalogue.directory = lambda: Path(cards)
install.PART = int(part)
total = 0
receive = client.Connection._receive


def counted(*args):
    global total  # noqa: PLW0603
    got = receive(*args)
    total += len(got)
    Path(counter).write_text(str(total))
    return got


client.Connection._receive = counted
hub.pull(name)
