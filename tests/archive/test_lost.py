"""Logs of which a server lost events: what is put back, and what a requester knows of those that the store lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from aworld_runtime.archive.logs import Logs
from aworld_runtime.archive.lost import put_back, say_ended, say_lost, say_restored
from aworld_runtime.bus.open import open_bus
from aworld_runtime.events import (
    EpisodeFinished,
    EpisodeForked,
    EpisodeRequested,
    Event,
    LogRestored,
    MessagePosted,
)
from aworld_runtime.messages import Task
from aworld_runtime.names import episode_log
from aworld_runtime.store.open import open_store

pytestmark = pytest.mark.anyio

REQUESTED = Event.of(
    EpisodeRequested(task=Task(id="t", prompt="?"), program="m:a"), source="r/1", episode_id="e"
)
FINISHED = REQUESTED.caused(EpisodeFinished(answer="42"), source="worker/w")


def log_of(first: Event, *, after: int = 0, length: int = 5) -> list[Event]:
    """Events of one log from `after` on, as its owner knows them."""
    notes = [first.caused(MessagePosted(content=f"{i}"), source="w/1") for i in range(length - 1)]
    return [event.at(seq) for seq, event in enumerate([first, *notes], after + 1)]


@pytest.mark.parametrize("kept", [0, 1, 3, 5])
async def test_what_the_bus_lacks_of_a_log_is_put_back_and_nothing_else(kept: int) -> None:
    known = log_of(REQUESTED)
    async with open_bus("memory://") as bus:
        await bus.append("log", 0, known[:kept])
        assert await put_back(bus, "log", known) == 5 - kept
        assert await bus.read("log") == known


async def test_a_fork_is_put_back_where_it_began() -> None:
    known = log_of(Event.of(EpisodeForked(parent="p", at=3), source="fork/1"), after=3)
    async with open_bus("memory://") as bus:
        assert await put_back(bus, "log", known) == 5
        assert await bus.read("log") == known


async def test_a_log_that_began_anew_or_has_gone_on_is_left_alone() -> None:
    known = log_of(REQUESTED)
    async with open_bus("memory://") as bus:
        await bus.append("anew", 0, [FINISHED])
        assert await put_back(bus, "anew", known) == 0
        assert await bus.last_seq("anew") == 1
        await bus.append("on", 0, [*known, FINISHED])
        assert await put_back(bus, "on", known) == 0
        assert not await say_restored(bus, "on", 5, known[0], source="worker/w")
        assert await bus.last_seq("on") == 6


async def test_an_episode_that_begins_again_says_that_its_log_was_lost() -> None:
    async with open_bus("memory://") as bus:
        await say_lost(bus, REQUESTED, source="runtime/r")
        events = await bus.read(episode_log("e"))
    assert [event.data for event in events] == [REQUESTED.data, LogRestored(at=0)]


async def test_nothing_is_said_where_somebody_knew_more() -> None:
    async with open_bus("memory://") as bus:
        await bus.append(episode_log("e"), 0, [REQUESTED])
        await say_lost(bus, REQUESTED, source="runtime/r")
        assert await bus.last_seq(episode_log("e")) == 1


async def test_an_end_that_is_known_outlives_its_log(tmp_path: Path) -> None:
    async with (
        open_bus("memory://") as bus,
        open_store(f"sqlite:///{tmp_path}/store.db") as store,
    ):
        logs = Logs(bus, store)
        kept = FINISHED.model_copy(update={"episode_id": "kept", "id": "kept"})
        await store.put_events(episode_log("kept"), [kept.at(1)])
        await say_ended(bus, logs, [REQUESTED, FINISHED, kept], source="runtime/r")
        events = await bus.read(episode_log("e"))
        assert await bus.last_seq(episode_log("kept")) == 0
    assert [event.data for event in events] == [LogRestored(at=0), FINISHED.data]
    assert events[-1].id == FINISHED.id
