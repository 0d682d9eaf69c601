"""What every event bus promises (aworld_runtime/bus/base.py), one promise per test, on every backend.

Nothing here waits by luck: a test waits for what it expects, or for as long as a promise says that nothing happens.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from datetime import timedelta
from typing import TypeVar, cast

import anyio
import pytest
from anyio.lowlevel import checkpoint
from pydantic import JsonValue

from aworld_runtime.bus import Bus, Delivery, FeedEntry, Mail, NodeInfo
from aworld_runtime.bus.base import read_all, read_own
from aworld_runtime.errors import (
    Fenced,
    MalformedEventError,
    MissingParentError,
    NotFoundError,
    PayloadTooLargeError,
    QueueFullError,
    RequestTimeoutError,
)
from aworld_runtime.events import (
    REFUSE_ABOVE,
    EpisodeCancelled,
    EpisodeForked,
    EpisodeTakenOver,
    Event,
    MessagePosted,
    ModelCompleted,
    ToolCalled,
    ToolReturned,
    utc_now,
)
from aworld_runtime.messages import ToolCall
from aworld_runtime.names import episode_log
from tests.contracts.conftest import SMALL, Backend, Connect
from tests.waiting import wait_until

pytestmark = pytest.mark.anyio

T = TypeVar("T")

LEASE_S = 0.5
"""Short, so that what a lost lease does shows soon."""
QUIET_S = 0.2
"""How long nothing must come, where nothing may come."""
DEADLINE_S = 5.0


# --- what the tests are made of ------------------------------------------------------------------


def note(text: str, *, role: str = "writer") -> Event:
    return Event.of(MessagePosted(content=text), source=f"{role}/1")


def notes(*texts: str) -> list[Event]:
    return [note(text) for text in texts]


def text_of(event: Event) -> str:
    assert isinstance(event.data, MessagePosted)
    return event.data.content


def texts(events: Iterable[Event]) -> list[str]:
    return [text_of(event) for event in events]


def mail_texts(mails: Iterable[Mail]) -> list[str]:
    return [text_of(mail.event) for mail in mails]


async def soon(awaitable: Awaitable[T], timeout_s: float = DEADLINE_S) -> T:
    """What the awaitable gives, which must be soon."""
    with anyio.fail_after(timeout_s):
        return await awaitable


async def first(iterator: AsyncIterator[T], count: int) -> list[T]:
    """The next `count` things to come."""
    return [await soon(anext(iterator)) for _ in range(count)]


async def nothing_from(awaitable: Awaitable[object]) -> bool:
    """Whether nothing comes of it for a while."""
    with anyio.move_on_after(QUIET_S):
        await awaitable
        return False
    return True


async def mails_of(box: AsyncIterator[list[Mail]], count: int) -> list[Mail]:
    found: list[Mail] = []
    while len(found) < count:
        found += await soon(anext(box))
    return found


async def entries_of(feed: AsyncIterator[list[FeedEntry]], count: int) -> list[FeedEntry]:
    found: list[FeedEntry] = []
    while len(found) < count:
        found += await soon(anext(feed))
    return found


async def append_all(bus: Bus, log: str, *batches: list[Event]) -> int:
    seq = await bus.last_seq(log)
    for batch in batches:
        seq = await bus.append(log, seq, batch)
    return seq


# --- the bus as a whole --------------------------------------------------------------------------


async def test_an_error_of_its_user_passes_through_as_it_is(connect: Connect) -> None:
    with pytest.raises(ZeroDivisionError):
        async with connect():
            raise ZeroDivisionError


async def test_an_error_passes_through_whatever_is_open(connect: Connect) -> None:
    with pytest.raises(ZeroDivisionError):
        async with (
            connect() as bus,
            bus.mailbox("log"),
            bus.tail("log"),
            bus.feed(),
            bus.listen("channel"),
            bus.consume("queue", consumer="c"),
        ):
            raise ZeroDivisionError


# --- logs ----------------------------------------------------------------------------------------


async def test_a_log_is_empty_at_first(bus: Bus) -> None:
    assert await bus.last_seq("log") == 0
    assert await bus.read("log") == []


async def test_seq_begins_at_1_and_has_no_gaps(bus: Bus) -> None:
    assert await bus.append("log", 0, notes("a", "b")) == 2
    assert await bus.append("log", 2, notes("c")) == 3
    assert [event.seq for event in await bus.read("log")] == [1, 2, 3]
    assert await bus.last_seq("log") == 3


async def test_events_come_back_as_they_went_in(bus: Bus) -> None:
    event = Event.of(
        ModelCompleted(
            text="ü\n\x00", token_ids=(1, 2, 150_000), behavior_logprobs=(-0.5, -1.0, 0.0)
        ),
        source="solver/2",
        run_id="r",
        task_id="t",
        group_id="g",
        episode_id="e",
        causation_id="cause",
        correlation_id="request",
        to="verifier",
        attempt=2,
        deadline=utc_now(),
        hops=3,
        trust="model",
        policy="p",
        policy_version=7,
    )
    await bus.append("log", 0, [event])
    assert await bus.read("log") == [event.at(1)]


async def test_a_large_event_comes_back_whole(bus: Bus) -> None:
    text = random.Random(1).randbytes(500_000).hex()
    await bus.append("log", 0, notes(text))
    assert texts(await bus.read("log")) == [text]


async def test_large_content_comes_back_whole_from_wherever_it_was(bus: Bus) -> None:
    large = [random.Random(seed).randbytes(60_000).hex() for seed in (1, 2, 1)] + ["x" * 1_000_000]
    async with bus.mailbox("log") as box:
        await bus.append("log", 0, notes(large[0], "small", large[1]))
        await bus.send_mail("log", *notes(*large[2:]))
        mails = await mails_of(box, 2)
        await bus.append("log", 3, [mail.event for mail in mails], acks=mails)
    await bus.put("queue", note(large[0]))
    everything = [large[0], "small", *large[1:]]
    assert texts(await bus.read("log")) == everything
    async with bus.tail("log", 2) as tail:
        assert texts(await first(tail, 4)) == everything[1:]
    async with bus.consume("queue", consumer="c") as consumer:
        assert text_of((await soon(consumer.take())).event) == large[0]
    await bus.restore("other", await bus.read("log"))
    await bus.unlink("log")
    assert texts(await bus.read("log")) == everything[-1:]
    assert texts(await bus.read("other")) == everything


async def test_a_tail_that_is_cancelled_over_large_content_loses_nothing(bus: Bus) -> None:
    large = [random.Random(seed).randbytes(60_000).hex() for seed in range(5)]
    await bus.append("log", 0, notes(*large))
    read: list[str] = []
    async with bus.tail("log") as tail:
        while len(read) < len(large):
            with anyio.move_on_after(random.uniform(0, 0.002)):
                read.append(text_of(await anext(tail)))
    assert read == large


async def test_what_was_appended_is_sent_on_whole_however_large_it_is(bus: Bus) -> None:
    small, large = notes("short", "".join(random.choices("abcdefghijklmnop", k=100_000)))
    await bus.append("log", 0, [small, large])
    await bus.put("work", small, large)
    async with bus.consume("work", consumer="c", credit=2) as consumer:
        taken = [(await soon(consumer.take())).event for _ in range(2)]
    assert taken == [small, large]


async def test_a_part_of_a_log_can_be_read(bus: Bus) -> None:
    await bus.append("log", 0, notes(*"abcdef"))
    assert texts(await bus.read("log", 3)) == list("cdef")
    assert texts(await bus.read("log", 3, limit=2)) == list("cd")
    assert await bus.read("log", 7) == []


MANY = "abcdefghijklmnopqrstuvwxyz"
"""So many events appended at once share what a backend keeps them in."""


@pytest.mark.parametrize("start", [1, 2, 13, 26, 27, 28, 29])
async def test_many_events_appended_at_once_are_read_and_followed_from_any_of_them(
    bus: Bus, start: int
) -> None:
    await append_all(bus, "log", notes(*MANY), notes("1"), notes("2"))
    expected = [*MANY, "1", "2"][start - 1 :]
    assert texts(await bus.read("log", start)) == expected
    assert texts(await bus.read("log", start, limit=3)) == expected[:3]
    assert [event.seq for event in await bus.read("log", start)] == [*range(start, 29)]
    async with bus.tail("log", start) as tail:
        await bus.append("log", 28, notes(*MANY))
        assert texts(await first(tail, len(expected) + 26)) == [*expected, *MANY]


@pytest.mark.parametrize("expected_seq", [0, 1, 2, 3, 25, 27, 40])
@pytest.mark.parametrize("number", [1, 26])
async def test_an_append_between_events_that_were_appended_at_once_is_fenced(
    bus: Bus, expected_seq: int, number: int
) -> None:
    await bus.append("log", 0, notes(*MANY))
    with pytest.raises(Fenced, match="log"):
        await bus.append("log", expected_seq, notes(*MANY[:number]))
    assert texts(await bus.read("log")) == list(MANY)
    assert await bus.append("log", 26, notes(*MANY[:number])) == 26 + number


async def test_an_acknowledgement_between_events_that_were_appended_at_once_is_fenced(
    bus: Bus,
) -> None:
    await append_all(bus, "log", notes(*MANY), notes("1"))
    await bus.send_mail("log", note("mail"))
    async with bus.mailbox("log") as box:
        (mail,) = await anext(box)
        with pytest.raises(Fenced):
            await bus.append("log", 2, [], acks=[mail])
    async with bus.mailbox("log") as box:
        assert mail_texts(await anext(box)) == ["mail"]


async def test_of_many_events_appended_at_once_unlink_leaves_the_last(bus: Bus) -> None:
    await bus.append("log", 0, notes(*MANY))
    await bus.unlink("log", last=25)
    assert texts(await bus.read("log")) == list(MANY)
    await bus.unlink("log", last=26)
    (left,) = await bus.read("log")
    assert (left.seq, text_of(left)) == (26, "z")


async def test_logs_do_not_mix(bus: Bus) -> None:
    await append_all(bus, "one", notes("a"), notes("b"))
    await append_all(bus, "two", notes("c"))
    assert texts(await bus.read("one")) == ["a", "b"]
    assert texts(await bus.read("two")) == ["c"]


@pytest.mark.parametrize("expected_seq", [0, 1, 3])
async def test_an_append_at_another_place_than_the_end_is_fenced(
    bus: Bus, expected_seq: int
) -> None:
    await bus.append("log", 0, notes("a", "b"))
    with pytest.raises(Fenced, match="log"):
        await bus.append("log", expected_seq, notes("c"))
    assert texts(await bus.read("log")) == ["a", "b"]


async def test_appending_the_very_same_events_again_succeeds_and_adds_nothing(bus: Bus) -> None:
    batch = notes("a", "b")
    await bus.append("log", 0, batch)
    await bus.append("log", 2, notes("c"))
    assert await bus.append("log", 0, batch) == 2
    assert texts(await bus.read("log")) == ["a", "b", "c"]


async def test_a_repeated_append_with_one_other_event_is_fenced(bus: Bus) -> None:
    a, b = notes("a", "b")
    await bus.append("log", 0, [a, b])
    with pytest.raises(Fenced):
        await bus.append("log", 0, [a, note("b")])
    with pytest.raises(Fenced):
        await bus.append("log", 0, [a, b, note("c")])
    assert texts(await bus.read("log")) == ["a", "b"]


async def test_one_of_many_writers_wins_each_place(connect: Connect) -> None:
    writers, each = 6, 8

    async def write(name: int) -> None:
        async with connect() as bus:
            for number in range(each):
                event = note(f"{name}:{number}")
                seq = await bus.last_seq("log")
                while True:
                    try:
                        await bus.append("log", seq, [event])
                        break
                    except Fenced:
                        seq = await bus.last_seq("log")

    async with anyio.create_task_group() as tg:
        for name in range(writers):
            tg.start_soon(write, name)
    async with connect() as bus:
        events = await bus.read("log")
    assert [event.seq for event in events] == list(range(1, writers * each + 1))
    for name in range(writers):
        mine = [text for text in texts(events) if text.startswith(f"{name}:")]
        assert mine == [f"{name}:{number}" for number in range(each)]


async def test_a_zombies_append_is_refused_after_a_takeover(connect: Connect) -> None:
    async with connect() as zombie, connect() as heir:
        seq = await zombie.append("log", 0, notes("begun"))
        takeover = Event.of(EpisodeTakenOver(worker="worker/2"), source="worker/2")
        await heir.append("log", seq, [takeover])
        with pytest.raises(Fenced):
            await zombie.append("log", seq, notes("late"))
        assert [event.type for event in await heir.read("log")] == [
            "message.posted",
            "episode.taken_over",
        ]


async def test_an_event_above_the_cap_is_refused_wherever_it_goes(bus: Bus) -> None:
    huge = note("x" * (REFUSE_ABOVE + 1))
    with pytest.raises(PayloadTooLargeError, match="bytes"):
        await bus.append("log", 0, [note("small"), huge])
    with pytest.raises(PayloadTooLargeError):
        await bus.send_mail("log", huge)
    with pytest.raises(PayloadTooLargeError):
        await bus.put("queue", huge)
    assert await bus.read("log") == []
    assert await bus.backlog("queue") == 0


def nested(depth: int) -> JsonValue:
    value: JsonValue = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "content",
    ["\ud800", {"\ud800": 1}, [9**9999], nested(200)],
    ids=["text", "key", "number", "depth"],
)
async def test_an_event_that_could_not_be_read_again_is_refused_wherever_it_goes(
    bus: Bus, content: JsonValue
) -> None:
    event = Event.of(ToolReturned(name="any", content=content), source="any/1")
    with pytest.raises(MalformedEventError):
        await bus.append("log", 0, [event])
    with pytest.raises(MalformedEventError):
        await bus.send_mail("log", event)
    with pytest.raises(MalformedEventError):
        await bus.put("queue", event)
    with pytest.raises(MalformedEventError):
        await bus.reply(note("asked"), event)
    assert await bus.read("log") == []
    assert await bus.backlog("queue") == 0


async def test_a_fork_begins_in_the_middle(bus: Bus) -> None:
    forked = Event.of(EpisodeForked(parent="parent", at=7), source="fork/1")
    assert await bus.append("log", 7, [forked, note("live")]) == 9
    assert [event.seq for event in await bus.read("log")] == [8, 9]
    assert texts(await bus.read("log", 9)) == ["live"]
    assert await bus.append("log", 9, notes("more")) == 10


async def test_nothing_but_a_fork_begins_in_the_middle(bus: Bus) -> None:
    forked_elsewhere = Event.of(EpisodeForked(parent="parent", at=6), source="fork/1")
    for batch in (notes("a"), [forked_elsewhere]):
        with pytest.raises(Fenced):
            await bus.append("log", 7, batch)
    assert await bus.last_seq("log") == 0


async def test_the_history_of_a_fork_begins_with_its_parents(bus: Bus) -> None:
    """Also where the parent is a fork, and the fork begins before that one's own events do."""
    await bus.append("root", 0, notes("a", "b", "c", "d"))
    first = Event.of(EpisodeForked(parent="root", at=3), source="fork/1")
    await bus.append("child", 3, [first, note("e")])
    for parent, at in (("child", 4), ("child", 2), ("root", 4)):
        forked = Event.of(EpisodeForked(parent=parent, at=at), source="fork/1")
        log = f"{parent} at {at}"
        await bus.append(log, at, [forked, note("f")])
        whole = [*(await read_all(bus, parent))[:at], *await bus.read(log)]
        assert [event.seq for event in whole] == list(range(1, at + 3))
        assert await read_all(bus, log) == whole
        assert await read_all(bus, log, 2, last=at) == whole[1:at]
        assert await read_all(bus, log, at + 1) == whole[at:]
        assert await read_own(bus, log) == whole[at:]


