"""Each kind of fault: what it does, and how it is healed. To healthy work each should do nothing but take time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

from aworld_runtime.archive.logs import Logs
from aworld_runtime.archive.lost import say_lost
from aworld_runtime.bus.base import Bus
from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.chaos import hostile
from aworld_runtime.chaos.claims import held_by
from aworld_runtime.chaos.plan import Fault
from aworld_runtime.chaos.proxy import Mode
from aworld_runtime.chaos.stage import Part, Stage, faketime_library
from aworld_runtime.chaos.workload import MISDEEDS, request
from aworld_runtime.events import Event, Registry
from aworld_runtime.names import EPISODES_QUEUE, episode_log

HOUR_S = 3600
SPARE_BYTES = 4096
AWAY = (OSError, TimeoutError, anyio.EndOfStream, anyio.BrokenResourceError)
"""The server is away just now, and with it whom to harm; or it has hung up."""


class Injector:
    """Injects the faults of a schedule. `bus` goes past the proxy."""

    def __init__(self, stage: Stage, bus: Bus, active: Callable[[], list[str]]) -> None:
        self.requested: dict[str, Event] = {}
        """The requests of episodes that misbehave, by episode."""
        self._stage = stage
        self._bus = bus
        self._active = active
        self._registry = Registry()
        self._keys = Keys("aworld")
        hostile.hostile()  # made before it is time

    async def inject(self, fault: Fault) -> None:
        """Do it, and heal it; returns when it is over. It heals however this ends."""
        await FAULTS[fault.kind](self, fault)

    async def request_again(self, logs: Logs) -> None:
        """What a server lost altogether: whoever requested something, as this did, says so and requests it again."""
        for episode_id, event in self.requested.items():
            if not await logs.last_seq(episode_log(episode_id)):
                await say_lost(self._bus, event, source=event.source)
                await self._bus.put(EPISODES_QUEUE, event)

    def why_not(self, kind: str) -> str:
        """The reason that a kind can't be had here; empty where it can."""
        if kind == "store_disk_full" and self._stage.mongo_program:
            return "a Mongo server ends when its disk is full; use --store sqlite"
        if kind.endswith("disk_full"):
            return self._stage.no_disks
        if kind == "clock_skewed" and faketime_library() is None:
            return "libfaketime is not installed (Debian: apt-get install libfaketime)"
        return ""

    # workers

    async def worker_killed(self, fault: Fault) -> None:
        victim = self._stage.some_part(("worker", "worker", "tools"), fault.dice)
        if victim is None or victim.process is None:
            return
        await self._kill(victim)
        await self._stage.start(victim)

    async def _kill(self, victim: Part) -> None:
        name, began = victim.name, time.monotonic()
        await self._stage.kill(victim)
        work = self._keys.queue(EPISODES_QUEUE).work
        held = await held_by(name, self._stage.server.url, work, self._registry)
        self._stage.blow("worker_killed", name, began, held)

    async def worker_stopped(self, fault: Fault) -> None:
        victim = self._stage.some_part(("worker",), fault.dice)
        if victim is None or victim.process is None:
            return
        victim.stopped = True
        async with self._window(fault.kind, victim.name):
            victim.process.send_signal(signal.SIGSTOP)
            try:
                await anyio.sleep(fault.seconds)
            finally:
                victim.process.send_signal(signal.SIGCONT)
                victim.stopped = False

    async def clock_skewed(self, fault: Fault) -> None:
        victim = self._stage.some_part(("worker",), fault.dice)
        if victim is None:
            return
        hours = HOUR_S if fault.choose(1000) % 2 else -HOUR_S
        clock = {
            "LD_PRELOAD": str(faketime_library()),
            "FAKETIME": f"{hours:+d}s",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }
        await self._kill(victim)
        await self._stage.start(victim, clock)
        async with self._window(fault.kind, victim.name):
            await anyio.sleep(fault.seconds)

    # server and network

    async def server_stopped(self, fault: Fault) -> None:
        process = self._stage.server.process
        if process is None:
            return
        async with self._window(fault.kind, "server"):
            process.send_signal(signal.SIGSTOP)
            try:
                await anyio.sleep(fault.seconds)
            finally:
                process.send_signal(signal.SIGCONT)

    async def server_killed(self, fault: Fault) -> None:
        await self._server_away(fault, empty=False)

    async def server_emptied(self, fault: Fault) -> None:
        await self._server_away(fault, empty=True)

    async def _server_away(self, fault: Fault, *, empty: bool) -> None:
        async with self._window(fault.kind, "server"):
            await self._stage.kill_server()
            try:
                if empty:
                    self._stage.empty_server()
                await anyio.sleep(fault.seconds)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stage.server.start()

    async def network_cut(self, fault: Fault) -> None:
        await self._network(fault, Mode.CUT)

    async def network_delayed(self, fault: Fault) -> None:
        await self._network(fault, Mode.DELAY)

    async def network_half_open(self, fault: Fault) -> None:
        await self._network(fault, (Mode.MUTE_REQUESTS, Mode.MUTE_REPLIES)[fault.choose(2)])

    async def _network(self, fault: Fault, mode: Mode) -> None:
        async with self._window(fault.kind, str(mode)):
            await self._stage.network(mode)
            try:
                await anyio.sleep(fault.seconds)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stage.network(Mode.PASS)

    async def server_disk_full(self, fault: Fault) -> None:
        async with self._window(fault.kind, "server"), full_disk(self._stage.disks["server"]):
            await anyio.sleep(fault.seconds)

    # store

    async def store_stopped(self, fault: Fault) -> None:
        async with self._window(fault.kind, self._stage.signal_store(signal.SIGSTOP)):
            try:
                await anyio.sleep(fault.seconds)
            finally:
                self._stage.signal_store(signal.SIGCONT)

    async def store_killed(self, fault: Fault) -> None:
        async with self._window(fault.kind, await self._stage.kill_store()):
            try:
                await anyio.sleep(fault.seconds)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stage.restart_store()

    async def store_disk_full(self, fault: Fault) -> None:
        async with self._window(fault.kind, "store"), full_disk(self._stage.disks["store"]):
            await anyio.sleep(fault.seconds)

    # load and input

    async def slow_consumer(self, fault: Fault) -> None:
        pair = [self._stage.parts[name] for name in ("sender", "receiver")]

        def tell(number: signal.Signals) -> None:
            for part in pair:
                if part.process is not None:
                    part.process.send_signal(number)

        async with self._window(fault.kind, "receiver"):
            tell(signal.SIGUSR1)
            try:
                await anyio.sleep(fault.seconds)
            finally:
                tell(signal.SIGUSR2)

    async def poison(self, fault: Fault) -> None:
        self._stage.blow(fault.kind, "queues")
        bodies = hostile.poison(self._registry, request("any", "any"))
        await self._throw(bodies, fault)
        deed = MISDEEDS[fault.choose(len(MISDEEDS))]
        villain = self._villain(fault, deed)
        await when_there_is_room(
            lambda: self._bus.put(EPISODES_QUEUE, villain), who="the fault injector"
        )

    async def hostile(self, fault: Fault) -> None:
        self._stage.blow(fault.kind, "queues")
        bodies = hostile.hostile()
        first = fault.choose(len(bodies))
        await self._throw([*bodies[first:], *bodies[:first]][:3], fault)
        with suppress(*AWAY):
            await hostile.endless_line(self._port)

    @property
    def _port(self) -> int:
        return self._stage.server.port or 0

    async def _throw(self, bodies: list[bytes], fault: Fault) -> None:
        active = self._active() or ["nobody"]
        episode = request("any", "any").model_copy(
            update={"episode_id": active[fault.choose(len(active))]}
        )
        with suppress(*AWAY):
            await hostile.throw(self._port, bodies, episode, self._keys)
            await hostile.mail_forged(self._port, episode, self._keys, self._registry)

    def _villain(self, fault: Fault, deed: str) -> Event:
        event = request(self._stage.place.run_id, f"{deed}-{fault.at:.2f}", deed)
        self.requested[event.episode_id or ""] = event
        return event

    @asynccontextmanager
    async def _window(self, kind: str, target: str) -> AsyncGenerator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._stage.blow(kind, target, began)


