"""What every store keeps, whatever the backend."""

import hashlib
import math
import re
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest

from aworld_runtime.errors import LogRewoundError, StoreError, UnknownEventTypeError
from aworld_runtime.events import (
    Event,
    EventData,
    HumanAsked,
    MessagePosted,
    ModelCompleted,
    Registry,
)
from aworld_runtime.messages import Usage
from aworld_runtime.payloads import Blob
from aworld_runtime.processes import spawn
from aworld_runtime.store import BusRecord, EpisodeRecord, RolloutRow, RunRecord, Store, open_store
from tests.waiting import wait_until

START = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
LOG = "episode:one"
WRITER = Path(__file__).with_name("writer.py")


def posted(seqs: Iterable[int], content: str = "hello") -> list[Event]:
    return [Event.of(MessagePosted(content=content), source="user/1").at(seq) for seq in seqs]


def blob_of(event: Event) -> Blob:
    blobs: list[Blob] = []
    Registry().encode_apart(event, blobs)
    return blobs[0]


def row(
    index: int, run_id: str = "run", *, logprobs: tuple[float, ...] = (-0.5, -1.25)
) -> RolloutRow:
    return RolloutRow(
        id=f"episode/solver/{index:06}",
        run_id=run_id,
        group_id="group",
        episode_id="episode",
        role="solver",
        token_ids=(index, 151_000),
        loss_mask=(False, True),
        behavior_logprobs=logprobs,
        policy="policy",
        policy_version=3,
        reward=0.75,
        weight=0.5,
    )


# --- events --------------------------------------------------------------------------------------------------------


async def test_events_come_back_as_they_were(store: Store) -> None:
    data: list[EventData] = [
        MessagePosted(content="größer ☃ \x00"),
        ModelCompleted(token_ids=(1, 2), behavior_logprobs=(math.nan, -0.1)),
    ]
    events = [
        Event.of(d, source="solver/1", episode_id="one", policy_version=4, time=START).at(seq)
        for seq, d in enumerate(data, 1)
    ]
    await store.put_events(LOG, events)
    first, second = await store.read(LOG)
    assert first == events[0]
    assert isinstance(second.data, ModelCompleted)
    assert math.isnan(second.data.behavior_logprobs[0])
    assert second.time == START


async def test_an_event_that_cannot_be_read_is_named(store: Store, store_url: str) -> None:
    """With the kind of error that it is."""
    await store.put_events(LOG, posted(range(1, 4)))
    await store.put_events(LOG, [Event.of(HumanAsked(question="?"), source="solver/1").at(4)])
    ignorant = Registry()
    del ignorant.types["human.asked"]
    told = rf"event 4 of episode:one in {re.escape(store.url)} can't be read: unknown event type"
    async with open_store(store_url, ignorant) as reader:
        assert len(await reader.read(LOG, limit=3)) == 3
        with pytest.raises(UnknownEventTypeError, match=told):
            await reader.read(LOG)


async def test_large_content_is_kept_once_for_all_logs_and_comes_back(store: Store) -> None:
    large = [note.at(seq) for seq, note in enumerate(posted([1, 2], "x" * 200_000), 1)]
    for log in (LOG, "episode:two"):
        await store.put_events(log, [*large, *posted([3])])
        await store.put_events(log, large)
        assert (await store.read(log))[:2] == large
    assert await store.blob(blob_of(large[0]).sha256) == blob_of(large[0]).content
    assert blob_of(large[0]) == blob_of(large[1])


async def test_a_blob_that_was_put_is_not_the_events_alone(store: Store) -> None:
    [event] = posted([1], "x" * 200_000)
    sha256 = await store.put_blob(blob_of(event).content)
    await store.put_events(LOG, [event])
    assert sha256 == blob_of(event).sha256
    assert await store.read(LOG) == [event]


async def test_part_of_a_log_is_read(store: Store) -> None:
    events = posted(range(1, 11))
    await store.put_events(LOG, events)
    assert await store.read(LOG, 4, limit=3) == events[3:6]
    assert await store.read(LOG, 9) == events[8:]
    assert await store.read(LOG, 11) == []
    assert await store.read(LOG, limit=0) == []
    assert await store.last_seq(LOG) == 10


