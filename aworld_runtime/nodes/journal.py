"""What one handler recorded, so that it can run again: after a takeover, and in a replay."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

from aworld_runtime.errors import DivergenceError
from aworld_runtime.events import (
    DeliveryDeadLettered,
    DeliveryHandled,
    Event,
    ModelCompleted,
    ModelFailed,
    ValueRecorded,
)

ANSWERS = (ModelCompleted, ModelFailed, ValueRecorded)
VOLATILE = frozenset({"id", "seq", "time", "traceparent", "attempt", "causation_id", "source"})
"""What a replay may do differently. Causes are equal by construction; a source names the worker."""


class Journal:
    """What one handler invocation recorded before: its emissions in program order, and the answers it got."""

    def __init__(self, recorded: Sequence[Event] = ()) -> None:
        self._emitted = deque(e for e in recorded if not isinstance(e.data, ANSWERS))
        self._answers = {e.correlation_id: e for e in recorded if isinstance(e.data, ANSWERS)}
        self.divergence: DivergenceError | None = None
        """The first; kept, because a handler may swallow the exception."""
        self.unanswered = False
        """The handler asked for something outside, and the record ends there."""

    def match(self, event: Event) -> Event | None:
        """The recorded event that `event` repeats; None where the record has ended.

        Raises:
            DivergenceError: the record has something else here.
        """
        if not self._emitted:
            return None
        recorded = self._emitted.popleft()
        if comparable(recorded) != comparable(event):
            raise self.remember(divergence(recorded, event))
        return recorded

    def remember(self, error: DivergenceError) -> DivergenceError:
        self.divergence = self.divergence or error
        return error

    def check(self) -> None:
        """To be called when the handler is done.

        Raises:
            DivergenceError: it strayed from its record, or did less.
        """
        if self.divergence is not None:
            raise self.divergence
        if self._emitted:
            raise divergence(self._emitted[0], None)

    def answer(self, request_id: str) -> Event | None:
        return self._answers.get(request_id)


def journals(events: Iterable[Event]) -> dict[tuple[str, str], list[Event]]:
    """What each handler invocation recorded, by its role and the id of the event it handled."""
    recorded: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event.causation_id is not None and not isinstance(
            event.data, DeliveryHandled | DeliveryDeadLettered
        ):
            recorded[event.role, event.causation_id].append(event)
    return recorded


def comparable(event: Event) -> dict[str, Any]:
    """An event without what may differ between a run and its replay."""
    return event.model_dump(mode="json", exclude=set(VOLATILE))


def divergence(recorded: Event, replayed: Event | None) -> DivergenceError:
    if replayed is None:
        what = "did nothing more"
    elif replayed.type != recorded.type:
        what = f"emitted {replayed.type}"
    else:
        what = f"differs in {', '.join(_differing(comparable(recorded), comparable(replayed)))}"
    return DivergenceError(
        f"at seq {recorded.seq}, {recorded.role} recorded {recorded.type}; this time it {what}",
        seq=recorded.seq,
        recorded=readable(recorded),
        replayed="(nothing)" if replayed is None else readable(replayed),
    )


def _differing(a: dict[str, Any], b: dict[str, Any], prefix: str = "") -> list[str]:
    """Paths of the fields that are not equal."""
    paths: list[str] = []
    for name in sorted({*a, *b}):
        one, two = a.get(name), b.get(name)
        if name == "data" and isinstance(one, dict) and isinstance(two, dict):
            paths += _differing(
                cast("dict[str, Any]", one), cast("dict[str, Any]", two), f"{name}."
            )
        elif one != two:
            paths.append(prefix + name)
    return paths


def readable(event: Event) -> str:
    """An event without its volatile fields, for a person."""
    return event.model_dump_json(indent=2, exclude=set(VOLATILE), exclude_defaults=True)