FAULTS: dict[str, Callable[[Injector, Fault], Awaitable[None]]] = {
    "worker_killed": Injector.worker_killed,
    "worker_stopped": Injector.worker_stopped,
    "clock_skewed": Injector.clock_skewed,
    "server_stopped": Injector.server_stopped,
    "server_killed": Injector.server_killed,
    "server_emptied": Injector.server_emptied,
    "network_cut": Injector.network_cut,
    "network_delayed": Injector.network_delayed,
    "network_half_open": Injector.network_half_open,
    "server_disk_full": Injector.server_disk_full,
    "store_stopped": Injector.store_stopped,
    "store_killed": Injector.store_killed,
    "store_disk_full": Injector.store_disk_full,
    "slow_consumer": Injector.slow_consumer,
    "poison": Injector.poison,
    "hostile": Injector.hostile,
}


@asynccontextmanager
async def full_disk(place: Path) -> AsyncGenerator[None]:
    """A file takes what is free, again and again, until the end."""
    filler = place / "filler"
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_keep_full, filler)
            yield
            tasks.cancel_scope.cancel()
    finally:
        filler.unlink(missing_ok=True)


async def _keep_full(filler: Path) -> None:
    with filler.open("ab") as file:
        while True:
            disk = os.statvfs(filler)
            free = disk.f_bavail * disk.f_frsize
            if free > SPARE_BYTES:
                with suppress(OSError):  # others were faster
                    os.posix_fallocate(file.fileno(), file.tell(), free)
                file.seek(0, os.SEEK_END)
            await anyio.sleep(0.2)
