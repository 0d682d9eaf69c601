"""Control of an episode that runs: pause, resume, cancel, whatever else it is at."""

from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

import anyio
import pytest

from aworld_runtime import Agent
from aworld_runtime.bus.base import Bus, Mail, read_all
from aworld_runtime.bus.memory import MemoryBus
from aworld_runtime.bus.open import open_bus
from aworld_runtime.errors import BusFullError
from aworld_runtime.events import (
    BreakpointsSet,
    DeliveryHandled,
    EpisodeCancelled,
    EpisodeFinished,
    EpisodePaused,
    EpisodeRequested,
    EpisodeResumed,
    EpisodeStepped,
    EpisodeTakenOver,
    Event,
    EventData,
    MessagePosted,
    ModelCompleted,
    ModelRequested,
    Registry,
    SubscriptionChanged,
    ToolCalled,
    ToolReturned,
    utc_now,
)
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.nodes.node import Program
from aworld_runtime.nodes.owner import EpisodeOwner
from aworld_runtime.nodes.pause import ENDS, Pause
from aworld_runtime.replay.replay import replay
from tests.episodes import Adder, of_kind, one, owner_of, request_episode
from tests.waiting import wait_until

ADDITION = ToolCall(id="c1", name="add", arguments={"a": 1, "b": 2})


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with open_bus("memory://") as opened:
        yield opened


def adding(request: ModelRequest) -> Reply:
    return ADDITION if request.messages[-1].role == "user" else "three"


def adding_agent() -> tuple[Program, ScriptedModel, Adder]:
    model, tool = ScriptedModel(adding, delay_s=0.05), Adder()
    return Agent("solver", llm=model, tools=[tool]).program(), model, tool


async def tell(bus: Bus, owner: EpisodeOwner, data: EventData) -> None:
    await bus.send_mail(owner.log, Event.of(data, source="cli/1"))


def has(owner: EpisodeOwner, kind: type[EventData]) -> bool:
    return bool(of_kind(owner.events, kind))


async def pause_during_its_first_turn(bus: Bus, owner: EpisodeOwner) -> None:
    await wait_until(lambda: has(owner, ModelRequested))
    await tell(bus, owner, EpisodePaused(reason="a look at it"))
    await wait_until(lambda: has(owner, EpisodePaused))


