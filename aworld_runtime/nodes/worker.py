"""A worker: a process's share of the episodes.

    queue "episodes" ──▶ take (at most `slots` held) ──▶ EpisodeOwner ──▶ mail to the run ──▶ ack
    every second: announce itself, and the tools and environment it hosts

An episode that waits for a person keeps its slot and its claim, but no task. A worker that dies leaves its claims unsettled;
others take its episodes over. `drain` stops taking and lets what runs end.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import anyio
from anyio.abc import TaskGroup
from pydantic import JsonValue

from aworld_runtime import telemetry
from aworld_runtime.bus.base import Bus, Delivery, NodeInfo, Readable
from aworld_runtime.bus.presence import announce
from aworld_runtime.bus.restarts import restarts
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import (
    AWorldError,
    EventError,
    Fenced,
    WorkerRefusedError,
    first_error,
)
from aworld_runtime.events import EpisodeFinished, EpisodeRequested, Event, utc_now
from aworld_runtime.models.client import NO_DEFAULTS, ModelDefaults
from aworld_runtime.names import EPISODES_QUEUE, run_log
from aworld_runtime.nodes.connections import Connections
from aworld_runtime.nodes.deliveries import bury, try_again
from aworld_runtime.nodes.node import Program, Runnable, load_program
from aworld_runtime.nodes.owner import EpisodeOwner
from aworld_runtime.tools.call import told

logger = logging.getLogger(__name__)
PROGRAMS_KEPT = 256
"""Programs that stay loaded, each for other arguments."""


@dataclass(slots=True, eq=False)
class Held:
    """An episode that the worker has claimed."""

    delivery: Delivery
    owner: EpisodeOwner | None = None
    """None until its program is loaded."""


class Worker:
    """Runs episodes from the queue until drained or cancelled.

    `programs` are runnables known to this process alone, by the reference (`local:NAME`) that requests use; `models` is
    what model clients fall back to; `logs` has what forks share with others, if not the bus.
    """

    def __init__(  # noqa: PLR0913 - what a process has for its episodes
        self,
        bus: Bus,
        *,
        name: str,
        slots: int = 8,
        programs: Mapping[str, Runnable] | None = None,
        version: str = "",
        models: ModelDefaults = NO_DEFAULTS,
        queue: str = EPISODES_QUEUE,
        logs: Readable | None = None,
    ) -> None:
        self.name = name
        self._bus = bus
        self._slots = slots
        # Not `or {}`: a runtime's own, which is empty now, fills up later.
        self._programs: Mapping[str, Runnable] = {} if programs is None else programs
        self._version = version
        self._queue = queue
        self._logs = logs
        self._loaded: dict[str, Program] = {}
        """The one used last stands last."""
        self._connections = Connections(models)
        self._hosted: set[tuple[str, str]] = set()
        self._held: set[Held] = set()
        self._let_go = anyio.Event()
        """Set when the next of them is."""
        self._woken: list[Held] = []
        self._any_woken = anyio.Event()
        self._draining = anyio.Event()
        self._since = utc_now()
        telemetry.EPISODES_RUNNING.watch(self, lambda worker: worker.running)

    async def run(self) -> None:
        """Run episodes until drained.

        Raises:
            WorkerRefusedError: an episode wants other code; it, and whatever ran, goes to other workers.
        """
        try:
            async with (
                self._bus.consume(
                    self._queue,
                    consumer=self.name,
                    credit=self._slots,
                    past_deadline=True,  # that it is too late belongs into the episode's log
                ) as consumer,
                anyio.create_task_group() as tasks,
            ):
                self._since = self._bus.now()
                tasks.start_soon(
                    partial(announce, self._bus, self._nodes, who=f"worker {self.name}")
                )
                tasks.start_soon(self._watch_server)
                tasks.start_soon(self._go_on_with_woken, tasks)
                async with anyio.create_task_group() as taking:
                    taking.start_soon(self._stop_taking, taking)
                    while True:
                        self._start(tasks, await consumer.take())
                while self._held:
                    self._let_go = anyio.Event()
                    await self._let_go.wait()
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            refused, _ = group.split(WorkerRefusedError)
            if refused is None:
                raise
            raise first_error(refused) from None
        finally:
            for held in tuple(self._held):
                self._release(held)
            with anyio.move_on_after(2, shield=True):
                await self._connections.aclose()

    @property
    def running(self) -> int:
        """Episodes that it owns now, those included that wait."""
        return len(self._held)

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    def health(self) -> dict[str, JsonValue]:
        """What it says of itself when asked."""
        return {
            "status": "draining" if self.draining else "ok",
            "worker": self.name,
            "version": self._version,
            "running": self.running,
            "slots": self._slots,
        }

    def drain(self) -> None:
        """Take no more episodes; `run` returns once those it has are done."""
        self._draining.set()

    async def _stop_taking(self, taking: TaskGroup) -> None:
        await self._draining.wait()
        taking.cancel_scope.cancel()

    # --- episodes --------------------------------------------------------------------------------------------------

    def _start(self, tasks: TaskGroup, delivery: Delivery) -> None:
        held = Held(delivery)
        self._held.add(held)
        tasks.start_soon(self._go_on, held)

    async def _go_on(self, held: Held) -> None:
        """Work on an episode until it is over, here at least, or waits."""
        event = held.delivery.event
        with telemetry.about(episode=event.episode_id, run=event.run_id, worker=self.name):
            waiting = await self._own(held)
        if waiting is None:
            self._release(held)
        else:
            waiting.rest(partial(self._rouse, held))

    def _rouse(self, held: Held) -> None:
        self._woken.append(held)
        self._any_woken.set()

    async def _go_on_with_woken(self, tasks: TaskGroup) -> None:
        while True:
            await self._any_woken.wait()
            self._any_woken = anyio.Event()
            while self._woken:
                tasks.start_soon(self._go_on, self._woken.pop())

    def _release(self, held: Held) -> None:
        if held.owner is not None:
            held.owner.close()
        self._held.discard(held)
        self._let_go.set()

    async def _own(self, held: Held) -> EpisodeOwner | None:
        """Returns the owner if it waits now."""
        delivery, owner, refusal = held.delivery, held.owner, None
        event = delivery.event
        if owner is None:
            if not isinstance(event.data, EpisodeRequested) or event.episode_id is None:
                await bury(delivery, f"expected episode.requested, got {event.type}")
                return None
            program, refusal = await self._program(event, event.data)
            owner = held.owner = EpisodeOwner(
                bus=self._bus,
                requested=event,
                program=program,
                worker=self.name,
                connect=self._connections.borrowed,
                delivery=delivery,
                logs=self._logs,
            )
        fenced: list[BaseException] = []
        unreadable: list[BaseException] = []
        try:
            # One that can't run here still ends, with the reason in its log: nobody waits for it in vain.
            if await owner.work(refusal=refusal) is None:
                return owner
        except* Fenced as group:
            fenced.append(first_error(group))
        except* EventError as group:
            unreadable.append(first_error(group))
        if unreadable:  # its log: that must not take every worker down in turn
            await self._fail(delivery, unreadable[0])
            return None
        if fenced:
            logger.info("%s goes to another worker: %s", owner.log, fenced[0])
        else:
            await self._report(owner.events[-1])
        # Also where it was taken over: either the claim is lost, and this gives its slot back, or the episode had been
        # queued twice, and whoever has it now holds the other claim.
        await delivery.ack()
        return None

    async def _program(self, event: Event, data: EpisodeRequested) -> tuple[Program, str | None]:
        """What the episode runs; or nothing, and why not.

        Raises:
            WorkerRefusedError: the fault is this worker's, so the claim stays unsettled: others can run it.
        """
        try:
            await self._check_code(event, data.code_version)
            return self._load(data), None
        except WorkerRefusedError:
            raise
        except AWorldError as error:
            logger.warning("episode %s can't run: %s", event.episode_id, error)
            return Program(nodes=()), f"{type(error).__name__}: {error}"

    async def _fail(self, delivery: Delivery, error: BaseException) -> None:
        """Leave an episode that no log can tell of to another try; after the last one its run learns of it."""
        if not await try_again(delivery, error):
            failed = EpisodeFinished(
                reason="failed", error=f"{type(error).__name__}: {told(error)}"
            )
            await self._report(delivery.event.caused(failed, source=f"worker/{self.name}"))

    async def _check_code(self, requested: Event, wanted: str) -> None:
        """See whether the episode can run with this code.

        Raises:
            WorkerRefusedError: it can't, and another worker's code may be right.
            AWorldError: its run goes on with this code, so nobody has the code it was requested with.
        """
        if not self._version or wanted in ("", self._version):
            return
        versions = (
            f"worker {self.name} runs code version {self._version}, the episode wants {wanted}"
        )
        run = (await _runs(self._bus)).get(requested.run_id or "")
        if run is not None and run.version == self._version:
            raise AWorldError(f"{versions}: its run has been resumed with other code")
        raise WorkerRefusedError(f"{versions}: start workers from the same code")

    def _load(self, data: EpisodeRequested) -> Program:
        """The program of a request. What was imported is kept, since most episodes of a run share it."""
        key = f"{data.program} {data.model_dump_json(include={'arguments'})}"
        program = self._loaded.pop(key, None) or load_program(
            data.program, data.arguments, self._programs
        )
        if data.program not in self._programs:
            self._loaded[key] = program
            if len(self._loaded) > PROGRAMS_KEPT:
                del self._loaded[next(iter(self._loaded))]
        self._hosted |= {("tool", tool) for tool in program.tool_names}
        if data.task.environment is not None:
            self._hosted.add(("environment", data.task.environment.rpartition(":")[2]))
        return program

    async def _report(self, finished: Event) -> None:
        """Tell the run. At least once: the run knows episodes by their id."""
        if finished.run_id is not None:
            report = partial(self._bus.send_mail, run_log(finished.run_id), finished)
            await when_there_is_room(report, who=f"worker {self.name}")

    async def _watch_server(self) -> None:
        async for _ in restarts(self._bus):
            for held in tuple(self._held):
                if held.owner is not None:
                    held.owner.look()

    def _nodes(self) -> Iterable[NodeInfo]:
        common = {
            "version": self._version,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": self._since,
        }
        detail = {"slots": self._slots, "running": self.running}
        load = self.running / self._slots
        yield NodeInfo.model_validate(
            {
                "name": f"worker/{self.name}",
                "kind": "worker",
                "load": load,
                "queues": (self._queue,),
                "detail": detail,
                **common,
            }
        )
        for kind, hosted in sorted(self._hosted):
            yield NodeInfo.model_validate(
                {"name": f"{hosted}/{self.name}", "kind": kind, "load": load, **common}
            )


async def check_version(bus: Bus, version: str) -> None:
    """See whether a worker of this code may join.

    Raises:
        WorkerRefusedError: a run on this bus uses other code.
    """
    for node in (await _runs(bus)).values():
        if node.version != version:
            raise WorkerRefusedError(
                f"{node.name} on this bus runs code version {node.version}, this worker has {version}:"
                " start it from the same code"
            )


async def _runs(bus: Bus) -> Mapping[str, NodeInfo]:
    """By run id, who says with which code the run works: its launcher, or its trainer where none is seen."""
    speakers = [n for n in await bus.nodes() if n.kind in ("trainer", "launcher") and n.version]
    # One that died is listed for a while, beside who resumed its run.
    speakers.sort(key=lambda node: (node.kind == "launcher", node.seen or utc_now()))
    return {node.name.partition("/")[2]: node for node in speakers}
