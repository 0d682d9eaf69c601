"""What a requester knows of episodes that a server lost before the store had them."""

from __future__ import annotations

from pathlib import Path

import pytest

from aworld_runtime.archive.logs import Logs
from aworld_runtime.archive.lost import say_ended, say_lost
from aworld_runtime.bus.open import open_bus
from aworld_runtime.events import EpisodeFinished, EpisodeRequested, Event, LogRestored
from aworld_runtime.messages import Task
from aworld_runtime.names import episode_log
from aworld_runtime.store.open import open_store

pytestmark = pytest.mark.anyio

REQUESTED = Event.of(
    EpisodeRequested(task=Task(id="t", prompt="?"), program="m:a"), source="r/1", episode_id="e"
)
FINISHED = REQUESTED.caused(EpisodeFinished(answer="42"), source="worker/w")


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
