"""An episode's log as spans, with OpenTelemetry's conventions for generative AI. Pure: the same log, the same spans.

    invoke_workflow PROGRAM      the episode, from its request to its end
    └── invoke_agent ROLE        from what an agent was asked to the last it had to do about it
        ├── chat MODEL           a completion
        ├── execute_tool TOOL    a call
        └── invoke_agent ROLE    another agent, on what this one said to it

A span is given out when the event has come that ends it. Ids are derived from the episode's and the events' ids, so a log
that is read again gives the very same spans. A caller's `traceparent` is continued.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple
from uuid import UUID

from pydantic import JsonValue

from aworld_runtime.events import (
    FAILURES,
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeCancelled,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeForked,
    EpisodePaused,
    EpisodeRequested,
    EpisodeResumed,
    EpisodeStepped,
    EpisodeTakenOver,
    Event,
    HumanAnswered,
    LogRestored,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    RewardGiven,
    ToolCalled,
    ToolFailed,
    ToolReturned,
)
from aworld_runtime.messages import Message, ToolCall
from aworld_runtime.models.client import PROVIDERS
from aworld_runtime.trajectory import TrajectoryFold
from aworld_runtime.urls import shown

Attribute = str | int | float | tuple[str, ...]

RULES = frozenset({"swarm", "environment", "worker", "janitor"})
"""Roles that are no agents; what they cause is the episode's own."""
MOMENTS = (
    *(EpisodeClaimed, EpisodeTakenOver, LogRestored),
    *(EpisodePaused, EpisodeStepped, EpisodeResumed, EpisodeCancelled),
)
"""What is shown of the episode itself."""
FROM_OUTSIDE = (ToolReturned, ToolFailed, HumanAnswered)
"""Said to agents by others."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")


class Moment(NamedTuple):
    """Something that happened during a span."""

    name: str
    time: datetime


@dataclass(frozen=True, slots=True)
class Span:
    """One operation that has ended."""

    name: str
    kind: Literal["internal", "client"]
    trace_id: int
    span_id: int
    parent_id: int | None
    start: datetime
    end: datetime
    attributes: Mapping[str, Attribute]
    error: str | None = None
    """What went wrong, empty where content isn't wanted; `error.type` names its kind. None: nothing."""
    moments: tuple[Moment, ...] = ()


class _Cause(NamedTuple):
    """What is remembered of an event."""

    role: str
    causation_id: str | None
    correlation_id: str | None
    time: datetime
    seq: int


@dataclass(slots=True)
class _Open:
    """An operation that goes on."""

    name: str
    span_id: int
    parent_id: int | None
    start: datetime
    attributes: dict[str, Attribute]
    kind: Literal["internal", "client"] = "internal"
    moments: list[Moment] = field(default_factory=list[Moment])
    to_handle: int = 1
    """Of an agent: deliveries that it has not handled: what it was asked, and an answer for each of its calls."""

    def count(self, name: str, amount: int) -> None:
        before = self.attributes.get(name, 0)
        self.attributes[name] = amount + (before if isinstance(before, int) else 0)


_Key = tuple[str, str]
"""An agent's role, and the event that it was asked with."""


