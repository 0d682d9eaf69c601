"""`aworld debug EPISODE`: stop anywhere in an episode, look, change something and go on."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
)
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import urlsplit

from aworld_runtime.cli.own_types import own_types
from aworld_runtime.cli.shared import (
    LAST,
    add_breakpoints,
    add_bus,
    add_store,
    find_episode,
    joined_bus,
    stored,
)
from aworld_runtime.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from aworld_runtime.bus.base import Bus
    from aworld_runtime.cli.own_types import OwnTypes
    from aworld_runtime.replay.debugger import Debugger
    from aworld_runtime.replay.live import Live
    from aworld_runtime.runtime import Runtime

T = TypeVar("T")
TERMINATED = 130
"""Exit code at SIGTERM: a prompt survives Ctrl-C, as which it counts elsewhere."""
SLOTS = 8
"""For a fork, and those before it that are being left."""
LEAVE_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Open an episode in a debugger: breakpoints, steps forwards and back, what every agent knew at any event. A recorded"
        " episode's handlers run again as you pass them, without a live call. Edit an event, and a fork of the episode goes on"
        " live from there. An episode that still runs is paused and stepped on its worker. help lists the commands."
    )
    parser.add_argument(
        "episode",
        nargs="?",
        default=LAST,
        metavar="EPISODE",
        help="an id, or how it begins, or last (the newest episode; the default)",
    )
    add_breakpoints(parser)
    parser.add_argument(
        "--program",
        metavar="MODULE:ATTRIBUTE",
        help="the agent or swarm, where it isn't the one that the log names",
    )
    add_bus(parser)
    add_store(parser)
    parser.epilog = (
        "As a script: printf 'break tool.called\\nc\\np data\\nq\\n' | aworld debug last. Exit code 1 where a handler did"
        " something else than its record, 2 where a command failed."
    )


def run(arguments: argparse.Namespace) -> int:
    return debug(arguments)


def debug(arguments: argparse.Namespace, *, first: str | None = None) -> int:
    """Open the prompt on an episode that is, or was; `first` is a command to begin with."""
    _expect_no_json(arguments)
    with _Session(arguments) as session:
        debugger, about = session.enter(_opened(arguments))
        return session.converse(debugger, about, first)


def debug_new(arguments: argparse.Namespace) -> int:
    """The same on an episode of `aworld run`, which begins with it."""
    _expect_no_json(arguments)
    with _Session(arguments) as session:
        runtime = session.runtime()
        submit = partial(
            runtime.submit,
            arguments.program,
            arguments.question,
            timeout_s=arguments.timeout,
            paused=True,
        )
        episode = session.portal.call(submit)
        debugger = session.enter(runtime.debug(episode))
        return session.converse(debugger, f"episode {episode}: live, paused", None)


def _expect_no_json(arguments: argparse.Namespace) -> None:
    if vars(arguments).get("json"):
        raise UsageError("--json and a debugger's prompt: choose one")


class _Session:
    """An event loop in a thread of its own, and what is open in it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._stack = ExitStack()
        self._runtime: Runtime | None = None

    def __enter__(self) -> Self:
        from anyio.from_thread import start_blocking_portal

        self.portal = self._stack.enter_context(start_blocking_portal())
        before = signal.signal(signal.SIGTERM, _terminate)
        self._stack.callback(signal.signal, signal.SIGTERM, before)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def enter(self, manager: AbstractAsyncContextManager[T]) -> T:
        return self._stack.enter_context(self.portal.wrap_async_context_manager(manager))

    def runtime(self) -> Runtime:
        """Where new episodes live; opened for the first."""
        if self._runtime is None:
            self._runtime = self.enter(_runtime(self._arguments))
        return self._runtime

    def converse(self, debugger: Debugger, about: str, first: str | None) -> int:
        """The prompt, until it is left; returns the exit code."""
        from aworld_runtime.cli.prompt import Prompt

        for text in self._arguments.breakpoints:
            self.portal.call(debugger.break_at, text)
        prompt = Prompt(debugger, self.portal, runtime=self.runtime)
        try:
            return prompt.go(about, first)
        finally:
            self.portal.call(_leave, debugger, self._arguments.bus)


