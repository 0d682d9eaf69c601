"""The load: who writes how many events of which size to whom.

    owner of an episode ─turn─▶ append to its log ─▶ put to the queue of a role ─▶ take ─▶ ack
                        (a turn: `batch` events at most, all for one role)

A round is as much of it as is in memory at once; each has episodes of its own.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from aworld_runtime.errors import ConfigError
from aworld_runtime.events import Event, MessagePosted, Registry
from aworld_runtime.messages import Data
from aworld_runtime.names import episode_log

BODY_BYTES = 1024
"""Of an event as it is encoded, metadata included."""
ROUND_EVENTS = 40_000


class Load(Data):
    """The shape of the throughput phase."""

    events: int = 200_000
    roles: int = 10
    episodes: int = 1000
    """At once."""
    batch: int = 100
    """Events in one append and in one put, at most."""
    publishers: int = 16
    """Owners that are in a call at once."""
    take: int = 200
    """Deliveries taken and acknowledged at once, at most."""
    credit: int = 1000
    """Unsettled deliveries of one consumer, at most."""

    def check(self) -> None:
        """See whether it can be run.

        Raises:
            ConfigError: a number that must be one or more.
        """
        for name, value in self:
            if value < 1:
                raise ConfigError(f"--{name} {value}: expected 1 or more")


def role_name(index: int) -> str:
    return f"role{index:03}"


def queue_name(role: str) -> str:
    """The queue from which a role of the benchmark takes its events."""
    return f"bench:{role}"


class Writer:
    """Makes events of one size: a kilobyte of prose, and the metadata that every event has."""

    def __init__(self) -> None:
        self._random = random.Random(0)
        letters = "etaoinshrdlu"
        words = ["".join(self._random.choices(letters, k=1 + i % 9)) for i in range(2000)]
        self._text = " ".join(self._random.choices(words, k=20_000))
        bare = len(Registry().encode(self._event("00000-00000", role_name(0), "")))
        self._size = max(BODY_BYTES - bare, 0)

    def event(self, episode_id: str, role: str) -> Event:
        begin = self._random.randrange(len(self._text) - self._size)
        return self._event(episode_id, role, self._text[begin : begin + self._size])

    def _event(self, episode_id: str, role: str, content: str) -> Event:
        return Event.of(
            MessagePosted(content=content),
            source="owner/bench",
            run_id="bench",
            task_id="bench",
            episode_id=episode_id,
            to=role,
        )


@dataclass(slots=True)
class Turn:
    """What an owner appends at once, and for whom."""

    role: str
    events: list[Event]


@dataclass(slots=True)
class Script:
    """What one owner has to do, and how far its log is."""

    log: str
    turns: deque[Turn]
    ids: list[str]
    """Of all its events, in order: what must stand in its log at the end."""
    seq: int = 0


@dataclass
class Round:
    """The scripts of a round's owners."""

    scripts: list[Script]
    events: int
    sent: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Role → ids of the events that its consumer must get."""


def rounds(load: Load, writer: Writer) -> Iterator[Round]:
    """The whole load, built a round at a time."""
    left, number = load.events, 0
    while left > 0:
        events = min(left, ROUND_EVENTS)
        yield _round(load, writer, number, events)
        left -= events
        number += 1


def _round(load: Load, writer: Writer, number: int, events: int) -> Round:
    made = Round([], events, {role_name(i): set[str]() for i in range(load.roles)})
    share, more = divmod(events, load.episodes)
    for index in range(load.episodes):
        count = share + (index < more)
        if not count:
            break
        episode_id = f"{number:05}-{index:05}"
        script = Script(episode_log(episode_id), deque(), [])
        for turn, begin in enumerate(range(0, count, load.batch)):
            role = role_name((index + turn) % load.roles)
            size = min(load.batch, count - begin)
            batch = [writer.event(episode_id, role) for _ in range(size)]
            script.turns.append(Turn(role, batch))
            script.ids += [event.id for event in batch]
            made.sent[role].update(event.id for event in batch)
        made.scripts.append(script)
    return made