class SpanFold:
    """Takes an episode's log event by event. `content` adds what was said to models and tools, and what they said."""

    def __init__(self, *, content: bool = False) -> None:
        self._content = content
        self._trace_id = 0
        self._root_id = 0
        self._root: _Open | None = None
        self._causes: dict[str, _Cause] = {}
        self._agents: dict[_Key, _Open] = {}
        self._begun: dict[_Key, int] = {}
        """Every agent's span so far, by what it was asked with."""
        self._joined: dict[_Key, _Key] = {}
        """A delivery that only continues what an earlier one began."""
        self._calls: dict[str, _Open] = {}
        """Completions and tool calls, by the event that asks for them."""
        self._folds: dict[str, TrajectoryFold] = {}

    def add(self, event: Event) -> list[Span]:
        """Take the log's next event; returns the spans that it ends."""
        if not self._trace_id:
            self._begin(event)
        self._causes[event.id] = _Cause(
            event.role, event.causation_id, event.correlation_id, event.time, event.seq
        )
        if self._content:
            self._listen(event)
        match event.data:
            case DeliveryHandled():
                return self._handled(event)
            case DeliveryDeadLettered() as data:
                return self._gave_up(event, data)
            case EpisodeFinished() as data:
                return self._finish(event, data)
            case ModelCompleted() | ModelFailed() | ToolReturned() | ToolFailed():
                return self._answered(event)
            case ModelRequested() as data:
                self._calls[event.id] = self._chat(event, data)
            case ToolCalled() as data:
                self._calls[event.id] = self._tool(event, data)
            case _:
                self._note(event)
        return []

    def _note(self, event: Event) -> None:
        """Take an event that neither begins nor ends a call, nor ends anything else."""
        if isinstance(event.data, MOMENTS):
            if self._root is not None:
                self._root.moments.append(Moment(event.type, event.time))
        elif isinstance(event.data, RewardGiven) and event.data.role is None:
            if self._root is not None:
                self._root.attributes["aworld.reward"] = event.data.reward
        elif not isinstance(event.data, FROM_OUTSIDE):
            self._agent(event)

    # --- spans that begin ------------------------------------------------------------------------------------------

    def _begin(self, event: Event) -> None:
        episode = event.episode_id or event.id
        self._root_id = _span_id("episode", episode)
        caller = _TRACEPARENT.fullmatch(event.traceparent or "")
        self._trace_id = int(caller[1], 16) if caller else _trace_id(episode)
        match event.data:
            case EpisodeRequested(program=program):
                name, origin = f"invoke_workflow {program}", {"gen_ai.workflow.name": program}
            case EpisodeForked(parent=parent, at=at):
                name = "invoke_workflow"
                origin = {"aworld.forked_from": parent, "aworld.forked_at": at}
            case _:
                return  # the log's beginning is gone: there are its agents, but not the whole
        attributes = _present(
            {
                "gen_ai.operation.name": "invoke_workflow",
                **origin,
                "gen_ai.conversation.id": episode,
                "aworld.run.id": event.run_id,
                "aworld.group.id": event.group_id,
                "aworld.task.id": event.task_id,
                "aworld.attempt": event.attempt,
                "aworld.seq": event.seq,
            }
        )
        calling = int(caller[2], 16) if caller else None
        self._root = _Open(name, self._root_id, calling, event.time, attributes)

    def _agent(self, event: Event) -> _Open | None:
        """The span of the agent that made this event; begun where this is the first it did."""
        if event.role in RULES or event.causation_id is None:
            return None
        key = self._key(event.role, event.causation_id)
        if key in self._agents:
            return self._agents[key]
        asked = self._causes.get(key[1])
        if asked is None:
            return None
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": event.role,
            "gen_ai.conversation.id": event.episode_id or "",
            "aworld.seq": asked.seq,
        }
        name, span_id = f"invoke_agent {event.role}", _span_id(*key)
        self._begun[key] = span_id
        self._agents[key] = _Open(name, span_id, self._asker(key, asked), asked.time, attributes)
        return self._agents[key]

    def _key(self, role: str, delivered: str) -> _Key:
        """What the agent was asked with: the delivery itself, unless it answers a call that the agent still works on."""
        key = (role, delivered)
        if key not in self._joined and key not in self._agents:
            earlier = self._caller(key)
            if earlier in self._agents:
                self._joined[key] = earlier
        return self._joined.get(key, key)

    def _caller(self, key: _Key) -> _Key | None:
        """Where the delivery is an answer to the agent: what it worked on when it asked."""
        answer = self._causes.get(key[1])
        call = self._causes.get(answer.correlation_id or "") if answer else None
        if call is None or call.role != key[0] or call.causation_id is None:
            return None
        earlier = (call.role, call.causation_id)
        return self._joined.get(earlier, earlier)

    def _asker(self, key: _Key, asked: _Cause) -> int:
        """The span of whoever asked: an agent, or the episode."""
        earlier = self._caller(key)
        if earlier is None and asked.causation_id is not None:
            earlier = (asked.role, asked.causation_id)
            earlier = self._joined.get(earlier, earlier)
        return self._begun.get(earlier, self._root_id) if earlier else self._root_id

    def _chat(self, event: Event, data: ModelRequested) -> _Open:
        agent = self._agent(event)
        provider, model = _provider(data.model)
        attributes = _present(
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": provider,
                "gen_ai.request.model": model,
                "gen_ai.request.temperature": data.temperature,
                "gen_ai.request.max_tokens": data.max_tokens,
                "gen_ai.request.seed": data.seed,
                "gen_ai.agent.name": event.role,
                "gen_ai.conversation.id": event.episode_id,
                "aworld.seq": event.seq,
            }
        )
        if self._content:
            attributes["gen_ai.input.messages"] = self._prompt(event.role, data)
        parent = agent.span_id if agent else self._root_id
        span_id = _span_id("call", event.id)
        return _Open(f"chat {model}", span_id, parent, event.time, attributes, "client")

    def _tool(self, event: Event, data: ToolCalled) -> _Open:
        agent = self._agent(event)
        if agent is not None:
            agent.to_handle += 1
        call = data.call
        attributes: dict[str, Attribute] = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": call.name,
            "gen_ai.tool.call.id": call.id,
            "gen_ai.tool.type": "function",
            "gen_ai.agent.name": event.role,
            "gen_ai.conversation.id": event.episode_id or "",
            "aworld.seq": event.seq,
        }
        if self._content:
            attributes["gen_ai.tool.call.arguments"] = _json(call.arguments)
        parent = agent.span_id if agent else self._root_id
        name = f"execute_tool {call.name}"
        return _Open(name, _span_id("call", event.id), parent, event.time, attributes)

    # --- spans that end --------------------------------------------------------------------------------------------

    def _answered(self, event: Event) -> list[Span]:
        call = self._calls.pop(event.correlation_id or "", None)
        if call is None:
            return []
        match event.data:
            case ModelCompleted() as data:
                self._completed(call, event, data)
            case ToolReturned(content=content) if self._content:
                call.attributes["gen_ai.tool.call.result"] = _json(content)
            case ModelFailed(error=kind, message=message) | ToolFailed(error=kind, message=message):
                return [self._ended(call, event, kind, message)]
            case _:
                pass
        return [self._ended(call, event)]

    def _completed(self, call: _Open, event: Event, data: ModelCompleted) -> None:
        call.attributes["gen_ai.response.finish_reasons"] = (data.finish_reason,)
        call.attributes |= _present(
            {"aworld.policy": event.policy, "aworld.policy_version": event.policy_version}
        )
        for one in (call, self._agent(event), self._root):
            if one is not None:
                one.count("gen_ai.usage.input_tokens", data.usage.prompt_tokens)
                one.count("gen_ai.usage.output_tokens", data.usage.completion_tokens)
        if self._content:
            said = Message(role="assistant", content=data.text, tool_calls=data.tool_calls)
            reason = "tool_call" if data.finish_reason == "tool_calls" else data.finish_reason
            call.attributes["gen_ai.output.messages"] = _json(
                [{**_written(said), "finish_reason": reason}]
            )

    def _handled(self, event: Event) -> list[Span]:
        key = self._key(event.role, event.causation_id or "")
        agent = self._agents.get(key)
        if agent is None:
            return []  # it did nothing about it
        agent.to_handle -= 1
        if agent.to_handle > 0:
            return []
        del self._agents[key]
        return [self._ended(agent, event)]

    def _gave_up(self, event: Event, data: DeliveryDeadLettered) -> list[Span]:
        agent = self._agent(event)
        if agent is None:
            return []
        del self._agents[self._key(event.role, event.causation_id or "")]
        return [self._ended(agent, event, data.error, data.message)]

    def _finish(self, event: Event, data: EpisodeFinished) -> list[Span]:
        """The episode's end is the end of all that goes on."""
        spans = [
            self._ended(call, event, "interrupted", "the episode ended first")
            for call in self._calls.values()
        ]
        spans += [self._ended(agent, event) for agent in self._agents.values()]
        if self._root is not None:
            self._root.attributes["aworld.reason"] = data.reason
            failure = data.reason if data.reason in FAILURES else None
            spans.append(self._ended(self._root, event, failure, data.error or ""))
        self._calls, self._agents, self._root = {}, {}, None
        return spans

    def _ended(self, it: _Open, event: Event, kind: str | None = None, message: str = "") -> Span:
        if kind is not None:
            it.attributes["error.type"] = kind
        return Span(
            name=it.name,
            kind=it.kind,
            trace_id=self._trace_id,
            span_id=it.span_id,
            parent_id=it.parent_id,
            start=it.start,
            end=max(event.time, it.start),  # made on two machines: their clocks may differ
            attributes=it.attributes,
            error=None if kind is None else shown(message) if self._content else "",
            moments=tuple(it.moments),
        )

    # --- content ---------------------------------------------------------------------------------------------------

    def _listen(self, event: Event) -> None:
        for role in (event.role, event.to):
            if role is not None and role not in RULES:
                self._folds.setdefault(role, TrajectoryFold(role))
        for fold in self._folds.values():
            fold.add(event)

    def _prompt(self, role: str, data: ModelRequested) -> str:
        fold = self._folds[role]
        new = [fold.pending[seq] for seq in data.sources if seq in fold.pending]
        return _json([_written(message) for message in (*fold.messages, *data.preamble, *new)])


