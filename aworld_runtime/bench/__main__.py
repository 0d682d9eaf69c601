"""`python -m aworld_runtime.bench`: the same as `aworld bench`."""

import sys

from aworld_runtime.cli.command_line import main

sys.exit(main(["bench", *sys.argv[1:]]))
