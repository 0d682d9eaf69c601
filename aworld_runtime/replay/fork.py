"""Forks: an episode that begins as another one did, up to an event, and goes on live from there.

`begin_fork` reads the little that it needs of the other and makes the fork's first events; `lay` puts them on a bus. The
log that is forked stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pydantic import JsonValue, ValidationError

from aworld_runtime.archive.logs import Logs
from aworld_runtime.bus.base import Bus, read_all
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.errors import ConfigError, NotFoundError, ReplayError, UsageError
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
    LogRestored,
    ModelCompleted,
    RecordDropped,
    SubscriptionChanged,
    new_id,
    written,
)
from aworld_runtime.forks import Origin
from aworld_runtime.messages import ModelSpec
from aworld_runtime.models.client import located
from aworld_runtime.names import episode_log
from aworld_runtime.nodes.node import Runnable, load_program

BOOKKEEPING = (
    EpisodeRequested,
    EpisodeClaimed,
    EpisodeTakenOver,
    EpisodeForked,
    EpisodeFinished,
    SubscriptionChanged,
    DeliveryHandled,
    DeliveryDeadLettered,
    LogRestored,
    RecordDropped,
)
"""What an owner notes down: another one's notes would be other ones."""
SAMPLED = (
    "prompt_offset",
    "prompt_token_ids",
    "token_ids",
    "behavior_logprobs",
    "version_spans",
)
"""Of a completion: nobody sampled what a person has written."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a fork does otherwise than its parent."""

    edit: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Path in the parent's next event → its value: `{"data.content": "42"}`."""
    program: str | None = None
    arguments: Mapping[str, JsonValue] | None = None
    models: Mapping[str, ModelSpec] = field(default_factory=dict[str, ModelSpec])
    """Role, or `*`, → its model."""
    paused: bool = False
    """It begins paused."""


async def begin_fork(
    logs: Logs, parent: str, at: int, changes: Changes, *, source: str, run_id: str | None
) -> list[Event]:
    """The first events of a new episode that shares the events of the episode `parent` up to `at`.

    Raises:
        NotFoundError: no such episode, or it has no such event.
        UsageError: it ended there; or these changes can't be made.
        EventError: no log can hold the edited event.
        ConfigError: a program that was an object of another process, or a model that nobody could ask.
    """
    log = episode_log(parent)
    pending = await _following(logs, log, at)
    request = await _request_at(logs, log, at)
    if not isinstance(request.data, EpisodeRequested):
        raise ReplayError(f"log {log} doesn't begin with episode.requested: it can't be forked")
    made = partial(
        Event.of, source=source, run_id=run_id, task_id=request.task_id, episode_id=new_id()
    )
    forked = made(EpisodeForked(parent=log, at=at, edited=tuple(sorted(changes.edit))))
    requested = made(_changed(request.data, changes), trust="user")
    opening = [forked, requested]
    if changes.edit:
        if pending is None:
            raise UsageError(f"event {at} is the last of {log} so far: no event follows to edit")
        opening.append(Origin(requested, pending.seq).own(_edited(pending, changes.edit)))
    return [event.at(seq) for seq, event in enumerate(opening, at + 1)]


def expect_roles(
    requested: Event, models: Mapping[str, ModelSpec], programs: Mapping[str, Runnable]
) -> None:
    """See that the program that is requested, perhaps one of `programs`, has these roles.

    Raises:
        ConfigError: there is no such role.
    """
    data = requested.data
    if not (models and isinstance(data, EpisodeRequested)):
        return
    known = load_program(data.program, data.arguments, programs).by_role
    for role in models:
        if role not in known and role != "*":
            raise ConfigError(f"no role {role!r} in {data.program}; there are: {', '.join(known)}")


async def lay(bus: Bus, logs: Logs, opening: Sequence[Event]) -> int:
    """Put the beginning of a fork's log on the bus, where that isn't there; returns its last seq.

    On a server what it shares goes with it, because workers elsewhere may have no store to read it from.
    """
    forked = opening[0].data
    if not isinstance(forked, EpisodeForked):
        raise TypeError(f"a fork begins with episode.forked, not {opening[0].type}")
    log = episode_log(opening[0].episode_id or "")
    if not await bus.last_seq(log):
        if bus.url.startswith("memory:"):
            put = partial(bus.append, log, forked.at, opening)
        else:
            shared = await read_all(logs, forked.parent, last=forked.at)
            put = partial(bus.restore, log, [*shared, *opening])
        await when_there_is_room(put, who=opening[0].source)
    return opening[-1].seq


