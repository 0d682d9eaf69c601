"""How records look in a store, whatever the backend: bytes and plain values.

Records are kept as JSON beside the few fields they are found by; arrays of a training row are kept
as raw little-endian bytes, so a NaN comes back as the NaN that was put.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypedDict

from aworld_runtime.errors import LogRewoundError
from aworld_runtime.events import Event
from aworld_runtime.store.base import RolloutRow

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class RowDocument(TypedDict):
    """A `RolloutRow` as plain values."""

    id: str
    run_id: str
    group_id: str
    episode_id: str
    role: str
    token_ids: bytes
    """int32"""
    loss_mask: bytes
    """one byte for each token, 0 or 1"""
    behavior_logprobs: bytes
    """float32"""
    policy: str
    policy_version: int
    reward: float
    weight: float


def pack_row(row: RolloutRow) -> RowDocument:
    return RowDocument(
        id=row.id,
        run_id=row.run_id,
        group_id=row.group_id,
        episode_id=row.episode_id,
        role=row.role,
        token_ids=array("i", row.token_ids).tobytes(),
        loss_mask=bytes(row.loss_mask),
        behavior_logprobs=array("f", row.behavior_logprobs).tobytes(),
        policy=row.policy,
        policy_version=row.policy_version,
        reward=row.reward,
        weight=row.weight,
    )


def unpack_row(fields: RowDocument) -> RolloutRow:
    token_ids = array("i")
    token_ids.frombytes(fields["token_ids"])
    logprobs = array("f")
    logprobs.frombytes(fields["behavior_logprobs"])
    return RolloutRow(
        id=fields["id"],
        run_id=fields["run_id"],
        group_id=fields["group_id"],
        episode_id=fields["episode_id"],
        role=fields["role"],
        token_ids=tuple(token_ids),
        loss_mask=tuple(byte != 0 for byte in fields["loss_mask"]),
        behavior_logprobs=tuple(logprobs),
        policy=fields["policy"],
        policy_version=fields["policy_version"],
        reward=fields["reward"],
        weight=fields["weight"],
    )


def pack_metrics(metrics: Mapping[str, float]) -> str:
    """JSON with NaN and Infinity, which Python reads back."""
    return json.dumps(dict(metrics))


def unpack_metrics(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in json.loads(text).items()}


def microseconds(moment: datetime | None) -> int:
    """Sorts records by time without losing precision; 0 where there is none."""
    return 0 if moment is None else (moment - EPOCH) // timedelta(microseconds=1)


def check_same(log: str, events: Iterable[Event], kept: Mapping[int, str]) -> None:
    """Refuse `events` where `kept` (seq → event id) already holds another event.

    Raises:
        LogRewoundError: names the first such position.
    """
    for event in events:
        if kept.get(event.seq, event.id) != event.id:
            raise LogRewoundError(
                f"log {log!r} was rewound: position {event.seq} holds event {kept[event.seq]} in the store, but the bus"
                f" now has {event.id} ({event.type}) there. The bus lost acknowledged events; the store's copy is"
                " untouched"
            )
