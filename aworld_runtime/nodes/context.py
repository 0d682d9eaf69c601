"""What a handler may touch: its history, and the world through a journal.

A handler runs once live. After a takeover, and in a replay, it runs again over what it recorded: `emit` is compared
with the record and answers come from it, so that no effect happens twice and no replay lies. Nothing else in agents or
swarms may call a model, read the clock or draw a random number.
"""

from __future__ import annotations

import hashlib
import random
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, Protocol

from pydantic import JsonValue, TypeAdapter

from aworld_runtime import errors
from aworld_runtime.errors import ConfigError, DivergenceError, ModelError
from aworld_runtime.events import (
    EpisodeRequested,
    Event,
    EventData,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    ValueRecorded,
    utc_now,
)
from aworld_runtime.messages import Completion, Message, ModelSpec, ToolSpec, Trust
from aworld_runtime.models.base import ChatModel, ModelRequest
from aworld_runtime.trajectory import TrajectoryFold

ANSWERS = (ModelCompleted, ModelFailed, ValueRecorded)
VOLATILE = frozenset({"id", "seq", "time", "traceparent", "attempt", "causation_id", "source"})
"""What a replay may do differently. Causes are equal by construction; a source names the worker."""

_PROMPT = TypeAdapter(tuple[tuple[Message, ...], tuple[ToolSpec, ...]])


class World(Protocol):
    """Where a live context's effects go."""

    async def commit(self, events: Sequence[Event]) -> None:
        """Make events durable."""
        ...

    @property
    def connect(self) -> Callable[[ModelSpec], ChatModel]:
        """Gives a client for a spec, shared by all that ask for the same."""
        ...


class Journal:
    """What one handler invocation recorded before: its emissions in program order, and the answers it got."""

    def __init__(self, recorded: Sequence[Event] = ()) -> None:
        self._emitted = deque(e for e in recorded if not isinstance(e.data, ANSWERS))
        self._answers = {e.correlation_id: e for e in recorded if isinstance(e.data, ANSWERS)}

    def match(self, event: Event) -> Event | None:
        """The recorded event that `event` repeats; None where the record has ended.

        Raises:
            DivergenceError: the record has something else here.
        """
        if not self._emitted:
            return None
        recorded = self._emitted.popleft()
        if comparable(recorded) != comparable(event):
            raise divergence(recorded, event)
        return recorded

    def answer(self, request_id: str) -> Event | None:
        return self._answers.get(request_id)

    @property
    def rest(self) -> Event | None:
        """The first recorded emission that was not repeated."""
        return self._emitted[0] if self._emitted else None


def comparable(event: Event) -> dict[str, Any]:
    """An event without what may differ between a run and its replay."""
    return event.model_dump(mode="json", exclude=set(VOLATILE))


def divergence(recorded: Event, replayed: Event | None) -> DivergenceError:
    what = "did nothing more" if replayed is None else f"emitted {replayed.type}"
    return DivergenceError(
        f"at seq {recorded.seq}, {recorded.role} recorded {recorded.type}; this time it {what}",
        seq=recorded.seq,
        recorded=readable(recorded),
        replayed="(nothing)" if replayed is None else readable(replayed),
    )


def readable(event: Event) -> str:
    """An event without its volatile fields, for a person."""
    return event.model_dump_json(indent=2, exclude=set(VOLATILE), exclude_defaults=True)


