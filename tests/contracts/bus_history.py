"""Histories of a bus, as they are drawn, and as they run (test_bus_machine.py).

A history is drawn before it runs. What a step acts on is a number, which counts what is there by then, from the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import anyio
from hypothesis import strategies as st

from aworld_runtime.events import EpisodeCancelled, MessagePosted, utc_now
from aworld_runtime.names import EPISODES_QUEUE, episode_log
from tests.contracts.checked_bus import DEADLINE_S, CheckedBus, Member, Owner, Taken

T = TypeVar("T")

LEASE = 3
"""Units of time."""
QUEUE = EPISODES_QUEUE
CALLS = "tools"
"""A queue of requests."""
SLOW = "environments"
"""A queue of work that takes its time."""
EPISODES = ("1", "2")
LOGS = tuple(map(episode_log, EPISODES))


class History:
    """One history as it runs. Where there is nothing that a step could act on, it does nothing."""

    def __init__(self, bus: CheckedBus, unit_s: float) -> None:
        self.bus = bus
        self.unit_s = unit_s
        self.members: list[Member] = []
        self.frozen: list[Member] = []
        self.owners: list[Owner] = []
        self.taken: list[Taken] = []

    # consumers

    async def join(self, credit: int, client: int) -> None:
        self.members.append(await self.bus.join(QUEUE, credit, client))

    async def leave(self, member: int) -> None:
        """What it holds is given back at once; what it says of that later counts for nothing."""
        for leaver in nth(self.members, member):
            self.members.remove(leaver)
            await self.bus.leave(leaver)

    async def crash(self, member: int) -> None:
        """At work. Or it only seems so: until its leases have run out, what it says of its work counts."""
        for dying in nth(self.members, member):
            self.members.remove(dying)
            self.taken += await self.bus.take(dying, 1)
            await self.bus.crash(dying)

    async def freeze(self, member: int) -> None:
        """With its process, at work; others take over."""
        for frozen in nth(self.members, member):
            self.members.remove(frozen)
            self.taken += await self.bus.take(frozen, 1)
            self.bus.freeze(frozen)
            self.frozen.append(frozen)

    async def thaw(self, member: int) -> None:
        """It goes on, and thinks that it still has its work."""
        for thawed in nth(self.frozen, member):
            self.frozen.remove(thawed)
            await self.bus.thaw(thawed)
            self.members.insert(0, thawed)

    async def work_slowly(self) -> None:
        await self.bus.work_slowly(SLOW)

    async def take(self, member: int, at_most: int) -> None:
        for taker in nth(self.members, member):
            self.taken += await self.bus.take(taker, at_most)

    async def ack(self, one: int, *, another: bool) -> None:
        for first in self.works(one):
            same = [work for work in self.taken if work.member is first.member]
            others = [work for work in same if work is not first and another]
            await self.bus.ack(first, *others[-1:])

    async def retry(self, one: int, after: int | None) -> None:
        for work in self.works(one):
            self.taken.remove(work)
            await self.bus.retry(work, None if after is None else after * self.unit_s)

    async def fail_again_and_again(self, member: int, times: int, after: int) -> None:
        for worker in nth(self.members, member):
            for _ in range(times):
                for work in await self.bus.take(worker, worker.room):
                    await self.bus.retry(work, after * self.unit_s)

    async def inherit(self, member: int, saying: str) -> None:
        """Take what another had, who says something of it before it knows."""
        for heir in nth(self.members, member):
            taken = await self.bus.take(heir, 1)
            former = [x for x in self.taken if any(work.held.former is x.held for work in taken)]
            for loser in former:
                self.taken.remove(loser)
                if saying == "done":
                    await self.bus.ack(loser)
                elif saying == "failed":
                    await self.bus.retry(loser, 0)
                else:
                    await self.bus.give_up(loser)
            self.taken += taken

    async def give_up(self, one: int) -> None:
        for work in self.works(one):
            await self.bus.give_up(work)

    async def ask(self, one: int) -> None:
        for work in self.works(one):
            await self.bus.ask(work)

    def works(self, number: int) -> list[Taken]:
        """What nobody has said anything of comes first; to say it twice is the other case."""
        return nth(sorted(self.taken, key=lambda work: not work.settled), number)

    # work

    async def put(self, number: int, client: int, *, twice: bool) -> None:
        """Twice, where the first reply was lost."""
        events = [self.bus.note("work") for _ in range(number)]
        for _ in range(1 + twice):
            await self.bus.put(QUEUE, *events, client=client)

    async def put_later(self, after: int, *, twice: bool) -> None:
        event = self.bus.note("later")
        for _ in range(1 + twice):
            await self.bus.put_later(QUEUE, event, after * self.unit_s)

    async def put_too_late(self) -> None:
        late = utc_now() - timedelta(hours=1)
        event = self.bus.event(MessagePosted(content="too late"), deadline=late)
        await self.bus.put(QUEUE, event, late=True)

    async def see_to_a_dead_letter(self, letter: int, *, again: bool) -> None:
        await self.bus.see_to_dead(QUEUE, letter, again=again)

    # owners

    async def claim(self, log: int, client: int) -> None:
        """Take a log over. Who owned it goes on, and learns of it when an append is refused."""
        self.owners.append(await self.bus.own(self.log(log), client))

    async def append(self, owner: int, notes: int, *, reads: bool) -> None:
        """What was done, and the mail that was read."""
        for writer in nth(self.owners, owner):
            if reads:
                await self.bus.read_mail(writer)
            await self.bus.record(writer, *(self.bus.note("done") for _ in range(notes)))

    async def append_again(self, owner: int) -> None:
        """The reply was lost."""
        for writer in nth(self.owners, owner):
            if writer.last_append is not None:
                await self.bus.append(writer.bus, writer.log, *writer.last_append)

    async def read_mail(self, owner: int) -> None:
        for reader in nth(self.owners, owner):
            await self.bus.read_mail(reader)

    async def mail(self, log: int, urgent: list[bool], *, twice: bool) -> None:
        events = [
            self.bus.event(EpisodeCancelled(reason="no")) if is_urgent else self.bus.note("mail")
            for is_urgent in urgent
        ]
        for _ in range(1 + twice):
            await self.bus.send_mail(self.log(log), *events)

    async def reply_by_mail(self, episode: int) -> None:
        await self.bus.reply_by_mail(EPISODES[episode])

    # calls and broadcasts

    async def request(self, client: int, answers: int) -> None:
        timeout_s = DEADLINE_S if answers else self.unit_s
        await self.bus.request(CALLS, client, answers=answers, timeout_s=timeout_s)

    async def broadcast(self, client: int, number: int) -> None:
        await self.bus.broadcast(client, number)

    # logs

    def log(self, number: int) -> str:
        """Of the newest owner, or the other one."""
        place = LOGS.index(self.owners[-1].log) if self.owners else 0
        return LOGS[(place + number) % len(LOGS)]

    async def append_out_of_the_blue(self, log: int, expected: int, notes: int) -> None:
        """As of an owner whom nobody remembers."""
        events = [self.bus.note("stranger") for _ in range(notes)]
        await self.bus.append(self.bus.clients[0], self.log(log), expected, events)

    async def fork(self, log: int, back: int) -> None:
        """The log's beginning, as another's."""
        await self.bus.fork(self.log(log), self.log(log + 1), back)

    async def unlink(self, log: int, keep: int, *, stale: bool) -> None:
        """Where nothing is kept, it is as if the server had lost the log."""
        await self.bus.unlink(self.log(log), keep * self.unit_s, stale=stale)

    async def restore(self, log: int, missing: int, *, another: bool) -> None:
        """From a store, which may not have the newest; or another history, where there is one."""
        if another:
            await self.bus.restore_another(self.log(log))
        await self.bus.restore(self.log(log), missing)

    async def tail(self, log: int, start: int, client: int) -> None:
        await self.bus.tail(self.log(log), start, client)

    async def follow_the_feed(self, processed: int, client: int, *, then_trim: bool) -> None:
        await self.bus.follow(processed, client)
        if then_trim:
            await self.bus.trim()

    # time

    async def time_passes(self, units: int) -> None:
        await anyio.sleep(units * self.unit_s)


def nth(things: Sequence[T], number: int) -> list[T]:
    """One of them, the newest for 0; of none, none."""
    return [things[-1 - number % len(things)]] if things else []


# --- what is drawn -------------------------------------------------------------------------------


class Step(NamedTuple):
    """One call of a history, before it is known what it will meet."""

    call: Callable[..., Coroutine[Any, Any, None]]
    operands: dict[str, Any]

    def __repr__(self) -> str:
        operands = ", ".join(f"{name}={value!r}" for name, value in self.operands.items())
        return f"{self.call.__name__}({operands})"


Steps = st.SearchStrategy[list[Step]]


def step(
    call: Callable[..., Coroutine[Any, Any, None]], **operands: st.SearchStrategy[Any]
) -> Steps:
    return st.fixed_dictionaries(operands).map(lambda drawn: [Step(call, drawn)])


def one_of(*strategies: Steps) -> Steps:
    """As hypothesis has it; who is named twice comes twice as often."""
    return st.sampled_from(strategies).flatmap(lambda strategy: strategy)


def then(*parts: Steps) -> Steps:
    """One after the other. Now and then one is left out; what fails is made small so."""
    several = st.tuples(*(one_of(NOTHING, *[part] * 9) for part in parts))
    return several.map(lambda lists: [*chain(*lists)])


NOTHING: Steps = st.just([])
NEWEST = SAME = st.just(0)
FORMER = st.just(1)
OLDEST = st.just(-1)
ANY = st.integers(0, 4)
EITHER = st.integers(0, 1)
FEW = st.integers(1, 3)
NOTES = st.sampled_from([1, 2, 3, 9, 20])
"""From eight on, a server holds them together."""
SAYINGS = ("done", "failed", "given up")
MAYBE = st.booleans()
NO, YES = st.just(False), st.just(True)
KEEP = st.sampled_from([10_000, 10_000, 0, 2])

join = step(History.join, credit=st.sampled_from([1, 2, 8]), client=EITHER)
put = step(History.put, number=FEW, client=EITHER, twice=MAYBE)
put_later = step(History.put_later, after=FEW, twice=MAYBE)
take = step(History.take, member=ANY, at_most=FEW)
die = step(History.crash, member=NEWEST)
fail = step(
    History.fail_again_and_again,
    member=ANY,
    times=st.integers(2, 4),
    after=st.sampled_from([0, 1]),
)
fail_at_all = step(
    History.fail_again_and_again, member=NEWEST, times=st.just(4), after=st.sampled_from([0, 1])
)
settle = one_of(
    step(History.ack, one=ANY, another=MAYBE),
    step(History.retry, one=ANY, after=st.sampled_from([0, 1, 2, None])),
    step(History.give_up, one=ANY),
    step(History.ask, one=ANY),
)
see_to_the_dead = step(History.see_to_a_dead_letter, letter=ANY, again=MAYBE)
claim = step(History.claim, log=EITHER, client=EITHER)
take_over = step(History.claim, log=SAME, client=EITHER)
append = step(History.append, owner=ANY, notes=NOTES, reads=MAYBE)
mail = step(History.mail, log=SAME, urgent=st.lists(MAYBE, min_size=1, max_size=3), twice=MAYBE)
unlink = step(History.unlink, log=SAME, keep=KEEP, stale=NO)
restore = step(History.restore, log=SAME, missing=st.integers(0, 12), another=MAYBE)
time_passes = step(History.time_passes, units=st.integers(1, 2 * LEASE))

COMMON = [
    *(join, put, put_later, take, take, fail, settle, settle, see_to_the_dead, time_passes),
    *(claim, append, append, mail, unlink, restore),
]
RARE = [
    step(History.leave, member=ANY),
    step(History.freeze, member=ANY),
    step(History.thaw, member=ANY),
    step(History.work_slowly),
    step(History.crash, member=ANY),
    step(History.put_too_late),
    step(History.read_mail, owner=ANY),
    step(History.append_again, owner=ANY),
    step(
        History.append_out_of_the_blue,
        log=EITHER,
        expected=st.integers(0, 24),
        notes=st.sampled_from([0, 1, 2, 9]),
    ),
    step(History.fork, log=EITHER, back=st.integers(0, 12)),
    step(History.unlink, log=EITHER, keep=KEEP, stale=MAYBE),
    step(History.tail, log=EITHER, start=st.sampled_from([1, 2, 9]), client=EITHER),
    step(History.reply_by_mail, episode=EITHER),
    step(History.request, client=EITHER, answers=st.integers(0, 2)),
    step(History.broadcast, client=EITHER, number=FEW),
    step(History.follow_the_feed, processed=st.integers(0, 9), client=EITHER, then_trim=MAYBE),
]
STORIES = [
    # A consumer dies at work, another gets the work; the first is back, and settles what isn't its own.
    then(
        step(History.put, number=st.just(1), client=EITHER, twice=NO),
        join,
        die,
        take,
        one_of(
            step(History.ask, one=FORMER),
            step(History.ack, one=FORMER, another=NO),
            step(History.retry, one=FORMER, after=st.just(0)),
            step(History.give_up, one=FORMER),
        ),
        step(History.ask, one=NEWEST),
    ),
    then(put, join, die, take, settle, settle),
    # Its process was only stopped. Others took over when it settles, goes on, or leaves.
    then(
        step(History.put, number=st.just(1), client=EITHER, twice=NO),
        join,
        step(History.freeze, member=NEWEST),
        join,
        one_of(
            step(History.take, member=NEWEST, at_most=FEW),
            *(step(History.inherit, member=NEWEST, saying=st.just(x)) for x in SAYINGS),
        ),
        step(History.thaw, member=NEWEST),
        one_of(NOTHING, step(History.leave, member=OLDEST), step(History.ask, one=FORMER)),
        step(History.ask, one=NEWEST),
        settle,
    ),
    # Who gets the work of one that died fails at it; or who gets any.
    then(put, join, die, fail, see_to_the_dead),
    then(join, put, fail_at_all, see_to_the_dead),
    # Work is given back, while other work waits.
    then(
        step(History.put, number=st.just(3), client=EITHER, twice=NO),
        join,
        step(History.take, member=NEWEST, at_most=EITHER.map(lambda more: 1 + more)),
        step(History.leave, member=NEWEST),
        join,
        step(History.take, member=NEWEST, at_most=FEW),
        settle,
    ),
    # Somebody waits for work that is not due, or too late.
    then(
        join,
        one_of(
            step(History.put_later, after=st.just(3), twice=NO),
            then(step(History.put_too_late), put),
        ),
        step(History.take, member=NEWEST, at_most=FEW),
    ),
    # An owner records its mail.
    then(claim, mail, step(History.append, owner=NEWEST, notes=NOTES, reads=YES), mail),
    # An owner has read its mail when another takes over, and goes on.
    then(
        claim,
        mail,
        step(History.read_mail, owner=NEWEST),
        take_over,
        step(History.append, owner=NEWEST, notes=NOTES, reads=NO),
        step(History.append, owner=FORMER, notes=NOTES, reads=MAYBE),
        step(History.append_again, owner=FORMER),
        append,
    ),
    # A log is retired or lost; its owner goes on, and the log comes back.
    then(
        claim,
        step(History.append, owner=NEWEST, notes=NOTES, reads=MAYBE),
        *(mail, unlink, append, mail, restore, append),
    ),
]
PROGRAMS = st.tuples(
    *(one_of(NOTHING, then(join, join)), claim, one_of(*STORIES)),
    st.lists(one_of(NOTHING, *COMMON, *RARE, *STORIES * 3), min_size=6, max_size=16),
).map(lambda drawn: [*chain(*drawn[:-1], *drawn[-1])])
