"""An owner that has nothing to do but wait for a person: no task, and nothing missed."""
# ruff: noqa: ARG002 - nodes have a given signature

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aworld_runtime.bus.base import Bus, read_all
from aworld_runtime.bus.open import open_bus
from aworld_runtime.errors import Fenced
from aworld_runtime.events import (
    EpisodeCancelled,
    EpisodeFinished,
    EpisodeRequested,
    EpisodeTakenOver,
    Event,
    HumanAnswered,
    HumanAsked,
)
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Program
from aworld_runtime.nodes.owner import EpisodeOwner
from tests.episodes import one, owner_of, request_episode


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    async with open_bus("memory://") as opened:
        yield opened


class Asker:
    """Asks a human, and finishes with the answer."""

    role = "asker"
    subscriptions = (EpisodeRequested.type,)

    async def handle(self, ctx: Context, event: Event) -> None:
        if isinstance(event.data, HumanAnswered):
            ctx.emit(EpisodeFinished(answer=event.data.answer))
        else:
            ctx.emit(HumanAsked(question="Shall it go on?"))


PROGRAM = Program(nodes=(Asker(),))


def answer(owner: EpisodeOwner) -> Event:
    asked = next(event for event in owner.events if isinstance(event.data, HumanAsked))
    return Event.of(
        HumanAnswered(answer="yes"), source="human/1", to=Asker.role, correlation_id=asked.id
    )


async def asking(bus: Bus, requested: Event | None = None) -> EpisodeOwner:
    """One that has asked and waits."""
    owner = owner_of(bus, requested or request_episode(), PROGRAM)
    assert await owner.work() is None
    return owner


async def woken(owner: EpisodeOwner, by: Callable[[], Awaitable[None]]) -> None:
    woken = anyio.Event()
    owner.rest(woken.set)
    await anyio.wait_all_tasks_blocked()
    assert not woken.is_set()
    await by()
    with anyio.fail_after(5):
        await woken.wait()


async def test_an_owner_that_waits_for_a_human_keeps_no_task_and_hears_the_answer(
    bus: Bus,
) -> None:
    tasks = len(asyncio.all_tasks())
    owner = await asking(bus)
    assert len(asyncio.all_tasks()) == tasks
    await woken(owner, by=lambda: bus.send_mail(owner.log, answer(owner)))
    finished = await owner.work()
    assert finished is not None
    assert finished.answer == "yes"
    owner.close()


async def test_an_owner_at_rest_is_cancelled_like_any_other(bus: Bus) -> None:
    owner = await asking(bus)
    cancel = Event.of(EpisodeCancelled(reason="not needed"), source="cli/1")
    await woken(owner, by=lambda: bus.send_mail(owner.log, cancel))
    finished = await owner.work()
    assert finished is not None
    assert finished.reason == "cancelled"
    owner.close()


async def test_the_time_of_an_owner_at_rest_goes_on(bus: Bus) -> None:
    owner = await asking(bus, request_episode(timeout_s=0.1))
    await woken(owner, by=checkpoint)
    finished = await owner.work()
    assert finished is not None
    assert finished.reason == "time_limit"
    owner.close()


class Hanger(Asker):
    """Waits for what never comes."""

    async def handle(self, ctx: Context, event: Event) -> None:
        await anyio.sleep_forever()


def test_a_time_limit_needs_no_task_to_end_what_hangs() -> None:
    async def main() -> None:
        async with open_bus("memory://") as bus:
            owner = owner_of(bus, request_episode(timeout_s=0.05), Program(nodes=(Hanger(),)))
            with anyio.fail_after(5):
                assert (await owner.run()).reason == "time_limit"

    asyncio.run(main())  # where anyio itself runs no loop, a timer can't start a task


async def test_an_owner_at_rest_puts_back_what_the_server_lost_and_rests_again(bus: Bus) -> None:
    owner = await asking(bus)
    known = await read_all(bus, owner.log)
    await bus.unlink(owner.log, keep_s=0)

    async def look() -> None:
        owner.look()

    await woken(owner, by=look)
    assert await owner.work() is None
    assert await read_all(bus, owner.log) == known
    owner.close()


async def test_an_owner_at_rest_that_was_taken_over_is_fenced_when_it_hears_of_something(
    bus: Bus,
) -> None:
    owner = await asking(bus)
    taken_over = Event.of(EpisodeTakenOver(worker="w2"), source="worker/w2")
    await bus.append(owner.log, len(owner.events), [taken_over])
    await woken(owner, by=lambda: bus.send_mail(owner.log, answer(owner)))
    fenced = False
    try:
        await owner.work()
    except* Fenced:
        fenced = True
    assert fenced
    owner.close()


@pytest.mark.parametrize("moment", range(12))
async def test_an_answer_that_comes_while_its_owner_goes_to_rest_is_heard(
    bus: Bus, moment: int
) -> None:
    first = await asking(bus)
    first.close()
    heir = owner_of(bus, first.events[0], PROGRAM, worker="w2")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(heir.run)
            for _ in range(moment):
                await checkpoint()
            await bus.send_mail(heir.log, answer(first))
    assert one(heir.events, EpisodeFinished).answer == "yes"
