"""Recorded episodes with the programs that ran them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aworld_runtime.errors import UsageError

if TYPE_CHECKING:
    from aworld_runtime.cli.own_types import OwnTypes
    from aworld_runtime.events import Event
    from aworld_runtime.nodes.node import Program
    from aworld_runtime.replay.replay import ReplayReport
    from aworld_runtime.store.base import EpisodeRecord, Store


class NeedsProgramError(UsageError):
    """The log names a program that was an object inside the process that ran it."""


class Programs:
    """Loads what the logs name, each program once, and replays over it."""

    def __init__(self, store: Store, types: OwnTypes, given: str | None) -> None:
        self._store = store
        self._types = types
        self._given = given
        self._loaded: dict[str, Program] = {}

    async def replay(self, episode: EpisodeRecord) -> ReplayReport:
        from aworld_runtime.replay.replay import replay

        return await replay(*await self.recorded(episode))

    async def recorded(self, episode: EpisodeRecord) -> tuple[list[Event], Program]:
        """Its log, and the program that ran it."""
        from aworld_runtime.bus.base import read_all
        from aworld_runtime.events import EpisodeRequested
        from aworld_runtime.forks import Origin
        from aworld_runtime.names import episode_log
        from aworld_runtime.nodes.node import load, load_program

        log = episode_log(episode.id)
        await self._types.of(self._store, log)
        reference = self._given or episode.program
        if not self._given and reference.startswith("local:"):
            raise NeedsProgramError("its program was an object of another process")
        load(reference)
        events = await read_all(self._store, log)
        requested = Origin.of(events).requested
        data = requested and requested.data
        arguments = data.arguments if isinstance(data, EpisodeRequested) else {}
        key = f"{reference} {arguments}"
        if key not in self._loaded:
            self._loaded[key] = load_program(reference, arguments, {})
        return events, self._loaded[key]
