"""Two runs compared by what became of the same tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from aworld_runtime.messages import Data
from aworld_runtime.replay.diff import Outcome
from aworld_runtime.store.base import EpisodeRecord

_Key = tuple[str | None, int, int]


class OutcomeDiff(Data):
    """One task, tried in both runs with another outcome."""

    task: str | None
    index: int
    a: Outcome
    b: Outcome

    @property
    def reward_change(self) -> float:
        return (self.b.reward or 0.0) - (self.a.reward or 0.0)


class RunDiff(Data):
    a: str
    b: str
    same: bool
    pairs: int
    """Episodes of the same task and index in both."""
    changed: tuple[OutcomeDiff, ...]
    """Where the outcome is another, the largest change of reward first."""
    only_a: tuple[str, ...]
    """Episodes without a counterpart."""
    only_b: tuple[str, ...]
    rewards: tuple[float | None, float | None]
    """Mean of the pairs that have one in both."""


def compare_runs(
    a: str, b: str, of_a: Sequence[EpisodeRecord], of_b: Sequence[EpisodeRecord]
) -> RunDiff:
    """Compare the outcomes of two runs' episodes, each run's in the order in which they began."""
    left, right = _by_task(of_a), _by_task(of_b)
    if not left.keys() & right.keys():  # tasks that were named by chance: pair them in order
        left, right = _in_order(left), _in_order(right)
    pairs = [(key, left[key], right[key]) for key in left if key in right]
    changed = [
        OutcomeDiff(task=one.task_id, index=one.index, a=_outcome(one), b=_outcome(two))
        for _, one, two in pairs
        if (one.status, one.answer, one.reward) != (two.status, two.answer, two.reward)
    ]
    only_a = tuple(left[key].id for key in left if key not in right)
    only_b = tuple(right[key].id for key in right if key not in left)
    rewards = [
        (one.reward, two.reward)
        for _, one, two in pairs
        if one.reward is not None and two.reward is not None
    ]
    return RunDiff(
        a=a,
        b=b,
        same=not (changed or only_a or only_b),
        pairs=len(pairs),
        changed=tuple(sorted(changed, key=lambda change: -abs(change.reward_change))),
        only_a=only_a,
        only_b=only_b,
        rewards=(_mean([one for one, _ in rewards]), _mean([two for _, two in rewards])),
    )


def _by_task(episodes: Iterable[EpisodeRecord]) -> dict[_Key, EpisodeRecord]:
    """By task, index and how often it was tried before; of a repeated attempt the last."""
    tried: dict[tuple[str | None, int], dict[str | None, EpisodeRecord]] = defaultdict(dict)
    for episode in episodes:
        groups = tried[episode.task_id, episode.index]
        group = episode.group_id or episode.id
        kept = groups.get(group)
        if kept is None or kept.attempt <= episode.attempt:
            groups[group] = episode
    return {
        (task, index, number): episode
        for (task, index), groups in tried.items()
        for number, episode in enumerate(groups.values())
    }


def _in_order(episodes: Mapping[_Key, EpisodeRecord]) -> dict[_Key, EpisodeRecord]:
    return {(None, 0, number): episode for number, episode in enumerate(episodes.values())}


def _outcome(episode: EpisodeRecord) -> Outcome:
    return Outcome(
        episode=episode.id, status=episode.status, answer=episode.answer, reward=episode.reward
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
