"""An episode and a run at a glance, folded from their logs one event at a time."""

from __future__ import annotations

from aworld_runtime.events import (
    EpisodeAnswered,
    EpisodeFinished,
    EpisodeForked,
    EpisodeRequested,
    EpisodeTakenOver,
    Event,
    ModelCompleted,
    RewardGiven,
    RunFinished,
    RunStarted,
    RunTakenOver,
)
from aworld_runtime.names import episode_of_log
from aworld_runtime.store.base import EpisodeRecord, RunRecord


def advance(record: EpisodeRecord, event: Event) -> EpisodeRecord:
    """`record` after `event` of its log; an event that it has seen changes nothing."""
    if event.seq <= record.last_seq:
        return record
    changes: dict[str, object] = {"last_seq": event.seq}
    if record.started is None:
        changes |= {
            "started": event.time,
            "run_id": event.run_id,
            "group_id": event.group_id,
            "task_id": event.task_id,
            "attempt": event.attempt,
        }
    match event.data:
        case EpisodeForked(parent=parent):
            changes["parent"] = episode_of_log(parent)
        case EpisodeRequested() as data:
            changes |= {"task_id": data.task.id, "program": data.program, "index": data.index}
        case EpisodeTakenOver():
            changes["takeovers"] = record.takeovers + 1
        case ModelCompleted() as data:
            changes |= {"turns": record.turns + 1, "usage": record.usage + data.usage}
        case EpisodeAnswered() as data:
            changes["answer"] = data.answer
        case RewardGiven(role=None) as data:
            changes["reward"] = data.reward
        case EpisodeFinished() as data:
            changes |= {
                "answer": data.answer,
                "status": data.reason,
                "error": data.error,
                "finished": event.time,
            }
        case _:
            pass
    return record.model_copy(update=changes)


def advance_run(record: RunRecord | None, run_id: str, event: Event) -> RunRecord | None:
    """The run's record after `event` of its log; None until it has started."""
    match event.data:
        case RunStarted(kind=kind, config=config) if record is None:
            return RunRecord(id=run_id, kind=kind, started=event.time, config=config)
        case RunStarted() | RunTakenOver() if record is not None:  # resumed
            return record.model_copy(update={"finished": None, "reason": None})
        case RunFinished(reason=reason) if record is not None:
            return record.model_copy(update={"finished": event.time, "reason": reason})
        case _:
            return record
