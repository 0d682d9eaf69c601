"""The processes of a run that are clients of its bus; each writes its history.

    worker, tools     the product's own Worker and ToolWorker
    archiver          copies to the store; beside it, the janitor tidies the bus, and restores what it lost
    submitter         keeps episodes coming, and owns the run's log
    sender, receiver  a lane of its own, for bursts and a consumer that is too slow (SIGUSR1: begin, SIGUSR2: end)

SIGTERM: an orderly end. Run as `python -m aworld_runtime.chaos.part ROLE NAME`, with the rest in the environment's
`Place`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio

from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.archive.janitor import Janitor
from aworld_runtime.bus.base import Bus
from aworld_runtime.bus.open import open_bus
from aworld_runtime.chaos.history import History, recorded
from aworld_runtime.chaos.submitter import RESTORE_AFTER_S, Submitter
from aworld_runtime.chaos.workload import TOOL, Measure
from aworld_runtime.errors import BusUnavailableError
from aworld_runtime.events import Event, ValueRecorded
from aworld_runtime.messages import Data
from aworld_runtime.nodes.owner import when_there_is_room
from aworld_runtime.nodes.tool_worker import ToolWorker
from aworld_runtime.nodes.worker import Worker
from aworld_runtime.store.open import open_store

PLACE: Final = "AWORLD_CHAOS"
"""Environment variable with the `Place` as JSON; it also marks the processes of a run."""
SLOTS = 64
LANE = "chaos-lane"
SEND_EVERY_S = 0.05
BURST = 10
"""Times as many in a burst."""
TAKE_S = 0.002
SLOW = 100
"""Times as slow."""
DRAIN_S = 60.0
RETIRE_AFTER_S = 10.0
KNOCK_S = 0.2

logger = logging.getLogger(__name__)


class Place(Data):
    """Where a run's processes meet."""

    run_id: str
    bus: str
    store: str
    folder: str
    outstanding: int

    def history(self, name: str) -> Path:
        return Path(self.folder) / "history" / f"{name}.jsonl"


@dataclass(frozen=True, slots=True)
class Me:
    """What a part knows of itself."""

    name: str
    place: Place
    bus: Bus
    signals: Signals


async def run_part(role: str, name: str, place: Place) -> None:
    """Be one of the processes until SIGTERM."""
    history = History(place.history(name))
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2) as signals:
        async with AsyncExitStack() as stack:
            bus = recorded(await _reached(place.bus, stack), history)
            await PARTS[role](Me(name, place, bus, signals))


async def _reached(url: str, stack: AsyncExitStack) -> Bus:
    """The bus, once it can be reached: whoever starts workers does the same."""
    while True:
        try:
            return await stack.enter_async_context(open_bus(url))
        except BusUnavailableError as error:
            logger.warning("%s", error)
            await anyio.sleep(KNOCK_S)


Signals = AsyncIterator[signal.Signals]
Part = Callable[[Me], Awaitable[None]]


async def _worker(me: Me) -> None:
    worker = Worker(me.bus, name=me.name, slots=SLOTS)
    async with anyio.create_task_group() as tasks:

        async def drain() -> None:
            await _terminated(me.signals)
            worker.drain()

        tasks.start_soon(drain)
        await worker.run()
        tasks.cancel_scope.cancel()


async def _tools(me: Me) -> None:
    await _until_terminated(ToolWorker(me.bus, {TOOL: Measure()}, name=me.name).run, me.signals)


async def _archiver(me: Me) -> None:
    async with (
        open_store(me.place.store) as store,
        Archiver(me.bus, store) as archiver,
        anyio.create_task_group() as tasks,
    ):
        janitor = Janitor(
            me.bus, store, archiver, retire_after_s=RETIRE_AFTER_S, restore_after_s=RESTORE_AFTER_S
        )
        tasks.start_soon(janitor.run)
        await _terminated(me.signals)
        await archiver.drain(DRAIN_S)
        tasks.cancel_scope.cancel()


async def _submitter(me: Me) -> None:
    place = me.place
    async with open_store(place.store) as store, anyio.create_task_group() as tasks:
        submitter = Submitter(me.bus, store, place.run_id, outstanding=place.outstanding)

        async def stop() -> None:
            await _terminated(me.signals)
            submitter.stop()

        tasks.start_soon(stop)
        await submitter.run()
        tasks.cancel_scope.cancel()


async def _sender(me: Me) -> None:
    pace = _Pace(me.signals)

    async def send() -> None:
        number = 0
        while True:
            for _ in range(BURST if pace.strained else 1):
                number += 1
                event = Event.of(
                    ValueRecorded(kind="lane", value=number), source=f"sender/{me.name}"
                )
                await when_there_is_room(lambda event=event: me.bus.put(LANE, event), who=me.name)
            await anyio.sleep(SEND_EVERY_S)

    await _until_terminated(send, pace)


async def _receiver(me: Me) -> None:
    pace = _Pace(me.signals)

    async def receive() -> None:
        async with me.bus.consume(LANE, consumer=me.name, credit=8) as consumer:
            while True:
                delivery = await consumer.take()
                await anyio.sleep(TAKE_S * SLOW if pace.strained else TAKE_S)
                await delivery.ack()

    await _until_terminated(receive, pace)


class _Pace:
    """Signals, of which SIGUSR1 and SIGUSR2 turn the strain on and off."""

    def __init__(self, signals: Signals) -> None:
        self.strained = False
        self._signals = signals

    async def __aiter__(self) -> AsyncIterator[signal.Signals]:
        async for number in self._signals:
            self.strained = number == signal.SIGUSR1
            yield number


async def _until_terminated(
    work: Callable[[], Coroutine[None, None, None]], signals: Signals | _Pace
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work)
        await _terminated(signals)
        tasks.cancel_scope.cancel()


async def _terminated(signals: Signals | _Pace) -> None:
    async for number in signals:
        if number == signal.SIGTERM:
            return


PARTS: dict[str, Part] = {
    "worker": _worker,
    "tools": _tools,
    "archiver": _archiver,
    "submitter": _submitter,
    "sender": _sender,
    "receiver": _receiver,
}


def main(role: str, name: str) -> None:
    """Run one part to its end."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(run_part(role, name, Place.model_validate_json(os.environ[PLACE])))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
