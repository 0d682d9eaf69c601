"""What a run's log keeps of a step: `step.finished`, all but its times. The same rows and weights make the same again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from aworld_runtime.events import StepFinished
from aworld_runtime.training.rows import TrainingRow, fingerprint
from aworld_runtime.trajectory import Episode


class Report(Protocol):
    """What the learner says of a step; see `StepReport`."""

    @property
    def metrics(self) -> dict[str, float]: ...
    @property
    def advantages(self) -> tuple[float, ...]: ...
    @property
    def gradient_norms(self) -> tuple[float, ...]: ...
    @property
    def computed_with(self) -> Mapping[str, str]: ...


def record_of(
    step: int, report: Report, episodes: Sequence[Episode], rows: Sequence[TrainingRow]
) -> StepFinished:
    """Of the batch that was made of these episodes."""
    return StepFinished(
        step=step,
        metrics=report.metrics | rollout_metrics(episodes, rows),
        rows=tuple(fingerprint(row) for row in rows),
        advantages=report.advantages,
        gradient_norms=report.gradient_norms,
        computed_with=dict(report.computed_with),
    )


def rollout_metrics(episodes: Sequence[Episode], rows: Sequence[TrainingRow]) -> dict[str, float]:
    """What the batch's episodes were like, by the names of the field."""
    rewards = [e.reward for e in episodes if e.reward is not None]
    turns = [len(t.turns) for e in episodes for t in e.trajectories]
    sampled = [sum(row.loss_mask) for row in rows]
    parts: dict[str, list[float]] = {}
    for episode in episodes:
        for trajectory in episode.trajectories:
            for name, value in trajectory.breakdown.items():
                parts.setdefault(name, []).append(value)
    return {
        "reward/mean": _mean(rewards),
        "reward/max": max(rewards, default=0.0),
        "rollout/num_turns": _mean(turns),
        "rollout/response_length": _mean(sampled),
        "rollout/tool_calls": _mean([e.tool_calls for e in episodes]),
        "rollout/rows_per_rollout": len(rows) / max(1, len({row.rollout_id for row in rows})),
        **{f"reward/{name}": _mean(values) for name, values in sorted(parts.items())},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
