"""What mail an owner lets into its log: nobody may pretend to be one of its own roles, or answer what he wasn't asked.

Who may send mail at all is the server's access list's business; here is what an honest sender never does.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from aworld_runtime.events import (
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeAnswered,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeForked,
    EpisodeRequested,
    EpisodeTakenOver,
    Event,
    RecordDropped,
    SubscriptionChanged,
    ToolCalled,
    ToolFailed,
    ToolReturned,
)
from aworld_runtime.tools.base import BaseTool, RemoteTool

OWNERS_ROLE = "worker"
OWNERS_ALONE = (
    EpisodeRequested,
    EpisodeClaimed,
    EpisodeTakenOver,
    EpisodeForked,
    EpisodeAnswered,
    EpisodeFinished,
    SubscriptionChanged,
    ToolCalled,
    DeliveryHandled,
    DeliveryDeadLettered,
    RecordDropped,
)
"""What only an owner says: its log's bookkeeping."""


@dataclass(frozen=True, slots=True)
class Reception:
    """Of one episode."""

    episode_id: str | None
    agents: Container[str]
    tools: Mapping[str, Mapping[str, BaseTool]]
    """By the role that may call them."""

    def forged(self, event: Event, called: Event | None) -> str | None:
        """Why `event` can't be what it says it is; None for what may enter the log. `called` is the call it answers."""
        if event.role == OWNERS_ROLE or event.role in self.agents:
            return f"it comes from {event.source}, and role {event.role} runs in the owner itself"
        if isinstance(event.data, OWNERS_ALONE):
            return f"only an episode's owner says {event.type}"
        if event.episode_id not in (None, self.episode_id):
            return f"it is of episode {event.episode_id}"
        if isinstance(event.data, ToolReturned | ToolFailed):
            return self._not_asked(event, called)
        return None

    def _not_asked(self, answer: Event, called: Event | None) -> str | None:
        if called is None or not isinstance(called.data, ToolCalled):
            return f"it answers the call {answer.correlation_id}, which nobody has made"
        name = called.data.call.name
        if not isinstance(self.tools.get(called.role, {}).get(name), RemoteTool):
            return f"it answers a call of {name}, a tool that runs in the owner itself"
        if answer.role != name:
            return f"it comes from {answer.source}, and {name} was asked"
        return None

    def labeled(self, event: Event) -> Event:
        """With the trust that a tool's words deserve, whatever they say of themselves."""
        of_a_tool = isinstance(event.data, ToolReturned | ToolFailed) or any(
            event.role in tools for tools in self.tools.values()
        )
        if not of_a_tool or event.trust == "tool":
            return event
        return event.model_copy(update={"trust": "tool"})