class Context:
    """One handler invocation: the delivered event, what came before it, and the journal."""

    def __init__(
        self,
        *,
        role: str,
        source: str,
        event: Event,
        log: Sequence[Event],
        request: EpisodeRequested,
        world: World | None,
        journal: Journal,
    ) -> None:
        self.role = role
        self.event = event
        self.task = request.task
        self._source = source
        self._log = log
        self._seed = request.seed
        self._models = request.models
        self._world = world
        self.journal = journal
        self._unsaved: list[Event] = []
        self._values = 0
        self._random: random.Random | None = None
        self._trajectory: TrajectoryFold | None = None

    @property
    def history(self) -> tuple[Event, ...]:
        """All events up to the delivered one, and later ones that the role's own earlier handlers caused.

        The same live, after a takeover and replayed, however the log was interleaved.
        """
        seq = self.event.seq
        earlier = self._log[: seq - 1]
        own = [e for e in self._log[seq:] if e.role == self.role]
        if own:
            causes = {e.id for e in earlier}
            own = [e for e in own if e.causation_id in causes]
        return (*earlier, self.event, *own)

    @property
    def trajectory(self) -> TrajectoryFold:
        """The role's turns so far, and what it has not seen yet."""
        if self._trajectory is None:
            self._trajectory = TrajectoryFold(self.role)
            for event in self.history:
                self._trajectory.add(event)
        return self._trajectory

    def emit(
        self,
        data: EventData,
        *,
        to: str | None = None,
        correlation_id: str | None = None,
        trust: Trust = "system",
    ) -> Event:
        """Add an event to what this handler commits. `trust="model"` for what a model said."""
        event = self._event(data, to=to, correlation_id=correlation_id, trust=trust)
        recorded = self.journal.match(event)
        if recorded is not None:
            return recorded
        if self._world is None:
            raise self._unrecorded(f"emitted {data.type}", event)
        self._unsaved.append(event)
        return event

    async def complete(
        self,
        model: ChatModel | None,
        *,
        preamble: Sequence[Message] = (),
        tools: Sequence[ToolSpec] = (),
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> Completion:
        """The role's next turn: its conversation so far goes to the model. `preamble` and `tools` open the first turn.

        Raises:
            ModelError: the call failed; recorded too.
        """
        fold = self.trajectory
        pending = fold.pending
        if fold.turns:
            seen = fold.messages
            messages = (*seen, *pending.values())
            tools = fold.tools
        else:
            seen = ()
            messages = (*preamble, *pending.values())
        seed = (
            int.from_bytes(
                hashlib.sha256(f"{self._seed}:{self.role}:{self.event.seq}".encode()).digest()[:4],
                "big",
            )
            >> 1
        )
        spec = self._models.get(self.role) or self._models.get("*")
        name = spec.model if spec else model.name if model else ""
        requested = self.emit(
            ModelRequested(
                model=name,
                prompt_sha256=hashlib.sha256(
                    _PROMPT.dump_json((messages, tuple(tools)))
                ).hexdigest(),
                previous=fold.last_request if fold.turns else None,
                sources=tuple(pending),
                preamble=() if fold.turns else tuple(preamble),
                tools=() if fold.turns else tuple(tools),
                temperature=temperature,
                max_tokens=max_tokens,
                seed=seed,
            )
        )
        answer = self.journal.answer(requested.id)
        if answer is None:
            if self._world is None:
                raise self._unrecorded("called a model", requested)
            chat = self._world.connect(spec) if spec else model
            if chat is None:
                raise ConfigError(f"agent {self.role!r} has no model: give it llm=LLMClient(...)")
            await self._world.commit(self.take_unsaved())
            answer = await self._ask(
                chat,
                requested,
                ModelRequest(
                    messages=messages,
                    tools=tuple(tools),
                    previous_ids=fold.previous_ids,
                    new_from=len(seen),
                    temperature=temperature,
                    max_tokens=max_tokens,
                    seed=seed,
                    key=requested.id,
                ),
            )
        match answer.data:
            case ModelFailed(error=error, message=message):
                raise _model_error(error)(message)
            case ModelCompleted() as data:
                return data.completion(fold.previous_ids, answer.policy)
            case _:
                raise TypeError(f"{answer.type} can't answer a model request")

    async def record(self, kind: str, produce: Callable[[], Awaitable[JsonValue]]) -> JsonValue:
        """A value from outside: produced once, recorded, and the same ever after."""
        self._values += 1
        key = f"{self.event.id}:{self.role}:{self._values}"
        recorded = self.journal.answer(key)
        if recorded is None:
            if self._world is None:
                raise self._unrecorded(
                    f"asked for a value ({kind})", self._event(ValueRecorded(kind=kind))
                )
            recorded = self._event(
                ValueRecorded(kind=kind, value=await produce()), correlation_id=key
            )
            self._unsaved.append(recorded)
        data = recorded.data
        if not isinstance(data, ValueRecorded) or data.kind != kind:
            raise divergence(recorded, self._event(ValueRecorded(kind=kind)))
        return data.value

    async def now(self) -> datetime:
        """The clock, recorded."""

        async def read_clock() -> JsonValue:
            return utc_now().isoformat()

        return datetime.fromisoformat(str(await self.record("clock", read_clock)))

    @property
    def random(self) -> random.Random:
        """Seeded by the episode's seed, the role and the delivered event: the same in every run of this handler."""
        if self._random is None:
            self._random = random.Random(f"{self._seed}:{self.role}:{self.event.seq}")
        return self._random

    def uuid(self) -> str:
        """From `random`, so repeatable."""
        return str(uuid.UUID(int=self.random.getrandbits(128), version=4))

    def take_unsaved(self) -> list[Event]:
        """Events that are not durable yet; the caller commits them."""
        unsaved, self._unsaved = self._unsaved, []
        return unsaved

    async def _ask(self, chat: ChatModel, requested: Event, request: ModelRequest) -> Event:
        try:
            completion = await chat.complete(request)
        except ModelError as error:
            data: EventData = ModelFailed(error=type(error).__name__, message=str(error))
            answer = self._event(data, correlation_id=requested.id)
        else:
            answer = self._event(
                ModelCompleted.of(completion, self.trajectory.previous_ids),
                correlation_id=requested.id,
                trust="model",
                policy=completion.policy,
                policy_version=completion.policy_version,
            )
        self._unsaved.append(answer)
        return answer

    def _unrecorded(self, did: str, event: Event) -> DivergenceError:
        return DivergenceError(
            f"at seq {self.event.seq}, {self.role} {did}, which the record doesn't hold",
            seq=self.event.seq,
            recorded="(nothing)",
            replayed=readable(event),
        )

    def _event(self, data: EventData, **metadata: Any) -> Event:
        cause = self.event
        return Event.of(
            data,
            source=self._source,
            run_id=cause.run_id,
            task_id=cause.task_id,
            group_id=cause.group_id,
            episode_id=cause.episode_id,
            attempt=cause.attempt,
            causation_id=cause.id,
            hops=cause.hops + 1,
            traceparent=cause.traceparent,
            **metadata,
        )


def _model_error(name: str) -> type[ModelError]:
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, ModelError) else ModelError
