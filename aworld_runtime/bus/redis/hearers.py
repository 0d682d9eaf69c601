"""Who hears what comes over the pub/sub connection: listeners of a broadcast, waiters for a reply."""

from __future__ import annotations

import json
from typing import Self, cast

import anyio
from pydantic import JsonValue

from aworld_runtime.bus.recent import Recent


class Listener:
    """Iterates over what is broadcast while it listens."""

    def __init__(self) -> None:
        self._heard = Recent[bytes]()
        self._changed = anyio.Event()

    def hear(self, message: bytes) -> None:
        self._heard.add(message, len(message))
        self._changed.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JsonValue:
        while not self._heard:
            self._changed = anyio.Event()
            await self._changed.wait()
        return cast("JsonValue", json.loads(self._heard.oldest()))


class Waiting:
    """Waits for one reply."""

    def __init__(self) -> None:
        self.answer = b""
        """The reply as it came; empty while there is none."""
        self._arrived = anyio.Event()

    def hear(self, message: bytes) -> None:
        if message and not self.answer:
            self.answer = message
            self._arrived.set()

    async def wait(self, seconds: float) -> bool:
        """Whether it came within `seconds`."""
        with anyio.move_on_after(seconds):
            await self._arrived.wait()
        return bool(self.answer)
