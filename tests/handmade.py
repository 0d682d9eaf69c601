"""Logs made by hand, for folds of them."""

from datetime import UTC, datetime, timedelta
from typing import Any

from aworld_runtime.events import (
    DeliveryHandled,
    EpisodeFinished,
    EpisodeRequested,
    Event,
    EventData,
    MessagePosted,
)
from aworld_runtime.messages import Task

EPISODE = "01a22d04-a65b-75db-b285-4da33b3bedd5"
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return BEGAN + timedelta(seconds=seconds)


class Log:
    """A log made by hand: one event each second, the first at 1; or at a `time` that is given."""

    def __init__(self, traceparent: str | None = None) -> None:
        self.events: list[Event] = []
        self._traceparent = traceparent
        requested = EpisodeRequested(task=Task(id="t1", prompt="Add."), program="my.agents:solver")
        self.requested = self.add("user", requested, None)

    def add(
        self,
        role: str,
        data: EventData,
        cause: Event | None,
        answers: Event | None = None,
        **fields: Any,
    ) -> Event:
        seq = len(self.events) + 1
        metadata: dict[str, Any] = {
            "source": f"{role}/w1",
            "episode_id": EPISODE,
            "run_id": "r1",
            "time": at(seq),
            "causation_id": cause.id if cause else None,
            "correlation_id": answers.id if answers else None,
            "traceparent": self._traceparent,
        }
        event = Event.of(data, **metadata | fields).at(seq)
        self.events.append(event)
        return event

    def asked(
        self, role: str, cause: Event, by: str = "swarm", text: str = "Add.", **fields: Any
    ) -> Event:
        return self.add(by, MessagePosted(content=text), cause, to=role, **fields)

    def handled(self, role: str, event: Event) -> None:
        self.add(role, DeliveryHandled(seq=event.seq), event)

    def finished(self, reason: Any = "answered", error: str | None = None) -> list[Event]:
        self.add("environment", EpisodeFinished(reason=reason, error=error), self.requested)
        return self.events
