"""Two histories compared as a person would: what they share, where they part, and what each agent did otherwise.

Of no interest, and left out, is what differs between any two runs of the same: ids, times, workers, seeds, who took over, tokens
and logprobs where the text is the same, numbers of calls that a model made up. Causes are compared by their positions.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import Any, Literal

from pydantic import JsonValue

from aworld_runtime.events import (
    AnswerProposed,
    BreakpointsSet,
    DeliveryDeadLettered,
    DeliveryHandled,
    DuplicateFiltered,
    EpisodeAnswered,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeForked,
    EpisodePaused,
    EpisodeRequested,
    EpisodeResumed,
    EpisodeStepped,
    EpisodeTakenOver,
    Event,
    LogRestored,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    RecordDropped,
    RewardGiven,
    SubscriptionChanged,
    ToolCalled,
    ToolFailed,
    ToolReturned,
    ValueRecorded,
)
from aworld_runtime.forks import counted
from aworld_runtime.messages import Data
from aworld_runtime.nodes.journal import differing
from aworld_runtime.replay.cause import differences
from aworld_runtime.trajectory import as_text

BOOKKEEPING = (
    EpisodeRequested,  # compared by itself
    EpisodeClaimed,
    EpisodeTakenOver,
    EpisodeForked,
    EpisodePaused,
    EpisodeStepped,
    EpisodeResumed,
    BreakpointsSet,
    LogRestored,
    SubscriptionChanged,
    DeliveryHandled,
    DuplicateFiltered,
    RecordDropped,
)
"""How an episode came to run, not what it did."""
COMPARED = {"type", "role", "to", "trust", "causation_id", "correlation_id", "data"}
NOISE: dict[type, frozenset[str]] = {
    ModelRequested: frozenset({"prompt_sha256", "seed"}),
    ModelCompleted: frozenset(
        {
            "prompt_offset",
            "prompt_token_ids",
            "token_ids",
            "behavior_logprobs",
            "version_spans",
        }
    ),
}
"""Fields of data that are other in each run, or follow from others that are compared."""
REQUESTED = {"task", "program", "arguments", "models"}
"""What of a request is compared."""


class FirstDifference(Data):
    """Where the histories part."""

    a: int | None
    """Seq of the event; None where that history has ended."""
    b: int | None
    role: str
    what: str
    recorded: tuple[str, str]
    """Both events, as far as they are compared."""


class Call(Data):
    """A tool call, and what it gave."""

    seq: int
    name: str
    arguments: str
    """JSON, or what the model wrote in its place."""
    answer: str | None = None
    """None where none came."""
    failed: bool = False


class CallDiff(Data):
    """A call that only one of them made, or made otherwise, or to which something else was answered."""

    change: Literal["added", "removed", "arguments", "answer"]
    a: Call | None
    b: Call | None


class RoleTotals(Data):
    """One role's part in an episode."""

    turns: int = 0
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """That its models and tools took."""
    answer: str | None = None
    """The last that it proposed."""
    reward: float | None = None


class RoleDiff(Data):
    role: str
    a: RoleTotals
    b: RoleTotals
    calls: tuple[CallDiff, ...]


class Outcome(Data):
    """How an episode ended."""

    episode: str
    status: str | None = None
    answer: str = ""
    reward: float | None = None


class EpisodeDiff(Data):
    a: Outcome
    b: Outcome
    same: bool
    shared: int
    """Events that are the very same in both: of a fork and its parent."""
    alike: int
    """Events after these that are alike; bookkeeping is not counted."""
    request: tuple[str, ...]
    """What was asked for otherwise."""
    first: FirstDifference | None
    roles: tuple[RoleDiff, ...]


