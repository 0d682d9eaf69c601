"""Events: immutable facts in the log of an episode or a run.

An `Event` is an envelope of standard metadata (CloudEvents 1.0 names where it has them) around `data`, one small class
per type. A `Registry` knows the types: those below and every subclass of `EventData` that a user has defined; it
encodes, and decodes with a clear error for what it doesn't know. Nothing here does I/O.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Generic, Literal, Self

import pydantic_core
import uuid_utils
from pydantic import BaseModel, ConfigDict, Field, JsonValue, SerializeAsAny, ValidationError
from typing_extensions import TypeVar

from aworld_runtime.errors import (
    ConfigError,
    EventError,
    ForgedEventError,
    MalformedEventError,
    PayloadTooLargeError,
    UnknownEventTypeError,
)
from aworld_runtime.messages import (
    Completion,
    Data,
    FinishReason,
    Message,
    ModelSpec,
    PackedFloats,
    PackedInts,
    Task,
    ToolCall,
    ToolSpec,
    Trust,
    Usage,
    VersionSpan,
)
from aworld_runtime.payloads import (
    APART_ABOVE,
    APART_ABOVE_COMPRESSED,
    NONE,
    STUB,
    Blob,
    part,
    whole,
)

COMPRESS_ABOVE = 4 * 1024
"""Bytes above which an encoded event is compressed."""
AT_ONCE = 256 * 1024
"""Bytes above which JSON is parsed before it is validated: with a million wrong keys that takes a tenth of the time."""
MOST_COMPLAINTS = 100
REFUSE_ABOVE = 8 * 1024 * 1024
"""Bytes above which an event is refused."""
MOST_BREAKPOINTS = 100
SURELY_FLAT = 100
"""Brackets up to which JSON can't be too deep to be read; nor, below `COMPRESS_ABOVE`, can a number be too long."""

StopReason = Literal[
    "answered",
    "turn_limit",
    "token_limit",
    "time_limit",
    "hop_limit",
    "quiescent",
    "failed",
    "cancelled",
    "malformed",
]
"""Why an agent or an episode stopped."""
FAILURES: frozenset[StopReason] = frozenset({"failed", "cancelled", "time_limit"})
"""Ends that say nothing about the policy; another attempt is made."""


class EventData(Data):
    """Payload of one event type. Subclass with `type` set to a dotted, past-tense name to add a type."""

    type: ClassVar[str]
    formerly: ClassVar[tuple[str, ...]] = ()
    """Names that the type had: events of these names are still read."""
    schema_version: ClassVar[int] = 1
    """Of the fields. Count it up with a change after which old logs would not be read, and see to them in `upcast`."""
    control: ClassVar[bool] = False
    """As mail it passes all that is not: a person's word must not wait behind data."""

    @classmethod
    def upcast(cls, data: dict[str, JsonValue], version: int) -> dict[str, JsonValue]:
        """`data`, the JSON that an older `version` of this type wrote, as today's would write it."""
        raise NotImplementedError(f"it has no upcast from version {version}")


# --- an episode's life ---------------------------------------------------------------------------------------------


class EpisodeRequested(EventData):
    """Somebody wants a task done. First event of a log, and the work item that a worker claims."""

    type = "episode.requested"
    task: Task
    program: str
    """`module:attribute` of the agent or swarm, or `local:NAME` for one known to this process alone."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    models: dict[str, ModelSpec] = Field(default_factory=dict[str, ModelSpec])
    """Role → the model it uses instead of its own; `*` for every role not named."""
    seed: int = 0
    index: int = 0
    """Place in its group, 0 … group_size - 1; a retry keeps it and counts `attempt` up."""
    code_version: str = ""
    """A worker of another version refuses it."""
    timeout_s: float | None = None
    """Seconds it may run, from each claim or takeover: its wait for a worker doesn't count, unlike in `Event.deadline`."""
    paused: bool = False
    """It begins paused: whoever debugs it sets breakpoints first."""
    after_loss: bool = False
    """Queued again since the server lost data: more of the log may be lost than it shows, and whoever goes on says so."""


class EpisodeClaimed(EventData):
    type = "episode.claimed"
    worker: str


class EpisodeTakenOver(EventData):
    """The former owner is gone; every later append of its is refused."""

    type = "episode.taken_over"
    worker: str


class LogRestored(EventData):
    """The server lost the log; up to `at` it is the store's copy, or an owner's. Acknowledged events that came after that may
    be lost.
    """

    type = "log.restored"
    at: int


