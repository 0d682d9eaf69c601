"""The rules of a line of agents: the task goes to the first, each answer to the next, the last answer is the episode's."""

from __future__ import annotations

from collections.abc import Sequence

from aworld_runtime.events import (
    AnswerProposed,
    EpisodeAnswered,
    EpisodeRequested,
    Event,
    EventData,
    MessagePosted,
)
from aworld_runtime.messages import Task
from aworld_runtime.nodes.context import Context


class Serial:
    """Swarm rules as a node. `decide` is pure, so a topology is tested without a model."""

    role = "swarm"
    subscriptions = ("episode.requested", "answer.proposed")

    def __init__(self, roles: Sequence[str]) -> None:
        self.roles = tuple(roles)

    async def handle(self, ctx: Context, event: Event) -> None:
        for data, to in self.decide(ctx.task, event):
            ctx.emit(data, to=to)

    def decide(self, task: Task, event: Event) -> list[tuple[EventData, str | None]]:
        """What happens next, and to whom."""
        match event.data:
            case EpisodeRequested():
                return [(MessagePosted(content=task.prompt), self.roles[0])]
            case AnswerProposed(text=text, reason=reason):
                following = self.roles.index(event.role) + 1
                if reason != "answered" or following == len(self.roles):
                    return [(EpisodeAnswered(answer=text, reason=reason), None)]
                content = f"{task.prompt}\n\nAnswer of {event.role}:\n{text}"
                return [(MessagePosted(content=content), self.roles[following])]
            case _:
                return []
