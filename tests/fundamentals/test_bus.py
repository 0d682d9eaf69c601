"""The event bus in five minutes: logs, mail, queues, and who else hears of things.

`memory://` needs no server; put a `redis://` URL in its place and the same code spans processes.
"""

import anyio
import pytest

from aworld_runtime.bus import open_bus
from aworld_runtime.errors import Fenced
from aworld_runtime.events import EpisodeCancelled, Event, MessagePosted

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


async def test_who_subscribes_to_types_hears_of_them_in_every_log() -> None:
    async with open_bus("memory://") as bus:
        await bus.append("one", 0, [say("hello")])
        await bus.append("two", 0, [say("to whom it may concern")])

        heard: list[str] = []
        async for event in bus.subscribe("message.*"):
            heard.append(event.type)
            if len(heard) == 2:
                break
        assert heard == ["message.posted", "message.posted"]


async def test_a_broadcast_reaches_whoever_listens_now() -> None:
    """Lossy: for what is worth nothing later, such as a model's tokens as they come."""
    async with open_bus("memory://") as bus, bus.listen("tokens") as tokens:
        await bus.broadcast("tokens", {"role": "solver", "text": "4"})
        assert await anext(tokens) == {"role": "solver", "text": "4"}


async def test_a_word_to_the_owner_passes_everything_else() -> None:
    async with open_bus("memory://") as bus, bus.mailbox("log") as mailbox:
        for number in range(1000):
            await bus.send_mail("log", say(str(number)))
        stop = Event.of(EpisodeCancelled(reason="enough"), source="me/1")
        await bus.send_mail("log", stop)

        first_mail = (await anext(mailbox))[0]
        assert first_mail.event.data == EpisodeCancelled(reason="enough")
