"""One run: everything is started, faults strike as scheduled, everything is healed, and then checked.

start ─▶ load + faults (seconds) ─▶ heal ─▶ every episode ends ─▶ the archiver drains ─▶ collect ─▶ stop ─▶ check
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio

from aworld_runtime.archive.logs import Logs
from aworld_runtime.archive.marker import is_marker
from aworld_runtime.bus.base import Bus
from aworld_runtime.bus.open import open_bus
from aworld_runtime.chaos import checker, takeover
from aworld_runtime.chaos.checker import Evidence, Log, Stored, Violation
from aworld_runtime.chaos.faults import Injector
from aworld_runtime.chaos.history import HistoryReader, Operation, checksum
from aworld_runtime.chaos.part import LANE
from aworld_runtime.chaos.plan import KINDS, Fault, schedule
from aworld_runtime.chaos.report import MOST_TAKEOVER_S, Episodes, Report
from aworld_runtime.chaos.stage import Stage, on_stage, until
from aworld_runtime.chaos.workload import answer_of
from aworld_runtime.events import EpisodeFinished, Event, Registry
from aworld_runtime.names import episode_of_log
from aworld_runtime.store.base import Store
from aworld_runtime.store.open import open_store

logger = logging.getLogger(__name__)

PROGRESS_S = 5.0
GRACE_S = 90.0
"""For every episode to end once everything is healed."""
RESTORED_S = 12.0
"""For what the server lost to be restored, if it was lost at the very end."""
DRAIN_S = 60.0
PAGE = 2000
LISTED = 50
"""Violations told in full; the rest is counted."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What is asked for."""

    seconds: float
    seed: int
    kinds: Collection[str]
    folder: Path
    load: int
    """Episodes at once."""
    mongo_program: str | None = None


async def run(options: Options, say: Say) -> Report:
    """Run, heal, check."""
    plan = schedule(options.seed, options.seconds, options.kinds)
    small_disks = any(fault.kind.endswith("disk_full") for fault in plan)
    options.folder.mkdir(parents=True, exist_ok=True)
    async with on_stage(
        options.folder,
        options.seed,
        load=options.load,
        mongo_program=options.mongo_program,
        small_disks=small_disks,
    ) as stage:
        async with open_bus(stage.url(stage.server.port)) as bus:
            run = _Run(options, stage, bus, say)
            skipped = await run.strike(plan)
            await run.settle()
            logs = await run.collect()
        say("everything ends; histories, bus and store are compared")
        await stage.close(orderly=True)
        stage.unmount_disks()
        left = stage.processes_left()
        return run.judge(logs, skipped, left)


