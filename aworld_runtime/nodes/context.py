"""What a handler may touch: its history, and the world through a journal.

A handler runs once live. After a takeover, and in a replay, it runs again over what it recorded: `emit` is compared
with the record and answers come from it, so that no effect happens twice and no replay lies. Nothing else in agents or
swarms may call a model, read the clock or draw a random number.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Protocol

import anyio
import pydantic_core
from pydantic import JsonValue, TypeAdapter
from typing_extensions import TypeIs

from aworld_runtime import errors, telemetry
from aworld_runtime.errors import ConfigError, DivergenceError, ModelError
from aworld_runtime.events import (
    EpisodeFinished,
    EpisodeRequested,
    Event,
    EventData,
    HumanAsked,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    RecordDropped,
    ValueRecorded,
    utc_now,
    written,
)
from aworld_runtime.messages import Completion, Message, ModelSpec, Task, ToolSpec, Trust
from aworld_runtime.models.base import ChatModel, ModelRequest
from aworld_runtime.nodes.history import History
from aworld_runtime.nodes.journal import CANCELLED, Journal, readable
from aworld_runtime.tools.call import cut, is_cancelled, told
from aworld_runtime.trajectory import TrajectoryFold

LARGE_INT = 2**63
_MAKES_A_VALUE: ContextVar[Context | None] = ContextVar("makes_a_value", default=None)
"""Whose handler is in the code that gives a value to record."""
_PROMPT = TypeAdapter(tuple[tuple[Message, ...], tuple[ToolSpec, ...]])


Connect = Callable[[ModelSpec | ChatModel], AbstractAsyncContextManager[ChatModel]]


class World(Protocol):
    """Where a live context's effects go."""

    async def commit(self, events: Sequence[Event]) -> None:
        """Make events durable."""
        ...

    @property
    def connect(self) -> Connect:
        """Gives the model of a spec or a client for one call, with this process's settings."""
        ...


