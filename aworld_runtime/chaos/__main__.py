"""`python -m aworld_runtime.chaos`."""

import sys

from aworld_runtime.cli import main

sys.exit(main(["chaos", *sys.argv[1:]]))
