"""What one handler recorded, so that it can run again: after a takeover, and in a replay.

    recorded, in logged order:   asked A · asked B · answer B · said x · answer A · …
                                 └ emitted, in this order       └ released once all before it has been repeated

What a handler does next may depend on which answer came first, so answers reach it one at a time and in the logged order,
and far enough apart for each to take its course; live, too.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Container, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import anyio
import anyio.lowlevel
import pydantic_core
from pydantic import JsonValue

from aworld_runtime.errors import DivergenceError
from aworld_runtime.events import (
    DeliveryDeadLettered,
    DeliveryHandled,
    Event,
    ModelCompleted,
    ModelFailed,
    RecordDropped,
    ValueRecorded,
)
from aworld_runtime.forks import counted

ANSWERS = (ModelCompleted, ModelFailed, ValueRecorded)
VOLATILE = frozenset({"id", "seq", "time", "traceparent", "attempt", "causation_id", "source"})
"""What a replay may do differently. Causes are equal by construction; a source names the worker."""


CANCELLED = "Cancelled"
"""The error of an answer that the handler stopped waiting for: a time limit of its own, or another answer came first."""
SETTLE = 16
"""Turns of the event loop before an answer reaches a handler of several tasks: what the one before it set off, in this task
or the next, is done by then. So it is the same in every run.
"""
PATIENCE_S = 5.0
"""For the record to go on, where a handler waits for its answer; besides the time that the handler took when it ran live."""

LONGEST_S = 600.0
"""At most so much counts as that time: a handler that ran again in a fork had begun when its parent ran."""


class Journal:
    """What one handler invocation recorded before: its emissions in program order, and the answers it got.

    An event among `edited` stands for whatever is emitted in its place. The record binds from event `free` + 1 on: where no
    more than what is before that differs, it is taken back (`dropped`), and the handler goes on without a record. One that is
    `cut` is of a handler that had not ended: it may do more.
    """

    def __init__(
        self,
        recorded: Sequence[Event] = (),
        *,
        edited: Container[int] = (),
        free: int = 0,
        cut: bool = False,
    ) -> None:
        self._rest = {event.id: event for event in recorded}
        """Not repeated yet, in logged order."""
        self._emitted = deque(e for e in recorded if not isinstance(e.data, ANSWERS))
        self._answers = {e.correlation_id: e for e in recorded if isinstance(e.data, ANSWERS)}
        took = (recorded[-1].time - recorded[0].time).total_seconds() if recorded else 0.0
        self._asked = set[str]()
        """What the handler has asked for, of what is recorded with its answer."""
        self._patience_s = PATIENCE_S + min(took, LONGEST_S)
        self._moved: anyio.Event | None = None
        self._task = asyncio.current_task()
        self._turn: anyio.Lock | None = None
        """Held by the answer that comes next, once the handler is known to have tasks besides this one."""
        self._waiting = 0
        self._edited = edited
        self.cut = cut
        self._free = free
        self.dropped: tuple[int, ...] = ()
        """Seqs of what was taken back."""
        self.divergence: DivergenceError | None = None
        """The first; kept, because a handler may swallow the exception."""

    def match(self, event: Event) -> Event | None:
        """The recorded event that `event` repeats; None where the record has ended.

        Raises:
            DivergenceError: the record has something else here.
        """
        self.expect_none()
        if not self._emitted:
            return None
        recorded = self._emitted.popleft()
        stands = recorded.seq in self._edited and recorded.type == event.type
        other = self._not_asked_before(recorded)
        if other is None and not (stands or _alike(recorded, event)):
            other = recorded
        if other is not None:
            if self.take_back():
                return None
            raise self.differ(other, event)
        self._repeated(recorded)
        return recorded

    def _not_asked_before(self, emitted: Event) -> Event | None:
        """An answer that was there before this was emitted, and that the handler hasn't even asked for this time."""
        for recorded in self._rest.values():
            if recorded is emitted:
                break
            if recorded.correlation_id not in self._asked:
                return recorded
        return None

    @property
    def has_ended(self) -> bool:
        """Whether the record was cut here, and all of it has been repeated: what follows is no difference."""
        return self.cut and not self._rest and self.divergence is None

    def take_back(self, *repeated: Event) -> bool:
        """Let what is left of the record, and of it what seemed `repeated`, count no more; False where it binds."""
        left = [*repeated, *self._rest.values()]
        if any(event.seq > self._free for event in left):
            return False
        self.dropped += tuple(event.seq for event in left)
        self._rest.clear()
        self._emitted.clear()
        self._answers.clear()
        self._move()
        return True

    def expect_none(self) -> None:
        """See that the handler hasn't strayed: from there on nothing it does counts.

        Raises:
            DivergenceError: it has.
        """
        if self.divergence is not None:
            raise self.divergence

    def differ(self, recorded: Event, replayed: Event | None) -> DivergenceError:
        return self.remember(divergence(recorded, replayed))

    def remember(self, error: DivergenceError) -> DivergenceError:
        self.divergence = self.divergence or error
        return error

    async def all_repeated(self) -> None:
        """Wait until the handler has repeated its record, or strayed from it."""
        while self._rest and self.divergence is None:
            if not await self._has_moved():
                self._stuck()

    def check(self) -> None:
        """To be called when the handler is done.

        Raises:
            DivergenceError: it strayed from its record, or did less.
        """
        self.expect_none()
        if self._rest and not self.take_back():
            raise self.differ(next(iter(self._rest.values())), None)

    async def answer(self, key: str) -> Event | None:
        """The recorded answer to `key`, in its turn; None where there is none.

        Raises:
            DivergenceError: its turn doesn't come.
        """
        self.expect_none()
        recorded = self._answers.get(key)
        if recorded is None:
            return None
        self._asked.add(key)
        with self._counted():
            if was_cancelled(recorded):
                await self._until_cancelled(recorded)
            await self._in_turn(recorded)
        if recorded.id not in self._rest:
            return None
        self._repeated(recorded)
        return recorded

    async def ask(self, live: Callable[[], Awaitable[Event]]) -> Event:
        """A live answer, in its turn: after what is recorded."""
        with self._counted():
            answer = await live()
            await self._in_turn(None)
        return answer

    @contextmanager
    def _counted(self) -> Generator[None]:
        self._waiting += 1
        if self._turn is None and (self._waiting > 1 or asyncio.current_task() is not self._task):
            self._turn = anyio.Lock()
        try:
            yield
        finally:
            self._waiting -= 1

    async def _in_turn(self, answer: Event | None) -> None:
        """Wait until all that was logged before the answer has been repeated, or taken back, and what that set off is done."""
        while self._rest and next(iter(self._rest.values())) is not answer:
            if not await self._has_moved() and not self.take_back():
                raise self._stuck()
        if self._turn is not None:  # the handler has several tasks
            async with self._turn:
                for _ in range(SETTLE):
                    await anyio.lowlevel.checkpoint()

    async def _until_cancelled(self, recorded: Event) -> None:
        """The handler stopped waiting for this answer then: its own doing, so it does that again."""
        try:
            while recorded.id in self._rest:
                if not await self._has_moved() and not self.take_back():
                    raise self._stuck()
        except anyio.get_cancelled_exc_class():
            self._repeated(recorded)
            raise

    def _stuck(self) -> DivergenceError:
        """What the handler waits for can't come, since this, which came before it, doesn't happen."""
        return self.differ(next(iter(self._rest.values())), None)

    async def _has_moved(self) -> bool:
        """Wait until more of the record has been repeated; False where it takes too long."""
        self._moved = self._moved or anyio.Event()
        with anyio.move_on_after(self._patience_s):
            await self._moved.wait()
            return True
        return False

    def _repeated(self, recorded: Event) -> None:
        self._rest.pop(recorded.id, None)
        self._move()

    def _move(self) -> None:
        if self._moved is not None:
            self._moved.set()
            self._moved = None