class Context:
    """One handler invocation: the delivered event, what came before it, and the journal."""

    def __init__(
        self,
        *,
        role: str,
        source: str,
        event: Event,
        history: History,
        request: EpisodeRequested,
        world: World | None,
        journal: Journal,
    ) -> None:
        self.role = role
        self.event = event.model_copy(update={"data": event.data.model_copy(deep=True)})
        """The delivered event. A copy: what a handler does to a list in it is done to no log."""
        self._task = request.task
        self._source = source
        self._history = history
        self._seed = request.seed
        self._models = request.models
        self._world = world
        self.journal = journal
        self._unsaved: list[Event] = []
        self._requests = 0
        self._values = 0
        self._random: random.Random | None = None
        self._ended = False
        self._told_dropped = False

    @cached_property
    def task(self) -> Task:
        """What the episode is about; a copy, as `event` is."""
        return self._task.model_copy(deep=True)

    @cached_property
    def history(self) -> tuple[Event, ...]:
        """All events up to the delivered one, and later ones that the role's own earlier handlers caused."""
        return self._history.until(self.event, self.role)

    @cached_property
    def trajectory(self) -> TrajectoryFold:
        """The role's turns so far, and what it has not seen yet."""
        return self._history.trajectory(self.event, self.role)

    def emit(
        self,
        data: EventData,
        *,
        to: str | None = None,
        correlation_id: str | None = None,
        trust: Trust = "system",
    ) -> Event:
        """Add an event to what this handler commits. `trust="model"` for what a model said.

        Raises:
            ValueError: this handler has ended the episode, and nothing follows `episode.finished`; or a value is being made, which
                a replay doesn't do.
            EventError: it is too large, or no log can hold it.
        """
        self._expect_may(f"emitted {data.type}")
        self._ended = isinstance(data, EpisodeFinished)
        event = self._event(data, to=to, correlation_id=correlation_id, trust=trust)
        written(event)  # here, and not when it is appended: a replay gets as far
        recorded = self.journal.match(event)
        if recorded is not None:
            return recorded
        if self._world is None and not self.journal.has_ended:
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
            ConfigError: neither the agent nor the run gives this role a model.
        """
        asked = self._models.get(self.role) or self._models.get("*") or model
        if asked is None:
            raise ConfigError(f"agent {self.role!r} has no model: give it llm=LLMClient(...)")
        fold = self.trajectory
        pending = fold.pending
        if fold.turns:
            seen = fold.messages
            messages = (*seen, *pending.values())
            tools = fold.tools
        else:
            seen = ()
            messages = (*preamble, *pending.values())
        seed = self._next_seed()
        requested = self.emit(
            ModelRequested(
                model=asked.model if isinstance(asked, ModelSpec) else asked.name,
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
        request = ModelRequest(
            messages=messages,
            tools=tuple(tools),
            previous_ids=fold.previous_ids,
            new_from=len(seen),
            temperature=temperature,
            max_tokens=max_tokens,
            seed=seed,
            key=requested.id,
        )

        async def ask(world: World) -> Event:
            await world.commit(self.take_unsaved())
            return await self._ask(world, asked, requested, request)

        answer = await self._answer(
            requested.id,
            ask,
            given_up=ModelFailed(error=CANCELLED, message="the handler stopped waiting for it"),
            asked="called a model",
        )
        match answer.data:
            case ModelFailed(error=error, message=message):
                raise _model_error(error)(message)
            case ModelCompleted() as data:
                return data.completion(fold.previous_ids, answer.policy)
            case _:
                raise TypeError(f"{answer.type} can't answer a model request")

    def _next_seed(self) -> int:
        """Of this handler's next request: several at once are samples, not copies."""
        place = f"{self._seed}:{self.role}:{self.event.seq}"
        source = f"{place}:{self._requests}" if self._requests else place
        self._requests += 1
        return int.from_bytes(hashlib.sha256(source.encode()).digest()[:4], "big") >> 1

    async def record(self, kind: str, produce: Callable[[], Awaitable[JsonValue]]) -> JsonValue:
        """A value from outside: produced once, recorded, and the same ever after: JSON, as it is read from a log.

        Raises:
            ValueError: as `emit`.
            Exception: what `produce` raised, made anew of its class and arguments; the same ever after, too.
        """
        self._expect_may(f"asked for a value ({kind})")
        self._values += 1
        key = f"{self.event.id}:{self.role}:{self._values}"
        raised: BaseException | None = None

        async def ask(_: World) -> Event:
            nonlocal raised
            token = _MAKES_A_VALUE.set(self)
            try:
                data = ValueRecorded(kind=kind, value=await produce())
                return _checked(self._event(data, correlation_id=key))
            except anyio.get_cancelled_exc_class() as error:
                if is_cancelled():
                    raise
                raised = error
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary: recorded, so that it fails so ever after
                raised = error
            finally:
                _MAKES_A_VALUE.reset(token)
            return self._event(_failed(kind, raised), correlation_id=key)

        answer_to = partial(
            self._answer,
            key,
            ask,
            given_up=ValueRecorded(kind=kind, error=CANCELLED),
            asked=f"asked for a value ({kind})",
        )
        answer = await answer_to()
        if not _is_of(answer.data, kind) and self.journal.take_back(answer):
            answer = await answer_to()
        data = answer.data
        if not _is_of(data, kind):
            raise self.journal.differ(answer, self._event(ValueRecorded(kind=kind)))
        if data.error is not None:
            raise _exception(data.error, data.error_args) from raised
        return _as_read(data.value)

    async def sleep(self, seconds: float) -> None:
        """Let time pass; a replay doesn't wait."""

        async def pass_time() -> JsonValue:
            await anyio.sleep(seconds)
            return None

        await self.record(f"sleep {seconds:g} s", pass_time)

    def ask(self, question: str, *, trust: Trust = "system") -> Event:
        """Ask a person. The answer is another delivery to this role, `human.answered`, whenever it comes; its
        `correlation_id` is the returned event's id. `trust="model"` where a model asks.
        """
        return self.emit(HumanAsked(question=question), trust=trust)

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
        if self.journal.dropped and not self._told_dropped:
            self._told_dropped = True
            unsaved.insert(0, self._event(RecordDropped(seqs=self.journal.dropped)))
        return unsaved

    async def _answer(
        self,
        key: str,
        ask: Callable[[World], Awaitable[Event]],
        *,
        given_up: EventData,
        asked: str,
    ) -> Event:
        """The recorded answer, or else a live one, which is recorded; `given_up` where the handler stops waiting for it."""
        answer = await self.journal.answer(key)
        if answer is not None:
            return answer
        if self._world is not None:
            live = partial(ask, self._world)
        elif self.journal.cut:
            live = _no_answer
        else:
            raise self._unrecorded(asked, self._event(given_up, correlation_id=key))
        try:
            answer = await self.journal.ask(live)
        except anyio.get_cancelled_exc_class():
            self._unsaved.append(self._event(given_up, correlation_id=key))
            raise
        self._unsaved.append(answer)
        return answer

    async def _ask(
        self,
        world: World,
        asked: ModelSpec | ChatModel,
        requested: Event,
        request: ModelRequest,
    ) -> Event:
        began = time.perf_counter()
        try:
            async with world.connect(asked) as model:
                completion = await model.complete(request)
            answer = _checked(
                self._event(
                    ModelCompleted.of(completion, self.trajectory.previous_ids),
                    correlation_id=requested.id,
                    trust="model",
                    policy=completion.policy,
                    policy_version=completion.policy_version,
                )
            )
        except anyio.get_cancelled_exc_class() as error:
            if is_cancelled():
                raise
            answer = self._event(_failure(error), correlation_id=requested.id)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary: a client's crash is recorded, so a replay repeats it
            answer = self._event(_failure(error), correlation_id=requested.id)
        _count(requested, answer, time.perf_counter() - began)
        return answer

    def _expect_may(self, what: str) -> None:
        if self._ended:
            raise ValueError(f"{self.role} {what} after episode.finished")
        if _MAKES_A_VALUE.get() is self:
            raise ValueError(
                f"{self.role} {what} inside ctx.record: a replay makes no values, so nothing in there would happen; do it"
                " before or after"
            )

    def _unrecorded(self, did: str, event: Event) -> DivergenceError:
        return self.journal.remember(
            DivergenceError(
                f"on seq {self.event.seq}, {self.role} {did}, which the record doesn't hold",
                seq=self.event.seq,
                recorded="(nothing)",
                replayed=readable(event),
            )
        )

    def _event(self, data: EventData, **metadata: Any) -> Event:
        return self.event.caused(data, source=self._source, **metadata)


