"""The store: what outlives the bus.

Events (an exact copy of every log), and projections that can be rebuilt from them: episodes, training rows, metrics.
Only the archiver and an import write events. A backend is chosen by URL (`open_store`) and passes tests/contracts/test_store.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from typing import Protocol, Self

from pydantic import JsonValue

from aworld_runtime.events import Event, StopReason
from aworld_runtime.messages import Data, PackedFloats, PackedInts, Usage


class EpisodeRecord(Data):
    """One episode at a glance: the fold of its log so far."""

    id: str
    run_id: str | None = None
    group_id: str | None = None
    task_id: str | None = None
    parent: str | None = None
    """The episode that it was forked from."""
    program: str = ""
    index: int = 0
    attempt: int = 1
    status: StopReason | None = None
    """None while it runs."""
    answer: str = ""
    error: str | None = None
    reward: float | None = None
    turns: int = 0
    usage: Usage = Usage()
    takeovers: int = 0
    started: datetime | None = None
    finished: datetime | None = None
    last_seq: int = 0
    feed: str | None = None
    """Id of the feed it was last archived from: of the bus that it runs on, as long as that keeps its data."""


class RunRecord(Data):
    """One command: a training, an evaluation, an `agent.run`."""

    id: str
    kind: str
    started: datetime
    finished: datetime | None = None
    reason: str | None = None
    config: dict[str, JsonValue] = {}


class RolloutRow(Data):
    """One training row as stored; see `training.rows.TrainingRow` for the meaning of its fields."""

    id: str
    """`episode/role/row`, so that writing it twice is writing it once."""
    run_id: str
    group_id: str
    episode_id: str
    role: str
    token_ids: PackedInts
    loss_mask: tuple[bool, ...]
    behavior_logprobs: PackedFloats
    policy: str
    policy_version: int
    reward: float
    weight: float = 1.0


class BusRecord(Data):
    """A bus as its janitor last saw it: for the next one, since both may die with the server's data."""

    url: str
    feeds: tuple[str, ...]
    """Ids of those that it has had, the newest last."""
    lost: tuple[str, ...] = ()
    """Those that its server has lost, and whose episodes are yet to be restored."""
    seen: datetime


class Store(Protocol):
    """All methods raise `StoreUnavailableError` when the store can't be reached within its deadline."""

    url: str
    """Without the password: it may be shown."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...

    # events
    async def put_events(self, log: str, events: Sequence[Event]) -> None:
        """Keep `events` (their `seq` set) of one log. Writing the same again changes nothing.

        Raises:
            LogRewoundError: an event with another id is already kept at one of these seqs; nothing is overwritten.
        """
        ...

    async def read(self, log: str, start: int = 1, *, limit: int = 10_000) -> list[Event]: ...
    async def last_seq(self, log: str) -> int: ...
    async def logs(self, prefix: str = "") -> list[str]:
        """Names of the logs that begin with `prefix`, sorted."""
        ...

    # projections
    async def put_episode(self, episode: EpisodeRecord) -> None:
        """Insert, or replace a record with an older `last_seq`, or the same one of another feed."""
        ...

    async def episode(self, episode_id: str) -> EpisodeRecord | None: ...
    async def episodes(
        self, *, run_id: str | None = None, group_id: str | None = None, limit: int = 1000
    ) -> list[EpisodeRecord]:
        """Newest first."""
        ...

    def run_episodes(self, run_id: str) -> AsyncIterator[EpisodeRecord]:
        """Oldest first. Streams; those of a run never have to fit in memory."""
        ...

    async def unfinished(
        self, feed: str, *, after: str = "", limit: int = 100
    ) -> list[EpisodeRecord]:
        """Episodes of this feed that have no end yet, by id, those after the id `after`. Costs nothing for the others."""
        ...

    async def put_run(self, run: RunRecord) -> None: ...
    async def runs(self, *, limit: int = 100) -> list[RunRecord]:
        """Newest first."""
        ...

    async def put_bus(self, bus: BusRecord) -> None: ...
    async def bus(self, url: str) -> BusRecord | None: ...

    async def put_rollouts(self, rows: Sequence[RolloutRow]) -> None: ...
    def rollouts(self, run_id: str) -> AsyncIterator[RolloutRow]:
        """Streams; a run's rows never have to fit in memory."""
        ...

    async def put_metrics(self, run_id: str, step: int, metrics: Mapping[str, float]) -> None: ...
    async def metrics(self, run_id: str) -> list[tuple[int, dict[str, float]]]:
        """By step."""
        ...

    # blobs, by content
    async def put_blob(self, content: bytes) -> str:
        """Keep bytes; returns their sha256 in hex."""
        ...

    async def blob(self, sha256: str) -> bytes | None: ...

    # where followers of the feed are
    async def cursor(self, follower: str) -> str | None: ...
    async def set_cursor(self, follower: str, cursor: str) -> None: ...
