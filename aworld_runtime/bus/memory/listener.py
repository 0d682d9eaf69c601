"""Who listens to broadcasts."""

from __future__ import annotations

from typing import Self

from anyio.lowlevel import checkpoint
from pydantic import JsonValue

from aworld_runtime.bus.memory.signal import Signal
from aworld_runtime.bus.recent import Recent


class Listener:
    """Iterates over what is broadcast while it listens."""

    def __init__(self) -> None:
        self._heard = Recent[JsonValue]()
        self._changed = Signal()

    def hear(self, value: JsonValue, size: int) -> None:
        self._heard.add(value, size)
        self._changed.notify_all()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> JsonValue:
        await checkpoint()
        while not self._heard:
            await self._changed.wait()
        return self._heard.oldest()