async def _no_answer() -> Event:
    """None comes any more: the handler was cut off as it waited."""
    while True:
        await anyio.sleep_forever()


def _count(requested: Event, answer: Event, seconds: float) -> None:
    if not isinstance(requested.data, ModelRequested):
        raise TypeError(f"{requested.type} asks no model")
    model = requested.data.model
    telemetry.MODEL_CALLS.add(1, model)
    telemetry.MODEL_SECONDS.observe(seconds, model)
    if isinstance(answer.data, ModelCompleted):
        telemetry.INPUT_TOKENS.add(answer.data.usage.prompt_tokens, model)
        telemetry.OUTPUT_TOKENS.add(answer.data.usage.completion_tokens, model)
    else:
        telemetry.MODEL_FAILURES.add(1, model)


def _as_read(value: JsonValue) -> JsonValue:
    """A handler's own copy, where NaN is text as in every log, and which it may change."""
    if value is None or isinstance(value, str | int):
        return value
    return pydantic_core.from_json(pydantic_core.to_json(value, inf_nan_mode="strings"))


def _is_of(data: EventData, kind: str) -> TypeIs[ValueRecorded]:
    return isinstance(data, ValueRecorded) and data.kind == kind


def _checked(event: Event) -> Event:
    """The event, which a log can hold.

    Raises:
        EventError: none can.
    """
    written(event)
    return event


def _failed(kind: str, error: BaseException) -> ValueRecorded:
    """What is recorded of a value that could not be had."""
    cls = type(error)
    plain = all(
        isinstance(arg, str | float | None) or (isinstance(arg, int) and abs(arg) < LARGE_INT)
        for arg in error.args
    )
    args = tuple(cut(arg) if isinstance(arg, str) else arg for arg in error.args)
    return ValueRecorded(
        kind=kind,
        error=f"{cls.__module__}:{cls.__qualname__}",
        error_args=args if plain else (told(error),),
    )


def _exception(name: str, args: Sequence[JsonValue]) -> BaseException:
    """What a value failed with: of its own class, if that is known here and can be made of `args` alone. It is made of the
    record live, too, so that a handler sees the same ever after.
    """
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)  # nothing is imported because a log says so
    for part in path.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, Exception | SystemExit):
        with suppress(Exception):  # the boundary: user code
            return found.__new__(found, *args)
    return RuntimeError(f"{path}: {', '.join(map(str, args))}")


def _failure(error: BaseException) -> ModelFailed:
    name = type(error).__name__
    if isinstance(error, ModelError):
        return ModelFailed(error=name, message=told(error))
    return ModelFailed(error="ModelError", message=f"{name}: {told(error)}")


def _model_error(name: str) -> type[ModelError]:
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, ModelError) else ModelError