def spans(events: Iterable[Event], *, content: bool = False) -> list[Span]:
    """All spans of a log that have ended, in the order of their ends."""
    fold = SpanFold(content=content)
    return [span for event in events for span in fold.add(event)]


def _trace_id(episode: str) -> int:
    """The episode's id itself where it is a UUID, so that either finds the other."""
    try:
        return UUID(episode).int or 1
    except ValueError:
        return int.from_bytes(hashlib.sha256(episode.encode()).digest()[:16]) or 1


def _span_id(*names: str) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:8]) or 1


def _provider(model: str) -> tuple[str, str]:
    """Who serves a model, and what it is called there. Others are served by engines that speak OpenAI's format."""
    provider, slash, name = model.partition("/")
    return (provider, name) if slash and provider in PROVIDERS else ("openai", model)


def _present(attributes: Mapping[str, Attribute | None]) -> dict[str, Attribute]:
    return {name: value for name, value in attributes.items() if value is not None}


def _json(value: JsonValue | Sequence[Mapping[str, JsonValue]]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _written(message: Message) -> dict[str, JsonValue]:
    """A message in the shape of the conventions."""
    if message.role == "tool":
        part: JsonValue = {
            "type": "tool_call_response",
            "id": message.tool_call_id,
            "result": message.content,
        }
        return {"role": "tool", "parts": [part]}
    parts: list[JsonValue] = []
    if message.content:
        parts.append({"type": "text", "content": message.content})
    return {"role": message.role, "parts": [*parts, *map(_called, message.tool_calls)]}


def _called(call: ToolCall) -> JsonValue:
    return {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}
