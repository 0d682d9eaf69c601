"""Noticing that the server was restarted: what it kept may be gone, in part or altogether."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import anyio

from aworld_runtime.bus.base import Bus

LOOK_S = 1.0
"""Seconds between two looks at whether the server is still the same."""


async def restarts(bus: Bus) -> AsyncGenerator[str]:
    """The server's id, each time it has become another. Never ends by itself."""
    known = await bus.server_id()
    while True:
        await anyio.sleep(LOOK_S)
        if (now := await bus.server_id()) != known:
            known = now
            yield now
