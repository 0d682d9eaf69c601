"""Advantages: how much better a rollout did than the others of its group.

Pure functions of plain numbers in float64. An estimator sees the rewards of one group, one number a rollout;
`row_advantages` applies it per (group, role), counts each rollout once however many rows it has, and gives every row
of a rollout the same value. The token axis comes later: an advantage is constant along its row.

Where others differ (versions in tests/training/fixtures/grpo_fixtures.json): TRL adds 1e-4 to the standard deviation,
verl 1e-6 as here; verl returns the bare reward for a group of one, which trains on an unbaselined number: here it is 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aworld_runtime.errors import TrainingError
from aworld_runtime.training.algorithms import AdvantageName
from aworld_runtime.training.rows import TrainingRow

Advantage = Callable[[Sequence[float]], tuple[float, ...]]

STD_EPS = 1e-6
REWARD_NOISE = 1e-8
"""Rewards of a group closer than this, relative to the largest, are equal: a sum of parts rounds differently in another
order, and (r - mean) / std would blow the rounding up to a full-sized advantage."""

LARGEST_REWARD = 1e30
"""Squares and sums of rewards stay within float64, and advantages within float32, where losses are computed."""


def grpo_advantages(rewards: Sequence[float], *, std_eps: float = STD_EPS) -> tuple[float, ...]:
    """A_i = (r_i - mean(r)) / (std(r) + std_eps), std with ddof 1 (DeepSeekMath, arXiv:2402.03300, eq. 2)."""
    centered = dr_grpo_advantages(rewards)
    if not any(centered):
        return centered
    std = math.sqrt(math.fsum(value * value for value in centered) / (len(centered) - 1))
    return tuple(value / (std + std_eps) for value in centered)


def dr_grpo_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """A_i = r_i - mean(r), without the division by std (Dr. GRPO, arXiv:2503.20783)."""
    if is_zero_variance(rewards):
        return (0.0,) * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return tuple(reward - mean for reward in rewards)


def rloo_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """A_i = r_i - mean of the others = G/(G-1) * (r_i - mean(r)) (RLOO, arXiv:2402.14740)."""
    size = len(rewards)
    return tuple(
        value * (size / (size - 1)) if value else 0.0 for value in dr_grpo_advantages(rewards)
    )


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """True if the group has nothing to learn from: one rollout, or rewards equal up to float noise."""
    if any(not math.isfinite(reward) for reward in rewards):
        raise TrainingError(f"rewards {list(rewards)} are not all finite; None and NaN are not 0")
    if len(rewards) < 2:
        return True
    return max(rewards) - min(rewards) <= REWARD_NOISE * max(1.0, *map(abs, rewards))


ADVANTAGES: Mapping[AdvantageName, Advantage] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
}


@dataclass(frozen=True, slots=True)
class RowAdvantages:
    """The advantages of a batch, in the order of its rows."""

    values: tuple[float, ...]
    """[R] one a row."""
    zero_variance: tuple[bool, ...]
    """[R] True where the row's group has nothing to learn from; such rows are dropped before the forward pass."""
    groups: int
    """Number of (group, role) pairs."""
    zero_variance_groups: int


def row_advantages(
    rows: Sequence[TrainingRow], *, advantage: Advantage = grpo_advantages
) -> RowAdvantages:
    """Advantages per (group, role), each rollout counted once.

    Raises:
        TrainingError: a reward is too large, or a rollout has several.
    """
    rewards: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if abs(row.reward) > LARGEST_REWARD:
            raise TrainingError(
                f"group {row.group_id!r}: rollout {row.rollout_id!r} has reward {row.reward:g},"
                f" beyond ±{LARGEST_REWARD:g}"
            )
        rollouts = rewards.setdefault((row.group_id, row.role), {})
        if rollouts.setdefault(row.rollout_id, row.reward) != row.reward:
            raise TrainingError(
                f"rows of rollout {row.rollout_id!r} disagree on its reward: "
                f"{rollouts[row.rollout_id]} and {row.reward}"
            )
    flat = {scope: is_zero_variance(list(rollouts.values())) for scope, rollouts in rewards.items()}
    values = {
        scope: dict(zip(rollouts, advantage(list(rollouts.values())), strict=True))
        for scope, rollouts in rewards.items()
    }
    return RowAdvantages(
        values=tuple(values[row.group_id, row.role][row.rollout_id] for row in rows),
        zero_variance=tuple(flat[row.group_id, row.role] for row in rows),
        groups=len(rewards),
        zero_variance_groups=sum(flat.values()),
    )
