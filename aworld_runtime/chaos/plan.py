"""The schedule of a run: which fault strikes when and for how long, drawn from the seed alone.

    workers   a worker is killed every two seconds, all the time
    one       one worker: stopped, or given a wrong clock
    server    the bus server and the network to it, one fault at a time
    store     the store, while all the others go on
    load      bursts, and a consumer that can't keep up
    input     poison and hostile bytes

Tracks run side by side; on each, its kinds come in an order of the seed's, again and again, with rests between them.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

FULL_S = 120.0
"""Length of a run in which each fault lasts as long as it says; in a shorter one it is shorter."""
FIRST_S = 3.0
"""Seconds before the first fault: work is under way."""
KILL_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault."""

    track: str
    seconds: float
    """How long it lasts in a full run."""
    shortest: float
    """Less would be no fault."""
    rest: float
    """Seconds at least until the next of its track; up to twice as many."""
    does: str


KINDS: dict[str, Kind] = {
    "worker_killed": Kind(
        "workers", 0, 0, KILL_EVERY_S, "kill -9 of a worker or tool worker; another one starts"
    ),
    "worker_stopped": Kind(
        "one",
        30,
        5,
        6,
        "SIGSTOP of a worker for 30 s, then SIGCONT: what it still commits is refused",
    ),
    "clock_skewed": Kind("one", 10, 3, 4, "a worker's clock is an hour fast or slow (libfaketime)"),
    "server_stopped": Kind("server", 12, 3, 5, "SIGSTOP of the bus server for 12 s"),
    "server_killed": Kind("server", 1, 0.5, 5, "kill -9 of the bus server; it starts with its AOF"),
    "server_emptied": Kind(
        "server", 1, 0.5, 8, "kill -9 of the bus server; it starts without its data"
    ),
    "network_cut": Kind("server", 4, 1, 5, "connections to the bus are reset and refused"),
    "network_delayed": Kind("server", 8, 2, 5, "all that passes to and from the bus is late"),
    "network_half_open": Kind(
        "server", 7, 2, 5, "connections stay open, but requests or replies vanish"
    ),
    "server_disk_full": Kind("server", 5, 2, 5, "no space for the bus server's AOF"),
    "store_stopped": Kind("store", 60, 4, 5, "SIGSTOP of the store (SQLite: of the archiver)"),
    "store_killed": Kind("store", 3, 1, 5, "kill -9 of the store (SQLite: of the archiver)"),
    "store_disk_full": Kind("store", 8, 2, 5, "no space for the store's events and blobs"),
    "slow_consumer": Kind("load", 12, 3, 8, "ten times the load on a consumer 100 times too slow"),
    "poison": Kind(
        "input",
        0,
        0,
        6,
        "undecodable events; handlers that raise, loop, hang, or end their process",
    ),
    "hostile": Kind(
        "input",
        0,
        0,
        6,
        "huge lines, zip bombs, deep nesting, a million keys, pickles, forged sources",
    ),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a schedule."""

    kind: str
    at: float
    """Seconds since the start of the load."""
    seconds: float
    dice: float
    """In [0, 1): what is left to chance (which worker, which direction) comes from it."""

    @property
    def until(self) -> float:
        return self.at + self.seconds

    def choose(self, count: int) -> int:
        """One of `count`, by its dice."""
        return int(self.dice * count)


@dataclass(frozen=True, slots=True)
class Blow:
    """What was really done to whom, when, by the machine's monotonic clock."""

    kind: str
    target: str
    began: float
    ended: float
    held: tuple[str, ...] = ()
    """Of a worker that was killed: episodes that it had claimed, as the server says; it may not have lived to say so."""


def schedule(seed: int, seconds: float, kinds: Collection[str] = tuple(KINDS)) -> list[Fault]:
    """The faults of a run, by time; the same for the same arguments."""
    faults: list[Fault] = []
    for track in dict.fromkeys(kind.track for kind in KINDS.values()):
        # One generator each: to leave out the kinds of one track doesn't change the others.
        chance = random.Random(f"{seed}:{track}")
        names = [name for name in KINDS if KINDS[name].track == track and name in kinds]
        faults += _track(chance, names, seconds)
    return sorted(faults, key=lambda fault: fault.at)


def _track(chance: random.Random, names: list[str], seconds: float) -> list[Fault]:
    scale = min(1.0, seconds / FULL_S)
    chance.shuffle(names)
    faults: list[Fault] = []
    at = FIRST_S * chance.uniform(1.0, 2.0)
    while names:
        began = len(faults)
        for name in names:
            kind = KINDS[name]
            lasts = max(kind.shortest, kind.seconds * scale)
            if at + lasts <= seconds:
                faults.append(Fault(name, at, lasts, chance.random()))
                rest = kind.rest if name == "worker_killed" else kind.rest * max(scale, 0.4)
                jitter = 1.0 if name == "worker_killed" else chance.uniform(1.0, 2.0)
                at += lasts + rest * jitter
        if len(faults) == began:
            return faults
    return faults