async def test_unknown_log_is_empty(store: Store) -> None:
    assert await store.read("episode:none") == []
    assert await store.last_seq("episode:none") == 0
    await store.put_events("episode:none", [])
    assert await store.logs() == []


async def test_log_may_begin_after_its_parents_prefix(store: Store) -> None:
    events = posted(range(8, 10))
    await store.put_events(LOG, events)
    assert await store.read(LOG) == events
    assert await store.last_seq(LOG) == 9


async def test_logs_are_listed_by_prefix(store: Store) -> None:
    for log in ("run:1", "episode:b", "episode:a", "episode:a:2", "episodes"):
        await store.put_events(log, posted([1, 2]))
    assert await store.logs("episode:") == ["episode:a", "episode:a:2", "episode:b"]
    assert await store.logs() == ["episode:a", "episode:a:2", "episode:b", "episodes", "run:1"]
    assert await store.logs("step:") == []
    assert len(await store.read("episode:a")) == 2


async def test_writing_again_changes_nothing(store: Store) -> None:
    events = posted(range(1, 6))
    await store.put_events(LOG, events[:3])
    await store.put_events(LOG, events[:3])
    await store.put_events(LOG, events[1:])
    assert await store.read(LOG) == events


async def test_rewound_log_is_refused_and_left_as_it_was(store: Store) -> None:
    kept = posted(range(1, 4))
    await store.put_events(LOG, kept)
    with pytest.raises(LogRewoundError, match=kept[2].id) as caught:
        await store.put_events(LOG, posted(range(3, 7)))
    assert LOG in str(caught.value)
    assert await store.read(LOG) == kept


async def test_rewound_log_does_not_disturb_others(store: Store) -> None:
    await store.put_events(LOG, posted([1]))
    others = {f"episode:{i}": posted(range(1, 4)) for i in range(10)}

    async def rewind() -> None:
        with pytest.raises(LogRewoundError):
            await store.put_events(LOG, posted([1]))

    async with anyio.create_task_group() as group:
        for log, events in others.items():
            group.start_soon(store.put_events, log, events)
            group.start_soon(rewind)
    for log, events in others.items():
        assert await store.read(log) == events


async def test_event_without_a_seq_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="seq"):
        await store.put_events(LOG, posted([0]))


async def test_concurrent_writers_of_one_log_keep_each_event_once(
    store: Store, store_url: str
) -> None:
    events = posted(range(1, 301))

    async def archive(target: Store, size: int) -> None:
        for at in range(0, len(events), size):
            await target.put_events(LOG, events[at : at + size])

    async with open_store(store_url) as second, anyio.create_task_group() as group:
        group.start_soon(archive, store, 7)
        group.start_soon(archive, second, 50)
        group.start_soon(archive, store, 300)
    assert await store.read(LOG) == events


async def test_large_batch_is_split(store: Store) -> None:
    """Twenty megabytes that don't compress, and more events than go into one insert."""
    noise = "".join(hashlib.sha256(str(i).encode()).hexdigest() for i in range(16_000))
    large = posted(range(1, 21), content=noise)
    small = posted(range(21, 1_521))
    await store.put_events(LOG, large + small)
    assert await store.last_seq(LOG) == 1_520
    assert await store.read(LOG, 19, limit=4) == large[18:] + small[:2]


async def test_other_process_reads_what_is_being_written(
    store: Store, store_url: str, tmp_path: Path
) -> None:
    output = tmp_path / "writer.log"
    async with await spawn([sys.executable, WRITER, store_url, LOG], log=output):
        await wait_until(lambda: _acknowledged(output) >= 20, 20, "the other process's writes")
        acknowledged = _acknowledged(output)
        events = await store.read(LOG)
        await store.put_events("episode:mine", posted([1]))
    assert len(events) >= acknowledged
    assert [event.seq for event in events] == list(range(1, len(events) + 1))


