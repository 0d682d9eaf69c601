"""The runtime: bus, store, archiver and workers put together, for as long as an `async with` lasts.

submit ─▶ queue "episodes" ─▶ worker ─▶ owner ─▶ log ──▶ archiver ─▶ store
result ◀── run log ◀── mail ◀─────────────┘
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from secrets import randbits, token_hex
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple

import anyio
from pydantic import JsonValue

from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.archive.janitor import Janitor
from aworld_runtime.archive.logs import Logs, Patient
from aworld_runtime.archive.requests import Requests
from aworld_runtime.archive.run_log import RunLog
from aworld_runtime.bus.base import Bus
from aworld_runtime.bus.open import open_bus
from aworld_runtime.config import Settings
from aworld_runtime.errors import AWorldError, ConfigError, NotFoundError, UsageError
from aworld_runtime.events import (
    EpisodeRequested,
    Event,
    Registry,
    RunFinished,
    RunStarted,
    new_id,
    utc_now,
)
from aworld_runtime.forks import Origin
from aworld_runtime.messages import ModelSpec, Task
from aworld_runtime.models.client import LLMClient
from aworld_runtime.names import episode_log
from aworld_runtime.nodes.node import Runnable
from aworld_runtime.nodes.questions import answer_to, the_question
from aworld_runtime.nodes.worker import Worker
from aworld_runtime.replay.debugger import Debugger
from aworld_runtime.replay.fork import Changes, begin_fork, expect_roles, lay
from aworld_runtime.replay.live import HEARD_S, Live
from aworld_runtime.store.base import Store
from aworld_runtime.store.open import open_store
from aworld_runtime.trajectory import Episode, episode_of
from aworld_runtime.urls import shown

logger = logging.getLogger(__name__)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
SEED_BITS = 53
"""As many as every JSON reader keeps."""
FINISH_S = 2.0
"""Seconds that a run that was cut short takes to say so in its log."""
DRAIN_S = 10.0
"""Seconds that leaving waits for the archive to catch up, and a run that is done for its end to be in its log."""


class Runtime:
    """Runs agents and swarms; enter it with `async with`.

        async with Runtime() as runtime:
            episode = await runtime.run(agent, "What is 17 * 23?")

    Args:
        bus: URL; `memory://` is this process.
        store: URL; `sqlite:///./.aworld/aworld.db` by default.
        slots: episodes at once in this process; 0 leaves them to workers elsewhere.
    """

    def __init__(
        self,
        *,
        bus: str | None = None,
        store: str | None = None,
        slots: int = 32,
        kind: str = "run",
    ) -> None:
        settings = Settings.from_env()
        registry = Registry()
        self.bus: Bus = open_bus(bus or settings.bus, registry, keys=settings.bus_keys)
        self.store: Store = open_store(store or settings.store, registry)
        self.run_id = f"{utc_now():%Y%m%d-%H%M%S}-{token_hex(3)}"
        self._settings = settings
        self._source = f"runtime/{self.run_id}"
        self._log = RunLog(self.bus, self.store, self.run_id)
        self._logs = Logs(self.bus, self.store)
        self._kind = kind
        self._slots = slots
        self._programs: dict[str, Runnable] = {}
        """Objects that unfinished episodes run, each under a name of its episode's own."""
        self._requests = Requests(
            self.bus,
            self.store,
            self._log,
            source=self._source,
            restore_after_s=settings.restore_after_s,
        )
        self._failure: BaseException | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.bus)
            await stack.enter_async_context(self.store)
            archiver = await stack.enter_async_context(Archiver(self.bus, self.store))
            stack.push_async_callback(archiver.drain, DRAIN_S)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            janitor = Janitor(
                self.bus,
                self.store,
                archiver,
                retire_after_s=self._settings.retire_after_s,
                restore_after_s=self._settings.restore_after_s,
            )
            tasks.start_soon(janitor.run)
            await self._log.append([self._event(RunStarted(kind=self._kind))])
            stack.push_async_callback(self._finish)
            tasks.start_soon(self._requests.run)
            if self._slots:
                worker = Worker(
                    self.bus,
                    name=token_hex(3),
                    slots=self._slots,
                    programs=self._programs,
                    models=self._settings.llm,
                    logs=Logs(self.bus, Patient(self.store)),
                )
                tasks.start_soon(worker.run)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._failure = error
        if isinstance(error, Exception):  # the caller's own: it stays as it is, in no group
            await self._stack.aclose()
        else:  # what it makes of the error counts only where it raises: a body cut short has no result
            await self._stack.__aexit__(kind, error, traceback)

    async def run(
        self, program: Runnable | str, task: str | Task, *, timeout_s: float | None = None
    ) -> Episode:
        """Do one task to its end, whatever the end is: see `Episode.reason` and `.error`."""
        return await self.result(await self.submit(program, task, timeout_s=timeout_s))

    async def submit(
        self,
        program: Runnable | str,
        task: str | Task,
        *,
        timeout_s: float | None = None,
        seed: int | None = None,
        paused: bool = False,
    ) -> str:
        """Queue one episode; returns its id. `seed`: of its models' samples and of `ctx.random`; none draws one, which the log
        keeps. `paused`: it starts when it is resumed, or stepped by a debugger.

        Raises:
            UsageError: a task or a program that is none.
            ConfigError: a program that workers elsewhere can't import.
        """
        task = Task(id=new_id(), prompt=task) if isinstance(task, str) else task
        if not isinstance(task, Task):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"task must be text or a Task, not {type(task).__name__}")
        episode_id = new_id()
        reference = self._reference(program, episode_id)
        requested = Event.of(
            EpisodeRequested(
                task=task,
                program=reference,
                seed=randbits(SEED_BITS) if seed is None else seed,
                paused=paused,
            ),
            source=self._source,
            run_id=self.run_id,
            task_id=task.id,
            episode_id=episode_id,
            trust="user",
            deadline=None if timeout_s is None else utc_now() + timedelta(seconds=timeout_s),
        )
        forget = partial(self._programs.pop, reference, None)
        await self._requests.submit(episode_id, requested, on_end=forget)
        return episode_id

    async def events(self, episode_id: str) -> list[Event]:
        """What has happened in an episode that this bus or this store knows; in a fork, with what it shares.

        Raises:
            NotFoundError: there is no such episode.
        """
        found = await self._logs.read_all(episode_log(episode_id))
        if not found:
            raise self._unknown(episode_id)
        return found

    async def fork(
        self,
        episode_id: str,
        *,
        at: int,
        edit: Mapping[str, JsonValue] | None = None,
        program: Runnable | str | None = None,
        arguments: Mapping[str, JsonValue] | None = None,
        models: Mapping[str, ModelSpec | str] | None = None,
        paused: bool = False,
    ) -> str:
        """Queue an episode that begins with the events 1 … `at` of another, and goes on live; returns its id.

        `edit` changes the event that came next, by path: `{"data.content": "42"}`. Without `program`, `arguments` and `models`
        it goes on with the other's; a role's model may be given by its name. `paused` is as in `submit`. The other episode
        stays as it is.

        Raises:
            NotFoundError: no such episode, or it has no such event.
            UsageError: it ended there; or these changes can't be made.
            ConfigError: a program that workers can't import, or a model that nobody could ask.
        """
        specs = {
            role: model
            if isinstance(model, ModelSpec)
            else LLMClient(model).spec(self._settings.llm)
            for role, model in (models or {}).items()
        }
        reference = None if program is None else self._reference(program, new_id())
        changes = Changes(edit or {}, reference, arguments, specs, paused)
        forget = partial(self._programs.pop, reference or "", None)
        try:
            opening = await begin_fork(
                self._logs, episode_id, at, changes, source=self._source, run_id=self.run_id
            )
            if self._slots:  # elsewhere its roles may not be known
                expect_roles(opening[1], specs, self._programs)
        except BaseException:
            forget()
            raise
        forked, requested, *_ = opening
        fork_id = forked.episode_id or ""
        begin = partial(lay, self.bus, self._logs, opening)
        await self._requests.submit(fork_id, requested, on_end=forget, begin=begin)
        return fork_id

    async def answer(self, episode_id: str, text: str, *, question: int | None = None) -> None:
        """Answer what an episode asks a person: the question at this seq, or the only one that is open.

        Raises:
            NotFoundError: it has no such question.
            UsageError: it has several.
        """
        log = episode_log(episode_id)
        asked = the_question(await self._logs.read_all(log), question)
        await self.bus.send_mail(log, answer_to(asked, text, source="human/runtime"))

    async def result(self, episode_id: str) -> Episode:
        """Wait for a submitted episode to finish.

        Raises:
            NotFoundError: it was not submitted here.
        """
        await self._requests.wait(episode_id)
        events = await self._logs.read_all(episode_log(episode_id))
        requested = Origin.of(events).requested
        if requested is None or requested.run_id != self.run_id:
            raise NotFoundError(f"episode {episode_id!r} was not submitted to this runtime")
        return episode_of(events)

    @asynccontextmanager
    async def debug(
        self, episode_id: str, program: Runnable | None = None
    ) -> AsyncGenerator[Debugger]:
        """A debugger for an episode that this bus or this store knows: it is at the end of one that runs, and at the beginning
        of one that has ended. With the `program` that ran, what has ended runs again as it is passed.

        Raises:
            NotFoundError: there is no such episode.
        """
        live = self.live(episode_id)
        with anyio.move_on_after(HEARD_S):
            await live.begin()
        if not live.events:
            raise self._unknown(episode_id)
        if live.finished:
            again = None if program is None else program.program()
            debugger = Debugger(live.events, again, forks=self, runs=program)
        else:
            debugger = Debugger(live.events, live=live, forks=self, runs=program)
        try:
            yield debugger
        finally:
            with anyio.move_on_after(FINISH_S, shield=True):
                await debugger.leave()

    def live(self, episode_id: str) -> Live:
        """An episode's log as it grows, and what its owner can be told."""
        return Live(self.bus, self._logs, episode_id)

    def _unknown(self, episode_id: str) -> NotFoundError:
        bus, store = shown(self.bus.url), shown(self.store.url)
        return NotFoundError(f"no episode {episode_id!r} on {bus} or in {store}")

    def _reference(self, program: Runnable | str, episode_id: str) -> str:
        if isinstance(program, str):
            return program
        if not hasattr(program, "program"):
            raise UsageError(
                f"expected an agent, a swarm or module:attribute, not {type(program).__name__}"
            )
        if not self.bus.url.startswith("memory:"):
            raise ConfigError(
                f"{type(program).__name__} object on bus {self.bus.url}: workers elsewhere can't see it;"
                " name it as module:attribute, or use memory://"
            )
        reference = f"local:{type(program).__name__}/{episode_id}"
        self._programs[reference] = program
        return reference

    async def _finish(self) -> None:
        error = self._failure
        finished = RunFinished(reason="done")
        if isinstance(error, KeyboardInterrupt | anyio.get_cancelled_exc_class()):
            finished = RunFinished(reason="interrupted")
        elif error is not None:
            finished = RunFinished(reason="failed", detail=f"{type(error).__name__}: {error}")
        limit_s = DRAIN_S if error is None else FINISH_S
        with anyio.move_on_after(limit_s, shield=True) as limit:
            await self._log.append([self._event(finished)])
        if limit.cancelled_caught:
            logger.warning("the bus has not taken the end of run %s in %g s", self.run_id, limit_s)

    def _event(self, data: RunStarted | RunFinished) -> Event:
        return Event.of(data, source=self._source, run_id=self.run_id)


