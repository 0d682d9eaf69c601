"""From episodes to training rows: the sampler's own ids and logprobs, never tokenized again.

turn 1: [prompt ............][sampled]
turn 2: [ids of turn 1 ..............][new messages][sampled]      extends: the same row goes on
turn 3: [another prompt ...][sampled]                              doesn't: a new row, sharing the rollout's weight
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from aworld_runtime.errors import TrainingError
from aworld_runtime.messages import Completion
from aworld_runtime.training.rows import TrainingRow
from aworld_runtime.trajectory import Episode, Trajectory


@dataclass
class _Row:
    token_ids: list[int] = field(default_factory=list[int])
    loss_mask: list[bool] = field(default_factory=list[bool])
    behavior_logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    def extends(self, completion: Completion) -> bool:
        prompt = completion.prompt_token_ids
        return list(prompt[: len(self.token_ids)]) == self.token_ids

    def add(self, completion: Completion) -> None:
        new = completion.prompt_token_ids[len(self.token_ids) :]
        self.token_ids += [*new, *completion.token_ids]
        self.loss_mask += [False] * len(new) + [True] * len(completion.token_ids)
        self.behavior_logprobs += [math.nan] * len(new) + list(completion.behavior_logprobs)
        self.versions += [span.version for span in completion.version_spans]


def rows_of(episode: Episode, roles: Sequence[str]) -> list[TrainingRow]:
    """Training rows of the trained `roles` of one finished episode, in role and turn order.

    Raises:
        TrainingError: a trained turn lacks token ids, logprobs, versions or a reward.
    """
    return [row for role in roles if (t := episode.trajectory(role)) for row in _rows(episode, t)]


def _rows(episode: Episode, trajectory: Trajectory) -> list[TrainingRow]:
    rollout_id = f"{episode.id}/{trajectory.role}"
    if trajectory.reward is None:
        raise TrainingError(f"rollout {rollout_id} has no reward: its environment gave none")
    rows: list[_Row] = []
    policy = ""
    for turn in trajectory.turns:
        completion = turn.completion
        if completion.policy is None or not completion.version_spans:
            raise TrainingError(
                f"rollout {rollout_id}, seq {turn.seq}: its completion names no policy version;"
                " trained agents sample from a policy sampler"
            )
        policy = completion.policy
        if not rows or not rows[-1].extends(completion):
            rows.append(_Row())
        rows[-1].add(completion)
    return [
        TrainingRow(
            rollout_id=rollout_id,
            group_id=episode.group_id or episode.id,
            role=trajectory.role,
            token_ids=tuple(row.token_ids),
            loss_mask=tuple(row.loss_mask),
            behavior_logprobs=tuple(row.behavior_logprobs),
            policy=policy,
            policy_version=min(row.versions),
            reward=trajectory.reward,
            weight=1 / len(rows),
        )
        for row in rows
    ]
