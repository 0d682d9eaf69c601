"""One training row: a token sequence, which of its tokens are trained, and how they were sampled.

Rows are what the learner eats. They are projected from episode logs elsewhere; nothing here reads a log or holds a
tensor.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, cast

from aworld_runtime.errors import TrainingError

FINGERPRINT_DIGITS = 16


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """A prompt with the turns sampled after it, token by token, exactly as the sampler saw them."""

    rollout_id: str
    """`episode_id/role`. Rows of one rollout share its reward, and count once in the group's statistics."""
    group_id: str
    """The episodes of one task sampled together; with `role`, the scope of the advantage baseline."""
    role: str
    token_ids: tuple[int, ...]
    """[T] prompt and sampled tokens, in order."""
    loss_mask: tuple[bool, ...]
    """[T] True exactly on sampled tokens of trained agents."""
    behavior_logprobs: tuple[float, ...]
    """[T] recorded by the sampler; NaN where masked."""
    policy: str
    policy_version: int
    """The oldest version that sampled a token of this row."""
    reward: float
    weight: float = 1.0
    """Share of the rollout that this row carries: 1/k when the rollout was split into k rows."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if length == 0:
            raise self._invalid("it has no tokens")
        if len(self.loss_mask) != length or len(self.behavior_logprobs) != length:
            raise self._invalid(
                f"token_ids, loss_mask and behavior_logprobs differ in length: {length}, "
                f"{len(self.loss_mask)}, {len(self.behavior_logprobs)}"
            )
        if not math.isfinite(self.reward):
            raise self._invalid(f"its reward is {self.reward}; give a finite number")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise self._invalid(f"its weight is {self.weight}; give a number above 0")
        if self.policy_version < 0:
            raise self._invalid(f"its policy_version is {self.policy_version}; versions start at 0")
        if self.loss_mask[0]:
            raise self._invalid("position 0 is trained, but nothing precedes it to predict it from")
        for position in self.trained_positions:
            logprob = self.behavior_logprobs[position]
            if not math.isfinite(logprob):
                raise self._invalid(
                    f"behavior_logprobs[{position}] is {logprob} at a trained position; every "
                    "trained token needs the sampler's logprob"
                )

    @property
    def trained_positions(self) -> tuple[int, ...]:
        return tuple(position for position, trained in enumerate(self.loss_mask) if trained)

    def _invalid(self, reason: str) -> TrainingError:
        return TrainingError(f"training row of rollout {self.rollout_id!r} is invalid: {reason}")


def row_ids(rows: Sequence[TrainingRow]) -> list[str]:
    """`episode/role/number` of each, where the rows of a rollout stand one after the other."""
    rollouts = groupby(row.rollout_id for row in rows)
    return [f"{rollout}/{number}" for rollout, same in rollouts for number, _ in enumerate(same)]


def fingerprint(row: TrainingRow) -> str:
    """The same for equal rows, and for no others: the first digits of a sha256 over every field."""
    content = json.dumps(_plain(row), allow_nan=False).encode()
    return hashlib.sha256(content).hexdigest()[:FINGERPRINT_DIGITS]


def encode_rows(rows: Sequence[TrainingRow]) -> bytes:
    """One JSON object a line; NaN, which JSON has no word for, is null."""
    return "".join(json.dumps(_plain(row), allow_nan=False) + "\n" for row in rows).encode()


def decode_rows(data: bytes) -> list[TrainingRow]:
    """What `encode_rows` wrote, equal field by field."""
    return [_row(json.loads(line)) for line in data.splitlines()]


def _plain(row: TrainingRow) -> dict[str, Any]:
    logprobs = [None if math.isnan(value) else value for value in row.behavior_logprobs]
    return asdict(row) | {"behavior_logprobs": logprobs}


def _row(fields: dict[str, Any]) -> TrainingRow:
    logprobs = [math.nan if value is None else value for value in fields["behavior_logprobs"]]
    lists = {
        "token_ids": tuple(fields["token_ids"]),
        "loss_mask": tuple(fields["loss_mask"]),
        "behavior_logprobs": tuple(logprobs),
    }
    return TrainingRow(**cast("dict[str, Any]", fields | lists))
