"""Random histories of a bus, each answer held against a model of what it promises, in memory and on real servers.

    consumers  join, take, settle, leave, die and come back late ─┐
    owners     claim an episode, append, read and record mail,    ├─▶ checked_bus.py ─▶ bus
               repeat what was done, go on when others took over  │         └─▶ bus_model.py
    others     put, mail, fork, unlink, restore, trim, follow    ─┘

In memory the loop's time is the history's own, and nobody waits for it; on servers it passes where a history says so.
For hours of it: `python -m pytest tests/contracts/test_bus_machine.py --hypothesis-profile=soak --timeout=0`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import anyio
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)

from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.events import EpisodeCancelled, MessagePosted, utc_now
from aworld_runtime.names import EPISODES_QUEUE, episode_log
from tests.contracts.checked_bus import CheckedBus, Member, Owner, Taken
from tests.contracts.loops import JumpingLoop

T = TypeVar("T")

STEPS = 40
"""Most steps of a history."""
LEASE = 3
"""Units of time."""
QUEUE = EPISODES_QUEUE
LOGS = st.sampled_from([episode_log("1"), episode_log("2")])
CLIENTS = st.integers(0, 1)


@dataclass(frozen=True)
class World:
    """A kind of bus, and how time passes there."""

    begin: Callable[[], Callable[[], AbstractAsyncContextManager[Bus]]]
    """A new bus; what opens a client of it."""
    loop: asyncio.AbstractEventLoop
    unit_s: float
    exact: bool
    """Time passes where a history says so, and nowhere else."""


class BusMachine(RuleBasedStateMachine):
    """One history."""

    members = Bundle[Member]("members")
    taken = Bundle[Taken]("taken")
    owners = Bundle[Owner]("owners")

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.sound = True
        self.over = asyncio.Event()
        opened: asyncio.Future[CheckedBus] = world.loop.create_future()
        self.host = world.loop.create_task(self._host(world.begin(), opened))
        world.loop.run_until_complete(
            asyncio.wait([opened, self.host], return_when="FIRST_COMPLETED")
        )
        self.bus = opened.result()

    # consumers

    @initialize(target=members, credit=st.integers(1, 3))
    def two_are_there(self, credit: int) -> MultipleResults[Member]:
        return multiple(
            *(self.do(self.bus.join(QUEUE, credit, client), QUEUE) for client in (0, 1))
        )

    @rule(target=members, credit=st.integers(1, 3), client=CLIENTS)
    def join(self, credit: int, client: int) -> Member:
        return self.do(self.bus.join(QUEUE, credit, client), QUEUE)

    @rule(member=consumes(members))
    def leave(self, member: Member) -> None:
        """What it holds is given back at once; what it says of that later counts for nothing."""
        self.do(self.bus.leave(member), QUEUE)

    @rule(target=taken, member=consumes(members))
    def crash(self, member: Member) -> MultipleResults[Taken]:
        """At work. Or it only seems so: until its leases have run out, what it says of its work counts."""
        last = self.do(self.bus.take(member, 1), QUEUE)
        self.do(self.bus.crash(member), QUEUE)
        return multiple(*last)

    @rule(target=taken, member=members, at_most=st.integers(1, 3))
    def take(self, member: Member, at_most: int) -> MultipleResults[Taken]:
        return multiple(*self.do(self.bus.take(member, at_most), QUEUE))

    @rule(one=taken, other=taken)
    def ack(self, one: Taken, other: Taken) -> None:
        both = one.member is other.member and one is not other
        self.do(self.bus.ack(*((one, other) if both else (one,))), QUEUE)

    @rule(one=consumes(taken), after=st.sampled_from([0, 1, 2, None]))
    def retry(self, one: Taken, after: int | None) -> None:
        after_s = None if after is None else after * self.world.unit_s
        self.do(self.bus.retry(one, after_s), QUEUE)

    @rule(member=members, times=st.integers(2, 4))
    def fail_again_and_again(self, member: Member, times: int) -> None:
        for _ in range(times):
            for one in self.do(self.bus.take(member, 1), QUEUE):
                self.do(self.bus.retry(one, 0), QUEUE)

    @rule(one=taken, only_ask=st.booleans())
    def give_up(self, one: Taken, *, only_ask: bool) -> None:
        """Or only ask whose it is."""
        self.do(self.bus.ask(one) if only_ask else self.bus.give_up(one), QUEUE)

    # work

    @rule(number=st.integers(1, 2), client=CLIENTS, twice=st.booleans())
    def put(self, number: int, client: int, *, twice: bool) -> None:
        """Twice, where the first reply was lost."""
        events = [self.bus.note("work") for _ in range(number)]
        for _ in range(1 + twice):
            self.do(self.bus.put(QUEUE, *events, client=client), QUEUE)

    @rule(after=st.integers(0, 3), twice=st.booleans())
    def put_later(self, after: int, *, twice: bool) -> None:
        """Or too late."""
        late = utc_now() - timedelta(hours=1)
        event = self.bus.event(MessagePosted(content="work"), deadline=None if after else late)
        for _ in range(1 + twice):
            if after:
                self.do(self.bus.put_later(QUEUE, event, after * self.world.unit_s), QUEUE)
            else:
                self.do(self.bus.put(QUEUE, event, late=True), QUEUE)

    @rule(pick=st.integers(0, 5), again=st.booleans())
    def see_to_a_dead_letter(self, pick: int, *, again: bool) -> None:
        self.do(self.bus.see_to_dead(QUEUE, pick, again=again), QUEUE)

    # owners

    @initialize(target=owners, log=LOGS)
    def one_is_claimed(self, log: str) -> Owner:
        return self.do(self.bus.own(log, 0), log)

    @rule(target=owners, log=LOGS, client=CLIENTS)
    def claim(self, log: str, client: int) -> Owner:
        """Take a log over. Who owned it goes on, and learns of it when an append is refused."""
        return self.do(self.bus.own(log, client), log)

    @rule(owner=owners, notes=st.integers(0, 3), reads=st.booleans())
    def append(self, owner: Owner, notes: int, *, reads: bool) -> None:
        """What was done, and the mail that was read."""
        if reads:
            self.do(self.bus.read_mail(owner))
        self.do(self.bus.record(owner, *(self.bus.note("done") for _ in range(notes))), owner.log)

    @rule(owner=owners)
    def append_again(self, owner: Owner) -> None:
        """The reply was lost."""
        if owner.last_append is not None:
            self.do(self.bus.append(owner.bus, owner.log, *owner.last_append), owner.log)

    @rule(owner=owners)
    def read_mail(self, owner: Owner) -> None:
        self.do(self.bus.read_mail(owner), owner.log)

    @rule(log=LOGS, control=st.lists(st.booleans(), min_size=1, max_size=3), twice=st.booleans())
    def mail(self, log: str, control: list[bool], *, twice: bool) -> None:
        events = [
            self.bus.event(EpisodeCancelled(reason="no")) if urgent else self.bus.note("mail")
            for urgent in control
        ]
        for _ in range(1 + twice):
            self.do(self.bus.send_mail(log, *events), log)

    # logs

    @rule(log=LOGS, expected=st.integers(0, 12), notes=st.integers(0, 3), client=CLIENTS)
    def append_out_of_the_blue(self, log: str, expected: int, notes: int, client: int) -> None:
        """As of an owner whom nobody remembers."""
        events = [self.bus.note("stranger") for _ in range(notes)]
        self.do(self.bus.append(self.bus.clients[client], log, expected, events), log)

    @rule(parent=LOGS, log=LOGS, back=st.integers(0, 2))
    def fork(self, parent: str, log: str, back: int) -> None:
        self.do(self.bus.fork(parent, log, back), log)

    @rule(log=LOGS, keep=st.sampled_from([0, 2, 10_000]), stale=st.booleans())
    def unlink(self, log: str, keep: int, *, stale: bool) -> None:
        """Where nothing is kept, it is as if the server had lost the log."""
        keep_s = keep * self.world.unit_s if self.world.exact or keep != 2 else 0.0
        self.do(self.bus.unlink(log, keep_s, stale=stale), log)

    @rule(log=LOGS, missing=st.integers(0, 2), another=st.booleans())
    def restore(self, log: str, missing: int, *, another: bool) -> None:
        """From a store, which may not have the newest; or another history, where there is one."""
        if another:
            self.do(self.bus.restore_another(log), log)
        self.do(self.bus.restore(log, missing), log)

    @rule(log=LOGS, start=st.integers(1, 8), client=CLIENTS)
    def tail(self, log: str, start: int, client: int) -> None:
        self.do(self.bus.tail(log, start, client))

    @rule(processed=st.integers(0, 9), client=CLIENTS, then_trim=st.booleans())
    def follow_the_feed(self, processed: int, client: int, *, then_trim: bool) -> None:
        self.do(self.bus.follow(processed, client))
        if then_trim:
            self.do(self.bus.trim())

    # time

    @rule(units=st.integers(1, 2 * LEASE))
    def time_passes(self, units: int) -> None:
        self.do(anyio.sleep(units * self.world.unit_s))

    # inside

    def do(self, call: Coroutine[Any, Any, T], *touched: str) -> T:
        """What the call gives; what it may have touched is as it must be."""

        async def checked() -> T:
            result = await call
            await self.bus.check(*touched)
            return result

        try:
            return self.world.loop.run_until_complete(checked())
        except BaseException:
            self.sound = False
            raise

    def teardown(self) -> None:
        loop = self.world.loop
        with ExitStack() as end:
            end.callback(lambda: loop.run_until_complete(self.host))
            end.callback(self.over.set)
            end.callback(lambda: loop.run_until_complete(self.bus.close()))
            if self.sound:
                self.do(self.bus.check_nothing_is_lost())

    async def _host(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Bus]],
        opened: asyncio.Future[CheckedBus],
    ) -> None:
        """A client is opened and closed in one task; each step is another."""
        world = self.world
        async with connect() as one, connect() as other:
            lease_s = LEASE * world.unit_s
            opened.set_result(CheckedBus(one, other, lease_s=lease_s, exact=world.exact))
            await self.over.wait()


def histories(number: int) -> settings:
    """The same in every run of the tests; a soak has many more, by chance."""
    soak = settings.get_current_profile_name() == "soak"
    return settings(
        max_examples=settings().max_examples if soak else number,
        stateful_step_count=STEPS,
        derandomize=not soak,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def play(world: World, number: settings) -> None:
    class History(BusMachine):
        def __init__(self) -> None:
            super().__init__(world)

    run_state_machine_as_test(History, settings=number)


def test_in_memory() -> None:
    loop = JumpingLoop()

    def begin() -> Callable[[], AbstractAsyncContextManager[Bus]]:
        bus = open_bus("memory://")
        return lambda: nullcontext(bus)

    world = World(begin, loop, unit_s=1.0, exact=True)
    try:
        play(world, histories(200))
    finally:
        loop.close()


@pytest.mark.slow
@pytest.mark.usefixtures("anyio_backend")
@pytest.mark.parametrize("server_url", ["redis", "cluster"], indirect=True)
def test_on_servers(server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if settings.get_current_profile_name() != "soak":
        pytest.skip(
            "its histories depend on the server's time: run it with --hypothesis-profile=soak"
        )
    monkeypatch.setattr("aworld_runtime.bus.redis.consumer.TEND_S", 0.02)  # who waits looks often
    loop = asyncio.new_event_loop()

    def begin() -> Callable[[], AbstractAsyncContextManager[Bus]]:
        joint = "&" if "?" in server_url else "?"
        return partial(open_bus, f"{server_url}{joint}namespace=machine-{uuid4().hex}")

    world = World(begin, loop, unit_s=0.05, exact=False)
    try:
        play(world, histories(20))
    finally:
        loop.close()
