"""What a training run has done so far: the fold of its log. Resuming is folding it again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aworld_runtime.events import (
    FAILURES,
    BatchFormed,
    CheckpointSaved,
    EpisodeFinished,
    EvaluationFinished,
    Event,
    GroupCompleted,
    GroupRequested,
    PolicyPublished,
    RunFinished,
    RunTakenOver,
    StepFinished,
)


def group_name(run_id: str, number: int) -> str:
    return f"{run_id}.g{number:05d}"


def episode_name(group: str, index: int, attempt: int) -> str:
    return f"{group}.{index}.{attempt}"


def parse_episode_name(episode_id: str) -> tuple[str, int, int]:
    """Group, index and attempt of an episode.

    Raises:
        ValueError: not an episode of a group.
    """
    group, index, attempt = episode_id.rsplit(".", 2)
    return group, int(index), int(attempt)


@dataclass
class Group:
    """Episodes of one task, and which attempt counts for each place."""

    requested: GroupRequested
    version: int | None = None
    """The policy's when it was requested; no sample of it is older. None in logs that don't say it."""
    attempts: dict[int, int] = field(default_factory=dict[int, int])
    """Index → attempts that have ended."""
    finished: dict[int, str] = field(default_factory=dict[int, str])
    """Index → the episode that counts."""
    failure: str | None = None
    """Of the last of its episodes that failed."""
    completed: GroupCompleted | None = None


@dataclass
class RunState:
    """Everything the trainer must know to go on."""

    groups: dict[str, Group] = field(default_factory=dict[str, Group])
    """In the order they were requested."""
    batches: dict[int, BatchFormed] = field(default_factory=dict[int, BatchFormed])
    steps: dict[int, StepFinished] = field(default_factory=dict[int, StepFinished])
    evaluations: dict[int, EvaluationFinished] = field(
        default_factory=dict[int, EvaluationFinished]
    )
    checkpoints: dict[int, str] = field(default_factory=dict[int, str])
    published: int = 0
    """Newest version that every sampler has acknowledged."""
    unscored: list[str] = field(default_factory=list[str])
    """The training groups, up to the last completed, since one in which an episode could be scored."""
    finished: RunFinished | None = None
    """None again once somebody has resumed it."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> RunState:
        state = cls()
        for event in events:
            state.add(event)
        return state

    def add(self, event: Event) -> None:
        match event.data:
            case GroupRequested() as data:
                self.groups[data.group] = Group(data, event.policy_version)
            case EpisodeFinished() as data:
                self._episode_finished(event.episode_id or "", data)
            case GroupCompleted() as data:
                self._group_completed(self.groups[data.group], data)
            case BatchFormed() as data:
                self.batches[data.step] = data
            case StepFinished() as data:
                self.steps[data.step] = data
            case EvaluationFinished() as data:
                self.evaluations[data.step] = data
            case CheckpointSaved() as data:
                self.checkpoints[data.step] = data.path
            case PolicyPublished():
                self.published = event.policy_version or 0
            case RunFinished() as data:
                self.finished = data
            case RunTakenOver():
                if self.finished is not None:
                    self.unscored.clear()
                self.finished = None
            case _:
                pass

    def knows(self, event: Event) -> bool:
        """Whether mail says what the log has already: an episode's end may be told twice."""
        place = self._place(event.episode_id or "")
        if not isinstance(event.data, EpisodeFinished) or place is None:
            return False
        group, index, attempt = place
        return attempt <= group.attempts.get(index, 0)

    def is_stray(self, event: Event) -> bool:
        """Whether mail tells the end of an episode that no group is waiting for, nor ever was."""
        if not isinstance(event.data, EpisodeFinished):
            return False
        place = self._place(event.episode_id or "")
        if place is None:
            return True
        group, index, attempt = place
        return (
            attempt > group.attempts.get(index, 0) + 1
        )  # each is queued after the end of the one before

    def waiting(self) -> list[str]:
        """Completed training groups that no batch has used, oldest first."""
        return [name for name, group in self.untrained() if group.completed is not None]

    def untrained(self) -> list[tuple[str, Group]]:
        """Training groups that a batch may still use, completed or not, oldest first."""
        used = {group for batch in self.batches.values() for group in batch.group_ids}
        return [
            (name, group)
            for name, group in self.groups.items()
            if group.requested.purpose == "train"
            and (group.completed is None or group.completed.episodes)
            and name not in used
        ]

    def requested_for_training(self) -> int:
        return sum(group.requested.purpose == "train" for group in self.groups.values())

    def _episode_finished(self, episode_id: str, data: EpisodeFinished) -> None:
        place = self._place(episode_id)
        if place is None:
            return
        group, index, attempt = place
        group.attempts[index] = max(attempt, group.attempts.get(index, 0))
        if data.reason not in FAILURES:
            group.finished[index] = episode_id
        else:
            group.failure = f"{episode_id} {data.reason} ({data.error})"

    def _group_completed(self, group: Group, data: GroupCompleted) -> None:
        group.completed = data
        if group.requested.purpose == "train":
            self.unscored = [] if data.episodes else [*self.unscored, data.group]

    def _place(self, episode_id: str) -> tuple[Group, int, int] | None:
        """Group, index and attempt of an episode; None where no group has such a place."""
        try:
            name, index, attempt = parse_episode_name(episode_id)
        except ValueError:
            return None
        group = self.groups.get(name)
        if group is None or not 0 <= index < group.requested.size or attempt < 1:
            return None
        # What int() also reads as a number ("01", "1_0") is another id.
        return (group, index, attempt) if episode_id == episode_name(name, index, attempt) else None
