"""What a server that comes back without its data costs: nothing that its owners know, on real servers that die.

The janitor's part, where the owners are gone too, is in test_janitor.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import pytest

from aworld_runtime.agents import Agent
from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.base import Delivery, read_all
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import Fenced
from aworld_runtime.events import (
    EpisodeFinished,
    EpisodeTakenOver,
    Event,
    EventData,
    LogRestored,
    ToolCalled,
)
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import EPISODES_QUEUE, episode_log
from aworld_runtime.nodes.claim import Claim
from aworld_runtime.nodes.worker import Worker
from tests.episodes import Gate, of_kind, owner_of, request_episode
from tests.faults import restart_empty
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    """A server for one test, which may do to it what it likes."""
    async with PrivateServer(tmp_path / "server") as server:
        yield server


def gated(*gates: Gate) -> Agent:
    calls = [ToolCall(id=gate.name, name=gate.name) for gate in gates]
    return Agent("gated", llm=ScriptedModel([*calls, "through"]), tools=list(gates))


async def ended(bus: Bus, log: str) -> Sequence[Event]:
    """The log, once its episode has ended."""
    found: list[Event] = []

    async def has_ended() -> bool:
        found[:] = await read_all(bus, log)
        return bool(of_kind(found, EpisodeFinished))

    await wait_until(has_ended, timeout=15, description=f"the end of {log}")
    return found


def ids(events: Sequence[Event]) -> list[str]:
    return [event.id for event in events]


async def test_an_idle_owner_puts_back_all_that_a_server_lost_and_the_episode_is_taken_over(
    server: PrivateServer,
) -> None:
    """Nothing happens in the episode, so no append of its own tells the owner."""
    gate = Gate()
    requested = request_episode()
    log = episode_log(requested.episode_id or "")
    async with open_bus(server.url) as bus, anyio.create_task_group() as tasks:
        tasks.start_soon(Worker(bus, name="w", programs={"local:test": gated(gate)}).run)
        await bus.put(EPISODES_QUEUE, requested)
        await gate.reached.wait()
        before = await read_all(bus, log)
        await restart_empty(server)

        async def is_back() -> bool:
            return ids(await read_all(bus, log))[: len(before)] == ids(before)

        await wait_until(is_back, timeout=10, description="the log put back")

        async def is_taken_over() -> bool:
            return bool(of_kind(await read_all(bus, log), EpisodeTakenOver))

        await wait_until(is_taken_over, timeout=20, description="the takeover")
        gate.open.set()
        after = await ended(bus, log)
        assert ids(after[: len(before)]) == ids(before)
        assert len(of_kind(after, EpisodeTakenOver)) == 1
        assert of_kind(after, EpisodeFinished)[0].answer == "through"
        tasks.cancel_scope.cancel()


async def test_an_owner_that_appends_to_a_lost_log_loses_nothing(server: PrivateServer) -> None:
    """Its next event is refused, then what the server lost is put back; another owner goes on."""
    first, second = Gate("first"), Gate("second")
    requested = request_episode()
    log = episode_log(requested.episode_id or "")
    async with open_bus(server.url) as bus, anyio.create_task_group() as tasks:
        tasks.start_soon(Worker(bus, name="w", programs={"local:test": gated(first, second)}).run)
        await bus.put(EPISODES_QUEUE, requested)
        await first.reached.wait()
        before = await read_all(bus, log)
        await restart_empty(server)
        first.open.set()
        second.open.set()
        after = await ended(bus, log)
        assert ids(after[: len(before)]) == ids(before)
        assert of_kind(after, EpisodeFinished)[0].answer == "through"
        called = [e.call.id for e in of_kind(after, ToolCalled)]
        assert called == ["first", "second"], "each once in the log"
        tasks.cancel_scope.cancel()


async def test_no_log_is_begun_on_a_claim_that_the_server_lost(server: PrivateServer) -> None:
    """As a worker has it that was stopped before it began, and goes on after the server came back without its data."""
    async with (
        open_bus(server.url) as bus,
        bus.consume(EPISODES_QUEUE, consumer="w") as consumer,
    ):
        await bus.put(EPISODES_QUEUE, request_episode())
        delivery = await consumer.take()
        claim = Claim(bus, "log", delivery.event, delivery)
        await claim.expect()
        await restart_empty(server)
        with pytest.raises(Fenced, match="no longer held"):
            await claim.expect()
        assert await bus.backlog(EPISODES_QUEUE) == 0


async def test_a_log_is_not_begun_on_a_server_that_lost_its_data_since_the_claim_was_seen(
    server: PrivateServer,
) -> None:
    """A worker may be stopped in between, for long."""
    async with open_bus(server.url) as bus:
        feed_id = await bus.feed_id("log")
        await bus.append("other", 0, [request_episode()], feed_id=feed_id)
        await restart_empty(server)
        for _ in range(2):
            with pytest.raises(Fenced):
                await bus.append("log", 0, [request_episode()], feed_id=feed_id)
            assert await bus.feed_id("log") != feed_id
        assert await bus.last_seq("log") == 0
        await bus.append("log", 0, [request_episode()], feed_id=await bus.feed_id("log"))


async def test_two_owners_of_one_lost_log_put_back_what_each_knows(server: PrivateServer) -> None:
    """One was stopped and taken over: it knows the beginning, the other all."""
    async with open_bus(server.url) as bus:
        requested = request_episode()
        log = episode_log(requested.episode_id or "")
        old = [requested, Event.of(EpisodeTakenOver(worker="w1"), source="worker/w1")]
        new = [Event.of(EpisodeTakenOver(worker="w2"), source="worker/w2")]
        await bus.append(log, await bus.append(log, 0, old), new)
        everything = await read_all(bus, log)
        await bus.put("claims", requested)
        async with bus.consume("claims", consumer="c", credit=2) as consumer:
            delivery = await consumer.take()
            await restart_empty(server)
            async with anyio.create_task_group() as owners:
                for known in (everything[:2], everything):
                    owners.start_soon(puts_back, bus, known, delivery)
            assert ids(await read_all(bus, log)) == ids(everything)
            assert await said_by_the_heir(bus, await consumer.take()) == LogRestored(at=3)


async def test_a_log_that_was_put_back_by_who_had_been_taken_over_says_that_more_may_be_lost(
    server: PrivateServer,
) -> None:
    """The one who knew how it went on died with the server's data."""
    async with open_bus(server.url) as bus:
        requested = request_episode()
        log = episode_log(requested.episode_id or "")
        await bus.append(log, 0, [requested, Event.of(EpisodeTakenOver(worker="w1"), source="w/1")])
        known = await read_all(bus, log)
        await bus.append(log, 2, [Event.of(EpisodeTakenOver(worker="w2"), source="w/2")])
        await bus.put("claims", requested)
        async with bus.consume("claims", consumer="c", credit=2) as consumer:
            delivery = await consumer.take()
            await restart_empty(server)
            await puts_back(bus, known, delivery)
            assert ids(await read_all(bus, log)) == ids(known)
            assert await said_by_the_heir(bus, await consumer.take()) == LogRestored(at=2)


