"""``python -m offmarl``: the same as ``offmarl``."""

from offmarl.cli import main

main()