def compare_episodes(a: Sequence[Event], b: Sequence[Event]) -> EpisodeDiff:
    """Compare two whole histories; of a fork, with what it shares."""
    a, b = counted(a), counted(b)
    pairs = enumerate(zip(a, b, strict=False))
    shared = next((n for n, (one, two) in pairs if one.id != two.id), min(len(a), len(b)))
    alike, first = _first_difference(a, b, shared)
    request = tuple(differences(_request(a), _request(b)))
    one, two = _Roles(a), _Roles(b)
    return EpisodeDiff(
        a=one.outcome,
        b=two.outcome,
        same=first is None and not request,
        shared=shared,
        alike=alike,
        request=request,
        first=first,
        roles=tuple(
            RoleDiff(
                role=role,
                a=one.totals[role],
                b=two.totals[role],
                calls=tuple(_compare_calls(one.calls[role], two.calls[role])),
            )
            for role in dict.fromkeys((*one.totals, *two.totals))
        ),
    )


def _first_difference(
    a: Sequence[Event], b: Sequence[Event], shared: int
) -> tuple[int, FirstDifference | None]:
    """How many events after those that are shared are alike, and what comes then."""
    left, right = _Plain(a), _Plain(b)
    pairs = zip_longest(_compared(a[shared:]), _compared(b[shared:]))
    alike = 0
    for one, two in pairs:
        was = None if one is None else left.of(one)
        now = None if two is None else right.of(two)
        if was != now:
            return alike, FirstDifference(
                a=one and one.seq,
                b=two and two.seq,
                role=one.role if one else two.role if two else "",
                what=_what(was, now),
                recorded=(_readable(was), _readable(now)),
            )
        alike += 1
    return alike, None


def _compared(events: Iterable[Event]) -> Iterable[Event]:
    return (event for event in events if not isinstance(event.data, BOOKKEEPING))


def _what(was: dict[str, Any] | None, now: dict[str, Any] | None) -> str:
    if was is None or now is None:
        return f"only {'B' if was is None else 'A'} goes on, with {(was or now or {})['type']}"
    if was["type"] != now["type"]:
        return f"{was['type']} in A, {now['type']} in B"
    return f"{was['type']} differs in {', '.join(differing(was, now))}"


def _readable(plain: dict[str, Any] | None) -> str:
    return "(nothing)" if plain is None else json.dumps(plain, indent=2, ensure_ascii=False)


def _request(events: Sequence[Event]) -> dict[str, JsonValue]:
    """The request in force, as far as it is compared."""
    for event in reversed(events):
        if isinstance(event.data, EpisodeRequested):
            fields = event.data.model_dump(mode="json", include=REQUESTED)
            fields["task"] = {**fields["task"], "id": None}
            if event.data.program.startswith("local:"):
                fields["program"] = "local"  # named anew in every process
            return fields
    return {}


class _Plain:
    """The events of one history in terms that mean the same in another."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._names: dict[str, str] = {}
        """By event id: its position among those that are compared, or its type."""
        self._seqs: dict[int, str] = {}
        self._calls: dict[str, str] = {}
        """By a call's id: its number."""
        position = 0
        for event in events:
            if isinstance(event.data, BOOKKEEPING):
                name = event.type
            else:
                position += 1
                name = str(position)
            self._names[event.id] = self._seqs[event.seq] = name
            for call in event.data.tool_calls if isinstance(event.data, ModelCompleted) else ():
                self._calls.setdefault(call.id, str(len(self._calls) + 1))

    def of(self, event: Event) -> dict[str, Any]:
        fields = event.model_dump(mode="json", include=COMPARED, exclude_defaults=True)
        fields["causation_id"] = self._name(event.causation_id)
        fields["correlation_id"] = self._name(event.correlation_id)
        data: dict[str, Any] = fields["data"]
        for noise in NOISE.get(type(event.data), ()):
            data.pop(noise, None)
        match event.data:
            case ModelRequested(previous=previous, sources=sources):
                data["previous"] = previous and self._seqs.get(previous)
                data["sources"] = [self._seqs.get(seq) for seq in sources]
            case ModelCompleted():
                for call in data.get("tool_calls", ()):
                    call["id"] = self._calls[call["id"]]
            case ToolCalled():
                data["call"]["id"] = self._calls.get(data["call"]["id"])
            case DeliveryDeadLettered(seq=seq):
                data["seq"] = self._seqs.get(seq)
            case ValueRecorded(kind="clock"):
                data.pop("value", None)
            case _:
                pass
        return fields

    def _name(self, reference: str | None) -> str | None:
        """Of an event, or of what a handler asked for on its account: `<id>:<role>:<number>`."""
        if reference is None:
            return None
        event_id, *rest = reference.split(":", 1)
        return ":".join([self._names.get(event_id, "outside"), *rest])


