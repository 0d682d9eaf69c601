"""An event in a few words, for lists that people read."""

from __future__ import annotations

import json

from aworld_runtime.events import (
    AnswerProposed,
    BreakpointsSet,
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeAnswered,
    EpisodeCancelled,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeForked,
    EpisodePaused,
    EpisodeRequested,
    EpisodeResumed,
    EpisodeStepped,
    EpisodeTakenOver,
    Event,
    EventData,
    HandoffMade,
    HumanAnswered,
    HumanAsked,
    LogRestored,
    MessagePosted,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    RecordDropped,
    RewardGiven,
    ToolCalled,
    ToolFailed,
    ToolReturned,
    ValueRecorded,
)
from aworld_runtime.messages import ToolCall
from aworld_runtime.trajectory import as_text


def gist(event: Event) -> str:
    """What happened, on one line of any length."""
    said = _said(event.data)
    text = " ".join(said.split())
    return f"→ {event.to}: {text}" if event.to else text


def _said(data: EventData) -> str:  # noqa: C901, PLR0911, PLR0912 - one line per type of event
    match data:
        case EpisodeRequested(task=task, program=program):
            return f"{task.prompt!r} for {program}"
        case EpisodePaused() | EpisodeResumed() | EpisodeCancelled():
            return data.reason
        case EpisodeStepped(count=count):
            return f"{count} may start"
        case BreakpointsSet(breakpoints=breakpoints):
            return "; ".join(breakpoints) or "none"
        case EpisodeClaimed(worker=worker) | EpisodeTakenOver(worker=worker):
            return f"by worker {worker}"
        case EpisodeForked(parent=parent, at=at, edited=edited):
            then = f", with another {', '.join(edited)} in the next" if edited else ""
            return f"from {parent} after event {at}{then}"
        case RecordDropped(seqs=seqs):
            return f"seq {', '.join(map(str, seqs))}: its handler went another way"
        case LogRestored(at=at):
            return f"from the store, up to event {at}: what came after it may be lost"
        case MessagePosted(content=content):
            return repr(content)
        case ModelRequested(model=model, sources=sources):
            return f"{model or 'model'}, {len(sources)} new messages"
        case ModelCompleted(text=text, tool_calls=calls, usage=usage):
            said = [repr(text)] if text else []
            said += [_call(call) for call in calls]
            return f"{', '.join(said) or '(nothing)'} [{usage.completion_tokens} tokens]"
        case ModelFailed(error=error, message=message):
            return f"{error}: {message}"
        case ToolCalled(call=call):
            return _call(call)
        case ToolReturned(name=name, content=content):
            return f"{name} = {as_text(content)}"
        case ToolFailed(name=name, error=error, message=message):
            return f"{name} failed: {error}: {message}"
        case AnswerProposed(text=text, reason=reason):
            return repr(text) if reason == "answered" else f"{text!r} ({reason})"
        case EpisodeAnswered(answer=answer, reason=reason):
            return repr(answer) if reason == "answered" else f"{answer!r} ({reason})"
        case EpisodeFinished(answer=answer, reason=reason, error=error):
            return f"{reason}{f' {answer!r}' if answer else ''}{f': {error}' if error else ''}"
        case HandoffMade(target=target, reason=reason):
            return f"to {target}{f': {reason}' if reason else ''}"
        case HumanAsked(question=text) | HumanAnswered(answer=text):
            return repr(text)
        case RewardGiven(reward=reward, breakdown=breakdown):
            parts = ", ".join(f"{name} {value:g}" for name, value in breakdown.items())
            return f"{reward:g}{f' ({parts})' if parts else ''}"
        case ValueRecorded(kind=kind, value=value):
            return f"{kind} = {as_text(value)}"
        case DeliveryHandled(seq=seq):
            return f"seq {seq}"
        case DeliveryDeadLettered(seq=seq, error=error, message=message):
            return f"seq {seq}: {error}: {message}"
        case _:
            return data.model_dump_json(exclude_defaults=True)


def _call(call: ToolCall) -> str:
    if call.malformed is not None:
        return f"{call.name}(malformed: {call.malformed!r})"
    written = {
        name: json.dumps(value, ensure_ascii=False) for name, value in call.arguments.items()
    }
    if len(written) == 1:  # its name says nothing that the tool's doesn't
        return f"{call.name}({''.join(written.values())})"
    return f"{call.name}({', '.join(f'{name}={value}' for name, value in written.items())})"
