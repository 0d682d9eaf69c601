"""`aworld bench fork`: forks of an episode with very many events, at its first, middle and last one and at random ones.

a log in a store ─▶ fork ─▶ episode.forked, episode.requested in a log of its own, and queued       (measured)
                      └──▶ a worker claims it, reads what it shares, and its first handler is done  (measured)
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import anyio

from aworld_runtime.bench import targets
from aworld_runtime.bench.bus import Machine
from aworld_runtime.bench.cost import rss_bytes
from aworld_runtime.bench.latency import percentile
from aworld_runtime.bench.long_log import SHORTEST, write_long_log
from aworld_runtime.bench.progress import Progress
from aworld_runtime.bench.targets import Hold
from aworld_runtime.errors import ConfigError, ProcessError
from aworld_runtime.events import (
    DeliveryHandled,
    EpisodeCancelled,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeForked,
    EpisodeRequested,
    Event,
)
from aworld_runtime.messages import Data
from aworld_runtime.names import episode_log
from aworld_runtime.runtime import Runtime
from aworld_runtime.store.open import open_store
from aworld_runtime.store.sqlite import path_of

PARENT = "long"
FORKS = 24
PATIENCE_S = 600.0
"""Until a fork's first handler is done."""


class Forked(Data):
    """One call of `Runtime.fork`."""

    id: str
    at: int
    ms: float
    """Until `episode.forked` is in the log, and the request in the queue."""


class WentOn(Data):
    """A fork that was run."""

    at: int
    claimed_s: float
    """From the call of `fork` to `episode.claimed`, its first live event."""
    handled_s: float
    """… to the end of its first handler. Before that its owner read all that it shares."""


class ForkBenchReport(Data):
    """What `aworld bench fork --json` prints."""

    events: int
    """Of the log that is forked."""
    log_mb: float
    """Of the store that holds it alone."""
    write_s: float
    """To make the log."""
    forks: tuple[Forked, ...]
    p50_ms: float
    max_ms: float
    kept_events: float
    """Of a fork in the store, its own, on average."""
    kept_bytes: float
    """By which a fork made the store grow, on average."""
    went_on: tuple[WentOn, ...]
    rss_mb: float
    """Memory of this process after the last of them."""
    machine: Machine
    holds: tuple[Hold, ...]
    verified: bool
    faults: tuple[str, ...]


class ForkBench:
    """On `memory://`, with the log in a SQLite file of a temporary folder."""

    def __init__(self, events: int, progress: Progress) -> None:
        if events < SHORTEST:
            raise ConfigError(f"--events {events}: expected {SHORTEST} or more")
        self._events = events
        self._progress = progress

    async def run(self) -> ForkBenchReport:
        """Write the log and fork it; then see some forks go on."""
        machine = Machine.this()
        with tempfile.TemporaryDirectory(prefix="aworld-bench-") as name:
            url = f"sqlite:///{Path(name) / 'bench.db'}"
            began = time.monotonic()
            async with open_store(url) as store:
                await write_long_log(store, PARENT, self._events, self._progress)
            write_s = time.monotonic() - began
            log_bytes = path_of(url).stat().st_size
            self._progress.say(f"the log has {log_bytes / 2**20:,.0f} MB; it is forked")
            forks = await self._fork(url)
            kept_bytes = path_of(url).stat().st_size - log_bytes
            async with open_store(url) as store:
                own = [await store.read(episode_log(fork.id)) for fork in forks]
                faults = faults_of(
                    forks, own, await store.last_seq(episode_log(PARENT)), self._events
                )
            went_on = await self._go_on(url)
        times = [fork.ms for fork in forks]
        hold = targets.at_most("max_ms", max(times), targets.FORK_MS, "ms")
        if not hold.holds:
            faults.append(f"a fork took {max(times):.0f} ms, more than {targets.FORK_MS:g}")
        return ForkBenchReport(
            events=self._events,
            log_mb=log_bytes / 2**20,
            write_s=write_s,
            forks=forks,
            p50_ms=percentile(times, 50),
            max_ms=max(times),
            kept_events=sum(map(len, own)) / len(own),
            kept_bytes=kept_bytes / len(forks),
            went_on=went_on,
            rss_mb=rss_bytes() / 2**20,
            machine=machine,
            holds=(hold,),
            verified=not faults,
            faults=tuple(faults),
        )

    @property
    def _places(self) -> tuple[int, int, int]:
        """The first event, the middle one, the last one."""
        return 1, self._events // 2, self._events

    async def _fork(self, url: str) -> tuple[Forked, ...]:
        """Without a worker: nothing but the forks."""
        dice = random.Random(0)
        others = [dice.randint(1, self._events) for _ in range(FORKS - len(self._places))]
        forks: list[Forked] = []
        async with Runtime(bus="memory://", store=url, slots=0, kind="bench") as runtime:
            for at in (*self._places, *others):
                began = time.perf_counter()
                fork_id = await runtime.fork(PARENT, at=at)
                ms = (time.perf_counter() - began) * 1000
                forks.append(Forked(id=fork_id, at=at, ms=ms))
        return tuple(forks)

    async def _go_on(self, url: str) -> tuple[WentOn, ...]:
        """One after the other: an owner has the whole log in memory."""
        went_on: list[WentOn] = []
        for at in self._places:
            self._progress.say(f"a fork at event {at:,} goes on")
            async with Runtime(bus="memory://", store=url, slots=1, kind="bench") as runtime:
                went_on.append(await _see_go_on(runtime, at))
        return tuple(went_on)


async def _see_go_on(runtime: Runtime, at: int) -> WentOn:
    """Fork, wait for the end of the first handler, and cancel."""
    began = time.perf_counter()
    fork_id = await runtime.fork(PARENT, at=at)
    log, times = episode_log(fork_id), dict[str, float]()
    with anyio.move_on_after(PATIENCE_S):
        async with runtime.bus.tail(log, at + 1) as events:
            async for event in events:
                if isinstance(event.data, DeliveryHandled) and event.type not in times:
                    cancelled = EpisodeCancelled(reason="measured")
                    mail = event.caused(cancelled, source="human/bench")
                    await runtime.bus.send_mail(log, mail)
                times.setdefault(event.type, time.perf_counter() - began)
                if isinstance(event.data, EpisodeFinished):
                    break
    if EpisodeFinished.type not in times:
        raise ProcessError(
            f"the fork at {at} has not gone on in {PATIENCE_S:g} s: {', '.join(times)}"
        )
    return WentOn(
        at=at, claimed_s=times[EpisodeClaimed.type], handled_s=times[DeliveryHandled.type]
    )


def faults_of(
    forks: Sequence[Forked], own: Sequence[Sequence[Event]], last_seq: int, events: int
) -> list[str]:
    """What is wrong with the store after forks of a log of so many events, of whose own events it has `own`."""
    faults: list[str] = []
    for fork, kept in zip(forks, own, strict=True):
        found = [(event.seq, event.type) for event in kept]
        wanted = [(fork.at + 1, EpisodeForked.type), (fork.at + 2, EpisodeRequested.type)]
        if found != wanted:
            faults.append(f"of the fork at {fork.at} the store has {found}, and not {wanted}")
    if last_seq != events:
        faults.append(f"the log that was forked ends at {last_seq}, and ended at {events}")
    return faults
