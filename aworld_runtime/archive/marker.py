"""Where the feed ends now: a marker is appended, and whoever follows the feed to it has seen all that came before.

Its log is unlinked at once; archivers skip it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

import anyio

from aworld_runtime.bus.base import Bus, FeedEntry
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.events import Event, ValueRecorded, new_id

PREFIX = "marker:"
UNLINK_S = 1.0
ROOM_S = 10.0
"""How long it waits for a bus that is full."""


def new_marker() -> str:
    return f"{PREFIX}{new_id()}"


def is_marker(log: str) -> bool:
    return log.startswith(PREFIX)


@asynccontextmanager
async def marked(bus: Bus, marker: str) -> AsyncGenerator[None]:
    """The feed holds an entry of the log `marker`, after everything appended so far."""
    event = Event.of(ValueRecorded(kind="marker"), source=marker)
    append = partial(bus.append, marker, 0, [event])
    await when_there_is_room(append, who=marker, patience_s=ROOM_S)
    try:
        yield
    finally:
        with anyio.move_on_after(UNLINK_S, shield=True):
            await bus.unlink(marker, keep_s=0)


async def feed_so_far(bus: Bus, after: str = "0") -> AsyncGenerator[FeedEntry]:
    """The feed's entries after the cursor, up to now; ends."""
    marker = new_marker()
    async with marked(bus, marker), bus.feed(after) as feed:
        async for entries in feed:
            for entry in entries:
                if entry.log == marker:
                    return
                if not is_marker(entry.log):
                    yield entry