class EpisodeForked(EventData):
    """This log continues `parent` after its event `at`."""

    type = "episode.forked"
    parent: str
    """Its log."""
    at: int
    edited: tuple[str, ...] = ()
    """What a person has changed of the parent's next event, which then follows the request here: paths such as
    `data.content`.
    """


class EpisodeAnswered(EventData):
    """The swarm is done; the environment scores next."""

    type = "episode.answered"
    answer: str
    reason: StopReason = "answered"


class EpisodeFinished(EventData):
    """Last event of a log."""

    type = "episode.finished"
    answer: str = ""
    reason: StopReason = "answered"
    error: str | None = None


class EpisodeCancelled(EventData):
    type = "episode.cancelled"
    control = True
    reason: str


class EpisodePaused(EventData):
    """No handler and no tool call starts from here on; what runs ends. Its time stands still, its worker's slot stays taken."""

    type = "episode.paused"
    control = True
    reason: str = ""


class EpisodeResumed(EventData):
    """What was put off starts."""

    type = "episode.resumed"
    control = True
    reason: str = ""


class EpisodeStepped(EventData):
    """So many handlers and tool calls may start though the episode is paused; it stays so."""

    type = "episode.stepped"
    control = True
    count: int = Field(default=1, ge=1)


class BreakpointsSet(EventData):
    """From here on the episode pauses at each event for which one of these predicates holds; they replace all before."""

    type = "breakpoints.set"
    control = True
    breakpoints: tuple[str, ...] = Field(default=(), max_length=MOST_BREAKPOINTS)
    """As in predicate.py. One that can't be read stops nothing."""


class SubscriptionChanged(EventData):
    """Who gets which event types from here on: role → type prefixes."""

    type = "subscription.changed"
    subscriptions: dict[str, tuple[str, ...]]


# --- agents, models, tools -----------------------------------------------------------------------------------------


class MessagePosted(EventData):
    type = "message.posted"
    content: str


class ModelRequested(EventData):
    """A prompt went to a model. Linear: the prompt is `previous`'s prompt, its completion, and what `sources` name."""

    type = "model.requested"
    model: str
    prompt_sha256: str
    """Of the messages and tools as sent."""
    previous: int | None = None
    """Seq of the request this one extends; none where the prompt starts anew."""
    sources: tuple[int, ...] = ()
    """Seqs of the events whose messages are new in this prompt."""
    preamble: tuple[Message, ...] = ()
    """Messages that come from no event (instructions); only where `previous` is none."""
    tools: tuple[ToolSpec, ...] = ()
    """Only where `previous` is none."""
    temperature: float | None = None
    """None, as for `max_tokens`: the model client's own setting."""
    max_tokens: int | None = None
    seed: int | None = None


class ModelCompleted(EventData):
    """A model's answer. `prompt_token_ids` holds the prompt after its first `prompt_offset` ids, which are those of the
    role's previous prompt and completion.
    """

    type = "model.completed"
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    usage: Usage = Usage()
    prompt_offset: int = 0
    prompt_token_ids: PackedInts = ()
    token_ids: PackedInts = ()
    behavior_logprobs: PackedFloats = ()
    version_spans: tuple[VersionSpan, ...] = ()

    @classmethod
    def of(cls, completion: Completion, previous_ids: tuple[int, ...]) -> ModelCompleted:
        """Write `completion` relative to `previous_ids`, the role's previous prompt and sampled ids."""
        offset = common_prefix(previous_ids, completion.prompt_token_ids)
        return cls(
            text=completion.text,
            tool_calls=completion.tool_calls,
            finish_reason=completion.finish_reason,
            usage=completion.usage,
            prompt_offset=offset,
            prompt_token_ids=completion.prompt_token_ids[offset:],
            token_ids=completion.token_ids,
            behavior_logprobs=completion.behavior_logprobs,
            version_spans=completion.version_spans,
        )

    def completion(self, previous_ids: tuple[int, ...], policy: str | None) -> Completion:
        """The completion as the model client returned it."""
        return Completion(
            text=self.text,
            tool_calls=self.tool_calls,
            finish_reason=self.finish_reason,
            usage=self.usage,
            prompt_token_ids=previous_ids[: self.prompt_offset] + self.prompt_token_ids,
            token_ids=self.token_ids,
            behavior_logprobs=self.behavior_logprobs,
            policy=policy,
            version_spans=self.version_spans,
        )


