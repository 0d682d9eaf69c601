"""How nodes send to a bus that is full."""

from __future__ import annotations

from functools import partial

import anyio
import pytest

from aworld_runtime.bus import open_bus
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import QueueFullError
from aworld_runtime.events import Event, MessagePosted

pytestmark = pytest.mark.anyio


def note(text: str) -> Event:
    return Event.of(MessagePosted(content=text), source="writer/1")


async def test_who_sends_waits_until_a_full_queue_has_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bus = open_bus("memory://?queue_limit=2")
    await bus.put("queue", note("a"), note("b"))
    async with bus.consume("queue", consumer="c") as consumer, anyio.create_task_group() as tg:
        tg.start_soon(
            partial(when_there_is_room, partial(bus.put, "queue", note("c")), who="sender")
        )
        await anyio.wait_all_tasks_blocked()
        assert await bus.backlog("queue") == 2
        for _ in range(3):
            await (await consumer.take()).ack()
    assert "sender waits until there is room: queue 'queue' is full" in caplog.text
    assert await bus.backlog("queue") == 0


async def test_who_has_no_more_patience_is_told_what_is_full() -> None:
    bus = open_bus("memory://?queue_limit=1")
    await bus.put("queue", note("a"))
    put = partial(bus.put, "queue", note("b"))
    with pytest.raises(QueueFullError, match="'queue' is full"):
        await when_there_is_room(put, who="sender", patience_s=0.1)
    assert await bus.backlog("queue") == 1