async def said_by_the_heir(bus: Bus, delivery: Delivery) -> EventData:
    """What whoever claims the episode next says first, right before the takeover."""
    owner = owner_of(bus, delivery.event, gated(Gate()).program())
    before = await bus.last_seq(owner.log)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(owner.run)
        await wait_until(lambda: len(owner.events) > before, description="it is taken over")
        tasks.cancel_scope.cancel()
    assert isinstance(owner.events[before + 1].data, EpisodeTakenOver)
    return owner.events[before].data


async def puts_back(bus: Bus, known: Sequence[Event], delivery: Delivery) -> None:
    """As an owner does whose claim the server has lost, and who notices that twice; each would end the other."""
    requested = delivery.event
    log = episode_log(requested.episode_id or "")
    claim = Claim(bus, log, requested, delivery)

    async def look() -> None:
        if not await claim.put_back(known):
            await claim.check()

    told: list[str] = []
    try:
        async with anyio.create_task_group() as owner:
            owner.start_soon(look)
            owner.start_soon(look)
    except* Fenced as fenced:
        told += [str(error) for error in fenced.exceptions]
    assert told
    assert "queued again" in told[0]


async def test_a_zombie_of_a_retired_log_is_refused(server: PrivateServer) -> None:
    async with open_bus(server.url) as bus:
        requested = request_episode()
        gate = Gate()
        owner = owner_of(bus, requested, gated(gate).program())
        taken = Event.of(EpisodeTakenOver(worker="w2"), source="worker/w2")
        end = Event.of(EpisodeFinished(answer="done"), source="worker/w2")
        with pytest.RaisesGroup(Fenced, flatten_subgroups=True):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(owner.run)
                await gate.reached.wait()
                await bus.append(owner.log, len(owner.events), [taken, end])
                await bus.unlink(owner.log)
                gate.open.set()
        assert ids(await read_all(bus, owner.log)) == [end.id]
        assert await bus.last_seq(owner.log) == len(owner.events) + 2
