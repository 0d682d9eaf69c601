"""What an episode had come to at an event: folds of its log, which run no user code."""

from __future__ import annotations

from collections.abc import Sequence

from aworld_runtime.errors import UsageError
from aworld_runtime.events import (
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeAnswered,
    EpisodeFinished,
    Event,
    StopReason,
    SubscriptionChanged,
    ToolCalled,
    ToolFailed,
    ToolReturned,
)
from aworld_runtime.forks import counted
from aworld_runtime.messages import Data, Message, ToolCall, ToolSpec
from aworld_runtime.nodes.pause import Pause
from aworld_runtime.nodes.questions import open_questions
from aworld_runtime.nodes.routing import first_subscriptions, receivers
from aworld_runtime.trajectory import TrajectoryFold, Turn


class OpenCall(Data):
    """A tool call that has no answer yet."""

    seq: int
    role: str
    """Who made it."""
    call: ToolCall


class EpisodeState(Data):
    """Who is to do what."""

    seq: int
    to_handle: dict[str, tuple[int, ...]]
    """Role → seqs of the events that it has yet to handle, oldest first; it may have begun with the first. Every role is there."""
    open_calls: tuple[OpenCall, ...] = ()
    questions: tuple[int, ...] = ()
    """Seqs of what people were asked and have not answered."""
    paused: bool = False
    steps_left: int = 0
    """Handlers and tool calls that may run though it is paused."""
    breakpoints: tuple[str, ...] = ()
    """At which its owner pauses it."""
    answer: str = ""
    reason: StopReason | None = None
    """None while it runs."""

    @property
    def idle(self) -> bool:
        """Nothing runs, and nothing can start."""
        return bool(self.to_handle) and not (any(self.to_handle.values()) or self.open_calls)


class RoleState(Data):
    """What one agent knew and had to do."""

    role: str
    seq: int
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    """As its next prompt has them; before its first turn that adds its instructions, which come with it."""
    pending: tuple[Message, ...]
    """The last of these, that were in no prompt yet."""
    tools: tuple[ToolSpec, ...]
    to_handle: tuple[int, ...]
    open_calls: tuple[OpenCall, ...]


def episode_state(events: Sequence[Event], seq: int) -> EpisodeState:
    """After event `seq` of its log."""
    subscriptions = first_subscriptions(events) or {}
    to_handle: dict[str, dict[int, Event]] = {role: {} for role in subscriptions}
    calls: dict[str, Event] = {}
    pause = Pause()
    answer, reason = "", None
    for event in counted(events[:seq]):
        pause.note(event)
        for role in receivers(event, to_handle, subscriptions):
            to_handle[role][event.seq] = event
        match event.data:
            case DeliveryHandled(seq=handled) | DeliveryDeadLettered(seq=handled):
                to_handle.get(event.role, {}).pop(handled, None)
            case ToolCalled():
                calls[event.id] = event
            case ToolReturned() | ToolFailed():
                calls.pop(event.correlation_id or "", None)
            case SubscriptionChanged():
                subscriptions = event.data.subscriptions
            case EpisodeAnswered():
                answer = event.data.answer
            case EpisodeFinished():
                answer, reason = event.data.answer, event.data.reason
                to_handle = {role: {} for role in to_handle}
            case _:
                pass
    return EpisodeState(
        seq=seq,
        to_handle={role: tuple(waiting) for role, waiting in to_handle.items()},
        open_calls=tuple(
            OpenCall(seq=e.seq, role=e.role, call=e.data.call)
            for e in calls.values()
            if isinstance(e.data, ToolCalled)
        ),
        questions=tuple(asked.seq for asked in open_questions(events[:seq])),
        paused=pause.active,
        steps_left=pause.steps,
        breakpoints=tuple(map(str, pause.breakpoints)),
        answer=answer,
        reason=reason,
    )


def role_state(events: Sequence[Event], seq: int, role: str) -> RoleState:
    """As `episode_state`, of one agent.

    Raises:
        UsageError: the episode has no such role.
    """
    state = episode_state(events, seq)
    if role not in state.to_handle:
        known = ", ".join(state.to_handle) or "none yet"
        raise UsageError(f"no role {role!r} in this episode; there are: {known}")
    fold = TrajectoryFold(role)
    for event in counted(events[:seq]):
        fold.add(event)
    pending = tuple(fold.pending.values())
    return RoleState(
        role=role,
        seq=seq,
        turns=tuple(fold.turns),
        messages=(*fold.messages, *pending),
        pending=pending,
        tools=fold.tools,
        to_handle=state.to_handle[role],
        open_calls=tuple(call for call in state.open_calls if call.role == role),
    )
