"""What an episode was, read off its log: one trajectory of turns per agent.

These are folds: pure functions of events, used alike by agents (their state), rewards, training rows and reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, cast

from pydantic import JsonValue

from aworld_runtime.events import (
    EpisodeAnswered,
    EpisodeFinished,
    EpisodeRequested,
    Event,
    HumanAnswered,
    MessagePosted,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    RewardGiven,
    StopReason,
    ToolCalled,
    ToolFailed,
    ToolReturned,
)
from aworld_runtime.forks import counted
from aworld_runtime.messages import Completion, Data, Message, Task, ToolSpec, Usage

SHOWN = 80
"""Characters of an answer that an episode's `repr` shows."""


class Turn(Data):
    """One completion, and the messages that were new to the agent in its prompt."""

    seq: int
    """Seq of its `model.completed`."""
    new_messages: tuple[Message, ...]
    completion: Completion


class Trajectory(Data):
    """One agent's turns in an episode, oldest first."""

    role: str
    turns: tuple[Turn, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    replies: tuple[Message, ...] = ()
    """Messages after its last turn."""
    reward: float | None = None
    breakdown: dict[str, float] = {}

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation as the agent saw it."""
        seen: list[Message] = []
        for turn in self.turns:
            seen += [*turn.new_messages, assistant_message(turn.completion)]
        return (*seen, *self.replies)


class Episode(Data):
    """One run of one task."""

    id: str
    task: Task
    run_id: str | None = None
    group_id: str | None = None
    index: int = 0
    attempt: int = 1
    answer: str = ""
    reason: StopReason | None = None
    """None while it runs."""
    error: str | None = None
    reward: float | None = None
    """Of the episode as a whole; a trajectory may carry its own."""
    trajectories: tuple[Trajectory, ...] = ()
    tool_calls: int = 0

    @property
    def episode_id(self) -> str:
        return self.id

    @property
    def usage(self) -> Usage:
        """Tokens and cost of all agents."""
        return sum(
            (t.completion.usage for tr in self.trajectories for t in tr.turns), start=Usage()
        )

    def __repr_args__(self) -> Iterable[tuple[str | None, object]]:
        """How it went, in one line: the fields hold whole conversations."""
        shown = self.answer if len(self.answer) <= SHOWN else f"{self.answer[: SHOWN - 1]}…"
        yield from (("id", self.id), ("reason", self.reason), ("answer", shown))
        if self.error is not None:
            yield "error", self.error
        if self.reward is not None:
            yield "reward", self.reward
        yield "turns", sum(len(t.turns) for t in self.trajectories)
        yield "tool_calls", self.tool_calls

    def trajectory(self, role: str) -> Trajectory | None:
        return next((t for t in self.trajectories if t.role == role), None)


def message_of(event: Event) -> Message | None:
    """What an event says to an agent; None where it says nothing."""
    match event.data:
        case MessagePosted(content=content) | HumanAnswered(answer=content):
            return Message(role="user", content=content)
        case ModelCompleted() as data:
            return Message(role="assistant", content=data.text, tool_calls=data.tool_calls)
        case ToolReturned(name=name, content=content):
            return Message(
                role="tool", content=as_text(content), name=name, tool_call_id=event.correlation_id
            )
        case ToolFailed(name=name, error=error, message=message):
            return Message(
                role="tool",
                content=f"{error}: {message}",
                name=name,
                tool_call_id=event.correlation_id,
            )
        case _:
            return None


def assistant_message(completion: Completion) -> Message:
    return Message(role="assistant", content=completion.text, tool_calls=completion.tool_calls)


def as_text(value: JsonValue) -> str:
    """A tool's result as the model reads it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class TrajectoryFold:
    """Builds one role's trajectory event by event, and keeps what its next request needs."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.turns: list[Turn] = []
        self.tools: tuple[ToolSpec, ...] = ()
        self.previous_ids: tuple[int, ...] = ()
        """Prompt and sampled ids of the latest turn, where the engine gave them."""
        self.last_request: int | None = None
        self.pending: dict[int, Message] = {}
        """Messages it has not seen yet, by the seq of their event."""
        self.open_calls: set[str] = set()
        """Ids of its tool calls that have no answer yet."""
        self._messages: list[Message] = []
        self._open: dict[str, tuple[int, ModelRequested]] = {}
        self._call_ids: dict[str, str] = {}

    def add(self, event: Event) -> None:
        """Take the log's next event; others' events are ignored."""
        data = event.data
        if event.role == self.role:
            match data:
                case ModelRequested():
                    if data.previous is None:
                        self.tools = data.tools
                    self._open[event.id] = (event.seq, data)
                case ModelFailed():
                    self._open.pop(event.correlation_id or "", None)
                case ModelCompleted():
                    self._complete(event, data)
                case ToolCalled():
                    self._call_ids[event.id] = data.call.id
                    self.open_calls.add(event.id)
                case _:
                    pass
        if isinstance(data, ToolReturned | ToolFailed):
            self.open_calls.discard(event.correlation_id or "")
        if event.to == self.role and (message := message_of(event)) is not None:
            if message.role == "tool":
                call_id = self._call_ids.get(event.correlation_id or "")
                message = message.model_copy(update={"tool_call_id": call_id})
            self.pending[event.seq] = message

    def _complete(self, event: Event, data: ModelCompleted) -> None:
        completion = data.completion(self.previous_ids, event.policy)
        self.previous_ids = completion.prompt_token_ids + completion.token_ids
        new_messages: tuple[Message, ...] = ()
        if opened := self._open.pop(event.correlation_id or "", None):
            self.last_request, request = opened
            seen = [self.pending.pop(seq) for seq in request.sources if seq in self.pending]
            new_messages = (*request.preamble, *seen)
        self.turns.append(Turn(seq=event.seq, new_messages=new_messages, completion=completion))
        self._messages += [*new_messages, assistant_message(completion)]

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation up to and including the latest turn."""
        return tuple(self._messages)

    def copy(self) -> TrajectoryFold:
        """Another, that goes on by itself."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | dict | set):
                setattr(other, name, cast("Any", value).copy())
        return other

    def trajectory(self, rewards: Mapping[str | None, RewardGiven]) -> Trajectory:
        given = rewards.get(self.role) or rewards.get(None)
        return Trajectory(
            role=self.role,
            turns=tuple(self.turns),
            tools=self.tools,
            replies=tuple(self.pending.values()),
            reward=None if given is None else given.reward,
            breakdown={} if given is None else given.breakdown,
        )


def episode_of(events: Iterable[Event]) -> Episode:
    """Fold a whole episode log.

    Raises:
        ValueError: the log doesn't begin with `episode.requested`.
    """
    folds: dict[str, TrajectoryFold] = {}
    rewards: dict[str | None, RewardGiven] = {}
    fields: dict[str, object] = {}
    tool_calls = 0
    for event in counted(tuple(events)):
        match event.data:
            case EpisodeRequested() as data:
                fields |= {
                    "id": event.episode_id,
                    "task": data.task,
                    "run_id": event.run_id,
                    "group_id": event.group_id,
                    "index": data.index,
                    "attempt": event.attempt,
                }
            case EpisodeAnswered() as data:
                fields |= {"answer": data.answer}
            case EpisodeFinished() as data:
                fields |= {"answer": data.answer, "reason": data.reason, "error": data.error}
            case RewardGiven() as data:
                rewards[data.role] = data
            case ModelRequested():
                folds.setdefault(event.role, TrajectoryFold(event.role))
            case ToolCalled():
                tool_calls += 1
            case MessagePosted() if event.to is not None:
                folds.setdefault(event.to, TrajectoryFold(event.to))
            case _:
                pass
        for fold in folds.values():
            fold.add(event)
    if "task" not in fields:
        raise ValueError("an episode's log begins with episode.requested; this one has none")
    whole = rewards.get(None)
    trajectories = tuple(fold.trajectory(rewards) for fold in folds.values() if fold.turns)
    return Episode.model_validate(
        fields
        | {
            "trajectories": trajectories,
            "tool_calls": tool_calls,
            "reward": None if whole is None else whole.reward,
        }
    )
