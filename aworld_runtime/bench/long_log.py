"""An episode as long as one likes: three roles pass on a number, which grows, each after the call of a tool.

    message.posted ─▶ value.recorded, tool.called, delivery.handled ─▶ tool.returned ─▶ message.posted to the next role, …

Its log is written straight into a store, and is event for event what the program `Relay` would have appended: a fork of it
goes on live anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

from pydantic import JsonValue

from aworld_runtime.archive.records import advance
from aworld_runtime.bench.progress import Progress
from aworld_runtime.events import (
    DeliveryHandled,
    EpisodeClaimed,
    EpisodeRequested,
    Event,
    MessagePosted,
    ToolCalled,
    ToolReturned,
    ValueRecorded,
    utc_now,
)
from aworld_runtime.messages import Task, ToolCall, ToolSpec
from aworld_runtime.names import episode_log
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program
from aworld_runtime.nodes.tool_calls import answer_event
from aworld_runtime.store.base import EpisodeRecord, Store
from aworld_runtime.tools.base import BaseTool

RELAY = "aworld_runtime.bench.long_log:Relay"
ROLES = ("north", "east", "south")
SHORTEST = 10
"""Events of which there is a first, a middle and a last one, and something to do after each."""
BATCH = 5_000
"""Events in memory while the log is written."""


def runner(number: int) -> str:
    """The role that gets this number."""
    return ROLES[number % len(ROLES)]


def call_of(number: int) -> ToolCalled:
    return ToolCalled(
        call=ToolCall(id=f"call-{number}", name=Measure.name, arguments={"number": number})
    )


class Measure(BaseTool):
    """Gives the number back."""

    name = "measure"

    def get_schema(self) -> ToolSpec:
        return ToolSpec(name=self.name)

    async def run(self, **arguments: JsonValue) -> JsonValue:
        return arguments["number"]


class Runner:
    """Answers a number with a call, and what the call gave with the next number for the next role."""

    def __init__(self, role: str, *subscriptions: str) -> None:
        self.role = role
        self.subscriptions = subscriptions

    async def handle(self, ctx: Context, event: Event) -> None:
        match event.data:
            case EpisodeRequested():
                ctx.emit(MessagePosted(content="0"), to=runner(0))
            case MessagePosted(content=number):
                await ctx.now()
                ctx.emit(call_of(int(number)))
            case ToolReturned(content=int(number)):
                ctx.emit(MessagePosted(content=str(number + 1)), to=runner(number + 1))
            case _:
                pass


class Relay:
    """The swarm; it never ends by itself."""

    def program(self) -> Program:
        first, *others = ROLES
        nodes = (Runner(first, EpisodeRequested.type), *map(Runner, others))
        tool = Measure()
        return Program(nodes, {role: {tool.name: tool} for role in ROLES}, max_hops=10**9)


async def write_long_log(store: Store, episode_id: str, events: int, progress: Progress) -> None:
    """Keep the first so many events of such an episode."""
    log, written = episode_log(episode_id), 0
    record = EpisodeRecord(id=episode_id)
    relay = islice(relay_events(episode_id), events)
    while batch := list(islice(relay, BATCH)):
        await store.put_events(log, batch)
        for event in () if written else batch[:2]:
            record = advance(record, event)
        written += len(batch)
        progress.tick(f"{written:,} of {events:,} events are written")
    await store.put_episode(record.model_copy(update={"last_seq": written}))


def relay_events(episode_id: str) -> Iterator[Event]:
    """What an owner would append, at its seq; without end."""
    place = count(1)

    def keep(event: Event) -> Event:
        return event.kept_at(next(place))

    task = Task(id="relay", prompt="Pass it on.")
    request = EpisodeRequested(task=task, program=RELAY)
    requested = keep(
        Event.of(
            request, source="runtime/bench", task_id=task.id, episode_id=episode_id, trust="user"
        )
    )
    yield requested
    yield keep(requested.caused(EpisodeClaimed(worker="bench"), source=_by("worker")))
    yield keep(requested.caused(Relay().program().subscribed, source=_by("worker")))
    yield (posted := keep(_passed_on(requested, ROLES[0], 0)))
    yield keep(_handled(requested, ROLES[0]))
    for number in count():
        role = runner(number)
        clock = ValueRecorded(kind="clock", value=utc_now().isoformat())
        key = f"{posted.id}:{role}:1"
        yield keep(posted.caused(clock, source=_by(role), correlation_id=key))
        yield (called := keep(posted.caused(call_of(number), source=_by(role))))
        yield keep(_handled(posted, role))
        answer = ToolReturned(name=Measure.name, content=number)
        yield (returned := keep(answer_event(called, answer, source=_by(Measure.name))))
        yield (posted := keep(_passed_on(returned, role, number + 1)))
        yield keep(_handled(returned, role))


def _passed_on(cause: Event, role: str, number: int) -> Event:
    message = MessagePosted(content=str(number))
    return cause.caused(message, source=_by(role), to=runner(number))


def _handled(event: Event, role: str) -> Event:
    return event.caused(DeliveryHandled(seq=event.seq), source=_by(role))


def _by(role: str) -> str:
    return f"{role}/bench"
