"""Which episodes a run still needs on the bus: those of groups that no step has used yet."""

from __future__ import annotations

from aworld_runtime.events import (
    BatchFormed,
    Event,
    GroupCompleted,
    GroupRequested,
    RunFinished,
    StepFinished,
)
from aworld_runtime.names import episode_of_log
from aworld_runtime.training.run_state import parse_episode_name


class Untrained:
    """The fold of a run's log, event by event."""

    def __init__(self) -> None:
        self._evaluated: set[str] = set()
        self._groups: set[str] = set()
        self._batches: dict[int, tuple[str, ...]] = {}

    def add(self, event: Event) -> None:
        match event.data:
            case GroupRequested(group=group, purpose=purpose):
                self._groups.add(group)
                if purpose == "evaluate":
                    self._evaluated.add(group)
            case GroupCompleted(group=group, episodes=episodes):
                if group in self._evaluated or not episodes:
                    self._groups.discard(group)
                    self._evaluated.discard(group)
            case BatchFormed(step=step, group_ids=groups):
                self._batches[step] = groups
            case StepFinished(step=step):
                self._groups.difference_update(self._batches.pop(step, ()))
            case RunFinished():
                self._groups.clear()
            case _:
                pass

    def needs(self, log: str) -> bool:
        try:
            group, _, _ = parse_episode_name(episode_of_log(log) or "")
        except ValueError:
            return False
        return group in self._groups
