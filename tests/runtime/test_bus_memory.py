"""What the memory bus does beyond the contract of every bus (tests/contracts/test_bus.py)."""

from __future__ import annotations

import asyncio

import anyio
import pytest
from anyio.lowlevel import checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from aworld_runtime.bus import Bus, Delivery, open_bus
from aworld_runtime.bus.memory.weight import weight
from aworld_runtime.bus.recent import MOST
from aworld_runtime.events import Event, MessagePosted, ModelCompleted, Registry, ToolReturned

pytestmark = pytest.mark.anyio

JSON: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def note(text: str) -> Event:
    return Event.of(MessagePosted(content=text), source="writer/1")


async def test_it_has_no_task_of_its_own() -> None:
    before = len(asyncio.all_tasks())
    async with open_bus("memory://") as bus, bus.mailbox("log"), bus.feed(), bus.tail("log"):
        await bus.put("queue", note("a"))
        assert len(asyncio.all_tasks()) == before


async def test_a_busy_loop_of_calls_lets_others_run() -> None:
    async with open_bus("memory://") as bus, anyio.create_task_group() as tg:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await checkpoint()

        tg.start_soon(count_turns)
        for seq in range(100):
            await bus.append("log", seq, [note("a")])
        assert turns > 5
        tg.cancel_scope.cancel()


async def test_a_cursor_saved_from_another_bus_reads_from_the_beginning() -> None:
    """An archiver's cursor outlives the process, a memory bus doesn't: nothing of the next one may be skipped."""
    async with open_bus("memory://") as old, old.feed() as feed:
        for seq in range(3):
            await old.append("log", seq, [note("a")])
        saved = (await anext(feed))[-1].cursor
        feed_id = await old.feed_id()
    async with open_bus("memory://") as new, new.feed(saved) as feed:
        assert await new.feed_id() != feed_id
        await new.append("log", 0, [note("b")])
        assert [entry.first for entry in await anext(feed)] == [1]


async def test_a_take_of_an_abandoned_consumer_swallows_no_work() -> None:
    async with (
        open_bus("memory://") as bus,
        bus.consume("queue", consumer="abandoned") as abandoned,
        bus.consume("queue", consumer="alive") as alive,
        anyio.create_task_group() as tg,
    ):
        tg.start_soon(abandoned.take)
        await anyio.wait_all_tasks_blocked()
        abandoned.abandon()
        await bus.put("queue", note("a"))
        with anyio.fail_after(1):
            assert (await alive.take()).event.data == MessagePosted(content="a")
        tg.cancel_scope.cancel()


async def test_each_of_many_waiting_consumers_is_woken_for_work() -> None:
    taken: list[Delivery] = []

    async def take_one(bus: Bus, name: str) -> None:
        async with bus.consume("queue", consumer=name) as consumer:
            delivery = await consumer.take()
            taken.append(delivery)
            await delivery.ack()

    async with open_bus("memory://") as bus:
        with anyio.fail_after(1):
            async with anyio.create_task_group() as tg:
                for number in range(20):
                    tg.start_soon(take_one, bus, str(number))
                await anyio.wait_all_tasks_blocked()
                for number in range(20):
                    await bus.put("queue", note(str(number)))
        assert len({delivery.event.id for delivery in taken}) == 20


async def test_a_listener_that_does_not_read_keeps_only_the_latest() -> None:
    async with open_bus("memory://") as bus, bus.listen("channel") as heard:
        for number in range(MOST + 5):
            await bus.broadcast("channel", number)
        assert await anext(heard) == 5


async def test_an_unlinked_log_leaves_nothing_behind() -> None:
    async with open_bus("memory://") as bus:
        async with bus.mailbox("log"):
            await bus.append("log", 0, [note("a")])
            await bus.unlink("log", keep_s=0)
        assert vars(bus)["_logs"] == {}


@settings(deadline=None)
@given(content=JSON, tokens=st.lists(st.integers(0, 2**31 - 1)))
def test_an_event_is_never_more_than_six_times_larger_than_its_weight(
    content: JsonValue, tokens: list[int]
) -> None:
    """So that no event above the cap passes because it looked small."""
    for data in (
        ToolReturned(name="any", content=content),
        ModelCompleted(token_ids=tuple(tokens), behavior_logprobs=(-0.5,) * len(tokens)),
    ):
        encoded = data.model_dump_json().encode()
        assert len(encoded) <= 6 * weight(data)
        assert len(Registry().encode(Event.of(data, source="a/1"))) <= 6 * weight(data) + 1000
