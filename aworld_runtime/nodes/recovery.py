"""What a log says of its former owners, to who takes it over."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from aworld_runtime.errors import EventError
from aworld_runtime.events import (
    DeliveryHandled,
    EpisodeAnswered,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeForked,
    EpisodeTakenOver,
    Event,
    LogRestored,
    SubscriptionChanged,
)
from aworld_runtime.forks import Origin, dropped
from aworld_runtime.nodes.journal import is_recorded
from aworld_runtime.nodes.routing import first_subscriptions, receivers

MOST_DEATHS = 3
"""Owners that may die in an episode, one after another and at the same place, before it is given up."""


def expect_no_end(log: str, past: Iterable[Event]) -> None:
    """See whether an owner may go on with a log.

    Raises:
        EventError: it goes on behind its end. Whoever took it over would add to the damage.
    """
    if end := next((event for event in past if isinstance(event.data, EpisodeFinished)), None):
        raise EventError(
            f"{log} goes on behind its end at event {end.seq}: it can't be taken over; aworld verify compares it"
            " with the store"
        )


def is_unclaimed_fork(past: Sequence[Event]) -> bool:
    """Whether it was forked, and nobody has begun to go on with it."""
    for event in reversed(past):
        if isinstance(event.data, EpisodeForked):
            return True
        if isinstance(event.data, EpisodeClaimed | EpisodeTakenOver):
            return False
    return False


def deaths(past: Sequence[Event]) -> int:
    """How many owners have died at its last place."""
    barren = takewhile(lambda e: isinstance(e.data, EpisodeTakenOver), reversed(past))
    return 1 + sum(1 for _ in barren)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What roles had still to handle where a log ends."""

    deliveries: list[tuple[Event, str]]
    """Which event, and by whom; in the log's order."""
    records: dict[tuple[str, str], list[Event]]
    """Of each of these, by role and event id: what its handler recorded before its owner died, or before the episode was forked."""


def unfinished(
    past: Sequence[Event],
    origin: Origin,
    roles: Container[str],
    subscriptions: Mapping[str, tuple[str, ...]],
) -> Unfinished:
    """Of these roles; `subscriptions` are those in force where the log tells of none. What a handler recorded in the parent of
    a fork is delivered to nobody yet: it may take it back.
    """
    found = Unfinished([], {})
    subscriptions = first_subscriptions(past) or subscriptions
    done, gone = _handled(past), dropped(past)
    for event in past:
        if isinstance(event.data, SubscriptionChanged):
            subscriptions = event.data.subscriptions
        if event.seq in gone:
            continue
        record = found.records.get((event.role, event.causation_id or ""))
        if record is not None and is_recorded(event):
            record.append(origin.own(event))
            if event.seq <= origin.at:
                continue
        for role in receivers(event, roles, subscriptions):
            if (role, event.seq) not in done:
                found.records[role, event.id] = []
                found.deliveries.append((origin.own(event), role))
    return found


def _handled(past: Sequence[Event]) -> set[tuple[str, int]]:
    """Deliveries that need no handling any more: role, and seq of the event."""
    return {
        (e.role, e.data.seq)
        for e, following in pairwise(past)
        if isinstance(e.data, DeliveryHandled) and not _cut_after(past[e.data.seq - 1], following)
    }


def _cut_after(handled: Event, following: Event) -> bool:
    """Whether `episode.finished` got lost, which comes in one append with the handling of an answer.

    A log that was restored from a store may end between them, and one may be forked there.
    """
    return isinstance(handled.data, EpisodeAnswered) and isinstance(
        following.data, EpisodeTakenOver | LogRestored | EpisodeForked
    )