async def _following(logs: Logs, log: str, at: int) -> Event | None:
    """The event after `at`, if there is one.

    Raises:
        NotFoundError: no such log; or no event `at`, or it is nowhere any more.
        UsageError: that is the end.
    """
    last = await logs.last_seq(log)
    if not last:
        raise NotFoundError(f"no log {log}: list episodes with: aworld runs --episodes")
    if not 1 <= at <= last:
        raise NotFoundError(f"{log} has no event {at}: it has 1 … {last}")
    there = {event.seq: event for event in await read_all(logs, log, at, last=at + 1)}
    if at not in there:
        raise NotFoundError(
            f"event {at} of {log} is no longer on the bus, and not in the store: name the store that has it"
        )
    if isinstance(there[at].data, EpisodeFinished):
        raise UsageError(
            f"event {at} is the end of {log}, which nothing follows: fork at {at - 1} or before"
        )
    following = there.get(at + 1)
    if following and await _are_one(logs, log, there[at], following):
        raise UsageError(
            f"event {at} of {log} and its end, which follows, are one: fork at {at - 1} or before"
        )
    return following


async def _are_one(logs: Logs, log: str, event: Event, following: Event) -> bool:
    """Whether a handler that ended the episode said with these that it was done: a fork between them would have no end. Who
    handles an answer is asked again, as `recovery.handled` says.
    """
    if not isinstance(event.data, DeliveryHandled) or not isinstance(
        following.data, EpisodeFinished
    ):
        return False
    seq = event.data.seq
    (delivered,) = await read_all(logs, log, seq, last=seq)
    same = (event.role, event.causation_id) == (following.role, following.causation_id)
    return same and not isinstance(delivered.data, EpisodeAnswered)


async def _request_at(logs: Logs, log: str, at: int) -> Event:
    """The request in force at event `at`, found without reading all that is before it."""
    first, *more = await logs.read(log, 1, limit=2)
    if isinstance(first.data, EpisodeForked):
        if more and more[0].seq <= at:
            return more[0]
        return await _request_at(logs, first.data.parent, min(at, first.data.at))
    if episode_log(first.episode_id or "") == log:
        return first
    # A fork's log on a server, with copies of what it shares.
    return Origin.of(await read_all(logs, log, last=at)).requested or first


def _changed(request: EpisodeRequested, changes: Changes) -> EpisodeRequested:
    program = changes.program or request.program
    if program.startswith("local:") and changes.program is None:
        raise ConfigError(
            f"the episode's program was an object of its process ({program}): say what to go on with, by"
            " program= or --program module:attribute"
        )
    for spec in changes.models.values():
        if spec.policy is None:
            located(spec)
    return request.model_copy(
        update={
            "program": program,
            "arguments": dict(
                request.arguments if changes.arguments is None else changes.arguments
            ),
            "models": {**request.models, **changes.models},
            "index": 0,
            "code_version": "",  # whoever forks wants to see what today's code does
            "after_loss": False,
            "paused": changes.paused,
        }
    )


def _edited(event: Event, edit: Mapping[str, JsonValue]) -> Event:
    """The event with other data."""
    if isinstance(event.data, BOOKKEEPING) or event.data.control:
        raise UsageError(
            f"the event to edit, {event.type} (seq {event.seq}), is its owner's bookkeeping: fork at the event before a message,"
            " a model's answer, a tool's call or its answer"
        )
    fields = event.data.model_dump(mode="json")
    for path, value in edit.items():
        _set(fields, path, value, event)
    if isinstance(event.data, ModelCompleted) and not any(
        f"data.{name}" in edit for name in SAMPLED
    ):
        fields = {name: value for name, value in fields.items() if name not in SAMPLED}
    try:
        data = type(event.data).model_validate(fields)
    except ValidationError as error:
        wrong = "; ".join(
            f"data.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()
        )
        raise UsageError(f"{event.type} can't be so: {wrong}") from error
    except TypeError as error:  # what is packed, such as token ids, is unpacked first
        raise UsageError(f"{event.type} can't be so: {error}") from error
    fresh = {"id": new_id(), "data": data, "policy": None, "policy_version": None}
    edited = event.model_copy(update=fresh)
    written(edited)
    return edited


def _set(fields: dict[str, JsonValue], path: str, value: JsonValue, event: Event) -> None:
    """Put `value` at `path` in the event's data."""
    root, *names = path.split(".")
    inside: JsonValue = fields
    if root != "data" or not names:
        raise UsageError(f"{path!r}: expected data.NAME, such as data.{next(iter(fields), 'NAME')}")
    for i, name in enumerate(names):
        last = i == len(names) - 1
        if isinstance(inside, dict) and name in inside:
            if last:
                inside[name] = value
            inside = inside[name]
        elif isinstance(inside, list) and name.isdecimal() and int(name) < len(inside):
            if last:
                inside[int(name)] = value
            inside = inside[int(name)]
        else:
            where = ".".join([root, *names[:i]])
            raise UsageError(
                f"{event.type} (seq {event.seq}) has no {path!r}; in {where} there is: {_names(inside)}"
            )


def _names(inside: JsonValue) -> str:
    if isinstance(inside, dict):
        return ", ".join(inside) or "nothing"
    if isinstance(inside, list):
        return f"0 … {len(inside) - 1}" if inside else "nothing"
    return "nothing, it is a value"
