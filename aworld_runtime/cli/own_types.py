"""Event types of a user's own: known once the module that defines them is imported."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aworld_runtime.cli.shared import import_from_here
from aworld_runtime.errors import UnknownEventTypeError, UsageError

if TYPE_CHECKING:
    from aworld_runtime.events import Registry

MODULE = "MODULE:ATTRIBUTE"


def add_program(parser: argparse.ArgumentParser) -> None:
    """`arguments.program` is for `own_types`."""
    parser.add_argument(
        "--program",
        metavar=MODULE,
        help="import this first: the agent or swarm, if it has event types of its own",
    )


@contextmanager
def own_types(program: str | None) -> Generator[Registry]:
    """The types that there are once `program` is imported; another one is an error that says how it becomes known."""
    from aworld_runtime.events import Registry
    from aworld_runtime.nodes.node import load

    if program is not None:
        import_from_here()
        load(program)
    try:
        yield Registry()
    except UnknownEventTypeError as error:
        raise UsageError(f"{error}, with --program {MODULE}") from error
