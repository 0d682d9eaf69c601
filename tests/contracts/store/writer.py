"""A process that writes events to a store until it is killed, and prints each seq that was acknowledged.

python writer.py URL LOG
"""

import sys

import anyio

from aworld_runtime.events import Event, MessagePosted
from aworld_runtime.store import open_store


async def write(url: str, log: str) -> None:
    async with open_store(url) as store:
        seq = 0
        while True:
            seq += 1
            event = Event.of(MessagePosted(content=f"message {seq}"), source="writer/1")
            await store.put_events(log, [event.at(seq)])
            sys.stdout.write(f"{seq}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(write, sys.argv[1], sys.argv[2])
