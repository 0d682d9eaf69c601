"""`aworld bench replay`: episodes such as users have are recorded live, then `aworld replay --all` runs them again.

The live phase runs many episodes at once, which a replay doesn't. What that saves is the time of running them once more, one
by one: the ratio is that of the episodes' own durations. The live phase's time on the clock stands beside it.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio

from aworld_runtime.bench import targets
from aworld_runtime.bench.bus import Machine
from aworld_runtime.bench.live import LivePhase
from aworld_runtime.bench.progress import Progress
from aworld_runtime.bench.targets import Hold
from aworld_runtime.bus.base import read_all
from aworld_runtime.errors import ConfigError, ProcessError, UsageError
from aworld_runtime.events import (
    EpisodeTakenOver,
    Event,
    EventData,
    HandoffMade,
    HumanAnswered,
    ModelCompleted,
    ModelFailed,
    RewardGiven,
    ToolCalled,
    ToolFailed,
    ToolReturned,
    ValueRecorded,
)
from aworld_runtime.messages import Data
from aworld_runtime.names import episode_log
from aworld_runtime.store.base import Store
from aworld_runtime.store.open import open_store

PATIENCE_S = 600.0
"""For the replay."""
ALL = 1_000_000
ANSWERS = (ModelCompleted, ModelFailed, ToolReturned, ToolFailed, HumanAnswered)


class Live(Data):
    """What was recorded."""

    episodes: int
    events: int
    kinds: dict[str, int]
    """How many of the episodes had what is hard to replay; see `KINDS`."""
    calls: int
    """Of models, tools and the person, all of them answered."""
    shortest_call_s: float
    live_s: float
    """The episodes' durations, added up: from the claim to the end, without the time one waited for another worker."""


class ReplayBenchReport(Live):
    """What `aworld bench replay --json` prints."""

    live_wall_s: float
    """Of the live phase, where many run at once: from the first request to the last end."""
    handlers: int
    """That ran again."""
    identical: int
    different: int
    live_calls: int
    replay_s: float
    """Of `aworld replay --all --json` on the clock, with the start of its process."""
    replay_cpu_s: float
    """CPU seconds of that process."""
    ratio: float
    """`live_s` over `replay_s`."""
    wall_ratio: float
    """`live_wall_s` over `replay_s`."""
    machine: Machine
    holds: tuple[Hold, ...]
    verified: bool
    faults: tuple[str, ...]


class ReplayBench:
    """`store` None is one in a temporary folder."""

    def __init__(self, episodes: int, store: str | None, progress: Progress) -> None:
        if episodes < 1:
            raise ConfigError(f"--episodes {episodes}: expected 1 or more")
        self._episodes = episodes
        self._store = store
        self._progress = progress

    async def run(self) -> ReplayBenchReport:
        """Record, then replay.

        Raises:
            UsageError: the store has episodes already, and all that it has is replayed.
        """
        machine = Machine.this()
        with tempfile.TemporaryDirectory(prefix="aworld-bench-") as name:
            folder = Path(name)
            url = self._store or f"sqlite:///{folder / 'bench.db'}"
            async with open_store(url) as store:
                if await store.episodes(limit=1):
                    raise UsageError(f"--store {url} has episodes already: name one without any")
            phase = LivePhase(folder, url, self._episodes, self._progress)
            await phase.run()
            async with open_store(url) as store:
                live = await read_live(store)
            self._progress.say(f"{live.events:,} events are recorded; now they are replayed")
            replayed = await _replay(url)
        return self._report(live, phase.wall_s, replayed, machine)

    def _report(
        self, live: Live, live_wall_s: float, replayed: Replayed, machine: Machine
    ) -> ReplayBenchReport:
        ratio, told = live.live_s / replayed.seconds, replayed.told
        faults = list(faults_of(live, told, episodes=self._episodes, ratio=ratio))
        return ReplayBenchReport(
            **dict(live),
            live_wall_s=live_wall_s,
            handlers=sum(episode["handlers"] for episode in told["episodes"]),
            identical=told["identical"],
            different=told["different"],
            live_calls=told["live_calls"],
            replay_s=replayed.seconds,
            replay_cpu_s=replayed.cpu_s,
            ratio=ratio,
            wall_ratio=live_wall_s / replayed.seconds,
            machine=machine,
            holds=(targets.at_least("ratio", ratio, targets.TIMES_LIVE),),
            verified=not faults,
            faults=tuple(faults),
        )