async def test_a_fork_whose_parent_is_not_there_says_what_is_missing(bus: Bus) -> None:
    await bus.append("root", 0, notes("a", "b"))
    forked = Event.of(EpisodeForked(parent="root", at=3), source="fork/1", episode_id="f")
    await bus.append("log", 3, [forked])
    expected = "episode f was forked from log root after event 3, and of its events 1 to 3 only 2"
    with pytest.raises(MissingParentError, match=expected):
        await read_all(bus, "log")
    assert await read_all(bus, "log", 4) == [forked.at(4)]


async def test_a_lost_log_is_restored_and_goes_on(bus: Bus) -> None:
    stored = [event.at(seq) for seq, event in enumerate(notes("a", "b"), 1)]
    await bus.restore("log", stored)
    assert await bus.read("log") == stored
    assert await bus.append("log", 2, notes("c")) == 3


async def test_a_restored_fork_keeps_its_place(bus: Bus) -> None:
    forked = Event.of(EpisodeForked(parent="parent", at=7), source="fork/1").at(8)
    await bus.restore("log", [forked, note("live").at(9)])
    assert [event.seq for event in await bus.read("log")] == [8, 9]
    assert await bus.append("log", 9, notes("more")) == 10


async def test_restore_leaves_a_log_that_is_there_alone(bus: Bus) -> None:
    await bus.append("log", 0, notes("a"))
    await bus.restore("log", [note("b").at(1), note("c").at(2)])
    assert texts(await bus.read("log")) == ["a"]


async def test_a_restored_log_is_on_the_feed(bus: Bus) -> None:
    await bus.restore("log", [note("a").at(1), note("b").at(2)])
    await bus.restore("log", [note("a").at(1), note("b").at(2)])
    await bus.append("other", 0, notes("c"))
    async with bus.feed() as feed:
        entries = await entries_of(feed, 2)
    assert sorted((e.log, e.first, e.last) for e in entries) == [("log", 1, 2), ("other", 1, 1)]


