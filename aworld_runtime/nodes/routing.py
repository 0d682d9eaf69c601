"""Who gets an event of an episode."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from aworld_runtime.events import EpisodeRequested, Event, SubscriptionChanged


def receivers(
    event: Event, roles: Container[str], subscriptions: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Of `roles` the one that the event names, or those subscribed to its type. A fork's own request, which comes
    later in its log than a first event, is for nobody.
    """
    if event.to is not None:
        role = event.to.partition("/")[0]
        return [role] if role in roles else []
    if isinstance(event.data, EpisodeRequested) and event.seq > 1:
        return []
    return [
        role
        for role, prefixes in subscriptions.items()
        if role != event.role and role in roles and event.type.startswith(prefixes or ("\0",))
    ]


def first_subscriptions(events: Iterable[Event]) -> Mapping[str, tuple[str, ...]] | None:
    """They stand after the request, and hold for it too."""
    for event in events:
        if isinstance(event.data, SubscriptionChanged):
            return event.data.subscriptions
    return None
