"""Tool calls: making one, whatever comes of it being an event for the caller; and which of an episode's wait for theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio

from aworld_runtime import telemetry
from aworld_runtime.errors import ToolError
from aworld_runtime.events import (
    DeliveryHandled,
    EpisodeFinished,
    Event,
    RecordDropped,
    ToolCalled,
    ToolFailed,
    ToolReturned,
)
from aworld_runtime.tools.base import BaseTool
from aworld_runtime.tools.call import call, told


class Calls:
    """An episode's: those that wait for their answer, and which have had one. `note` is told every event of its log."""

    __slots__ = ("_answered", "_waiting", "open")

    def __init__(self) -> None:
        self.open: dict[str, Event] = {}
        """By id: a call is the event that made it."""
        self._answered: set[str | None] = set()
        self._waiting: dict[str, anyio.Event] = {}

    def note(self, event: Event) -> None:
        if isinstance(event.data, ToolCalled):
            self.open[event.id] = event
        elif isinstance(event.data, ToolReturned | ToolFailed):
            call_id = event.correlation_id or ""
            self.open.pop(call_id, None)
            self._answered.add(call_id)
            if waiting := self._waiting.pop(call_id, None):
                waiting.set()
        elif isinstance(event.data, RecordDropped):
            for call in tuple(self.open.values()):
                if call.seq in event.data.seqs:
                    del self.open[call.id]
                    self._answered.add(call.id)

    def asked(self, answer: Event) -> Event | None:
        """The call that waits for this answer; None where none does, or it is no answer."""
        is_answer = isinstance(answer.data, ToolReturned | ToolFailed)
        return self.open.get(answer.correlation_id or "") if is_answer else None

    def is_late(self, event: Event) -> bool:
        """Whether it answers a call that has had its answer."""
        is_answer = isinstance(event.data, ToolReturned | ToolFailed)
        return is_answer and event.correlation_id in self._answered

    def settled(self, batch: Sequence[Event], worker: str) -> list[Event]:
        """What is appended of a batch. One answer per call; and on any way out, every open call gets one before the last event.

        Nothing follows `episode.finished`: what others emitted meanwhile is dropped with their `delivery.handled`.
        """
        kept: list[Event] = []
        answered: set[str | None] = set()
        finished: Event | None = None
        for event in batch:
            if isinstance(event.data, ToolReturned | ToolFailed):
                if event.correlation_id in answered or self.is_late(event):
                    continue
                answered.add(event.correlation_id)
            if finished is None and isinstance(event.data, EpisodeFinished):
                finished = event
                kept += closing([*self.open.values(), *kept], answered, worker)
            elif finished is None or (
                isinstance(event.data, DeliveryHandled)
                and (event.role, event.causation_id) == (finished.role, finished.causation_id)
            ):
                kept.append(event)
        return kept if finished is None else [*kept, finished]

    async def answered(self, call_id: str, timeout_s: float) -> bool:
        """Wait for its answer, but no longer than so; whether it has come."""
        if call_id in self.open:
            waiting = self._waiting.setdefault(call_id, anyio.Event())
            with anyio.move_on_after(timeout_s):
                await waiting.wait()
        return call_id not in self.open


def closing(events: Sequence[Event], answered: set[str | None], worker: str) -> list[Event]:
    """An answer to each call among `events` that has none, for an episode that ends."""
    return [
        answer_event(
            event,
            ToolFailed(
                name=event.data.call.name, error="Cancelled", message="the episode ended first"
            ),
            source=f"{event.data.call.name}/{worker}",
        )
        for event in events
        if isinstance(event.data, ToolCalled) and event.id not in answered
    ]


async def answer_call(
    called: Event, tool: BaseTool | None, *, source: str, known: Mapping[str, BaseTool]
) -> Event:
    """Make the call, with `tool` if there is one; `known` are all that the caller has."""
    answer = await _answer(called, tool, source=source, known=known)
    label = answer.role if answer.role in known else "unknown"
    telemetry.TOOL_CALLS.add(1, label)
    telemetry.TOOL_FAILURES.add(isinstance(answer.data, ToolFailed), label)
    return answer


async def _answer(
    called: Event, tool: BaseTool | None, *, source: str, known: Mapping[str, BaseTool]
) -> Event:
    if not isinstance(called.data, ToolCalled):
        raise TypeError(f"{called.type} is no tool call")
    request = called.data.call
    if tool is None:
        message = f"no tool {request.name!r}; there are: {', '.join(sorted(known)) or 'none'}"
        return answer_event(
            called,
            ToolFailed(name=request.name, error="UnknownToolError", message=message),
            source=source,
        )
    if request.malformed is not None:
        message = f"the call is not valid JSON: {request.malformed[:200]}"
        return answer_event(
            called,
            ToolFailed(name=request.name, error="ToolArgumentsError", message=message),
            source=source,
        )
    try:
        content = await call(tool, request.arguments, key=called.id)
    except ToolError as error:
        failed = ToolFailed(name=request.name, error=type(error).__name__, message=told(error))
        return answer_event(called, failed, source=source)
    return answer_event(called, ToolReturned(name=request.name, content=content), source=source)


def answer_event(called: Event, data: ToolReturned | ToolFailed, *, source: str) -> Event:
    return called.caused(
        data, source=source, correlation_id=called.id, to=called.role, trust="tool"
    )
