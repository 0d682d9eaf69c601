"""The event bus in five minutes: logs, mail, queues.

`memory://` needs no server; put a `redis://` URL in its place and the same code spans processes.
"""

import anyio
import pytest

from aworld_runtime.bus import open_bus
from aworld_runtime.errors import Fenced
from aworld_runtime.events import Event, MessagePosted

pytestmark = pytest.mark.anyio


def say(text: str) -> Event:
    return Event.of(MessagePosted(content=text), source="me/1")


async def test_a_log_is_an_ordered_list_of_events() -> None:
    async with open_bus("memory://") as bus:
        last = await bus.append("log", 0, [say("hello"), say("world")])
        assert last == 2

        events = await bus.read("log")
        assert [event.seq for event in events] == [1, 2]


async def test_only_one_writer_can_append_at_a_place() -> None:
    """Whoever appends says after which seq. Who is too late learns it, and drops its work."""
    async with open_bus("memory://") as bus:
        await bus.append("log", 0, [say("I was first")])
        with pytest.raises(Fenced):
            await bus.append("log", 0, [say("no, I was")])


async def test_mail_enters_a_log_in_the_append_that_acknowledges_it() -> None:
    """Others can't append to a log: they write to its owner, who records what it accepts. Exactly once."""
    async with open_bus("memory://") as bus, bus.mailbox("log") as mailbox:
        await bus.send_mail("log", say("please note"))

        mails = await anext(mailbox)
        await bus.append("log", 0, [mail.event for mail in mails], acks=mails)
        assert len(await bus.read("log")) == 1


async def test_work_on_a_queue_goes_to_one_consumer_until_it_is_done() -> None:
    async with open_bus("memory://") as bus:
        await bus.put("work", say("do this"))

        async with bus.consume("work", consumer="one") as consumer:
            await consumer.take()  # and leaves without having done it
        async with bus.consume("work", consumer="another") as consumer:
            delivery = await consumer.take()
            await delivery.ack()
        assert await bus.backlog("work") == 0


async def test_a_request_waits_for_its_reply() -> None:
    async with open_bus("memory://") as bus, anyio.create_task_group() as tg:

        async def serve() -> None:
            async with bus.consume("greetings", consumer="server") as consumer:
                delivery = await consumer.take()
                await bus.reply(delivery.event, say("hello to you"))
                await delivery.ack()

        tg.start_soon(serve)
        reply = await bus.request("greetings", say("hello"), timeout_s=5)
        assert reply.data == MessagePosted(content="hello to you")
