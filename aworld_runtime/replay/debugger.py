"""A debugger for episodes: stop at any event, look at what everybody knew there, change it and go on.

    events ──▶ position ──▶ Stop                       a record: the program's handlers run again as they are passed
                  │  at the end of what is there:      a live episode: it is told to step or to go on, and watched
                  └─▶ fork ──▶ a live one              of either, from any event; it begins paused

Time travel is free, because it is a log: positions go back and forth over what has happened.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import anyio
from pydantic import JsonValue

from aworld_runtime.errors import DivergenceError, ReplayError, UsageError
from aworld_runtime.events import (
    MOST_BREAKPOINTS,
    BreakpointsSet,
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeCancelled,
    EpisodePaused,
    EpisodeResumed,
    EpisodeStepped,
    Event,
)
from aworld_runtime.forks import EDITED_AFTER, Origin
from aworld_runtime.messages import ModelSpec
from aworld_runtime.nodes.node import Program, Runnable
from aworld_runtime.predicate import Predicate
from aworld_runtime.replay.live import HEARD_S, Live
from aworld_runtime.replay.replay import Divergence, Rerun
from aworld_runtime.replay.state import EpisodeState, RoleState, episode_state, role_state

Why: TypeAlias = Literal[
    "moved",  # where it was to go
    "breakpoint",
    "diverged",  # the handler that ends here did something else than the record
    "paused",  # by somebody else
    "waiting",  # nothing can start: a person is to answer, or it is to be resumed
    "start",
    "end",
]
WORDS = (EpisodePaused, EpisodeResumed, EpisodeStepped, BreakpointsSet)
"""Of a debugger: a step passes over them."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a movement ended, and why."""

    why: Why
    event: Event
    detail: str = ""
    """Which breakpoint, what differs, who waits for what."""
    difference: Divergence | None = None

    @property
    def seq(self) -> int:
        return self.event.seq


class Forks(Protocol):
    """Where forks are made: a `Runtime`."""

    async def fork(
        self,
        episode_id: str,
        *,
        at: int,
        edit: Mapping[str, JsonValue] | None = None,
        program: Runnable | str | None = None,
        models: Mapping[str, ModelSpec | str] | None = None,
        paused: bool = False,
    ) -> str: ...

    def live(self, episode_id: str) -> Live: ...