@asynccontextmanager
async def _runtime(arguments: argparse.Namespace) -> AsyncGenerator[Runtime]:
    from aworld_runtime.config import Settings
    from aworld_runtime.runtime import Runtime

    bus = arguments.bus or Settings.from_env().bus
    slots = SLOTS if bus.startswith("memory:") else vars(arguments).get("slots", 0)
    async with Runtime(bus=bus, store=arguments.store, slots=slots, kind="debug") as runtime:
        yield runtime


def _terminate(_: int, __: object) -> None:
    sys.exit(TERMINATED)


async def _leave(debugger: Debugger, bus: str | None) -> None:
    """Let go of the episode; one that is paused here, where nobody else can go on with it, is cancelled."""
    import anyio

    from aworld_runtime.events import EpisodeCancelled

    live = debugger.live
    if live is None:
        return
    known = len(live.events)
    with anyio.move_on_after(LEAVE_S):
        await debugger.leave()
        if live.is_here and debugger.now().paused and not live.finished:
            await live.tell(EpisodeCancelled(reason="its debugger has left it"))
    if any(isinstance(event.data, EpisodeCancelled) for event in live.events[known:]):
        print("it was left paused, and is cancelled")
    elif debugger.now().paused and not live.finished:
        where = f" --bus {bus}" if bus else ""
        print(f"it stays paused; to let it go on: aworld resume {live.episode_id}{where}")


@asynccontextmanager
async def _opened(arguments: argparse.Namespace) -> AsyncGenerator[tuple[Debugger, str]]:
    """A debugger of the episode, and a line about it."""
    from aworld_runtime.bus.base import read_all
    from aworld_runtime.cli.programs import Programs
    from aworld_runtime.config import Settings
    from aworld_runtime.names import episode_log
    from aworld_runtime.replay.debugger import Debugger

    bus_url = arguments.bus or Settings.from_env().bus
    async with AsyncExitStack() as stack:
        types = stack.enter_context(own_types(arguments.program))
        live = None
        if urlsplit(bus_url).scheme != "memory":
            live = await _live(stack, arguments, bus_url, types)
        if live is not None:
            debugger = Debugger(live.events, live=live, runs=arguments.program)
            yield debugger, f"episode {live.episode_id} runs: at its last event, {debugger.seq}"
            return
        async with stored(arguments.store) as store:
            episode = await find_episode(store, arguments.episode)
            programs = Programs(store, types, arguments.program)
            try:
                events, program = await programs.recorded(episode)
                note = "its handlers run again as you pass them"
            except UsageError as error:
                events, program = await read_all(store, episode_log(episode.id)), None
                note = f"no handler runs again: {error}; --program names one"
        about = (
            f"episode {episode.id}, {episode.status or 'unfinished'}, {len(events)} events; {note}"
        )
        yield Debugger(events, program, runs=arguments.program), about


async def _live(
    stack: AsyncExitStack, arguments: argparse.Namespace, bus_url: str, types: OwnTypes
) -> Live | None:
    """The episode as the bus has it; None where it has ended."""
    from aworld_runtime.archive.logs import Logs
    from aworld_runtime.names import episode_log
    from aworld_runtime.replay.live import Live

    logs: Bus | Logs
    bus = await stack.enter_async_context(joined_bus(bus_url))
    name: str = arguments.episode
    try:
        store = await stack.enter_async_context(stored(arguments.store))
    except NotFoundError:
        if name == LAST or not await bus.last_seq(episode_log(name)):
            raise
        logs = bus
    else:
        if name == LAST or not await bus.last_seq(episode_log(name)):
            name = (await find_episode(store, name)).id
        logs = Logs(bus, store)
    await types.of(logs, episode_log(name))
    live = Live(bus, logs, name)
    await live.look()
    return live if live.events and not live.finished else None