async def test_unlink_leaves_the_last_event_and_nothing_else(bus: Bus) -> None:
    await bus.append("log", 0, notes("a", "b", "c"))
    await bus.send_mail("log", note("mail"))
    await bus.append("other", 0, notes("d"))
    for _ in range(2):
        await bus.unlink("log")
        assert await bus.last_seq("log") == 3
        assert texts(await bus.read("log")) == ["c"]
    assert texts(await bus.read("other")) == ["d"]
    async with bus.mailbox("log") as box:
        assert await nothing_from(anext(box))


async def test_a_log_that_has_grown_meanwhile_is_not_unlinked(bus: Bus) -> None:
    await bus.append("log", 0, notes("a", "b"))
    await bus.unlink("log", last=1)
    assert texts(await bus.read("log")) == ["a", "b"]
    await bus.unlink("log", last=2)
    assert texts(await bus.read("log")) == ["b"]


@pytest.mark.parametrize("expected", [0, 1, 2, 3])
async def test_a_late_owner_of_a_retired_log_is_refused(bus: Bus, expected: int) -> None:
    await bus.append("log", 0, notes("a", "b", "c"))
    await bus.unlink("log")
    with pytest.raises(Fenced):
        await bus.append("log", expected, notes("late"))
    assert texts(await bus.read("log")) == ["c"]


async def test_the_last_append_to_a_log_may_be_repeated_when_that_is_retired(bus: Bus) -> None:
    events = notes("a", "b")
    await bus.append("log", 0, events[:1])
    await bus.append("log", 1, events[1:])
    await bus.unlink("log")
    assert await bus.append("log", 1, events[1:]) == 2
    with pytest.raises(Fenced, match="retired"):
        await bus.append("log", 2, [])


async def test_a_retired_log_is_gone_after_its_time(bus: Bus) -> None:
    await bus.append("log", 0, notes("a", "b"))
    await bus.unlink("log", keep_s=0.05)

    async def gone() -> bool:
        return await bus.last_seq("log") == 0

    await wait_until(gone, description="the end of its last event")
    await bus.append("log", 0, notes("a", "b"))
    await bus.unlink("log", keep_s=0)
    assert await bus.append("log", 0, notes("again")) == 1


async def test_of_a_retired_log_nothing_is_read_after_its_time(bus: Bus) -> None:
    await bus.append("log", 0, notes("a", "b"))
    stored = await bus.read("log")
    await bus.unlink("log", keep_s=0.05)

    async def gone() -> bool:
        return await bus.read("log") == []

    await wait_until(gone, description="the end of its last event")
    await bus.restore("log", stored[:1])
    assert await bus.read("log") == stored[:1]


async def test_mail_to_a_retired_log_is_there_when_it_is_put_back(bus: Bus) -> None:
    await bus.append("log", 0, notes("a", "b"))
    stored = await bus.read("log")
    await bus.unlink("log")
    await bus.send_mail("log", note("mail"))
    await bus.restore("log", stored)
    async with bus.mailbox("log") as box:
        assert mail_texts(await mails_of(box, 1)) == ["mail"]


async def test_mail_sent_at_the_instant_of_an_unlink_is_not_taken_for_what_that_freed(
    bus: Bus,
) -> None:
    async with bus.mailbox("log") as box:
        for _ in range(30):
            await bus.send_mail("log", note("freed"))
            (freed,) = await mails_of(box, 1)
            await bus.unlink("log")
            await bus.send_mail("log", note("mail"))
            (mail,) = await mails_of(box, 1)
            assert mail.id != freed.id
            await bus.append("log", 0, [], acks=[mail])


async def test_of_an_empty_log_unlink_frees_the_mail(bus: Bus) -> None:
    await bus.send_mail("log", note("mail"))
    await bus.unlink("log")
    async with bus.mailbox("log") as box:
        assert await nothing_from(anext(box))
    assert await bus.append("log", 0, notes("first")) == 1


async def test_a_retired_log_can_be_put_back_whole_and_goes_on(bus: Bus) -> None:
    await bus.append("log", 0, notes("a", "b", "c"))
    stored = await bus.read("log")
    await bus.unlink("log", keep_s=0.2)
    await bus.restore("log", [note("x").at(1), note("y").at(2), note("z").at(3)])
    assert await bus.read("log") == stored[-1:], "another history is no restore"
    await bus.restore("log", stored)
    assert await bus.read("log") == stored
    assert await bus.append("log", 3, notes("d")) == 4
    await anyio.sleep(0.25)
    assert await bus.last_seq("log") == 4


async def test_the_server_is_the_same_for_all_clients(connect: Connect) -> None:
    async with connect() as one, connect() as other:
        assert await one.server_id() == await other.server_id()


# --- tail ----------------------------------------------------------------------------------------


async def test_a_tail_gives_what_is_there_and_then_what_comes(connect: Connect) -> None:
    async with connect() as writer, connect() as reader, reader.tail("log") as tail:
        await writer.append("log", 0, notes("a", "b"))
        assert texts(await first(tail, 2)) == ["a", "b"]
        await writer.append("log", 2, notes("c"))
        [event] = await first(tail, 1)
        assert (text_of(event), event.seq) == ("c", 3)


async def test_a_tail_begins_in_the_middle(bus: Bus) -> None:
    await bus.append("log", 0, notes("a", "b", "c"))
    async with bus.tail("log", 2) as tail:
        assert texts(await first(tail, 2)) == ["b", "c"]


async def test_a_tail_may_begin_after_the_end(bus: Bus) -> None:
    await bus.append("log", 0, notes("a"))
    async with bus.tail("log", 3) as tail:
        await bus.append("log", 1, notes("b", "c"))
        assert texts(await first(tail, 1)) == ["c"]


async def test_a_tail_whose_wait_was_cancelled_goes_on(bus: Bus) -> None:
    async with bus.tail("log") as tail:
        assert await nothing_from(anext(tail))
        await bus.append("log", 0, notes("a"))
        assert texts(await first(tail, 1)) == ["a"]


async def test_every_tail_sees_every_event_in_order(connect: Connect) -> None:
    total, seen = 60, dict[int, list[int]]()

    async def follow(bus: Bus, name: int) -> None:
        async with bus.tail("log") as tail:
            seen[name] = [event.seq for event in await first(tail, total)]

    async with connect() as writer, connect() as reader, anyio.create_task_group() as tg:
        for name in range(3):
            tg.start_soon(follow, reader, name)
        for seq in range(0, total, 4):
            await writer.append("log", seq, notes(*"abcd"))
    assert list(seen.values()) == [list(range(1, total + 1))] * 3


# --- feed ----------------------------------------------------------------------------------------


async def test_the_feed_has_every_append_once_and_each_log_in_order(bus: Bus) -> None:
    await bus.append("one", 0, notes("a", "b"))
    await bus.append("two", 0, notes("c"))
    await bus.append("one", 2, notes("d"))
    async with bus.feed() as feed:
        entries = await entries_of(feed, 3)
    spans = [(entry.log, entry.first, entry.last) for entry in entries]
    assert sorted(spans) == [("one", 1, 2), ("one", 3, 3), ("two", 1, 1)]
    assert spans.index(("one", 1, 2)) < spans.index(("one", 3, 3))


async def test_the_feed_waits_for_more(connect: Connect) -> None:
    async with connect() as writer, connect() as reader, reader.feed() as feed:
        assert await nothing_from(anext(feed))
        await writer.append("log", 0, notes("a"))
        [entry] = await entries_of(feed, 1)
        assert (entry.log, entry.first, entry.last) == ("log", 1, 1)


async def test_a_feed_resumes_after_its_cursor(bus: Bus) -> None:
    await append_all(bus, "log", notes("a"), notes("b"), notes("c"))
    async with bus.feed() as feed:
        entries = await entries_of(feed, 3)
    async with bus.feed(entries[0].cursor) as feed:
        assert [entry.first for entry in await entries_of(feed, 2)] == [2, 3]
    async with bus.feed(entries[2].cursor) as feed:
        assert await nothing_from(anext(feed))