async def run_program(program: Runnable, task: str | Task) -> Episode:
    """One task on a runtime of its own.

    Raises:
        AWorldError: the episode failed.
    """
    async with Runtime(bus="memory://", slots=1) as runtime:
        episode = await runtime.run(program, task)
    if episode.reason == "failed":
        raise AWorldError(
            f"episode {episode.id} failed: {episode.error}; see it with: aworld log {episode.id}"
        )
    return episode


def run_sync(work: Callable[[*Ts], Awaitable[T]], *arguments: *Ts) -> T:
    """Run async work from synchronous code; inside a running event loop, on a thread of its own."""

    async def call() -> T:
        return await work(*arguments)

    if not _in_event_loop():
        return asyncio.run(call())
    outcome: list[T] = []
    failure: list[BaseException] = []
    stop: list[Callable[[], object]] = []

    async def stoppable() -> T:
        loop, scope = asyncio.get_running_loop(), anyio.CancelScope()
        stop.append(lambda: loop.call_soon_threadsafe(scope.cancel))
        with scope:
            return await call()
        raise KeyboardInterrupt

    ended = threading.Event()  # an interrupted join() takes the thread for dead

    def run() -> None:
        try:
            outcome.append(asyncio.run(stoppable()))
        except BaseException as error:  # noqa: BLE001 - carried over to the calling thread
            failure.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, name="aworld-run").start()
    try:
        ended.wait()
    except KeyboardInterrupt:  # a notebook's: without this the work would go on behind its back
        for end in stop:
            with suppress(RuntimeError):  # the loop has just ended by itself
                end()
        ended.wait()
        raise
    if failure:
        raise failure[0]
    return outcome[0]


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
