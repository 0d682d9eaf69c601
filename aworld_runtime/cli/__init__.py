"""The command line: `aworld`, also installed as `aworld-rt`."""

from aworld_runtime.cli.command_line import main

__all__ = ["main"]