def faults_of(live: Live, told: dict[str, Any], *, episodes: int, ratio: float) -> Iterator[str]:
    """What is wrong with a record of so many episodes, or with its replay, of which the command `told`."""
    if live.episodes != episodes:
        yield f"{live.episodes} episodes are in the store, and {episodes} were run"
    if live.shortest_call_s < targets.CALL_S:
        yield f"a call took {live.shortest_call_s:.3f} s, which is less than {targets.CALL_S:g}"
    for kind, having in live.kinds.items():
        if not having:
            yield f"no episode had {kind.replace('_', ' ')}: nothing is known of their replay; run more --episodes"
    for episode in told["episodes"]:
        if not episode["identical"]:
            yield f"{episode['episode']} differs: {episode['divergence']['message']}"
    for episode, why in told["unreadable"].items():
        yield f"{episode} can't be replayed: {why}"
    if told["identical"] != live.episodes:
        yield f"{told['identical']} of {live.episodes} episodes are identical"
    if told["live_calls"]:
        yield f"the replay made {told['live_calls']} live calls"
    if ratio < targets.TIMES_LIVE:
        yield f"the replay is only {ratio:.1f} times as fast as the live runs"


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the command did."""

    told: dict[str, Any]
    """What it printed."""
    seconds: float
    cpu_s: float


async def _replay(store: str) -> Replayed:
    command = [sys.executable, "-m", "aworld_runtime.cli", "replay", "--all", "--json"]
    began, cpu_s = time.perf_counter(), _cpu_s_of_children()
    with anyio.fail_after(PATIENCE_S):
        done = await anyio.run_process([*command, "--store", store], check=False)
    seconds = time.perf_counter() - began
    if not done.stdout:
        raise ProcessError(f"aworld replay failed: {done.stderr.decode(errors='replace')}")
    return Replayed(json.loads(done.stdout), seconds, _cpu_s_of_children() - cpu_s)


def _cpu_s_of_children() -> float:
    """Of those that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- the record ----------------------------------------------------------------------------------------------------


async def read_live(store: Store) -> Live:
    """Of all the episodes that a store has."""
    logs = [
        await read_all(store, episode_log(record.id)) for record in await store.episodes(limit=ALL)
    ]
    calls = [seconds for events in logs for seconds in call_seconds(events)]
    return Live(
        episodes=len(logs),
        events=sum(map(len, logs)),
        kinds={kind: sum(map(has, logs)) for kind, has in KINDS.items()},
        calls=len(calls),
        shortest_call_s=min(calls, default=0.0),
        live_s=sum(map(duration_s, logs)),
    )


def call_seconds(events: Sequence[Event]) -> Iterator[float]:
    """How long each call took, from the question to the answer."""
    asked = {event.id: event.time for event in events}
    for event in events:
        if isinstance(event.data, ANSWERS) and event.correlation_id in asked:
            yield (event.time - asked[event.correlation_id]).total_seconds()


def duration_s(events: Sequence[Event]) -> float:
    """From its claim, which is its second event, to its end; not counting when nobody had it."""
    nobody = sum(
        (then.time - last.time for last, then in pairwise(events) if _is(then, EpisodeTakenOver)),
        start=timedelta(),
    )
    return (events[-1].time - events[1].time - nobody).total_seconds()


def _is(event: Event, *kinds: type[EventData]) -> bool:
    return isinstance(event.data, kinds)


def _having(*kinds: type[EventData]) -> Callable[[Sequence[Event]], bool]:
    return lambda events: any(_is(event, *kinds) for event in events)


def _parallel_tools(events: Sequence[Event]) -> bool:
    causes = [event.causation_id for event in events if _is(event, ToolCalled)]
    return len(set(causes)) < len(causes)


KINDS: dict[str, Callable[[Sequence[Event]], bool]] = {
    "parallel_tools": _parallel_tools,
    "failed_tools": _having(ToolFailed),
    "failed_model_calls": _having(ModelFailed),
    "handoffs": _having(HandoffMade),
    "human_answers": _having(HumanAnswered),
    "takeovers": _having(EpisodeTakenOver),
    "recorded_values": _having(ValueRecorded),
    "rewards": _having(RewardGiven),
}
"""What is hard to replay; failed tools and model calls were called again. A takeover is that of a killed worker."""