@pytest.mark.chaos
async def test_killed_writer_loses_nothing_acknowledged(store_url: str, tmp_path: Path) -> None:
    output = tmp_path / "writer.log"
    async with await spawn([sys.executable, WRITER, store_url, LOG], log=output) as writer:
        await wait_until(lambda: _acknowledged(output) >= 50, 20, "the writer's progress")
        await writer.stop(grace=0)
    async with open_store(store_url) as store:
        assert await store.last_seq(LOG) >= _acknowledged(output)


async def test_cancelled_write_leaves_the_store_usable(store: Store) -> None:
    events = posted(range(1, 501))
    for at in range(0, 500, 50):
        with anyio.move_on_after(0.001):
            await store.put_events(LOG, events[at : at + 50])
    await store.put_events(LOG, events)
    assert await store.read(LOG) == events


async def test_closed_store_says_so(store_url: str) -> None:
    store = open_store(store_url)
    with pytest.raises(StoreError, match="async with"):
        await store.last_seq(LOG)
    async with store:
        assert await store.last_seq(LOG) == 0
    with pytest.raises(StoreError, match="async with"):
        await store.put_events(LOG, posted([1]))


async def test_store_keeps_its_content_when_closed(store_url: str) -> None:
    events = posted([1, 2])
    async with open_store(store_url) as store:
        await store.put_events(LOG, events)
    async with open_store(store_url) as store:
        assert await store.read(LOG) == events


# --- records -------------------------------------------------------------------------------------------------------


def record(name: str, minutes: int, **fields: object) -> EpisodeRecord:
    return EpisodeRecord.model_validate(
        {"id": name, "started": START + timedelta(minutes=minutes), "last_seq": 1} | fields
    )


async def test_episode_record_comes_back(store: Store) -> None:
    episode = record("one", 0, run_id="run", status="answered", answer="85", reward=0.5)
    episode = episode.model_copy(update={"usage": Usage(prompt_tokens=7, cost_usd=0.25)})
    await store.put_episode(episode)
    assert await store.episode("one") == episode
    assert await store.episode("two") is None


async def test_only_a_newer_episode_record_replaces(store: Store) -> None:
    for last_seq, answer in (
        (5, "five"),
        (3, "three"),
        (5, "five again"),
        (9, "nine"),
        (8, "eight"),
    ):
        await store.put_episode(record("one", 0, last_seq=last_seq, answer=answer))
        kept = await store.episode("one")
        assert kept is not None
        assert (kept.last_seq, kept.answer) == ((9, "nine") if last_seq > 7 else (5, "five"))


async def test_unfinished_episodes_of_a_feed_come_page_by_page(store: Store) -> None:
    for number in range(5):
        await store.put_episode(record(f"e{number}", 0, feed="f1"))
    await store.put_episode(record("e5", 0, feed="f1", status="answered"))
    await store.put_episode(record("e6", 0, feed="f2"))
    await store.put_episode(record("e7", 0))
    first = await store.unfinished("f1", limit=3)
    rest = await store.unfinished("f1", after=first[-1].id, limit=3)
    assert [e.id for e in (*first, *rest)] == ["e0", "e1", "e2", "e3", "e4"]
    await store.put_episode(record("e0", 0, feed="f2"))
    await store.put_episode(record("e1", 0, feed="f1", status="answered", last_seq=2))
    assert [e.id for e in await store.unfinished("f1")] == ["e2", "e3", "e4"]
    assert [e.id for e in await store.unfinished("f2")] == ["e0", "e6"]


