"""Questions to people: which of a log are open, and what an answer to one is."""

from __future__ import annotations

from collections.abc import Sequence

from aworld_runtime.errors import NotFoundError, UsageError
from aworld_runtime.events import Event, HumanAnswered, HumanAsked
from aworld_runtime.forks import Origin, counted


def open_questions(events: Sequence[Event]) -> list[Event]:
    """Each `human.asked` without its answer, as this episode's own."""
    asked: dict[str, Event] = {}
    for event in counted(events):
        if isinstance(event.data, HumanAsked):
            asked[event.id] = event
        elif isinstance(event.data, HumanAnswered):
            asked.pop(event.correlation_id or "", None)
    own = Origin.of(events).own
    return [own(event) for event in asked.values()]


def the_question(events: Sequence[Event], seq: int | None = None) -> Event:
    """The open question at `seq`; without it the only one.

    Raises:
        NotFoundError: there is none.
        UsageError: there are several.
    """
    found = open_questions(events)
    if seq is not None:
        found = [event for event in found if event.seq == seq]
    if not found:
        at = "" if seq is None else f" at event {seq}"
        raise NotFoundError(f"the episode has no open question{at}")
    if len(found) > 1:
        listed = ", ".join(str(event.seq) for event in found)
        raise UsageError(f"the episode has {len(found)} open questions, events {listed}: name one")
    return found[0]


def answer_to(asked: Event, text: str, *, source: str) -> Event:
    """A person's answer, as mail to the episode's owner; it is delivered to the role that asked."""
    return asked.caused(
        HumanAnswered(answer=text),
        source=source,
        correlation_id=asked.id,
        to=asked.role,
        trust="user",
    )