async def test_what_is_read_after_the_feed_told_of_it_is_there(connect: Connect) -> None:
    total = 40

    async def write() -> None:
        async with connect() as bus:
            for number in range(total):
                await bus.append(f"log{number % 5}", number // 5, notes(str(number)))

    async with connect() as bus, anyio.create_task_group() as tg:
        tg.start_soon(write)
        async with bus.feed() as feed:
            for entry in await entries_of(feed, total):
                events = await bus.read(entry.log, entry.first, limit=1)
                assert [event.seq for event in events] == [entry.first]


async def test_a_feeds_id_is_the_same_for_all_clients(connect: Connect) -> None:
    found: set[str] = set()

    async def ask(bus: Bus) -> None:
        found.add(await bus.feed_id())

    async with connect() as one, connect() as other, anyio.create_task_group() as tg:
        for bus in (one, other, one, other):
            tg.start_soon(ask, bus)
    async with connect() as bus:
        await bus.append("log", 0, notes("a"))
        await ask(bus)
    [feed_id] = found
    assert feed_id


async def test_a_refused_or_repeated_append_is_not_on_the_feed(bus: Bus) -> None:
    batch = notes("a")
    await bus.append("log", 0, batch)
    await bus.append("log", 0, batch)
    with pytest.raises(Fenced):
        await bus.append("log", 0, notes("b"))
    async with bus.feed() as feed:
        assert len(await entries_of(feed, 1)) == 1
        assert await nothing_from(anext(feed))


async def test_a_trimmed_feed_keeps_what_comes_after(bus: Bus) -> None:
    await append_all(bus, "log", notes("a"), notes("b"), notes("c"))
    async with bus.feed() as feed:
        entries = await entries_of(feed, 3)
    await bus.trim_feed(entries[2].cursor, entries[1].cursor)
    await bus.trim_feed()
    async with bus.feed() as feed:
        assert entries[2] in await entries_of(feed, 1)
    async with bus.feed(entries[1].cursor) as feed:
        assert await entries_of(feed, 1) == entries[2:]


async def test_a_subscription_gives_the_types_it_asks_for_and_resumes(bus: Bus) -> None:
    call = ToolCalled(call=ToolCall(id="1", name="calculator"))
    answer = ToolReturned(name="calculator", content=4)
    made = [Event.of(data, source="solver/1") for data in (call, answer)]
    await append_all(bus, "log", [note("a"), *made], notes("b"))
    subscription = bus.subscribe("tool.*")
    events = aiter(subscription)
    assert [event.type for event in await first(events, 2)] == ["tool.called", "tool.returned"]
    await append_all(bus, "log", [made[0]])
    assert [event.seq for event in await first(events, 1)] == [5]
    await events.aclose()

    resumed = aiter(bus.subscribe(after=subscription.cursor))
    assert [event.seq for event in await first(resumed, 1)] == [5]
    await resumed.aclose()


async def test_a_subscription_names_prefixes_of_types_and_hears_every_log(connect: Connect) -> None:
    call = Event.of(ToolCalled(call=ToolCall(id="1", name="calculator")), source="solver/1")
    async with connect() as bus, connect() as other:
        some, all_of_them = bus.subscribe("message.", "episode.c"), bus.subscribe("*")
        await other.append("one", 0, [note("a"), call])
        await other.append("two", 0, [cancel("enough"), note("b")])
        heard = aiter(some)
        types = sorted(event.type for event in await first(heard, 3))
        assert types == ["episode.cancelled", "message.posted", "message.posted"]
        await heard.aclose()
        everything = aiter(all_of_them)
        assert len(await first(everything, 4)) == 4
        await everything.aclose()


# --- mail ----------------------------------------------------------------------------------------


async def test_mail_reaches_the_owner_with_what_it_was_sent_as(connect: Connect) -> None:
    event = note("hello")
    async with connect() as sender, connect() as owner, owner.mailbox("log") as box:
        await sender.send_mail("log", event)
        [mail] = await mails_of(box, 1)
        assert (mail.log, mail.event) == ("log", event)


async def test_mail_may_come_before_the_log_has_an_owner(bus: Bus) -> None:
    await bus.send_mail("log", note("early"))
    async with bus.mailbox("log") as box:
        assert mail_texts(await mails_of(box, 1)) == ["early"]


async def test_a_mailbox_gives_each_mail_once_in_the_order_of_one_sender(bus: Bus) -> None:
    async with bus.mailbox("log") as box:
        for number in range(10):
            await bus.send_mail("log", note(str(number)))
        assert mail_texts(await mails_of(box, 10)) == [str(number) for number in range(10)]
        assert await nothing_from(anext(box))


async def test_acknowledged_mail_is_gone_and_the_rest_survives_a_change_of_owner(
    connect: Connect,
) -> None:
    async with connect() as old:
        await old.send_mail("log", note("kept"))
        await old.send_mail("log", note("left"))
        async with old.mailbox("log") as box:
            [kept, _] = await mails_of(box, 2)
            await old.append("log", 0, [kept.event], acks=[kept])
    async with connect() as heir, heir.mailbox("log") as box:
        assert mail_texts(await mails_of(box, 1)) == ["left"]
        assert await nothing_from(anext(box))


async def test_a_fenced_append_acknowledges_no_mail(bus: Bus) -> None:
    await bus.append("log", 0, notes("a"))
    await bus.send_mail("log", note("mail"))
    async with bus.mailbox("log") as box:
        [mail] = await mails_of(box, 1)
    with pytest.raises(Fenced):
        await bus.append("log", 0, [mail.event], acks=[mail])
    async with bus.mailbox("log") as box:
        assert mail_texts(await mails_of(box, 1)) == ["mail"]


async def test_mail_can_be_acknowledged_without_an_event(bus: Bus) -> None:
    """The owner has seen it already: a duplicate is acknowledged and not recorded."""
    await bus.append("log", 0, notes("a"))
    await bus.send_mail("log", note("duplicate"))
    async with bus.mailbox("log") as box:
        assert await bus.append("log", 1, [], acks=await mails_of(box, 1)) == 1
    async with bus.mailbox("log") as box:
        assert await nothing_from(anext(box))


async def test_a_repeated_append_acknowledges_its_mail(bus: Bus) -> None:
    """The reply was lost, and so the owner sends the same append again."""
    await bus.send_mail("log", note("mail"))
    async with bus.mailbox("log") as box:
        [mail] = await mails_of(box, 1)
        await bus.append("log", 0, [mail.event], acks=[mail])
        assert await bus.append("log", 0, [mail.event], acks=[mail]) == 1
    assert texts(await bus.read("log")) == ["mail"]


async def test_an_append_with_mail_alone_is_fenced_too(bus: Bus) -> None:
    await bus.append("log", 0, notes("a", "b"))
    with pytest.raises(Fenced):
        await bus.append("log", 1, [], acks=[])


async def test_mail_enters_the_log_exactly_once_though_sent_twice_and_owners_change(
    connect: Connect,
) -> None:
    sent = [note(str(number)) for number in range(30)]

    async def send() -> None:
        async with connect() as bus:
            for event in sent:
                await bus.send_mail("log", event)
                await bus.send_mail("log", event)

    async def own(until: int) -> None:
        """Records mail until the log holds `until` events, then goes away in the middle of its work."""
        async with connect() as bus, bus.mailbox("log") as box:
            log = await bus.read("log")
            known, seq = {event.id for event in log}, len(log)
            async for mails in box:
                for mail in mails:
                    fresh = [] if mail.event.id in known else [mail.event]
                    seq = await bus.append("log", seq, fresh, acks=[mail])
                    known.add(mail.event.id)
                    if seq >= until:
                        return

    async with anyio.create_task_group() as tg:
        tg.start_soon(send)
        for until in (7, 19, 30):
            await soon(own(until))
    async with connect() as bus:
        assert [event.id for event in await bus.read("log")] == [event.id for event in sent]


def cancel(reason: str) -> Event:
    return Event.of(EpisodeCancelled(reason=reason), source="cli/1")


async def test_control_mail_passes_all_other_mail(connect: Connect) -> None:
    async with connect() as owner, connect() as other, owner.mailbox("log") as box:
        await other.send_mail("log", *notes(*"abcde"))
        await other.send_mail("log", cancel("enough"))
        (urgent,) = await soon(anext(box))
        assert urgent.event.data == EpisodeCancelled(reason="enough")
        assert mail_texts(await mails_of(box, 5)) == list("abcde")
        await other.send_mail("log", note("f"))
        await other.send_mail("log", note("g"), cancel("again"), cancel("and again"))
        reasons = [mail.event.data for mail in await soon(anext(box))]
        assert reasons == [
            EpisodeCancelled(reason="again"),
            EpisodeCancelled(reason="and again"),
        ]
        assert mail_texts(await mails_of(box, 2)) == ["f", "g"]


async def test_an_owner_that_data_holds_up_hears_control_mail_in_a_mailbox_of_its_own(
    bus: Bus,
) -> None:
    await bus.send_mail("log", note("a"), cancel("enough"))
    async with bus.mailbox("log", "control") as control, bus.mailbox("log", "data") as data:
        assert mail_texts(await soon(anext(data))) == ["a"]
        assert (await soon(anext(control)))[0].event.type == "episode.cancelled"
        await bus.send_mail("log", note("b"))
        assert await nothing_from(anext(control))
        await bus.send_mail("log", cancel("now"))
        assert len(await soon(anext(control))) == 1
        assert mail_texts(await soon(anext(data))) == ["b"]


async def test_control_mail_is_acknowledged_like_any_other(bus: Bus) -> None:
    await bus.send_mail("log", note("a"), cancel("1"), cancel("2"))
    async with bus.mailbox("log") as box:
        mails = await mails_of(box, 3)
    await bus.append("log", 0, [mails[0].event, mails[2].event], acks=[mails[0], mails[2]])
    async with bus.mailbox("log") as box:
        assert [mail.id for mail in await soon(anext(box))] == [mails[1].id]
        await bus.unlink("log")
    async with bus.mailbox("log") as box:
        assert await nothing_from(anext(box))


async def test_a_mailbox_whose_wait_was_cancelled_goes_on(bus: Bus) -> None:
    async with bus.mailbox("log") as box:
        assert await nothing_from(anext(box))
        await bus.send_mail("log", note("a"))
        assert mail_texts(await mails_of(box, 1)) == ["a"]


async def test_who_does_not_wait_for_mail_is_told_of_it(connect: Connect) -> None:
    async with connect() as owner, connect() as sender, owner.mailbox("log") as box:
        comes, is_there = anyio.Event(), anyio.Event()
        box.call_when_mail(comes.set)
        assert await nothing_from(comes.wait())
        await sender.send_mail("log", note("a"), note("b"), cancel("enough"))
        await soon(comes.wait())
        assert [mail.event.type for mail in await mails_of(box, 1)] == ["episode.cancelled"]
        box.call_when_mail(is_there.set)
        await soon(is_there.wait())
        assert mail_texts(await mails_of(box, 2)) == ["a", "b"]


# --- queues --------------------------------------------------------------------------------------


async def test_work_arrives_in_the_order_it_was_put(bus: Bus) -> None:
    for text in "abc":
        await bus.put("queue", note(text))
    async with bus.consume("queue", consumer="c", credit=3) as consumer:
        deliveries = [await soon(consumer.take()) for _ in range(3)]
        assert texts(d.event for d in deliveries) == ["a", "b", "c"]
        assert {(d.queue, d.count, d.lost) for d in deliveries} == {("queue", 1, False)}


async def test_competing_consumers_get_each_piece_of_work_once(connect: Connect) -> None:
    total, taken = 60, list[str]()

    async def consume(name: str) -> None:
        async with connect() as bus, bus.consume("queue", consumer=name, credit=2) as consumer:
            while len(taken) < total:
                delivery = await consumer.take()
                taken.append(text_of(delivery.event))
                await delivery.ack()

    async with connect() as bus, anyio.create_task_group() as tg:
        for name in ("one", "two", "three"):
            tg.start_soon(consume, name)
        for number in range(total):
            await bus.put("queue", note(str(number)))
        await wait_until(lambda: is_settled(bus), description="all work settled")
        tg.cancel_scope.cancel()
    assert sorted(taken, key=int) == [str(number) for number in range(total)]


async def is_settled(bus: Bus, queue: str = "queue") -> bool:
    return await bus.backlog(queue) == 0


async def test_work_waits_for_a_consumer(bus: Bus) -> None:
    await bus.put("queue", note("a"))
    async with bus.consume("queue", consumer="c") as consumer:
        assert text_of((await soon(consumer.take())).event) == "a"


async def test_acknowledged_work_is_not_delivered_again(bus: Bus) -> None:
    await bus.put("queue", note("a"))
    async with bus.consume("queue", consumer="c") as consumer:
        await (await soon(consumer.take())).ack()
    assert await bus.backlog("queue") == 0
    async with bus.consume("queue", consumer="c") as consumer:
        assert await nothing_from(consumer.take())


async def test_work_put_and_taken_and_settled_in_batches(bus: Bus) -> None:
    await bus.put("work", *notes("a", "b", "c"))
    await bus.put("work", *notes("d", "e"))
    async with bus.consume("work", consumer="c1", credit=4) as consumer:
        taken: list[Delivery] = []
        while len(taken) < 4:
            taken += await soon(consumer.take_many(4 - len(taken)))
        assert texts(delivery.event for delivery in taken) == ["a", "b", "c", "d"]
        assert await nothing_from(consumer.take_many(4))  # its credit is used up
        await soon(consumer.ack(taken[:3]))
        assert texts(d.event for d in await soon(consumer.take_many(4))) == ["e"]
    async with bus.consume("work", consumer="c2") as other:
        assert text_of((await soon(other.take())).event) == "d"


async def test_a_batch_settles_what_is_still_ours_and_marks_what_is_lost(connect: Connect) -> None:
    async with connect() as one, connect() as two:
        await one.put("work", *notes("a", "b"))
        async with one.consume("work", consumer="c1", credit=2, lease_s=LEASE_S) as consumer:
            first, second = [await soon(consumer.take()) for _ in range(2)]
            consumer.abandon()
            async with two.consume("work", consumer="c2", credit=2, lease_s=LEASE_S) as other:
                taken_over = await soon(other.take())
                await consumer.ack([first, second])
                assert first.lost
                await taken_over.ack()
                assert await one.backlog("work") <= 1


async def test_many_mails_are_sent_at_once(bus: Bus) -> None:
    await bus.send_mail("log", *notes("a", "b", "c"))
    async with bus.mailbox("log") as box:
        assert mail_texts(await mails_of(box, 3)) == ["a", "b", "c"]


async def test_backlog_counts_what_is_not_settled(bus: Bus) -> None:
    for text in "abc":
        await bus.put("queue", note(text))
    assert await bus.backlog("queue") == 3
    async with bus.consume("queue", consumer="c", credit=2) as consumer:
        delivery, _ = await soon(consumer.take()), await soon(consumer.take())
        assert await bus.backlog("queue") == 3
        await delivery.ack()
        assert await bus.backlog("queue") == 2


async def test_credit_bounds_what_a_consumer_holds(bus: Bus) -> None:
    for text in "abc":
        await bus.put("queue", note(text))
    async with bus.consume("queue", consumer="c", credit=2) as consumer:
        held = [await soon(consumer.take()) for _ in range(2)]
        assert await nothing_from(consumer.take())
        await held[0].ack()
        assert text_of((await soon(consumer.take())).event) == "c"


async def test_a_full_consumer_leaves_work_to_others(bus: Bus) -> None:
    for text in "ab":
        await bus.put("queue", note(text))
    async with (
        bus.consume("queue", consumer="full", credit=1) as full,
        bus.consume("queue", consumer="free", credit=1) as free,
    ):
        taken = [(await soon(full.take())).event, (await soon(free.take())).event]
        assert sorted(texts(taken)) == ["a", "b"]


async def test_unsettled_work_of_an_abandoned_consumer_goes_to_another_within_the_lease(
    connect: Connect,
) -> None:
    async with connect() as dying, connect() as bus:
        await bus.put("queue", note("a"))
        async with (
            dying.consume("queue", consumer="dying", lease_s=LEASE_S) as abandoned,
            bus.consume("queue", consumer="heir", lease_s=LEASE_S) as heir,
        ):
            lost = await soon(abandoned.take())
            abandoned.abandon()
            found = await soon(heir.take(), timeout_s=LEASE_S + 1.0)
            assert (text_of(found.event), found.count) == ("a", 2)
            await wait_until(lambda: lost.lost, description="the first delivery known as lost")
            await found.ack()
        assert await bus.backlog("queue") == 0


async def test_two_consumers_of_one_name_hold_each_its_own(connect: Connect) -> None:
    """Two workers may have been given the same name."""
    async with connect() as dying, connect() as bus:
        await bus.put("queue", note("a"))
        async with (
            dying.consume("queue", consumer="w", lease_s=LEASE_S) as abandoned,
            bus.consume("queue", consumer="w", lease_s=LEASE_S) as heir,
        ):
            late = await soon(abandoned.take())
            abandoned.abandon()
            found = await soon(heir.take(), timeout_s=LEASE_S + 1.0)
            await late.ack()
            assert late.lost
            assert await found.standing() == "held"
            await found.ack()


async def test_unsettled_work_of_a_closed_consumer_goes_to_another(connect: Connect) -> None:
    async with connect() as leaving, connect() as bus:
        await bus.put("queue", note("a"))
        async with bus.consume("queue", consumer="heir", lease_s=LEASE_S) as heir:
            async with leaving.consume("queue", consumer="leaving", lease_s=LEASE_S) as consumer:
                await soon(consumer.take())
            assert text_of((await soon(heir.take(), timeout_s=LEASE_S + 1.0)).event) == "a"


@pytest.mark.parametrize("how", ["leaves", "dies"])
async def test_work_that_comes_back_comes_oldest_first_and_before_younger_work(
    bus: Bus, how: str
) -> None:
    await bus.put("queue", *notes("a", "b", "c", "d", "e", "f"))
    async with bus.consume("queue", consumer="first", credit=4, lease_s=LEASE_S) as first:
        _, second, *_ = [await soon(first.take()) for _ in range(4)]
        await second.ack()
        if how == "dies":
            first.abandon()
            await anyio.sleep(LEASE_S + 0.1)
    async with bus.consume("queue", consumer="heir", lease_s=LEASE_S) as heir:
        came: list[str] = []
        for _ in range(5):
            delivery = await soon(heir.take())
            came.append(text_of(delivery.event))
            await delivery.ack()
    assert came == ["a", "c", "d", "e", "f"]


async def test_work_slower_than_the_lease_is_not_stolen(connect: Connect) -> None:
    async with connect() as slow_bus, connect() as bus:
        await bus.put("queue", note("slow"))
        async with (
            slow_bus.consume("queue", consumer="slow", lease_s=LEASE_S) as slow,
            bus.consume("queue", consumer="thief", lease_s=LEASE_S) as thief,
        ):
            delivery = await soon(slow.take())
            with anyio.move_on_after(3 * LEASE_S):
                await thief.take()
                pytest.fail("work was stolen from a consumer that was still at it")
            assert not delivery.lost
            await delivery.ack()
        assert await bus.backlog("queue") == 0


async def test_losing_a_lease_is_not_a_failure(connect: Connect) -> None:
    """Workers may die under a piece of work more often than it may fail."""
    async with connect() as bus:
        await bus.put("queue", note("a"))
        for number in range(4):
            async with bus.consume("queue", consumer=f"c{number}", lease_s=LEASE_S) as consumer:
                delivery = await soon(consumer.take())
                assert delivery.count == number + 1
        assert await bus.dead_letters("queue") == []


async def test_the_owner_that_lost_its_lease_settles_nothing(connect: Connect) -> None:
    async with connect() as dying, connect() as bus:
        await bus.put("queue", note("a"))
        async with (
            dying.consume("queue", consumer="dying", lease_s=LEASE_S) as abandoned,
            bus.consume("queue", consumer="heir", lease_s=LEASE_S) as heir,
        ):
            lost = await soon(abandoned.take())
            abandoned.abandon()
            found = await soon(heir.take())
            await lost.retry(0.0, "late")
            await lost.dead_letter("late")
            assert await bus.dead_letters("queue") == []
            assert await bus.backlog("queue") == 1
            await found.ack()
            assert await bus.backlog("queue") == 0


async def test_the_last_try_of_who_has_left_is_not_the_end_of_the_work(bus: Bus) -> None:
    await bus.put("queue", note("a"))
    async with bus.consume("queue", consumer="leaves") as consumer:
        for _ in range(2):
            await (await soon(consumer.take())).retry(0, "fails")
        last = await soon(consumer.take())
    assert await last.retry(0, "fails again"), "it was given back and comes again"
    async with bus.consume("queue", consumer="heir") as consumer:
        assert text_of((await soon(consumer.take())).event) == "a"


async def test_a_delivery_is_held_then_taken_by_another_then_gone(connect: Connect) -> None:
    async with connect() as one, connect() as other:
        await one.put("queue", note("work"))
        async with one.consume("queue", consumer="dies", lease_s=LEASE_S) as dying:
            lost = await soon(dying.take())
            assert await lost.standing() == "held"
            dying.abandon()
            async with other.consume("queue", consumer="lives", lease_s=LEASE_S) as living:
                taken = await soon(living.take())
                assert (await lost.standing(), await taken.standing()) == ("taken", "held")
                await taken.ack()
                assert (await lost.standing(), await taken.standing()) == ("gone", "gone")


async def test_who_has_left_holds_nothing_any_more(bus: Bus) -> None:
    await bus.put("queue", note("work"))
    async with bus.consume("queue", consumer="leaves") as leaving:
        given_back = await soon(leaving.take())
    assert await given_back.standing() == "taken"


async def test_a_retry_comes_after_its_delay(bus: Bus) -> None:
    await bus.put("queue", note("a"))
    async with bus.consume("queue", consumer="c") as consumer:
        delivery = await soon(consumer.take())
        before = time.monotonic()
        await delivery.retry(0.3, "not yet")
        assert await bus.backlog("queue") == 1
        again = await soon(consumer.take())
        assert time.monotonic() - before >= 0.3
        assert (again.event.id, again.count) == (delivery.event.id, 2)


async def test_work_that_waits_for_its_retry_holds_up_nothing(bus: Bus) -> None:
    for text in "ab":
        await bus.put("queue", note(text))
    async with bus.consume("queue", consumer="c") as consumer:
        await (await soon(consumer.take())).retry(30.0, "later")
        assert text_of((await soon(consumer.take())).event) == "b"


async def fail(bus: Bus, queue: str, reasons: Iterable[str]) -> None:
    async with bus.consume(queue, consumer="failing") as consumer:
        for reason in reasons:
            await (await soon(consumer.take())).retry(0.0, reason)


async def test_the_third_failure_is_a_dead_letter_with_its_reason(bus: Bus) -> None:
    event = note("a")
    await bus.put("queue", event)
    await fail(bus, "queue", ["first", "second"])
    assert await bus.dead_letters("queue") == []
    await fail(bus, "queue", ["third"])
    [letter] = await bus.dead_letters("queue")
    assert (letter.queue, letter.event, letter.reason, letter.deliveries) == (
        "queue",
        event,
        "third",
        3,
    )
    assert await bus.backlog("queue") == 0


async def test_a_retry_without_a_time_backs_off_and_says_whether_it_comes_again(bus: Bus) -> None:
    await bus.put("queue", note("a"))
    async with bus.consume("queue", consumer="c") as consumer:
        again = [await (await soon(consumer.take())).retry(None, "failed") for _ in range(3)]
    assert again == [True, True, False]
    assert len(await bus.dead_letters("queue")) == 1


async def test_a_consumer_may_give_up_at_once(bus: Bus) -> None:
    await bus.put("queue", note("a"))
    async with bus.consume("queue", consumer="c") as consumer:
        await (await soon(consumer.take())).dead_letter("hopeless")
        assert await nothing_from(consumer.take())
    assert [letter.reason for letter in await bus.dead_letters("queue")] == ["hopeless"]


async def test_a_dead_letter_can_be_put_back_and_has_all_its_tries_again(bus: Bus) -> None:
    event = note("a")
    await bus.put("queue", event)
    await fail(bus, "queue", ["1", "2", "3"])
    [letter] = await bus.dead_letters("queue")
    await bus.requeue("queue", letter.id)
    assert await bus.dead_letters("queue") == []
    assert await bus.backlog("queue") == 1
    await fail(bus, "queue", ["4", "5"])
    async with bus.consume("queue", consumer="c") as consumer:
        delivery = await soon(consumer.take())
        assert delivery.event == event
        await delivery.ack()


async def test_an_unknown_dead_letter_can_be_neither_put_back_nor_dropped(bus: Bus) -> None:
    for unknown in ("1-1", "what?"):
        for change in (bus.requeue, bus.drop):
            with pytest.raises(NotFoundError, match=re.escape(f"no dead letter {unknown!r}")):
                await change("queue", unknown)


async def test_dead_letters_are_found_and_dropped(bus: Bus) -> None:
    assert await bus.dead_letter_queues() == []
    for queue, text in [("b", "1"), ("a", "2"), ("a", "3"), ("quiet", "4")]:
        await bus.put(queue, note(text))
    for queue, number in [("a", 2), ("b", 1)]:
        async with bus.consume(queue, consumer="c", credit=2) as consumer:
            for _ in range(number):
                await (await soon(consumer.take())).dead_letter("no")
    assert await bus.dead_letter_queues() == ["a", "b"]
    (oldest,) = await bus.dead_letters("a", limit=1)
    assert oldest.event is not None
    assert text_of(oldest.event) == "2"
    assert abs(oldest.time - bus.now()) < timedelta(seconds=10)
    await bus.drop("a", oldest.id)
    assert [texts([letter.event]) for letter in await bus.dead_letters("a") if letter.event] == [
        ["3"]
    ]
    (last,) = await bus.dead_letters("b")
    await bus.drop("b", last.id)
    assert await bus.dead_letter_queues() == ["a"]
    assert await bus.backlog("a") == 0


async def test_bytes_that_are_no_event_become_a_dead_letter_and_the_rest_flows(
    backend: Backend, bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    if backend.put_raw is None:
        pytest.skip("this bus passes objects: there are no bytes to be wrong")
    for raw in (
        b"\xff\x00 garbage",
        b"{}",
        b'{"type": "never.heard", "id": "1", "source": "a/1"}',
        b"z bomb",
    ):
        await backend.put_raw("queue", raw)
    await bus.put("queue", note("good"))
    async with bus.consume("queue", consumer="c") as consumer:
        delivery = await soon(consumer.take())
        assert text_of(delivery.event) == "good"
        await delivery.ack()
    letters = await bus.dead_letters("queue")
    assert len(letters) == 4
    assert caplog.text.count("work on queue 'queue' is a dead letter: ") == 4
    assert all(letter.event is None and letter.raw for letter in letters)
    assert any("never.heard" in letter.reason for letter in letters)
    assert await bus.backlog("queue") == 0


async def test_work_whose_deadline_has_passed_becomes_a_dead_letter_and_the_rest_flows(
    bus: Bus,
) -> None:
    late = note("late").model_copy(update={"deadline": bus.now() - timedelta(seconds=1)})
    early = note("early").model_copy(update={"deadline": bus.now() + timedelta(seconds=60)})
    await bus.put("queue", late, early, note("whenever"), late)
    async with bus.consume("queue", consumer="c", credit=4) as consumer:
        taken = [await soon(consumer.take()) for _ in range(2)]
        assert [text_of(delivery.event) for delivery in taken] == ["early", "whenever"]
        assert await nothing_from(consumer.take())
        await consumer.ack(taken)
    letters = await bus.dead_letters("queue")
    assert [text_of(letter.event) for letter in letters if letter.event] == ["late", "late"]
    assert all(re.fullmatch("deadline .* has passed", letter.reason) for letter in letters)
    assert await bus.backlog("queue") == 0


async def test_who_wants_it_gets_what_is_too_late(bus: Bus) -> None:
    late = note("late").model_copy(update={"deadline": bus.now() - timedelta(seconds=1)})
    await bus.put("queue", late)
    async with bus.consume("queue", consumer="c", past_deadline=True) as consumer:
        assert text_of((await soon(consumer.take())).event) == "late"


async def test_all_clients_share_a_clock(connect: Connect) -> None:
    async with connect() as one, connect() as other:
        assert abs(one.now() - other.now()) < timedelta(seconds=1)
        assert abs(one.now() - utc_now()) < timedelta(seconds=5)


async def test_a_full_queue_refuses_work_and_takes_it_again_once_some_is_settled(
    small_bus: Bus,
) -> None:
    bus = small_bus
    await bus.put("queue", *notes(*"ab"))
    await bus.put("queue", note("late"), at=utc_now() + timedelta(seconds=60))
    for at in (None, utc_now() + timedelta(seconds=60)):
        with pytest.raises(QueueFullError, match=f"'queue' is full: {SMALL} events.*queue_limit"):
            await bus.put("queue", note("c"), at=at)
    await bus.put("other", note("not full"))
    async with bus.consume("queue", consumer="c") as consumer:
        await (await soon(consumer.take())).ack()
        await bus.put("queue", note("c"))
        with pytest.raises(QueueFullError):
            await bus.put("queue", note("d"))
        delivery = await soon(consumer.take())
        assert text_of(delivery.event) == "b"
        with pytest.raises(QueueFullError):  # what is held is not settled
            await bus.put("queue", note("d"))
        await delivery.ack()
        assert text_of((await soon(consumer.take())).event) == "c"


async def test_what_a_full_queue_has_is_tried_again_and_taken_over(small_bus: Bus) -> None:
    bus = small_bus
    await bus.put("queue", note("hopeless"))
    await fail(bus, "queue", ["1", "2", "3"])
    await bus.put("queue", *notes(*"abc"))
    [letter] = await bus.dead_letters("queue")
    await bus.requeue("queue", letter.id)
    async with bus.consume("queue", consumer="c", lease_s=LEASE_S) as consumer:
        await (await soon(consumer.take())).retry(0.0, "once more")
        await (await soon(consumer.take())).retry(0.05, "later")
        assert text_of((await soon(consumer.take())).event) == "c"
        consumer.abandon()
    async with bus.consume("queue", consumer="d", credit=4, lease_s=LEASE_S) as consumer:
        taken = [text_of((await soon(consumer.take())).event) for _ in range(SMALL + 1)]
    assert sorted(taken) == ["a", "b", "c", "hopeless"]
    with pytest.raises(QueueFullError, match=f": {SMALL + 1} events"):
        await bus.put("queue", note("d"))


async def test_several_are_refused_together_or_taken_together(small_bus: Bus) -> None:
    await small_bus.put("queue", note("a"))
    await small_bus.put("queue", *notes(*"bcde"))
    with pytest.raises(QueueFullError):
        await small_bus.put("queue", *notes(*"fg"))
    assert await small_bus.backlog("queue") == 5


async def test_a_full_mailbox_refuses_mail_until_its_owner_has_recorded_some(
    small_bus: Bus,
) -> None:
    bus = small_bus
    asked = note("asked").model_copy(update={"episode_id": "e"})
    log = episode_log("e")
    async with bus.mailbox(log) as box:
        await bus.send_mail(log, *notes("1", "2"))
        await bus.reply(asked, note("3"))
        with pytest.raises(QueueFullError, match=f"'{log}' is full: {SMALL} mails.*mail_limit"):
            await bus.send_mail(log, note("4"))
        with pytest.raises(QueueFullError):
            await bus.reply(asked, note("4"))
        await bus.send_mail("other", note("not full"))
        await bus.send_mail(
            log, Event.of(EpisodeCancelled(reason="data blocks no control"), source="r/1")
        )
        assert [mail.lane for mail in await mails_of(box, 1)] == ["control"]
        mails = await mails_of(box, SMALL)
        await bus.append(log, 0, [mails[0].event], acks=mails[:1])
        await bus.send_mail(log, note("4"))
        assert mail_texts(await mails_of(box, 1)) == ["4"]


async def test_delayed_work_comes_when_it_is_due(bus: Bus) -> None:
    await bus.put("queue", note("later"), at=utc_now() + timedelta(seconds=0.4))
    await bus.put("queue", note("past"), at=utc_now() - timedelta(seconds=1))
    await bus.put("queue", note("now"))
    async with bus.consume("queue", consumer="c", credit=3) as consumer:
        before = time.monotonic()
        taken = [text_of((await soon(consumer.take())).event) for _ in range(3)]
        assert sorted(taken[:2]) == ["now", "past"]
        assert taken[2] == "later"
        assert time.monotonic() - before >= 0.3


async def test_a_waiting_consumer_learns_of_work_that_is_due_earlier(bus: Bus) -> None:
    await bus.put("queue", note("late"), at=utc_now() + timedelta(seconds=30))
    async with bus.consume("queue", consumer="c") as consumer, anyio.create_task_group() as tg:

        async def put_sooner() -> None:
            await checkpoint()
            await bus.put("queue", note("sooner"), at=utc_now() + timedelta(seconds=0.1))

        tg.start_soon(put_sooner)
        assert text_of((await soon(consumer.take())).event) == "sooner"


async def test_a_cancelled_take_strands_nothing(connect: Connect) -> None:
    """Takes are cancelled at any moment of their life while work comes; all of it is then still there to be taken."""
    total, taken, chance = 40, list[str](), random.Random(5)

    async def take_and_cancel(bus: Bus) -> None:
        async with bus.consume(
            "queue", consumer="nervous", credit=total, lease_s=LEASE_S
        ) as consumer:
            while True:
                delivery: Delivery | None = None
                with anyio.move_on_after(chance.uniform(0, 0.004)):
                    delivery = await consumer.take()
                if delivery is not None:
                    taken.append(text_of(delivery.event))
                    await delivery.ack()

    async with connect() as nervous, connect() as bus, anyio.create_task_group() as tg:
        tg.start_soon(take_and_cancel, nervous)
        for number in range(total):
            await bus.put("queue", note(str(number)))
        await wait_until(lambda: len(taken) == total, description="all work taken")
        await wait_until(lambda: is_settled(bus), description="all work settled")
        tg.cancel_scope.cancel()
    assert sorted(taken, key=int) == [str(number) for number in range(total)]


async def test_a_consumer_that_waits_does_not_lose_its_turn_to_a_cancelled_one(bus: Bus) -> None:
    got: list[str] = []

    async def wait_for_work(name: str) -> None:
        async with bus.consume("queue", consumer=name) as consumer:
            delivery = await consumer.take()
            got.append(text_of(delivery.event))
            await delivery.ack()

    async with anyio.create_task_group() as tg:
        async with anyio.create_task_group() as cancelled:
            cancelled.start_soon(wait_for_work, "first in line")
            await anyio.wait_all_tasks_blocked()
            tg.start_soon(wait_for_work, "second")
            await anyio.wait_all_tasks_blocked()
            await bus.put("queue", note("a"))
            cancelled.cancel_scope.cancel()
        with anyio.fail_after(DEADLINE_S):
            await wait_until(lambda: got == ["a"], description="the work done")
        tg.cancel_scope.cancel()


async def test_whoever_is_cancelled_leaves_soon_and_gives_back_what_it_held(
    connect: Connect,
) -> None:
    """Ctrl-C, or a failure beside it, ends a worker in the middle of everything."""
    holding = anyio.Event()
    cancelled_at = 0.0

    async def work() -> None:
        async with (
            connect() as bus,
            bus.mailbox("log") as mail,
            bus.feed(),
            bus.consume("queue", consumer="cancelled") as consumer,
        ):
            await consumer.take()
            holding.set()
            await anext(mail)

    async with connect() as bus:
        await bus.put("queue", note("a"))
        async with anyio.create_task_group() as tg:
            tg.start_soon(work)
            await soon(holding.wait())
            cancelled_at = time.monotonic()
            tg.cancel_scope.cancel()
        assert time.monotonic() - cancelled_at < 2.0
        async with bus.consume("queue", consumer="heir") as heir:
            assert text_of((await soon(heir.take())).event) == "a"


async def test_an_event_that_is_sent_on_from_a_log_leaves_its_seq_there(bus: Bus) -> None:
    called = note("a").at(7)
    await bus.put("queue", called)
    await bus.send_mail("log", called)
    async with bus.consume("queue", consumer="c") as consumer, bus.mailbox("log") as box:
        [mail] = await mails_of(box, 1)
        assert (await soon(consumer.take())).event.seq == 0
        assert mail.event.seq == 0


# --- request and reply ---------------------------------------------------------------------------


async def answer_one(bus: Bus, queue: str, text: str) -> None:
    async with bus.consume(queue, consumer="server") as consumer:
        delivery = await consumer.take()
        request = delivery.event
        answer = Event.of(
            MessagePosted(content=f"{text} {text_of(request)}"),
            source="server/1",
            correlation_id=request.id,
        )
        await bus.reply(request, answer)
        await delivery.ack()


async def test_work_for_a_role_goes_to_any_instance_and_work_for_an_instance_to_that_one(
    connect: Connect,
) -> None:
    async with connect() as bus, connect() as one, connect() as other:
        for queue in ("solver", "solver/2", "solver/2"):
            await bus.put(queue, note(queue).model_copy(update={"to": queue}))
        async with (
            one.consume("solver/1", consumer="1") as first_one,
            other.consume("solver/2", consumer="2", credit=2) as second,
            one.consume("solver", consumer="1") as any_one,
        ):
            direct = [await soon(second.take()) for _ in range(2)]
            assert [delivery.event.to for delivery in direct] == ["solver/2", "solver/2"]
            assert (await soon(any_one.take())).event.to == "solver"
            assert await nothing_from(first_one.take())


async def test_a_request_gets_its_reply(connect: Connect) -> None:
    async with connect() as client, connect() as server, anyio.create_task_group() as tg:
        tg.start_soon(answer_one, server, "queue", "hello")
        request = note("world")
        reply = await client.request("queue", request, timeout_s=DEADLINE_S)
        assert (text_of(reply), reply.correlation_id) == ("hello world", request.id)


async def test_requests_at_the_same_time_get_each_its_own_reply(connect: Connect) -> None:
    replies: dict[str, str] = {}

    async def ask(bus: Bus, text: str) -> None:
        replies[text] = text_of(await bus.request("queue", note(text), timeout_s=DEADLINE_S))

    async with connect() as client, connect() as server, anyio.create_task_group() as tg:
        for text in "abc":
            tg.start_soon(ask, client, text)
        for _ in "abc":
            tg.start_soon(answer_one, server, "queue", "re:")
    assert replies == {text: f"re: {text}" for text in "abc"}


async def test_nobody_works_for_a_caller_that_gave_up(bus: Bus) -> None:
    with pytest.raises(RequestTimeoutError):
        await bus.request("echo", note("hello?"), timeout_s=0.4)
    async with bus.consume("echo", consumer="server") as consumer:
        assert await nothing_from(consumer.take())

        async def is_dead() -> bool:
            return bool(await bus.dead_letters("echo"))

        await wait_until(is_dead, DEADLINE_S, "the request is among the dead letters")
    (letter,) = await bus.dead_letters("echo")
    assert "has passed" in letter.reason


async def test_a_request_keeps_its_own_deadline_where_that_is_sooner(bus: Bus) -> None:
    asked = note("now or never")
    passed = bus.now() - timedelta(seconds=1)
    with pytest.raises(RequestTimeoutError):
        await bus.request("echo", asked.model_copy(update={"deadline": passed}), timeout_s=0.1)
    async with bus.consume("echo", consumer="server", past_deadline=True) as consumer:
        assert (await soon(consumer.take())).event.deadline == passed


async def test_a_request_without_reply_ends_at_its_deadline(bus: Bus) -> None:
    before = time.monotonic()
    with pytest.raises(RequestTimeoutError, match="queue"):
        await bus.request("queue", note("anyone?"), timeout_s=0.2)
    assert 0.2 <= time.monotonic() - before < 2.0


async def test_a_reply_that_comes_too_late_harms_nobody(bus: Bus) -> None:
    request = note("anyone?")
    with pytest.raises(RequestTimeoutError):
        await bus.request("queue", request, timeout_s=0.05)
    await bus.reply(request, note("here"))


async def test_the_reply_to_an_episodes_request_is_mail_to_the_episode(connect: Connect) -> None:
    request = note("for an episode").model_copy(update={"episode_id": "e1"})
    async with connect() as tool, connect() as owner, owner.mailbox(episode_log("e1")) as box:
        await owner.put("queue", request)
        await answer_one(tool, "queue", "done")
        [mail] = await mails_of(box, 1)
        assert (text_of(mail.event), mail.event.correlation_id) == (
            "done for an episode",
            request.id,
        )


# --- broadcasts ----------------------------------------------------------------------------------


async def test_a_broadcast_reaches_everyone_who_listens_to_its_channel(connect: Connect) -> None:
    async with (
        connect() as one,
        connect() as two,
        one.listen("channel") as mine,
        two.listen("channel") as yours,
        two.listen("other") as other,
    ):
        await one.broadcast("channel", {"n": [1, None, "ü"]})
        await one.broadcast("channel", "again")
        assert await first(mine, 2) == [{"n": [1, None, "ü"]}, "again"]
        assert await first(yours, 2) == [{"n": [1, None, "ü"]}, "again"]
        assert await nothing_from(anext(other))


async def test_a_broadcast_is_lost_on_who_listens_later(bus: Bus) -> None:
    await bus.broadcast("channel", "early")
    async with bus.listen("channel") as heard:
        await bus.broadcast("channel", "late")
        assert await first(heard, 1) == ["late"]


async def test_a_listener_that_does_not_read_holds_up_nobody(bus: Bus) -> None:
    async with bus.listen("channel"), bus.listen("end") as end:
        for number in range(3000):
            await bus.broadcast("channel", number)
        await bus.broadcast("end", True)
        assert await first(end, 1) == [True]


async def test_a_slow_listener_loses_the_oldest_and_keeps_the_latest(bus: Bus) -> None:
    async with bus.listen("channel") as slow, bus.listen("channel") as quick:
        for number in range(3000):
            await bus.broadcast("channel", number)
        while await first(quick, 1) != [2999]:
            pass
        heard = await first(slow, 1024)
        assert heard == list(range(3000 - 1024, 3000))
        assert await nothing_from(anext(slow))


async def test_a_listener_holds_no_more_than_a_few_megabytes(bus: Bus) -> None:
    large = "x" * (5 * 1024 * 1024)
    async with bus.listen("channel") as slow, bus.listen("channel") as quick:
        for number in range(6):
            await bus.broadcast("channel", [number, large])
            await first(quick, 1)
        heard = [cast("list[JsonValue]", value)[0] for value in await first(slow, 3)]
        assert heard == [3, 4, 5]
        assert await nothing_from(anext(slow))


async def test_a_broadcast_above_the_cap_is_refused(bus: Bus) -> None:
    with pytest.raises(PayloadTooLargeError, match="channel"):
        await bus.broadcast("channel", "x" * REFUSE_ABOVE)


# --- membership ----------------------------------------------------------------------------------


def node(name: str, load: float = 0.0) -> NodeInfo:
    return NodeInfo(
        name=name,
        kind="tool",
        version="1",
        load=load,
        queues=("tool:calculator",),
        behind_s=0.5,
        since=utc_now(),
        detail={"slots": 2},
    )


def unseen(info: NodeInfo) -> NodeInfo:
    return info.model_copy(update={"seen": None})


async def test_nodes_that_announce_themselves_are_listed(connect: Connect) -> None:
    one, two = node("calculator/1"), node("calculator/2")
    async with connect() as bus, connect() as other:
        await bus.announce(one)
        await bus.announce(two)
        listed = sorted(await other.nodes(), key=lambda info: info.name)
        assert [unseen(info) for info in listed] == [one, two]
        assert [info.role for info in listed] == ["calculator", "calculator"]
        assert all(
            info.seen and abs(info.seen - bus.now()) < timedelta(seconds=5) for info in listed
        )


async def test_a_node_is_listed_as_it_last_announced_itself(bus: Bus) -> None:
    await bus.announce(node("calculator/1", load=0.0))
    latest = node("calculator/1", load=0.5)
    await bus.announce(latest)
    assert [unseen(info) for info in await bus.nodes()] == [latest]


async def test_a_node_that_withdraws_is_gone_at_once(bus: Bus) -> None:
    await bus.announce(node("calculator/1"))
    await bus.withdraw("calculator/1")
    await bus.withdraw("never/1")
    assert await bus.nodes() == []


async def test_a_node_that_falls_silent_is_gone_after_its_time(bus: Bus) -> None:
    await bus.announce(node("silent/1"), ttl_s=0.2)
    await bus.announce(node("alive/1"))
    assert len(await bus.nodes()) == 2

    async def only_one_is_left() -> bool:
        return [info.name for info in await bus.nodes()] == ["alive/1"]

    await wait_until(only_one_is_left, description="the silent node forgotten")


async def test_mail_that_its_owner_refuses_is_a_dead_letter_until_it_is_requeued(bus: Bus) -> None:
    refused = [note("forged"), Event.of(EpisodeCancelled(reason="forged"), source="x/1")]
    for event in refused:
        await bus.send_mail("log", event)
        async with bus.mailbox("log") as box:
            (mail,) = await anext(aiter(box))
        await bus.bury_mail(mail, "it is forged")
        async with bus.mailbox("log") as box:
            assert await nothing_from(anext(aiter(box)))
    letters = await bus.dead_letters("mail")
    assert [(letter.event, letter.log, letter.reason) for letter in letters] == [
        (event, "log", "it is forged") for event in refused
    ]
    await bus.requeue("mail", letters[0].id)
    async with bus.mailbox("log") as box:
        (mail,) = await anext(aiter(box))
    assert mail.event == refused[0]
    assert [letter.id for letter in await bus.dead_letters("mail")] == [letters[1].id]