def journals(events: Sequence[Event]) -> dict[tuple[str, str], list[Event]]:
    """What each handler invocation recorded, by its role and the id of the event it handled."""
    recorded: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in counted(events):
        if event.causation_id is not None and is_recorded(event):
            recorded[event.role, event.causation_id].append(event)
    return recorded


def is_recorded(event: Event) -> bool:
    """Whether it is a part of its handler's record, and no note about it."""
    return not isinstance(event.data, DeliveryHandled | DeliveryDeadLettered | RecordDropped)


def was_cancelled(answer: Event) -> bool:
    """Whether the handler stopped waiting before the answer came."""
    data = answer.data
    return isinstance(data, ModelFailed | ValueRecorded) and data.error == CANCELLED


def comparable(event: Event) -> dict[str, Any]:
    """An event without what may differ between a run and its replay, as it is read from a log."""
    return pydantic_core.from_json(_written(event))


def _written(event: Event) -> str:
    return event.model_dump_json(exclude=set(VOLATILE))


def _alike(one: Event, two: Event) -> bool:
    return _written(one) == _written(two) or same(comparable(one), comparable(two))


def same(one: JsonValue, two: JsonValue) -> bool:
    """Whether they are equal as JSON: other than in Python, `true` is not 1, and 1 is not 1.0."""
    return one == two and json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)


def divergence(recorded: Event, replayed: Event | None) -> DivergenceError:
    if replayed is None:
        what = "did nothing more"
    elif replayed.type != recorded.type:
        what = f"emitted {replayed.type}"
    else:
        what = f"differs in {', '.join(differing(comparable(recorded), comparable(replayed)))}"
    return DivergenceError(
        f"at seq {recorded.seq}, {recorded.role} recorded {recorded.type}; this time it {what}",
        seq=recorded.seq,
        recorded=readable(recorded),
        replayed="(nothing)" if replayed is None else readable(replayed),
        events=None if replayed is None else (recorded, replayed),
    )


def differing(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """Paths of the fields that are not equal."""
    paths: list[str] = []
    for name in sorted({*a, *b}):
        if same(a.get(name), b.get(name)):
            continue
        one, two = a.get(name), b.get(name)
        if name == "data" and isinstance(one, dict) and isinstance(two, dict):
            paths += differing(cast("dict[str, Any]", one), cast("dict[str, Any]", two), f"{name}.")
        else:
            paths.append(prefix + name)
    return paths


def readable(event: Event) -> str:
    """An event without its volatile fields, for a person."""
    return event.model_dump_json(indent=2, exclude=set(VOLATILE), exclude_defaults=True)