async def test_in_a_pause_what_runs_ends_and_nothing_starts(bus: Bus) -> None:
    program, model, tool = adding_agent()
    owner = owner_of(bus, request_episode(), program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await pause_during_its_first_turn(bus, owner)
        await wait_until(lambda: has(owner, ToolCalled))
        assert not has(owner, EpisodeFinished)
        await anyio.wait_all_tasks_blocked()
        assert tool.ran == []
        await tell(bus, owner, EpisodeResumed())
    assert (tool.ran, len(model.requests)) == ([(1, 2)], 2)
    assert one(owner.events, EpisodeFinished).answer == "three"
    resumed = next(e.seq for e in owner.events if isinstance(e.data, EpisodeResumed))
    assert next(e.seq for e in owner.events if isinstance(e.data, ToolReturned)) > resumed
    assert (await replay(owner.events, program)).identical


async def test_time_stands_still_in_a_pause(bus: Bus) -> None:
    program, _, _ = adding_agent()
    deadline = utc_now() + timedelta(seconds=0.4)
    requested = request_episode(timeout_s=0.4, deadline=deadline)
    owner = owner_of(bus, requested, program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await pause_during_its_first_turn(bus, owner)
        await wait_until(lambda: utc_now() > deadline, description="the deadline")
        await anyio.wait_all_tasks_blocked()
        assert not has(owner, EpisodeFinished)
        await tell(bus, owner, EpisodeResumed())
    assert one(owner.events, EpisodeFinished).reason == "answered"


async def test_an_alarm_is_put_off_by_a_pause() -> None:
    pause, alarm = Pause(), anyio.Event()
    pause.call_in(0.1, alarm.set)
    pause.begin()
    with anyio.move_on_after(0.15):
        await pause.may_start()
    assert not alarm.is_set()
    resumed = anyio.current_time()
    pause.end()
    await alarm.wait()
    assert anyio.current_time() - resumed >= 0.09


async def test_an_episode_stays_paused_over_a_takeover(bus: Bus) -> None:
    program, model, tool = adding_agent()
    requested = request_episode()
    first = owner_of(bus, requested, program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run)
        await pause_during_its_first_turn(bus, first)
        await wait_until(lambda: has(first, ToolCalled))
        tasks.cancel_scope.cancel()
    second = owner_of(bus, requested, program, worker="w2")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second.run)
        await wait_until(lambda: has(second, EpisodeTakenOver))
        await anyio.wait_all_tasks_blocked()
        assert (len(model.requests), tool.ran) == (1, [])
        await tell(bus, second, EpisodeResumed())
    assert one(second.events, EpisodeFinished).answer == "three"


async def test_the_time_of_a_pause_before_a_takeover_does_not_count_against_the_deadline(
    bus: Bus,
) -> None:
    program, _, _ = adding_agent()
    ago = utc_now() - timedelta(hours=1)
    requested = request_episode(deadline=ago + timedelta(minutes=5))
    owner = owner_of(bus, requested, program)
    paused = Event.of(EpisodePaused(), source="cli/1", time=ago)
    await bus.append(owner.log, 0, [requested, paused])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await wait_until(lambda: has(owner, EpisodeTakenOver))
        await tell(bus, owner, EpisodeResumed())
    assert one(owner.events, EpisodeFinished).reason == "answered"


async def test_a_paused_episode_in_which_nothing_is_left_to_do_waits_for_its_resumption(
    bus: Bus,
) -> None:
    owner = owner_of(bus, request_episode(), Program(nodes=()))
    paused = Event.of(EpisodePaused(), source="cli/1")
    await bus.append(owner.log, 0, [request_episode(), paused])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await wait_until(lambda: has(owner, EpisodeTakenOver))
        await anyio.wait_all_tasks_blocked()
        assert not has(owner, EpisodeFinished)
        await tell(bus, owner, EpisodeResumed())
    assert one(owner.events, EpisodeFinished).reason == "quiescent"


async def test_a_paused_episode_can_be_cancelled(bus: Bus) -> None:
    program, _, tool = adding_agent()
    owner = owner_of(bus, request_episode(), program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await pause_during_its_first_turn(bus, owner)
        await tell(bus, owner, EpisodeCancelled(reason="not needed"))
    assert one(owner.events, EpisodeFinished).reason == "cancelled"
    assert tool.ran == []


# --- steps and breakpoints ---------------------------------------------------------------------------------------------


def begins_paused() -> Event:
    requested = request_episode()
    data = requested.data
    assert isinstance(data, EpisodeRequested)
    return requested.model_copy(update={"data": data.model_copy(update={"paused": True})})


async def step(bus: Bus, owner: EpisodeOwner, count: int = 1) -> None:
    """Let one thing after another start; returns when all that could has ended."""
    ends = len([e for e in owner.events if e.type in ENDS])
    await tell(bus, owner, EpisodeStepped(count=count))
    await wait_until(lambda: len([e for e in owner.events if e.type in ENDS]) >= ends + count)
    await anyio.wait_all_tasks_blocked()


async def test_an_episode_that_begins_paused_is_stepped_through(bus: Bus) -> None:
    program, model, tool = adding_agent()
    owner = owner_of(bus, begins_paused(), program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await wait_until(lambda: has(owner, SubscriptionChanged))
        await anyio.wait_all_tasks_blocked()
        assert not has(owner, DeliveryHandled)
        await step(bus, owner)
        assert (len(model.requests), tool.ran) == (0, [])  # the swarm's rules gave out the task
        await step(bus, owner)
        assert (len(model.requests), tool.ran) == (1, [])
        await step(bus, owner)
        assert (len(model.requests), tool.ran) == (1, [(1, 2)])
        await tell(bus, owner, EpisodeResumed())
    assert one(owner.events, EpisodeFinished).answer == "three"
    assert (await replay(owner.events, program)).identical


async def test_a_step_that_nobody_asked_for_in_a_pause_is_none(bus: Bus) -> None:
    program, _, tool = adding_agent()
    owner = owner_of(bus, request_episode(), program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await wait_until(lambda: has(owner, ModelRequested))
        await tell(bus, owner, EpisodeStepped(count=9))
        await tell(bus, owner, EpisodePaused())
        await wait_until(lambda: has(owner, ToolCalled))
        await anyio.wait_all_tasks_blocked()
        assert tool.ran == []
        await tell(bus, owner, EpisodeResumed())


async def test_at_a_breakpoint_nothing_starts_that_follows_from_its_event(bus: Bus) -> None:
    program, _, tool = adding_agent()
    owner = owner_of(bus, begins_paused(), program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await tell(bus, owner, BreakpointsSet(breakpoints=("type=tool.called and name=add",)))
        await tell(bus, owner, EpisodeResumed())
        await wait_until(lambda: has(owner, EpisodePaused))
        await anyio.wait_all_tasks_blocked()
        assert tool.ran == []
        called, paused = (
            next(e for e in owner.events if isinstance(e.data, kind))
            for kind in (ToolCalled, EpisodePaused)
        )
        assert (paused.seq, paused.data) == (
            called.seq + 1,
            EpisodePaused(reason="breakpoint: type=tool.called and name=add"),
        )
        await tell(bus, owner, EpisodeResumed())
    assert one(owner.events, EpisodeFinished).answer == "three"
    assert (await replay(owner.events, program)).identical


async def test_a_breakpoint_ends_the_steps_that_are_left(bus: Bus) -> None:
    program, _, tool = adding_agent()
    owner = owner_of(bus, begins_paused(), program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await tell(bus, owner, BreakpointsSet(breakpoints=("tool.called",)))
        await tell(bus, owner, EpisodeStepped(count=20))
        await wait_until(lambda: has(owner, EpisodePaused))
        await anyio.wait_all_tasks_blocked()
        assert tool.ran == []
        await tell(bus, owner, BreakpointsSet())
        await tell(bus, owner, EpisodeStepped(count=20))
        await wait_until(lambda: has(owner, EpisodeFinished))


async def test_no_breakpoint_holds_up_the_end(bus: Bus) -> None:
    program, _, _ = adding_agent()
    owner = owner_of(bus, begins_paused(), program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await tell(bus, owner, BreakpointsSet(breakpoints=("episode.finished",)))
        await tell(bus, owner, EpisodeResumed())
    assert one(owner.events, EpisodeFinished).answer == "three"
    assert not has(owner, EpisodePaused)


async def test_a_breakpoint_that_cannot_be_read_is_told_and_stops_nothing(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    program, _, _ = adding_agent()
    owner = owner_of(bus, begins_paused(), program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await tell(bus, owner, BreakpointsSet(breakpoints=("type=(", "model.requested")))
        await tell(bus, owner, EpisodeResumed())
        await wait_until(lambda: has(owner, EpisodePaused))
        assert one(owner.events, EpisodePaused).reason == "breakpoint: type=model.requested"
        await tell(bus, owner, BreakpointsSet())
        await tell(bus, owner, EpisodeResumed())
    assert "goes on without a breakpoint: predicate 'type=('" in caplog.text
    assert one(owner.events, EpisodeFinished).answer == "three"


async def test_breakpoints_and_steps_survive_a_takeover(bus: Bus) -> None:
    program, model, tool = adding_agent()
    requested = begins_paused()
    first = owner_of(bus, requested, program)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first.run)
        await tell(bus, first, BreakpointsSet(breakpoints=("tool.called",)))
        await step(bus, first)
        await tell(bus, first, EpisodeStepped(count=2))
        await wait_until(lambda: has(first, ModelRequested))
        tasks.cancel_scope.cancel()  # in its first turn: two steps are left
    assert tool.ran == []
    second = owner_of(bus, requested, program, worker="w2")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(second.run)
        await wait_until(lambda: has(second, EpisodePaused))
        await anyio.wait_all_tasks_blocked()
        assert (len(model.requests), tool.ran) == (2, [])
        await step(bus, second)
        assert (len(model.requests), tool.ran) == (2, [(1, 2)])
        tasks.cancel_scope.cancel()
    third = owner_of(bus, requested, program, worker="w3")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(third.run)
        await wait_until(lambda: has(third, EpisodeTakenOver) and len(third.events) > 1)
        await anyio.wait_all_tasks_blocked()
        assert len(model.requests) == 2
        await tell(bus, third, EpisodeResumed())
    assert one(third.events, EpisodeFinished).answer == "three"
    assert tool.ran == [(1, 2)]


class Narrow(MemoryBus):
    """A bus that is full for every log until it is `open`."""

    def __init__(self) -> None:
        super().__init__("memory://", Registry())
        self.open = True
        self.refused = 0

    async def append(
        self,
        log: str,
        expected_seq: int,
        events: Sequence[Event],
        *,
        acks: Sequence[Mail] = (),
        feed_id: str | None = None,
    ) -> int:
        if not self.open:
            self.refused += 1
            raise BusFullError("no room")
        return await super().append(log, expected_seq, events, acks=acks, feed_id=feed_id)


async def test_a_cancellation_is_heard_while_data_waits_for_its_append() -> None:
    program, model, tool = adding_agent()
    async with Narrow() as bus:
        owner = owner_of(bus, request_episode(), program)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(owner.run)
            await wait_until(lambda: has(owner, ModelRequested))
            bus.open = False
            await tell(bus, owner, MessagePosted(content="first"))
            await wait_until(lambda: bus.refused > 0, description="the append that waits")
            for number in range(50):
                await tell(bus, owner, MessagePosted(content=str(number)))
            await wait_until(lambda: len(model.requests) == 1)
            await tell(bus, owner, EpisodeCancelled(reason="enough"))
            bus.open = True
        events = await read_all(bus, owner.log)
    assert one(events, EpisodeFinished).reason == "cancelled"
    assert [message.content for message in of_kind(events, MessagePosted)][1:] == ["first"]
    assert len(of_kind(events, ModelCompleted)) <= 1
    assert tool.ran == []
