"""The event bus alone: `python examples/event_bus.py [redis://127.0.0.1:6379]`."""

import sys

import anyio

from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.events import Event, MessagePosted


def say(text: str) -> Event:
    return Event.of(MessagePosted(content=text), source="example/1")


def text(event: Event) -> str:
    return str(event.data.content) if isinstance(event.data, MessagePosted) else event.type


async def serve(bus: Bus) -> None:
    """A role: takes work from its queue and answers it. Several processes may do so, each piece goes to one."""
    async with bus.consume("greetings", consumer="server-1") as consumer:
        while True:
            delivery = await consumer.take()
            await bus.reply(delivery.event, say(f"hello, {text(delivery.event)}"))
            await delivery.ack()  # without it the work comes again, here or elsewhere


async def main(url: str) -> None:
    async with open_bus(url) as bus, anyio.create_task_group() as tasks:
        tasks.start_soon(serve, bus)
        reply = await bus.request("greetings", say("Ada"), timeout_s=5)
        print(f"the reply: {text(reply)}")

        log = f"log-{reply.id}"
        await bus.append(log, 0, [say("one"), say("two")])  # only if the log still ends at seq 0
        print(f"the log: {[(event.seq, text(event)) for event in await bus.read(log)]}")

        async for event in bus.subscribe("message.*"):  # in every log, from the first on
            print(f"heard: {text(event)}")
            if text(event) == "two":
                break
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else "memory://")
