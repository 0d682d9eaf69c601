"""A worker's connections to models: those of the calls under way, and the few used last.

They are the worker's own, and not their clients', because they end with it and with its event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio

from aworld_runtime.messages import ModelSpec
from aworld_runtime.models.base import ChatModel
from aworld_runtime.models.client import NO_DEFAULTS, LLMClient, ModelDefaults, from_spec

CONNECTIONS_KEPT = 32
CLOSE_S = 2.0


class Connections:
    """Opened when first asked for; closed when nobody has used them for longest and they are too many."""

    def __init__(
        self, defaults: ModelDefaults = NO_DEFAULTS, *, keep: int = CONNECTIONS_KEPT
    ) -> None:
        self._defaults = defaults
        self._keep = keep
        self._open: dict[ModelSpec | LLMClient, ChatModel] = {}
        """The one used last stands last."""
        self._users: Counter[ModelSpec | LLMClient] = Counter()

    @asynccontextmanager
    async def borrowed(self, asked: ModelSpec | ChatModel) -> AsyncGenerator[ChatModel]:
        """The model that a spec or an agent's client stands for, for one call."""
        if not isinstance(asked, ModelSpec | LLMClient):
            yield asked
            return
        self._open[asked] = model = self._open.pop(asked, None) or self._new(asked)
        self._users[asked] += 1
        try:
            yield model
        finally:
            self._users[asked] -= 1
            await self._close_beyond(self._keep)

    def _new(self, asked: ModelSpec | LLMClient) -> ChatModel:
        if isinstance(asked, ModelSpec):
            return from_spec(asked, defaults=self._defaults)
        return asked.connect(self._defaults)

    async def aclose(self) -> None:
        """Close all that nobody uses."""
        await self._close_beyond(0)

    async def _close_beyond(self, keep: int) -> None:
        surplus = [asked for asked in self._open if not self._users[asked]]
        for asked in surplus[: max(len(self._open) - keep, 0)]:
            del self._users[asked]
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self._open.pop(asked).aclose()