class ModelFailed(EventData):
    type = "model.failed"
    error: str
    """Name of the error class; `Cancelled` where the handler stopped waiting for it."""
    message: str


class ToolCalled(EventData):
    type = "tool.called"
    call: ToolCall


class ToolReturned(EventData):
    type = "tool.returned"
    name: str
    content: JsonValue


class ToolFailed(EventData):
    """The call had no result; the agent is told why."""

    type = "tool.failed"
    name: str
    error: str
    message: str


class HandoffMade(EventData):
    type = "handoff.made"
    target: str
    reason: str = ""


class AnswerProposed(EventData):
    """An agent's last word on what it was asked."""

    type = "answer.proposed"
    text: str
    reason: StopReason = "answered"


class AnswerVerified(EventData):
    type = "answer.verified"
    answer: str
    detail: str = ""


class AnswerRejected(EventData):
    type = "answer.rejected"
    answer: str
    detail: str = ""


class ConflictDetected(EventData):
    type = "conflict.detected"
    roles: tuple[str, ...]
    detail: str


class DuplicateFiltered(EventData):
    type = "duplicate.filtered"
    original: int
    """Seq of the event that this one repeats."""


class HumanAsked(EventData):
    type = "human.asked"
    question: str


class HumanAnswered(EventData):
    type = "human.answered"
    answer: str


class RewardGiven(EventData):
    """`reward` is the number training uses; `breakdown` its named parts, already weighted."""

    type = "reward.given"
    role: str | None = None
    """Whose trajectory; none for every agent of the episode."""
    reward: float
    breakdown: dict[str, float] = Field(default_factory=dict[str, float])


class TimerSet(EventData):
    type = "timer.set"
    name: str
    at: datetime


class TimerFired(EventData):
    type = "timer.fired"
    name: str


class ValueRecorded(EventData):
    """Something a handler can't compute again: the clock, a random number, an environment's verdict."""

    type = "value.recorded"
    kind: str
    value: JsonValue = None
    error: str | None = None
    """`module:class` of the exception, where there was one instead; `Cancelled` where the handler stopped waiting for it."""
    error_args: tuple[JsonValue, ...] = ()
    """What it was made of."""


class DeliveryHandled(EventData):
    """The role is done with the event at `seq`: committed in the same append as what it caused."""

    type = "delivery.handled"
    seq: int


class DeliveryDeadLettered(EventData):
    """The role failed on the event at `seq` once too often."""

    type = "delivery.dead_lettered"
    seq: int
    error: str
    message: str
    attempts: int


class RecordDropped(EventData):
    """In a fork, a handler that had not ended went another way than its record: these events of it count no more."""

    type = "record.dropped"
    seqs: tuple[int, ...]


# --- a run's log ---------------------------------------------------------------------------------------------------


class RunStarted(EventData):
    type = "run.started"
    kind: str
    config: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])


class RunTakenOver(EventData):
    type = "run.taken_over"
    node: str


class RunFinished(EventData):
    type = "run.finished"
    reason: str
    detail: str = ""


class NodeJoined(EventData):
    type = "node.joined"
    node: str
    kind: str


class NodeLeft(EventData):
    type = "node.left"
    node: str
    reason: str = ""


class GroupRequested(EventData):
    """`size` episodes of one task were queued."""

    type = "group.requested"
    group: str
    task: Task
    size: int
    purpose: Literal["train", "evaluate"] = "train"


class GroupCompleted(EventData):
    """Every episode of the group is finished; `episodes` lists the attempt that counts, by index."""

    type = "group.completed"
    group: str
    episodes: tuple[str, ...]
    rewards: tuple[float, ...]


class BatchFormed(EventData):
    """The groups of the next optimizer step, recorded before it."""

    type = "batch.formed"
    step: int
    group_ids: tuple[str, ...]


class StepFinished(EventData):
    """One optimizer step. Metric names as in design.md: `actor/loss`, `perf/train_s`, ..."""

    type = "step.finished"
    step: int
    metrics: dict[str, float]
    rows: tuple[str, ...] = ()
    """Fingerprint of each training row of the batch, in order."""
    advantages: PackedFloats = ()
    """Of each row, as the loss had them."""
    gradient_norms: PackedFloats = ()
    """Of each parameter in the model's order, before clipping; one optimizer step of the batch after the other."""
    computed_with: dict[str, str] = Field(default_factory=dict[str, str])
    """Versions, processor, threads, ranks: where they are the same again, so are the numbers."""


