"""Who gets an event of an episode."""

from __future__ import annotations

from collections.abc import Container, Mapping

from aworld_runtime.events import EpisodeRequested, Event


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
