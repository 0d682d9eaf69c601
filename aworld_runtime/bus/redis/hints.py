"""What the server tells without being asked: hints that something is there to read, broadcasts, replies.

    run: connect ─▶ subscribe to all channels ─▶ messages to their hearers ─▶ … (until cancelled)
    keep_alive: a ping a second, so that a dead connection shows

Lossy: whoever hears also looks for himself now and then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager

import anyio

from aworld_runtime.bus.redis.wire import (
    REPLY_S,
    ReplyError,
    Unreachable,
    Wire,
    pack,
)
from aworld_runtime.errors import AccessDeniedError, ConfigError

logger = logging.getLogger(__name__)

PING_S = 1.0
PAUSE_S = 0.2
CONFIRM_S = 1.0
"""Longest wait for a subscription; then it is left to come when it comes."""

Hearer = Callable[[bytes], None]


class Hints:
    """One pub/sub connection for everything a bus listens to."""

    def __init__(
        self,
        dial: Callable[[], Awaitable[Wire]],
        on_connect: Callable[[], None],
        denial: Callable[[ReplyError], str],
    ) -> None:
        self._dial = dial
        self._denial = denial
        """What to tell who listens to something that isn't allowed."""
        self._denied: ReplyError | None = None
        self._on_connect = on_connect
        """Called after every connection: hints may have been missed."""
        self._hearers: dict[bytes, list[Hearer]] = {}
        self._watchers: dict[bytes, list[Hearer]] = {}
        """Who hears of messages on all channels of a pattern."""
        self._confirmed: dict[bytes, asyncio.Event] = {}
        self._wire: Wire | None = None
        self._packed: list[bytes] = []
        self._unsent = asyncio.Event()

    @contextmanager
    def hearing(self, channel: bytes, hearer: Hearer) -> Generator[asyncio.Event]:
        """Hear the channel's messages; the event is set once the server has confirmed."""
        hearers = self._hearers.setdefault(channel, [])
        hearers.append(hearer)
        if len(hearers) == 1:
            self._confirmed[channel] = asyncio.Event()
            self._say(b"SUBSCRIBE", channel)
        try:
            yield self._confirmed[channel]
        finally:
            hearers.remove(hearer)
            if not hearers:
                del self._hearers[channel], self._confirmed[channel]
                self._say(b"UNSUBSCRIBE", channel)

    @contextmanager
    def watching(self, pattern: bytes, watcher: Hearer) -> Generator[None]:
        """Hear on which of a pattern's channels there were messages."""
        watchers = self._watchers.setdefault(pattern, [])
        watchers.append(watcher)
        if len(watchers) == 1:
            self._say(b"PSUBSCRIBE", pattern)
        try:
            yield
        finally:
            watchers.remove(watcher)
            if not watchers:
                del self._watchers[pattern]
                self._say(b"PUNSUBSCRIBE", pattern)

    async def confirm(self, confirmed: asyncio.Event) -> None:
        """Wait for a confirmation, but not for ever.

        Raises:
            AccessDeniedError: there is none, and something was forbidden.
        """
        if not confirmed.is_set():
            with anyio.move_on_after(CONFIRM_S):
                await confirmed.wait()
            if self._denied is not None and not confirmed.is_set():
                raise AccessDeniedError(self._denial(self._denied))

    async def run(self) -> None:
        """Connect, hear, connect again; until cancelled."""
        while True:
            try:
                self._wire = await self._dial()
                self._packed.clear()
                for channel in self._hearers:  # each alone, as all of a command would be forbidden
                    self._say(b"SUBSCRIBE", channel)
                if self._watchers:
                    self._say(b"PSUBSCRIBE", *self._watchers)
                self._on_connect()
                while True:
                    self._hear(await self._receive(self._wire))
            except (Unreachable, ConfigError):
                await anyio.sleep(PAUSE_S)
            finally:
                if self._wire is not None:
                    self._wire.drop()
                    self._wire = None
                for confirmed in self._confirmed.values():
                    confirmed.clear()

    async def keep_alive(self) -> None:
        """Send what is to be said, and a ping when there is nothing; until cancelled."""
        while True:
            with anyio.move_on_after(PING_S):
                await self._unsent.wait()
            self._unsent.clear()
            wire = self._wire
            if wire is None:
                continue
            packed = b"".join(self._packed) or pack([(b"PING",)])
            self._packed.clear()
            try:
                await wire.send(packed)
            except Unreachable:
                wire.drop()  # `run` sees it and connects again

    async def _receive(self, wire: Wire) -> Sequence[bytes]:
        timer = asyncio.get_running_loop().call_later(REPLY_S, wire.drop)
        try:
            reply = await wire.receive()
        finally:
            timer.cancel()
        if not isinstance(reply, ReplyError):
            return reply
        if not reply.denied:
            raise Unreachable(str(reply))
        if self._denied is None:
            logger.warning("hints come late: %s", self._denial(reply))
        self._denied = reply
        return ()

    def _hear(self, message: Sequence[bytes]) -> None:
        if len(message) == 4:
            _, pattern, channel, _ = message
            for watcher in tuple(self._watchers.get(pattern, ())):
                watcher(channel)
            return
        kind, channel, payload = message if len(message) == 3 else (b"", b"", b"")
        if kind == b"message":
            for hearer in tuple(self._hearers.get(channel, ())):
                hearer(payload)
        elif kind == b"subscribe" and channel in self._confirmed:
            self._confirmed[channel].set()

    def _say(self, *command: bytes) -> None:
        if self._wire is not None:
            self._packed.append(pack([command]))
            self._unsent.set()
