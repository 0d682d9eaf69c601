"""Event types of a user's own: known once the module that defines them is imported.

Whatever reads an episode first imports the program that its log names, and what `--program` names where that was an object of
another process. What can't be imported is told where an event turns out to be of an unknown type, and not before: most logs
have none of a user's own.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from aworld_runtime.cli.shared import import_from_here
from aworld_runtime.cli.streams import own_prints
from aworld_runtime.errors import (
    AWorldError,
    EventError,
    UnknownEventTypeError,
    UnknownProgramError,
)

if TYPE_CHECKING:
    from aworld_runtime.bus.base import Readable
    from aworld_runtime.events import Event
    from aworld_runtime.store.base import Store

MODULE = "MODULE:ATTRIBUTE"
NEEDED = "needed where it has event types of its own, and was an object in a script"


def add_program(parser: argparse.ArgumentParser) -> None:
    """`arguments.program` is for `own_types`."""
    parser.add_argument(
        "--program",
        metavar=MODULE,
        help=f"import this first: the agent or swarm; {NEEDED}",
    )


def same_options(arguments: argparse.Namespace) -> str:
    """What a command that looks at the same episodes is to be given, too."""
    given = {name: vars(arguments).get(name) for name in ("program", "store")}
    return "".join(f" --{name} {shlex.quote(value)}" for name, value in given.items() if value)


@contextmanager
def own_types(program: str | None) -> Generator[OwnTypes]:
    """With what `--program` names imported. An event of a type that is still unknown is an error that says how it becomes known.

    Raises:
        UnknownProgramError: it can't be imported.
    """
    from aworld_runtime.nodes.node import load

    import_from_here()
    types = OwnTypes()
    if program:
        with own_prints(apart=True):
            load(program)
    try:
        yield types
    except UnknownEventTypeError as error:
        raise types.explained(error) from error


class OwnTypes:
    """Imports what the logs name, for one command; what that prints is kept apart from the command's own output."""

    def __init__(self) -> None:
        self._imported: dict[str, str] = {}
        """Program → why it can't be imported, if so."""

    async def of(self, logs: Readable, log: str) -> None:
        """Import what ran the episode of `log`, and those that it was forked from."""
        from aworld_runtime.events import EpisodeForked

        with suppress(EventError):  # it is told where it is read for the command's own purpose
            for first in await logs.read(log, 1, limit=1):
                self._import(first)
                if isinstance(first.data, EpisodeForked):
                    for requested in await logs.read(log, first.seq + 1, limit=1):
                        self._import(requested)
                    await self.of(logs, first.data.parent)

    async def of_all(self, store: Store, log: str) -> None:
        """The same; and of a run's log import what ran its episodes."""
        from aworld_runtime.names import episode_log, run_of_log

        if (run_id := run_of_log(log)) is None:
            await self.of(store, log)
            return
        async for episode in store.run_episodes(run_id):
            await self.of(store, episode_log(episode.id))

    def reading(self, logs: Readable) -> Readable:
        """`logs`; what a log names is imported as its beginning is read."""
        return _Reading(self, logs)

    def explained(self, error: AWorldError) -> AWorldError:
        """The error; where that is a type that isn't known, with what to do."""
        if not isinstance(error, UnknownEventTypeError):
            return error
        failed = [f"{name!r}: {why}" for name, why in self._imported.items() if why]
        why = f" (the log's program is {'; '.join(failed)})" if failed else ""
        return UnknownEventTypeError(f"{error}, with --program {MODULE}{why}")

    def _import(self, event: Event) -> None:
        from aworld_runtime.events import EpisodeRequested
        from aworld_runtime.nodes.node import load

        if not isinstance(event.data, EpisodeRequested) or event.data.program in self._imported:
            return
        program, why = event.data.program, ""
        if program.startswith("local:"):
            why = "an object of another process"
        else:
            try:
                with own_prints(apart=True):
                    load(program)
            except UnknownProgramError as error:
                why = str(error).partition(": ")[2]
        self._imported[program] = why


class _Reading:
    def __init__(self, types: OwnTypes, logs: Readable) -> None:
        self._types = types
        self._logs = logs

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]:
        if start <= 1:
            await self._types.of(self._logs, log)
        return await self._logs.read(log, start, limit=limit)
