"""Random histories of a bus, each answer held against a model of what it promises, in memory and on real servers.

    consumers  join, take, settle, leave, die and come back late ─┐
    owners     claim an episode, append, read and record mail,    ├─▶ checked_bus.py ─▶ bus
               repeat what was done, go on when others took over  │         └─▶ bus_model.py
    others     put, mail, call, fork, unlink, restore, follow    ─┘

bus_history.py draws them. In memory the loop's time is the history's own, and nobody waits for it; on servers it
passes where a history says so.
For hours of it: `python -m pytest tests/contracts/test_bus_machine.py --hypothesis-profile=soak --timeout=0`;
`-k memory`, `-k redis` and `-k cluster` are one of them. What it would notice: mutate.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.redis.heartbeat import Heartbeat, Lease
from tests.contracts.bus_history import LEASE, PROGRAMS, History, Step
from tests.contracts.checked_bus import LIMITS, CheckedBus
from tests.contracts.loops import JumpingLoop


@dataclass(frozen=True)
class World:
    """A kind of bus, and how time passes there."""

    begin: Callable[[], Callable[[], AbstractAsyncContextManager[Bus]]]
    """A new bus; what opens a client of it."""
    loop: asyncio.AbstractEventLoop
    unit_s: float
    exact: bool
    """Time passes where a history says so, and nowhere else."""
    renew: Callable[[str, bool], None] | None = None
    """Says of a consumer whether its leases are renewed, as they aren't while its process is stopped."""


async def run(world: World, program: Sequence[Step]) -> None:
    connect, lease_s = world.begin(), LEASE * world.unit_s
    async with (
        connect() as one,
        connect() as other,
        aclosing(
            CheckedBus(one, other, lease_s=lease_s, exact=world.exact, renew=world.renew)
        ) as bus,
    ):
        history = History(bus, world.unit_s)
        for number, each in enumerate(program):
            try:
                await each.call(history, **each.operands)
                await bus.check()
            except BaseException as error:
                error.add_note(f"in step {number} of {program}")
                raise
        await bus.check_nothing_is_lost()


def play(world: World, number: int) -> None:
    """Many histories: the same in every run of the tests; a soak has more, by chance."""
    profile = settings.get_current_profile_name()
    more = {"soak": settings().max_examples, "mutants": 5 * number}

    @settings(
        max_examples=more.get(profile, number),
        derandomize=profile != "soak",
        database=None,
        deadline=None,
        phases=[phase for phase in settings().phases if phase in (Phase.generate, Phase.shrink)],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(PROGRAMS)
    def keeps_its_promises(program: list[Step]) -> None:
        world.loop.run_until_complete(run(world, program))

    with closing(world.loop):
        keeps_its_promises()


def test_in_memory() -> None:
    def begin() -> Callable[[], AbstractAsyncContextManager[Bus]]:
        bus = open_bus(f"memory://?{LIMITS}")
        return lambda: nullcontext(bus)

    play(World(begin, JumpingLoop(), unit_s=1.0, exact=True), 400)


@pytest.mark.slow
@pytest.mark.usefixtures("anyio_backend")
@pytest.mark.parametrize("server_url", ["redis", "cluster"], indirect=True)
def test_on_servers(server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aworld_runtime.bus.redis.consumer.TEND_S", 0.02)  # who waits looks often

    def begin() -> Callable[[], AbstractAsyncContextManager[Bus]]:
        joint = "&" if "?" in server_url else "?"
        url = f"{server_url}{joint}{LIMITS}&namespace=machine-{uuid4().hex}"
        return partial(open_bus, url)

    leases: dict[str, tuple[Heartbeat, Lease]] = {}
    add = Heartbeat.add

    def note(heartbeat: Heartbeat, lease: Lease) -> None:
        """Does what it stands for, and remembers it: a process that stands still is one whose leases aren't renewed."""
        name, _, _ = lease.consumer.rpartition("-")  # without what the bus makes it unique by
        leases[name] = heartbeat, lease
        add(heartbeat, lease)

    def renew(consumer: str, renewing: bool) -> None:
        heartbeat, lease = leases[consumer]
        (heartbeat.add if renewing else heartbeat.remove)(lease)

    monkeypatch.setattr(Heartbeat, "add", note)
    play(World(begin, asyncio.new_event_loop(), unit_s=0.03, exact=False, renew=renew), 40)