class PolicyPublished(EventData):
    """Every sampler acknowledged these weights."""

    type = "policy.published"
    samplers: tuple[str, ...]


class CheckpointSaved(EventData):
    type = "checkpoint.saved"
    step: int
    path: str


class EvaluationFinished(EventData):
    """Held-out tasks were tried with the weights after `step`."""

    type = "evaluation.finished"
    step: int
    groups: tuple[str, ...]
    metrics: dict[str, float]


# --- the envelope --------------------------------------------------------------------------------------------------


def new_id() -> str:
    """A fresh event id (UUID version 7: sorts by time)."""
    return str(uuid_utils.uuid7())


def utc_now() -> datetime:
    return datetime.now(UTC)


Data_co = TypeVar("Data_co", bound=EventData, default=EventData, covariant=True)


class Event(BaseModel, Generic[Data_co]):
    """One fact. `seq`, its position in its log, is given by the append and not part of the stored body."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    # No default, as for `time`: writing an event would call it, only to see whether it may leave the field out.
    id: str
    type: str
    source: str
    """`role/instance` of the node that made it."""
    role: str
    run_id: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    episode_id: str | None = None
    seq: int = Field(default=0, exclude=True)
    time: datetime
    causation_id: str | None = None
    """The event that caused it."""
    correlation_id: str | None = None
    """The request it answers."""
    to: str | None = None
    """A role, `role/instance`, or none for whoever subscribes."""
    attempt: int = 1
    deadline: datetime | None = None
    hops: int = 0
    trust: Trust = "system"
    traceparent: str | None = None
    schema_version: int = 1
    """Of `data`."""
    policy: str | None = None
    policy_version: int | None = None
    data: SerializeAsAny[Data_co]

    @classmethod
    def of(cls, data: EventData, *, source: str, **metadata: Any) -> Event:
        """An event of `data`'s type, made now; the role is taken from `source` (`role/instance`)."""
        role = source.partition("/")[0]
        made = {
            "id": new_id(),
            "time": utc_now(),
            "type": data.type,
            "source": source,
            "role": role,
            "schema_version": data.schema_version,
        }
        return Event.model_validate({**made, "data": data, **metadata})

    def __repr_args__(self) -> Iterator[tuple[str | None, object]]:
        """What happened, in one line: a debugger at a Python prompt shows events. `model_dump()` has the rest."""
        yield from (("seq", self.seq), ("type", self.type), ("role", self.role))
        if self.to is not None:
            yield "to", self.to
        yield from (("data", self.data), ("id", self.id))

    def caused(self, data: EventData, *, source: str, **metadata: Any) -> Event:
        """An event that follows from this one: of the same run, task, group, episode and attempt, one hop further."""
        return Event.of(
            data,
            source=source,
            run_id=self.run_id,
            task_id=self.task_id,
            group_id=self.group_id,
            episode_id=self.episode_id,
            attempt=self.attempt,
            causation_id=self.id,
            hops=self.hops + 1,
            traceparent=self.traceparent,
            **metadata,
        )

    def at(self, seq: int) -> Self:
        """The same event at its place in a log."""
        if self.seq == seq:
            return self
        # As `model_copy(update=…)`, in a third of its time: every append on `memory://` makes copies.
        copied = self._empty()
        object.__setattr__(copied, "__dict__", {**self.__dict__, "seq": seq})
        return copied

    def kept_at(self, seq: int) -> Self:
        """As `at`, in a third of the memory and twice the time: for who keeps very many."""
        copied = self._empty()
        # Set one by one, the fields share their names with those of all other events.
        for name, value in self.__dict__.items():
            object.__setattr__(copied, name, value)
        object.__setattr__(copied, "seq", seq)
        return copied

    def _empty(self) -> Self:
        empty = self.__class__.__new__(self.__class__)
        object.__setattr__(empty, "__pydantic_fields_set__", _EVERY_FIELD)
        object.__setattr__(empty, "__pydantic_extra__", None)
        object.__setattr__(empty, "__pydantic_private__", None)
        return empty


_EVERY_FIELD = set(Event.model_fields)
"""Shared by all events in logs: a set of its own for each is as large as the rest of its metadata."""
# Only names that the first instances of a class were given one by one are shared by all: this is the first.
Event.of(EpisodeClaimed(worker=""), source="").kept_at(0)
_TYPE = b'","type":"'
_TYPE_WITHIN = 64
"""Bytes in which it is found, where we wrote the event: it follows the id."""


