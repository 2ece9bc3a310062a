"""The command line in this process, as tests/cli has it."""

from tests.cli.conftest import offmarl

__all__ = ["offmarl"]
