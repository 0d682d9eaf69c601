"""`python -m aworld_runtime.bench`."""

import argparse
import sys

from aworld_runtime.bench.cli import add_arguments, bench_command
from aworld_runtime.cli.command_line import explain
from aworld_runtime.errors import AWorldError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m aworld_runtime.bench")
    add_arguments(parser)
    try:
        return bench_command(parser.parse_args())
    except KeyboardInterrupt:
        return 130
    except (AWorldError, BaseExceptionGroup) as error:
        return explain(error)


sys.exit(main())