class Registry:
    """The closed set of event types: encodes events, decodes only what it knows. A type that is defined later is one of them once
    an event of it comes.

    Raises:
        ConfigError: two classes claim the same name.
    """

    def __init__(self) -> None:
        self.types: dict[str, type[EventData]] = {}
        """By name, former names included."""
        self._seen: set[type[EventData]] = set()
        self._readers: dict[bytes, Callable[[bytes], Event]] = {}
        """By the type's name: reads an envelope with this data in one pass."""
        self._look()

    def _look(self) -> None:
        """Take in the types that are new."""
        for cls in _subclasses(EventData):
            if cls in self._seen:
                continue
            for name in (cls.type, *cls.formerly):
                other = self.types.setdefault(name, cls)
                if not _redefines(cls, other):
                    raise ConfigError(
                        f"event type {name!r} is claimed by {_full_name(other)} and by {_full_name(cls)}: give one of"
                        " them another name"
                    )
                self.types[name] = cls
            self._seen.add(cls)

    def encode(self, event: Event) -> bytes:
        """JSON, compressed above 4 KiB.

        Raises:
            PayloadTooLargeError: above 8 MiB.
            MalformedEventError: what `decode` would refuse: half a surrogate pair, a number of 5000 digits, lists in
                lists 200 deep.
        """
        body = written(event)
        return b"z" + zlib.compress(body, 1) if len(body) > COMPRESS_ABOVE else body

    def encode_apart(self, event: Event, blobs: list[Blob]) -> bytes:
        """As `encode`, for a log: large content is added to `blobs`, and the event refers to it."""
        body = self.encode(event)
        if len(body) <= COMPRESS_ABOVE and body[:1] != b"z":
            return body
        write = event.__pydantic_serializer__.to_json
        raw = write(event, exclude_defaults=True)
        if len(raw) <= APART_ABOVE and len(body) <= APART_ABOVE_COMPRESSED:
            return body
        stub, blob = part(raw, write(event, exclude_defaults=True, exclude={"data"}))
        blobs.append(blob)
        return stub

    def decode(self, body: bytes, *, seq: int = 0, blobs: Mapping[str, bytes] = NONE) -> Event:
        """The event in `body`, at `seq`; `blobs` holds what it may refer to, by sha256.

        Raises:
            UnknownEventTypeError: its type is not registered.
            ForgedEventError: its role is not that of its source.
            MissingBlobError: it refers to content that is not among `blobs`.
            MalformedEventError: anything else that is wrong with it, a newer schema and a failed `upcast` included.
        """
        try:
            raw = _inflate(body) if body[:1] != STUB else whole(body, blobs, REFUSE_ABOVE)
            at_once = self._decode_at_once(raw) if len(raw) <= AT_ONCE else None
            event = at_once or self._decode_step_by_step(raw)
        except (
            ValueError,
            ValidationError,
            KeyError,
            TypeError,
            AttributeError,
            zlib.error,
        ) as error:
            raise MalformedEventError(f"not an event: {_told(error)}") from error
        if event.role != event.source.partition("/")[0]:
            raise ForgedEventError(
                f"event {event.type} {event.id:.100} is of role {event.role!r:.100}, and its source is"
                f" {event.source!r:.100}"
            )
        object.__setattr__(event, "seq", seq)  # frozen for others; this one is new
        return event

    def decode_log(
        self, rows: Iterable[tuple[int, bytes]], blobs: Mapping[str, bytes], *, log: str, at: str
    ) -> list[Event]:
        """The events of a log in these rows of seq and body; `at` is the URL of what keeps them.

        Raises:
            EventError: as `decode`; says which event it is, and where.
        """
        events: list[Event] = []
        seq = 0
        try:
            for seq, body in rows:
                events.append(self.decode(body, seq=seq, blobs=blobs))
        except EventError as error:
            raise type(error)(f"event {seq} of {log} in {at} can't be read: {error}") from error
        return events

    def _decode_at_once(self, raw: bytes) -> Event | None:
        """What we wrote ourselves, which begins with id and type; None for whatever needs a closer look."""
        begin = raw.find(_TYPE, 0, _TYPE_WITHIN) + len(_TYPE)
        kind = raw[begin : raw.find(b'"', begin)]
        read = self._readers.get(kind)
        if read is None:
            data_class = self.types.get(kind.decode(errors="replace"))
            if data_class is None:
                return None
            read = self._readers[kind] = Event[data_class].__pydantic_validator__.validate_json
        try:
            event = read(raw)
        except ValidationError:
            return None
        # It showed what looked like a `type`; it need not be the one that counts.
        data = event.data
        as_today = event.type == data.type and event.schema_version == data.schema_version
        return event if as_today else None

    def _decode_step_by_step(self, raw: bytes) -> Event:
        """Whatever JSON it is, to the event or to what is wrong with it."""
        fields = pydantic_core.from_json(raw)
        kind = fields["type"]
        if kind not in self.types:
            try:
                self._look()
            except ConfigError as error:
                raise UnknownEventTypeError(str(error)) from error
        data_class = self.types.get(kind)
        if data_class is None:
            raise UnknownEventTypeError(
                f"unknown event type {kind!r:.100}: import the module that defines it"
            )
        fields["data"] = _read(data_class, kind, fields["data"], fields.get("schema_version", 1))
        fields |= {"type": data_class.type, "schema_version": data_class.schema_version}
        return Event.model_validate(fields)