class _Run:
    def __init__(self, options: Options, stage: Stage, bus: Bus, say: Say) -> None:
        self._options = options
        self._stage = stage
        self._bus = bus
        self._say = say
        self._registry = Registry()
        self._readers: dict[Path, HistoryReader] = {}
        self._injector = Injector(stage, bus, self._active)
        self._in_force: Counter[str] = Counter()
        self._struck: Counter[str] = Counter()
        self._tracks = {kind.track: anyio.Lock() for kind in KINDS.values()}
        """A fault waits until the one before it on its track is healed, however long that takes."""
        self._began = time.monotonic()
        self._load = 0.0
        """The highest seen, of one minute and per core: on a busy machine everything takes longer."""

    async def strike(self, plan: list[Fault]) -> dict[str, str]:
        """Let the faults strike, and the time pass; returns the kinds that can't be had here, and why."""
        skipped = {f.kind: why for f in plan if (why := self._injector.why_not(f.kind))}
        self._began = time.monotonic()
        async with self._telling(self._progress), anyio.create_task_group() as faults:
            for fault in plan:
                if fault.kind not in skipped:
                    faults.start_soon(self._inject, fault)
            await anyio.sleep(self._options.seconds)
        return skipped

    async def settle(self) -> None:
        """Everything is healed: wait for the rest of the work."""
        self._say("everything is healed; what has begun may end now")
        self._stage.terminate("submitter")
        self._stage.terminate("sender")
        if any(blow.kind == "server_emptied" for blow in self._stage.blows):
            waits = f"waits {RESTORED_S:.0f} s for what the server lost to be restored"
            async with self._telling(lambda: waits):
                await anyio.sleep(RESTORED_S)
            async with open_store(self._stage.place.store) as store:
                await self._injector.request_again(Logs(self._bus, store))
        await self._wait(self._going_on, GRACE_S)
        self._stage.terminate("archiver")
        await self._wait(self._archiving, DRAIN_S)

    async def collect(self) -> dict[str, Log]:
        """Read everything that bus and store hold."""
        self._read_histories()
        appends = {op.target for op in self._operations() if op.call == "append"}
        names = sorted(name for name in appends if not is_marker(name))
        async with open_store(self._stage.place.store) as store:
            return {
                name: Log(await self._stored(self._bus, name), await self._stored(store, name))
                for name in names
            }

    def judge(self, logs: dict[str, Log], skipped: dict[str, str], left: int) -> Report:
        """Check, and put it into words."""
        self._read_histories()
        evidence = Evidence(list(self._operations()), logs, self._stage.blows, self._healthy_answer)
        violations = checker.check(evidence)
        violations += [
            Violation("crashes", crash.split(".")[0], 0, crash) for crash in self._stage.crashes
        ]
        if left:
            violations.append(Violation("processes_left", "", 0, f"{left} processes are left"))
        times = takeover.takeovers(evidence)
        slowest = takeover.p99(times)
        if slowest is not None and slowest > MOST_TAKEOVER_S:
            told = (
                f"99 of 100 takeovers within {slowest:.2f} s; {MOST_TAKEOVER_S:g} s are promised (up to"
                f" {self._load:.1f} processes wanted each core)"
            )
            violations.append(Violation("takeover_slow", "", 0, told))
        counts = Counter(violation.what for violation in violations)
        return Report(
            ok=not violations,
            seed=self._options.seed,
            seconds=self._options.seconds,
            acked=checker.acked(evidence.operations),
            faults=dict(sorted(self._struck.items())),
            skipped=skipped,
            acked_lost=counts["acked_lost"],
            duplicate_commits=counts["duplicate_commits"],
            order_violations=counts["order_violations"],
            silent_hangs=counts["silent_hangs"],
            wrong_ends=counts["wrong_ends"],
            queue_lost=counts["queue_lost"],
            not_archived=counts["not_archived"],
            crashes=counts["crashes"],
            takeover_p99_s=None if slowest is None else round(slowest, 3),
            takeovers_timed=len(times),
            load_per_core=round(self._load, 1),
            failed_loudly=len(checker.loud(logs)),
            zombie_appends_refused=self._zombies(evidence),
            processes_left=left,
            episodes=self._episodes(logs),
            store=self._stage.place.store.partition(":")[0],
            violations=tuple(checker.gather(violations)[:LISTED]),
        )

    # inside

    async def _inject(self, fault: Fault) -> None:
        await anyio.sleep(max(0.0, self._began + fault.at - time.monotonic()))
        async with self._tracks[KINDS[fault.kind].track]:
            if time.monotonic() > self._began + self._options.seconds:
                return
            self._struck[fault.kind] += 1
            self._in_force[fault.kind] += 1
            try:
                await self._injector.inject(fault)
            finally:
                self._in_force[fault.kind] -= 1

    @asynccontextmanager
    async def _telling(self, tell: Callable[[], str]) -> AsyncGenerator[None]:
        """Meanwhile say every few seconds what `tell` has to tell."""

        async def repeat() -> None:
            while True:
                await anyio.sleep(PROGRESS_S)
                self._read_histories()
                self._load = max(self._load, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
                self._say(f"{time.monotonic() - self._began:4.0f} s  {tell()}")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(repeat)
            yield
            tasks.cancel_scope.cancel()

    async def _wait(self, left: Callable[[], Awaitable[str]], patience_s: float) -> None:
        """Until nothing is left, and say what is waited for; what is left in the end, the checker finds."""
        began, waits_for = time.monotonic(), ""

        def tell() -> str:
            passed = time.monotonic() - began
            return f"waits for {waits_for} ({passed:.0f} s of at most {patience_s:.0f} s)"

        async def nothing_left() -> bool:
            nonlocal waits_for
            waits_for = await left()
            return not waits_for

        async with self._telling(tell):
            if not await until(nothing_left, patience_s):
                self._say(f"gave up after {patience_s:.0f} s waiting for {waits_for}")

    def _progress(self) -> str:
        faults = ", ".join(sorted(k for k, count in self._in_force.items() if count)) or "none"
        events = sum(len(o.ids) for o in self._operations() if _acked(o))
        episodes = f"{len(self._ended())}/{len(self._requested())}"
        return f"acked {events:>7,}  episodes {episodes}  faults now: {faults}"

    def _read_histories(self) -> None:
        for path in (self._stage.folder / "history").glob("*.jsonl"):
            reader = self._readers.setdefault(path, HistoryReader(path))
            reader.read()

    def _operations(self) -> list[Operation]:
        return [op for reader in self._readers.values() for op in reader.operations.values()]

    def _requested(self) -> set[str]:
        puts = (op for op in self._operations() if op.call == "put")
        return {
            e
            for op in puts
            for e, kind in zip(op.episodes, op.types, strict=True)
            if kind == checker.REQUESTED
        }

    def _ended(self) -> set[str]:
        ends = (op for op in self._operations() if _acked(op) and checker.FINISHED in op.types)
        return {episode_of_log(op.target) or op.target for op in ends}

    def _active(self) -> list[str]:
        """Episodes that somebody appended to lately."""
        appends = sorted((op.began, op.target) for op in self._operations() if _acked(op))
        ended = self._ended()
        recent = dict.fromkeys(episode_of_log(log) for _, log in appends[-100:])
        return [episode for episode in recent if episode is not None and episode not in ended]

    async def _going_on(self) -> str:
        """What has not ended yet. The submitter ends when all of its episodes have; what is restored after that ends once
        more.
        """
        if not self._stage.ended("submitter"):
            requested = self._requested()
            return f"{len(requested - self._ended())} of {len(requested)} episodes"
        self._read_histories()
        appends = {op.target for op in self._operations() if _acked(op)}
        async with open_store(self._stage.place.store) as store:
            logs = Logs(self._bus, store)
            for log in appends:
                last = await logs.last_seq(log) if episode_of_log(log) else 0
                newest = await logs.read(log, last, limit=1) if last else []
                if newest and not isinstance(newest[0].data, EpisodeFinished):
                    return f"{log}, whose last event is {newest[0].type}"
        backlog = await self._bus.backlog(LANE)
        return f"{backlog} pieces of work on queue {LANE}" if backlog else ""

    async def _archiving(self) -> str:
        return "" if self._stage.ended("archiver") else "the archiver to store the rest"

    async def _stored(self, where: Bus | Store, log: str) -> dict[int, Stored]:
        found: dict[int, Stored] = {}
        start = 1
        while page := await where.read(log, start, limit=PAGE):
            found |= {event.seq: self._seen(event) for event in page}
            start = page[-1].seq + 1
        return found

    def _seen(self, event: Event) -> Stored:
        data = event.data
        finished = isinstance(data, EpisodeFinished)
        return Stored(
            id=event.id,
            body=checksum(self._registry, event),
            type=event.type,
            cause=event.causation_id,
            reason=data.reason if finished else "",
            says=(data.error or data.answer) if finished else "",
        )

    def _healthy_answer(self, episode: str) -> str | None:
        run_id = self._stage.place.run_id
        name = episode.removeprefix(f"{run_id}-")
        if not name.startswith("walk-"):
            return None
        return answer_of(name)

    def _zombies(self, evidence: Evidence) -> int:
        stopped = {blow.target for blow in self._stage.blows if blow.kind == "worker_stopped"}
        return sum(
            op.process in stopped and op.error.startswith("Fenced")
            for op in evidence.calls["append"]
        )

    def _episodes(self, logs: dict[str, Log]) -> Episodes:
        episodes = [log for name, log in logs.items() if episode_of_log(name)]
        events = [event for log in episodes for event in log.events.values()]
        return Episodes(
            requested=len(self._requested()),
            finished=sum(bool(log.ends) for log in episodes),
            taken_over=sum(event.type == checker.TAKEN_OVER for event in events),
            misbehaved=len(self._injector.requested),
        )


def _acked(operation: Operation) -> bool:
    return operation.call == "append" and operation.outcome == "ok"
