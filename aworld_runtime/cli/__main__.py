"""`python -m aworld_runtime.cli`, for processes that start others."""

import sys

from aworld_runtime.cli.command_line import main

sys.exit(main())