async def test_the_episodes_of_a_run_stream_oldest_first(store: Store) -> None:
    names = [f"e{number:03}" for number in range(150)]
    for number, name in enumerate(names):
        await store.put_episode(record(name, number // 130, run_id="r1"))
    await store.put_episode(record("other", 0, run_id="r2"))
    assert [e.id async for e in store.run_episodes("r1")] == names
    assert [e.id async for e in store.run_episodes("none")] == []


async def test_episodes_come_newest_first(store: Store) -> None:
    await store.put_episode(record("a", 1, run_id="r1", group_id="g1"))
    await store.put_episode(record("b", 3, run_id="r1", group_id="g2"))
    await store.put_episode(record("c", 2, run_id="r2", group_id="g2"))

    def names(episodes: list[EpisodeRecord]) -> list[str]:
        return [episode.id for episode in episodes]

    assert names(await store.episodes()) == ["b", "c", "a"]
    assert names(await store.episodes(run_id="r1")) == ["b", "a"]
    assert names(await store.episodes(group_id="g2")) == ["b", "c"]
    assert names(await store.episodes(run_id="r1", group_id="g2")) == ["b"]
    assert names(await store.episodes(limit=2)) == ["b", "c"]


async def test_runs_come_newest_first(store: Store) -> None:
    for name, minutes in (("old", 0), ("new", 2), ("middle", 1)):
        run = RunRecord(id=name, kind="train", started=START + timedelta(minutes=minutes))
        await store.put_run(run)
    finished = run.model_copy(update={"reason": "done", "config": {"a.b": [1, None, 2**70]}})
    await store.put_run(finished)
    runs = await store.runs()
    assert [r.id for r in runs] == ["new", "middle", "old"]
    assert runs[1] == finished
    assert [r.id for r in await store.runs(limit=1)] == ["new"]


async def test_a_bus_is_kept_as_it_was_last_seen(store: Store) -> None:
    assert await store.bus("redis://a") is None
    first = BusRecord(url="redis://a", feeds=("f1",), seen=START)
    later = BusRecord(url="redis://a", feeds=("f1", "f2"), lost=("f1",), seen=START)
    for record in (first, later, first.model_copy(update={"url": "redis://b"})):
        await store.put_bus(record)
    assert await store.bus("redis://a") == later


async def test_training_rows_stream_and_are_kept_once(store: Store) -> None:
    rows = [row(i) for i in range(150)]
    await store.put_rollouts(rows)
    await store.put_rollouts(rows[100:])
    await store.put_rollouts([row(0, "other").model_copy(update={"id": "other/solver/0"})])
    assert [r async for r in store.rollouts("run")] == rows
    assert [r async for r in store.rollouts("none")] == []


async def test_nan_logprobs_survive(store: Store) -> None:
    await store.put_rollouts([row(0, logprobs=(math.nan, -0.1))])
    (kept,) = [r async for r in store.rollouts("run")]
    assert math.isnan(kept.behavior_logprobs[0])
    assert kept.behavior_logprobs[1] == row(0, logprobs=(0.0, -0.1)).behavior_logprobs[1]


async def test_metrics_come_by_step(store: Store) -> None:
    steps: dict[int, Mapping[str, float]] = {10: {"actor/loss": 0.5}, 9: {"perf/train_s.p99": 1.5}}
    for step, metrics in steps.items():
        await store.put_metrics("run", step, metrics)
    await store.put_metrics("run", 9, steps[9])
    await store.put_metrics("other", 1, {"a": 1.0})
    assert await store.metrics("run") == [(9, steps[9]), (10, steps[10])]


async def test_metrics_may_be_nan_or_infinite(store: Store) -> None:
    await store.put_metrics("run", 1, {"nan": math.nan, "inf": -math.inf})
    ((_, metrics),) = await store.metrics("run")
    assert math.isnan(metrics["nan"])
    assert metrics["inf"] == -math.inf


# --- blobs and cursors ---------------------------------------------------------------------------------------------


async def test_blobs_are_kept_by_content(store: Store) -> None:
    content = bytes(range(256)) * 4096
    name = await store.put_blob(content)
    assert name == hashlib.sha256(content).hexdigest()
    assert await store.put_blob(content) == name
    assert await store.blob(name) == content
    assert await store.blob("0" * 64) is None


async def test_cursor_moves(store: Store) -> None:
    assert await store.cursor("archiver") is None
    await store.set_cursor("archiver", "5-0")
    await store.set_cursor("other", "1-0")
    await store.set_cursor("archiver", "9-0")
    assert await store.cursor("archiver") == "9-0"


def _acknowledged(output: Path) -> int:
    """The last seq that the writer printed in full."""
    lines = output.read_text().rpartition("\n")[0].splitlines() if output.exists() else []
    return int(lines[-1]) if lines else 0