def _read(cls: type[EventData], kind: str, data: JsonValue, version: JsonValue) -> EventData:
    """`data` of an event of type `kind`, as `version` of it was written."""
    if not isinstance(version, int) or version < 1:
        raise MalformedEventError(f"event {kind} has schema version {version!r:.20}")
    if version > cls.schema_version:
        raise MalformedEventError(
            f"event {kind} has schema version {version}, newer than {cls.schema_version}: upgrade the code that"
            f" defines {_full_name(cls)}"
        )
    if version == cls.schema_version:
        return cls.model_validate(data)
    if not isinstance(data, dict):
        raise MalformedEventError(f"event {kind} has no object as its data")
    try:
        return cls.model_validate(cls.upcast(data, version))
    except Exception as error:
        raise MalformedEventError(
            f"event {kind} of schema version {version} can't be read as version {cls.schema_version}:"
            f" {_full_name(cls)}.upcast: {type(error).__name__}: {_told(error)}"
        ) from error


def written(event: Event) -> bytes:
    """Its JSON, as a log holds it.

    Raises:
        EventError: no log can; as `Registry.encode` says.
    """
    try:
        body = event.__pydantic_serializer__.to_json(event, exclude_defaults=True)
    except pydantic_core.PydanticSerializationError as error:
        raise MalformedEventError(f"event {event.type} can't be written: {error}") from error
    if len(body) > REFUSE_ABOVE:
        raise PayloadTooLargeError(
            f"event {event.type} has {len(body)} bytes; at most {REFUSE_ABOVE} fit in a log: store the content"
            " elsewhere and put a reference into the event"
        )
    if len(body) > COMPRESS_ABOVE or body.count(b"{") + body.count(b"[") > SURELY_FLAT:
        try:
            pydantic_core.from_json(body)
        except ValueError as error:
            raise MalformedEventError(f"event {event.type} can't be read again: {error}") from error
    return body


def _told(error: Exception) -> str:
    """What is wrong, without putting a million complaints into words."""
    if isinstance(error, ValidationError) and error.error_count() > MOST_COMPLAINTS:
        return f"{error.error_count()} of its fields are wrong, or unknown"
    return f"{error!s:.300}"


def _inflate(body: bytes) -> bytes:
    """Undo compression, never producing more than an event may hold."""
    if body[:1] != b"z":
        if len(body) > REFUSE_ABOVE:
            raise MalformedEventError(f"{len(body)} bytes; at most {REFUSE_ABOVE} are read")
        return body
    inflater = zlib.decompressobj()
    raw = inflater.decompress(body[1:], REFUSE_ABOVE)
    if inflater.unconsumed_tail or not inflater.eof:
        raise MalformedEventError(
            f"compressed content is cut or holds more than {REFUSE_ABOVE} bytes"
        )
    return raw


def _subclasses(cls: type[EventData]) -> Iterator[type[EventData]]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _redefines(cls: type[EventData], other: type[EventData]) -> bool:
    """Whether it is the same class once more, as where a notebook's cell runs again, or a script is imported, too."""
    modules = {cls.__module__, other.__module__}
    return cls.__qualname__ == other.__qualname__ and (len(modules) == 1 or "__main__" in modules)


def _full_name(cls: type[EventData]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids `a` and `b` share."""
    if b[: len(a)] == a:
        return len(a)
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
