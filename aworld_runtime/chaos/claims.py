"""Who holds which episodes, as the server says: a worker that is killed may have claimed some and not lived to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from aworld_runtime.bus.redis.entries import BODY
from aworld_runtime.bus.redis.keys import GROUP
from aworld_runtime.errors import EventError
from aworld_runtime.events import Registry

ANSWER_S = 1.0
MOST = 1000


async def held_by(worker: str, url: str, work: bytes, registry: Registry) -> Sequence[str]:
    """Ids of the episodes whose work on this queue the worker holds; none where the server is away just now."""
    held: list[str] = []
    try:
        async with Redis.from_url(url, socket_timeout=ANSWER_S) as server:
            pending = await server.xpending_range(work, GROUP, "-", "+", MOST)
            for claim in cast("list[dict[str, Any]]", pending):
                if claim["consumer"].decode().rpartition("-")[0] == worker:
                    entry_id = claim["message_id"]
                    found = cast("list[Any]", await server.xrange(work, entry_id, entry_id))
                    held += [registry.decode(fields[BODY]).episode_id or "" for _, fields in found]
    except (RedisError, OSError, EventError):
        return held
    return held
