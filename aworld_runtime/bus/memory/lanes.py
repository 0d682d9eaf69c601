"""Lossy lanes: what a listener has heard and not read yet."""

from __future__ import annotations

from collections import deque
from typing import Self

from anyio.lowlevel import checkpoint
from pydantic import JsonValue

from aworld_runtime.bus.memory.signal import Signal

LISTENER_BUFFER = 1024
"""Broadcasts kept for a listener that is slow; then the oldest are dropped."""


class Listener:
    """Iterates over what is broadcast while it listens."""

    def __init__(self) -> None:
        self._heard: deque[JsonValue] = deque(maxlen=LISTENER_BUFFER)
        self._changed = Signal()

    def hear(self, value: JsonValue) -> None:
        self._heard.append(value)
        self._changed.notify_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JsonValue:
        await checkpoint()
        while not self._heard:
            await self._changed.wait()
        return self._heard.popleft()
