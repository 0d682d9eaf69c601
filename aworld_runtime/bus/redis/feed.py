"""Reading the feed: one entry for each append, from a cursor on."""

from __future__ import annotations

import logging
from typing import Self

import anyio

from aworld_runtime.bus.base import FeedEntry
from aworld_runtime.bus.redis.awake import Awake
from aworld_runtime.bus.redis.entries import position
from aworld_runtime.bus.redis.link import FIRST_PAUSE_S, LONGEST_PAUSE_S, Link
from aworld_runtime.bus.redis.wire import (
    REPLY_S,
    Command,
    Reply,
    ReplyError,
    Unreachable,
    Wire,
    denial,
    pack,
)
from aworld_runtime.errors import AccessDeniedError, BusError, BusUnavailableError, ConfigError

logger = logging.getLogger(__name__)

BATCH = 1000
BLOCK_MS = 1000


class FeedReader:
    """Iterates over the feed in batches; waits at its end, on a connection of its own.

    Where the server came back empty, the cursor lies ahead of everything: then it begins anew.
    """

    def __init__(self, link: Link, key: bytes, after: str, outage_s: float) -> None:
        self._link = link
        self._key = key
        self._cursor = after.encode()
        self._outage_s = outage_s
        self._wire: Wire | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[FeedEntry]:
        awake, away_since = Awake(), None
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if found := await self._read():
                    return found
                away_since, pause_s = None, FIRST_PAUSE_S
            except (Unreachable, ConfigError) as error:
                self._wire = None
                now = awake.now()
                away_since = now if away_since is None else away_since
                if now - away_since > self._outage_s:
                    raise BusUnavailableError(
                        f"feed: the bus has not answered for {self._outage_s:g} s: {error}"
                    ) from error
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def close(self) -> None:
        """Give the connection back."""
        if self._wire is not None:
            await self._wire.close()
            self._wire = None

    async def _read(self) -> list[FeedEntry]:
        head = (b"XREAD", b"COUNT", str(BATCH), b"BLOCK", str(BLOCK_MS), b"STREAMS")
        reply = await self._ask((*head, self._key, self._cursor))
        if reply is None:
            await self._begin_anew_if_lost()
            return []
        entries = [_entry(entry_id, fields) for entry_id, fields in reply[0][1]]
        self._cursor = entries[-1].cursor.encode()
        return entries

    async def _begin_anew_if_lost(self) -> None:
        if self._cursor == b"0":
            return
        facts = await self._ask((b"XINFO", b"STREAM", self._key), missing=True)
        last = facts[facts.index(b"last-generated-id") + 1] if facts else b"0-0"
        if position(self._cursor) > position(last):
            logger.warning(
                "the feed ends at %s, before the cursor %s: the server lost data; reading it from its"
                " beginning",
                last.decode(),
                self._cursor.decode(),
            )
            self._cursor = b"0"

    async def _ask(self, command: Command, *, missing: bool = False) -> Reply:
        if self._wire is None:
            self._wire = await self._link.dial(self._key)
        patience_s = BLOCK_MS / 1000 + REPLY_S
        (reply,) = await self._wire.exchange(pack([command]), 1, patience_s=patience_s)
        if isinstance(reply, ReplyError):
            if missing and "no such key" in str(reply):
                return None
            if reply.denied:
                raise AccessDeniedError(denial(self._link.place(self._key), reply))
            if reply.code == "ERR":
                raise BusError(f"feed after {self._cursor.decode()!r}: {reply}")
            raise Unreachable(str(reply))
        return reply


def _entry(entry_id: bytes, fields: list[bytes]) -> FeedEntry:
    first, last, log = fields[1].decode().split(" ", 2)
    return FeedEntry(entry_id.decode(), log, int(first), int(last))