class Debugger:
    """At an event of a history: to begin with the first, of a live episode the last.

    Args:
        events: the whole history; `live` has its own.
        program: what ran: its handlers run again as their ends are passed, and a difference stops there.
        live: the episode, where it still runs.
        forks: where `edit` and `fork` go on.
        runs: what they run there, if it isn't what the log names.
    """

    def __init__(
        self,
        events: Sequence[Event],
        program: Program | None = None,
        *,
        live: Live | None = None,
        forks: Forks | None = None,
        runs: Runnable | str | None = None,
    ) -> None:
        if not events:
            raise ReplayError("an episode without events can't be debugged")
        self.seq = len(live.events) if live else 1
        self.live = live
        """None where the episode is a record."""
        self.breakpoints: dict[int, Predicate] = {}
        """By the number that clears it."""
        self._record = events
        self._rerun = None if program is None else Rerun(events, program)
        self._outcomes = {e.id for e in self._rerun.outcomes} if self._rerun else set[str]()
        self.forks = forks
        self._runs = runs
        self._forked = False
        """The live one is a fork that was made here."""
        self._numbers = 0
        for text in self.now().breakpoints if live else ():
            self._add(Predicate.parse(text))
        self._found = self._numbers
        """Breakpoints up to this number are somebody else's."""

    # --- look ----------------------------------------------------------------------------------------------------------

    @property
    def events(self) -> Sequence[Event]:
        """What has happened as far as it is known here."""
        return self.live.events if self.live else self._record

    @property
    def event(self) -> Event:
        """At the position: the log has it, and nothing that follows from it has begun."""
        return self.events[self.seq - 1]

    def state(self) -> EpisodeState:
        """Who is to do what at the position."""
        return episode_state(self.events, self.seq)

    def role(self, role: str) -> RoleState:
        """What an agent knows at the position.

        Raises:
            UsageError: the episode has no such role.
        """
        return role_state(self.events, self.seq, role)

    def now(self) -> EpisodeState:
        """Who is to do what at the end of what has happened."""
        return episode_state(self.events, len(self.events))

    # --- breakpoints -----------------------------------------------------------------------------------------------------

    async def break_at(self, where: str | Predicate) -> int:
        """Stop at events for which it holds; a live episode is paused there by its owner. Returns the breakpoint's number.

        Raises:
            PredicateError: it can't be read.
            UsageError: there are as many as a log's event holds.
        """
        self._expect_room()
        number = self._add(Predicate.parse(where) if isinstance(where, str) else where)
        await self._tell(self.breakpoints.values())
        return number

    async def clear(self, number: int | None = None) -> None:
        """Forget a breakpoint, or all.

        Raises:
            UsageError: there is no such breakpoint.
        """
        if number is None:
            self.breakpoints = {}
        elif self.breakpoints.pop(number, None) is None:
            known = ", ".join(map(str, self.breakpoints)) or "none"
            raise UsageError(f"no breakpoint {number}; there are: {known}")
        await self._tell(self.breakpoints.values())

    def _expect_room(self) -> None:
        if len(self.breakpoints) >= MOST_BREAKPOINTS:
            raise UsageError(
                f"there are {len(self.breakpoints)} breakpoints, as many as an episode can have: clear one"
            )

    def _add(self, predicate: Predicate) -> int:
        self._numbers += 1
        self.breakpoints[self._numbers] = predicate
        return self._numbers

    async def _tell(self, breakpoints: Iterable[Predicate]) -> None:
        """Have the owner stop there, where there is one."""
        if self.live is not None and not self.live.finished:
            texts = tuple(dict.fromkeys(map(str, breakpoints)))
            if texts != self.now().breakpoints:
                await self.live.tell(BreakpointsSet(breakpoints=texts))

    # --- move ------------------------------------------------------------------------------------------------------------

    async def step(self) -> Stop:
        """To the next event. At a live log's end one handler or tool call may start."""
        return await self._forward(lambda event: not isinstance(event.data, WORDS), step=True)

    async def next(self, role: str | None = None) -> Stop:
        """To the end of the next handler, of `role` if that is given."""

        def ends(event: Event) -> bool:
            handled = isinstance(event.data, DeliveryHandled | DeliveryDeadLettered)
            return handled and role in (None, event.role)

        return await self._forward(ends, step=True)

    async def until(self, where: int | str | Predicate) -> Stop:
        """To the next event for which the predicate holds, or to the one with this seq; breakpoints stop it too.

        Raises:
            UsageError: the position is not before this seq.
            PredicateError: it can't be read.
        """
        if isinstance(where, int):
            if where <= self.seq:
                raise UsageError(f"event {where} is not ahead of {self.seq}: goto goes back")
            where = f"seq>={where}"
        aim = Predicate.parse(where) if isinstance(where, str) else where
        self._expect_room()
        await self._tell([*self.breakpoints.values(), aim])
        try:
            return await self._forward(aim.matches, step=False)
        finally:
            with anyio.move_on_after(HEARD_S, shield=True):
                await self._tell(self.breakpoints.values())

    async def continue_(self) -> Stop:
        """To the next breakpoint, or the end."""
        return await self._forward(lambda _: False, step=False)

    def back(self) -> Stop:
        """To the event before, if there is one."""
        return self.goto(max(self.seq - 1, 1))

    def goto(self, seq: int) -> Stop:
        """To any event that has happened; no handler runs again.

        Raises:
            UsageError: there is none.
        """
        if not 1 <= seq <= len(self.events):
            raise UsageError(f"no event {seq}: the log has events 1 to {len(self.events)}")
        self.seq = seq
        return Stop("start" if seq == 1 else "moved", self.event)

    async def _forward(self, done: Callable[[Event], bool], *, step: bool) -> Stop:
        """Pass events until one is `done`; where there are no more, a live episode steps or goes on."""
        resumed = False
        if self.live is not None:
            await self.live.look()
        while True:
            while self.seq < len(self.events):
                self.seq += 1
                if (stop := await self._stop_here(done)) is not None:
                    return stop
            if self.live is None or self.live.finished:
                return Stop("end", self.event)
            now = self.now()
            if now.idle and (step or now.questions):
                return Stop("waiting", self.event, _waits_for(now))
            if now.paused and resumed and not step:
                return Stop("paused", self.event, _reason(self.events))
            if step:
                await self._step(now)
            elif now.paused:
                await self.live.tell(EpisodeResumed())
            resumed = True
            if self.seq == len(self.events):
                await self.live.more()

    async def _stop_here(self, done: Callable[[Event], bool]) -> Stop | None:
        event = self.event
        if self._rerun is not None and event.id in self._outcomes:
            try:
                await self._rerun.handler(event)
            except DivergenceError as error:
                with _deaf_to_breakpoint_calls():
                    difference = await self._rerun.explain(event, error)
                return Stop("diverged", event, difference.message, difference)
        if done(event):
            return Stop("moved", event)
        for number, predicate in self.breakpoints.items():
            if predicate.matches(event):
                return Stop("breakpoint", event, f"{number}: {predicate}")
        return None

    async def _step(self, now: EpisodeState) -> None:
        if self.live is None:
            raise RuntimeError("a record can't be told to step")
        if not now.paused:
            await self.live.tell(EpisodePaused(reason="debugger"))
        if not now.steps_left:
            await self.live.tell(EpisodeStepped())

    # --- change ------------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Let a live episode start nothing new.

        Raises:
            UsageError: it doesn't run.
        """
        await self._running().tell(EpisodePaused(reason="debugger"))

    async def resume(self) -> None:
        """Let a live episode go on, without following it.

        Raises:
            UsageError: it doesn't run.
        """
        await self._running().tell(EpisodeResumed())

    def _running(self) -> Live:
        if self.live is None or self.live.finished:
            raise UsageError("the episode has ended: edit an event, or fork it, and it runs again")
        return self.live

    async def edit(self, changes: Mapping[str, JsonValue]) -> Stop:
        """Go on, live and paused, with a fork in which the event at the position has other values: `{"data.content": "42"}`.

        Raises:
            UsageError: it is the first event; or there is no such field.
        """
        return await self._go_on(self.seq - 1, edit=changes)

    async def fork(
        self,
        *,
        program: Runnable | str | None = None,
        models: Mapping[str, ModelSpec | str] | None = None,
    ) -> Stop:
        """Go on, live and paused, with a fork from the position, perhaps with another program or other models."""
        self._runs = program or self._runs
        return await self._go_on(self.seq, models=models)

    async def _go_on(
        self,
        at: int,
        *,
        edit: Mapping[str, JsonValue] | None = None,
        models: Mapping[str, ModelSpec | str] | None = None,
    ) -> Stop:
        if at < 1:
            raise UsageError(
                "the request itself can't be edited; fork it, perhaps with another program"
            )
        if self.forks is None:
            raise UsageError("this debugger can make no fork: open it by Runtime.debug")
        requested = Origin.of(self.events).requested or self.events[0]
        fork = await self.forks.fork(
            requested.episode_id or "",
            at=at,
            edit=edit,
            program=self._runs,
            models=models,
            paused=True,
        )
        await self.leave()
        self.live, self._forked, self._rerun = self.forks.live(fork), True, None
        await self.live.look()
        self._found = 0
        self.seq = at + (EDITED_AFTER if edit else 2)
        await self._tell(self.breakpoints.values())
        return Stop("start", self.event)

    async def leave(self) -> None:
        """Let go of a live episode: the breakpoints that were set here are cleared. A pause stays; but a fork that was made here
        and is paused is cancelled.
        """
        if self.live is None:
            return
        await self.live.look()
        if self._forked and self.now().paused and not self.live.finished:
            await self.live.tell(EpisodeCancelled(reason="its debugger has left it"))
        else:
            await self._tell(p for n, p in self.breakpoints.items() if n <= self._found)


@contextmanager
def _deaf_to_breakpoint_calls() -> Generator[None]:
    """While a handler runs again for a reason of ours, the user's `breakpoint()` does nothing."""
    hook = sys.breakpointhook
    sys.breakpointhook = lambda *_, **__: None
    try:
        yield
    finally:
        sys.breakpointhook = hook


def _waits_for(state: EpisodeState) -> str:
    if state.questions:
        return f"for an answer to event {', '.join(map(str, state.questions))}"
    return "nothing is left to do: resume it, and it ends"


def _reason(events: Sequence[Event]) -> str:
    return next((e.data.reason for e in reversed(events) if isinstance(e.data, EpisodePaused)), "")