class _Roles:
    """What each role of one history did, and how it ended."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.totals: dict[str, RoleTotals] = defaultdict(RoleTotals)
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.outcome = Outcome(
            episode=next((e.episode_id for e in reversed(events) if e.episode_id), "")
        )
        self._asked: dict[str, datetime] = {}
        self._places: dict[str, tuple[str, int]] = {}
        """By the id of `tool.called`: its role, and its place among the role's calls."""
        for event in events:
            self._begin(event)
            self._add(event)

    def _begin(self, event: Event) -> None:
        """Note when what is asked began."""
        match event.data:
            case ModelRequested() | ToolCalled():
                self._asked[event.id] = event.time
            case EpisodeForked() | EpisodeClaimed():  # what is open at a fork is asked again
                self._asked = dict.fromkeys(self._asked, event.time)
            case _:
                pass

    def _add(self, event: Event) -> None:
        role, data = event.role, event.data
        match data:
            case ModelCompleted(usage=usage):
                tokens = usage.prompt_tokens + usage.completion_tokens
                self._count(role, turns=1, tokens=tokens, seconds=self._took(event))
            case ModelFailed():
                self._count(role, seconds=self._took(event))
            case ToolCalled(call=call):
                self._count(role, calls=1)
                self._places[event.id] = role, len(self.calls[role])
                arguments = call.malformed or json.dumps(call.arguments, ensure_ascii=False)
                self.calls[role].append(Call(seq=event.seq, name=call.name, arguments=arguments))
            case ToolReturned(content=content):
                self._answer(event, as_text(content), failed=False)
            case ToolFailed(error=error, message=message):
                self._answer(event, f"{error}: {message}", failed=True)
            case AnswerProposed(text=text):
                self.totals[role] = self.totals[role].model_copy(update={"answer": text})
            case RewardGiven(role=str(whose), reward=reward):
                self.totals[whose] = self.totals[whose].model_copy(update={"reward": reward})
            case RewardGiven(reward=reward):
                self.outcome = self.outcome.model_copy(update={"reward": reward})
            case EpisodeAnswered(answer=answer):
                self.outcome = self.outcome.model_copy(update={"answer": answer})
            case EpisodeFinished(answer=answer, reason=reason):
                end = {"answer": answer, "status": reason}
                self.outcome = self.outcome.model_copy(update=end)
            case _:
                pass

    def _answer(self, event: Event, answer: str, *, failed: bool) -> None:
        role, place = self._places.get(event.correlation_id or "", ("", 0))
        if role:
            call = self.calls[role][place]
            self.calls[role][place] = call.model_copy(update={"answer": answer, "failed": failed})
            self._count(role, seconds=self._took(event))

    def _count(self, role: str, **more: float) -> None:
        totals = self.totals[role]
        counted = {name: getattr(totals, name) + value for name, value in more.items()}
        self.totals[role] = totals.model_copy(update=counted)

    def _took(self, answer: Event) -> float:
        asked = self._asked.pop(answer.correlation_id or "", answer.time)
        return max((answer.time - asked).total_seconds(), 0.0)


def _compare_calls(a: Sequence[Call], b: Sequence[Call]) -> Iterable[CallDiff]:
    left, right = ([(call.name, call.arguments) for call in calls] for calls in (a, b))
    for _, i, i_end, j, j_end in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for one, two in zip_longest(a[i:i_end], b[j:j_end]):
            if one and two and one.name == two.name:
                if one.arguments != two.arguments:
                    yield CallDiff(change="arguments", a=one, b=two)
                elif (one.answer, one.failed) != (two.answer, two.failed):
                    yield CallDiff(change="answer", a=one, b=two)
                continue
            if one:
                yield CallDiff(change="removed", a=one, b=None)
            if two:
                yield CallDiff(change="added", a=None, b=two)
