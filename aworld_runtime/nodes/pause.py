"""A pause: asked for, or by a breakpoint; the steps that are taken in it; and an alarm that it puts off.

All of it is in the log, so it survives a takeover.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import anyio

from aworld_runtime.errors import PredicateError
from aworld_runtime.events import (
    BreakpointsSet,
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeFinished,
    EpisodePaused,
    EpisodeRequested,
    EpisodeResumed,
    EpisodeStepped,
    Event,
    ToolFailed,
    ToolReturned,
    utc_now,
)
from aworld_runtime.predicate import Predicate

logger = logging.getLogger(__name__)

ENDS = frozenset(
    kind.type for kind in (DeliveryHandled, DeliveryDeadLettered, ToolReturned, ToolFailed)
)
"""Of a handler or a tool call."""
WORDS = frozenset(
    kind.type
    for kind in (EpisodeRequested, EpisodePaused, EpisodeResumed, EpisodeStepped, BreakpointsSet)
)
"""What an episode is told. By name, because every event is asked, and most are neither."""


class Pause:
    """Whether an episode is paused, and at what it will be. To pause it twice is to pause it once."""

    __slots__ = (
        "_alarm",
        "_left_s",
        "_may",
        "_started",
        "_tell",
        "active",
        "breakpoints",
        "steps",
    )

    def __init__(self) -> None:
        self.active = False
        self.steps = 0
        """Handlers and tool calls that may run in this pause. The next that ends takes one with it, also where it began before:
        so the log tells how many are left.
        """
        self._started = 0
        """Of these, those that run."""
        self._may: anyio.Event | None = None
        """Only while somebody waits for it."""
        self.breakpoints: tuple[Predicate, ...] = ()
        self._tell: Callable[[], None] | None = None
        self._left_s = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        """None in a pause."""

    def note(self, event: Event) -> None:
        """Take the log's next event."""
        if event.type in ENDS and self.active:
            self.steps = max(self.steps - 1, 0)
            self.give_back()
        elif event.type in WORDS:
            self._hear(event)

    def _hear(self, event: Event) -> None:
        match event.data:
            case EpisodeRequested(paused=paused):  # a fork's own: its parent's pause ends here
                self.breakpoints = ()
                if paused:
                    self.begin()
                else:
                    self.end()
            case EpisodePaused():
                self.begin()
            case EpisodeResumed():
                self.end()
            case EpisodeStepped(count=count):
                self.steps += count * self.active
                self._look_again()
            case BreakpointsSet(breakpoints=texts):
                self.breakpoints = tuple(_readable(texts, event.episode_id))
            case _:
                pass

    def begin(self) -> None:
        self.steps = self._started = 0
        if not self.active:
            self.active = True
            if self._alarm is not None:
                self._left_s = self._alarm.when() - asyncio.get_running_loop().time()
                self.call_off()

    def end(self) -> None:
        if self.active:
            self.active = False
            self.steps = 0
            if self._tell is not None:
                self.call_in(self._left_s, self._tell)
            self._look_again()

    async def may_start(self) -> None:
        """Wait until a handler or a tool call may: nothing is paused, or a step is left."""
        while self.active and self._started >= self.steps:
            self._may = self._may or anyio.Event()
            await self._may.wait()
        self._started += self.active

    def give_back(self) -> None:
        """What was let start is done, or had nothing to do."""
        self._started = max(self._started - 1, 0)
        self._look_again()

    def _look_again(self) -> None:
        if self._may is not None:
            self._may.set()
            self._may = None

    def breaks(self, batch: Sequence[Event], first: int) -> tuple[int, EpisodePaused] | None:
        """The pause that a breakpoint puts into a batch about to be appended at `first`, and its place. In the same append as
        what it stops at: nothing that follows from that has started. None also for the end of an episode.
        """
        if not (self.breakpoints and batch) or isinstance(batch[-1].data, EpisodeFinished):
            return None
        for place, event in enumerate(batch):
            there = event.at(first + place)
            for predicate in self.breakpoints:
                if predicate.matches(there):
                    return place + 1, EpisodePaused(reason=f"breakpoint: {predicate}")
        return None

    def call_in(self, seconds: float, tell: Callable[[], None]) -> None:
        """Call `tell` after so long, pauses not counted."""
        self._tell, self._left_s = tell, max(seconds, 0)
        if not self.active:
            self._alarm = asyncio.get_running_loop().call_later(self._left_s, tell)

    def call_off(self) -> None:
        """What is not called yet won't be."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


def _readable(texts: Iterable[str], episode: str | None) -> Iterator[Predicate]:
    for text in texts:
        try:
            yield Predicate.parse(text)
        except PredicateError as error:
            logger.warning("episode %s goes on without a breakpoint: %s", episode, error)


def paused_s(events: Sequence[Event]) -> float:
    """How long, by the log, an episode has been paused until now."""
    seconds, began = 0.0, None
    for event in events:
        match event.data:
            case EpisodeRequested(paused=paused):
                seconds, began = 0.0, event.time if paused else None
            case EpisodePaused():
                began = began or event.time
            case EpisodeResumed() if began is not None:
                seconds += max((event.time - began).total_seconds(), 0)
                began = None
            case _:
                pass
    if began is not None:
        seconds += max((utc_now() - began).total_seconds(), 0)
    return seconds
