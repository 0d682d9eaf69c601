"""A timeline as lines: roles, below them their turns, below these their calls.

What is settled is given once, so a line depends on nothing that comes after it: a log that grows looks like one that has
ended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime

from aworld_runtime.cli.gist import gist
from aworld_runtime.cli.screen import (
    BOLD,
    CYAN,
    DIM,
    GREEN,
    PLAIN,
    RED,
    YELLOW,
    Line,
    Look,
    Piece,
    cells,
)
from aworld_runtime.cli.shared import counted
from aworld_runtime.events import (
    AnswerProposed,
    EpisodeFinished,
    EpisodePaused,
    EpisodeRequested,
    EpisodeResumed,
    EpisodeTakenOver,
    Event,
    HandoffMade,
    HumanAnswered,
    HumanAsked,
    MessagePosted,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    ToolFailed,
    ToolReturned,
)
from aworld_runtime.timeline import (
    Beginning,
    Call,
    End,
    Entry,
    Moment,
    Timeline,
    Totals,
    Turn,
    Work,
)
from aworld_runtime.trajectory import as_text

WAIT_S = 0.1
"""A wait that is worth a word."""
SLOW_S = 0.5
"""After so long it is shown that a role is at work on something that is no turn."""
MOST_SAID = 12
"""Lines of one turn while it goes on."""
MOST_SHOWN = 1000
"""Characters of what was said that are looked at: no line shows more."""
SEQ, OFFSET, TOOK = 5, 8, 9
INDENT = SEQ + OFFSET + 3
LABEL = (12, 48)
"""Columns for the names of what took time: half of a line, but no fewer and no more than so many."""


class Tree:
    """Lays out the entries of one timeline, in whatever order they are given."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._began: datetime | None = None
        self._work: Work | None = None
        """Whose lines the last ones are."""
        self._known: set[int] = set()
        """Works that have had their full heading, by number."""

    def settled(self, entry: Entry, totals: Totals, width: int) -> list[Line]:
        """An entry, for good."""
        match entry:
            case Beginning():
                return self._beginning(entry)
            case Turn():
                lines = [*self._heading(entry.work), *self._turn(entry, width)]
                self._work = entry.work if entry.outcome is None else None
                self._known.add(entry.work.number)
                return lines
            case Moment():
                branch = "├─ " if self._work else ""
                return [self._row(entry.event, [(branch, DIM), (_told(entry), YELLOW)])]
            case End(finished=finished, took_s=took_s):
                return [self._end(finished, took_s, totals, width)]

    def going_on(self, timeline: Timeline, now: datetime, width: int) -> list[Line]:
        """What is not settled at `now`, and how it stands."""
        lines: list[Line] = []
        before = self._work
        for turn in timeline.open.values():
            lines += [*self._heading(turn.work), *self._turn(turn, width, now)]
            self._work = turn.work
        self._work = before
        lines += self._handling(timeline, now)
        requested = timeline.requested
        if requested is None or timeline.finished is not None:
            return lines
        if timeline.worker is None:
            name = f"episode {requested.episode_id}"
            waits = f" · waits for a worker, {_since(requested.time, now)}"
            return [*lines, self._row(requested, [(name, BOLD), (waits, CYAN)])]
        facts = [f"running for {_since(requested.time, now)}"]
        if timeline.paused is not None:
            facts.append(f"paused for {_since(timeline.paused.time, now)}")
        return [*lines, [(f"{'':{INDENT}}{' · '.join([*facts, *_counts(timeline.totals)])}", CYAN)]]

    def _beginning(self, entry: Beginning) -> list[Line]:
        requested = entry.requested or entry.claimed
        self._began, self._work = requested.time, None
        waited = f" after {seconds(entry.waited_s)}" if entry.waited_s >= WAIT_S else ""
        facts = [f"{gist(entry.claimed).removeprefix('by ')}{waited}"]
        if requested.attempt > 1:
            facts.append(f"attempt {requested.attempt}")
        if isinstance(requested.data, EpisodeRequested):
            facts.append(re.sub(r"^(local:\w+)/.*", r"\1", requested.data.program))
        name = f"episode {requested.episode_id}"
        line = self._row(requested, [(name, BOLD), (f" · {' · '.join(facts)}", DIM)])
        if entry.forked is None:
            return [line]
        return [self._row(entry.forked, [(f"forked {gist(entry.forked)}", YELLOW)]), line]

    def _end(self, finished: Event, took_s: float, totals: Totals, width: int) -> Line:
        how, style = gist(finished), f"{BOLD};{RED}"
        if isinstance(finished.data, EpisodeFinished) and finished.data.error is None:
            how, style = self._look.fit(how, width // 3), f"{BOLD};{GREEN}"
        facts = ["", seconds(took_s), *_counts(totals)]
        return self._row(finished, [(how, style), (" · ".join(facts), PLAIN)])

    def _heading(self, work: Work) -> list[Line]:
        """Whose lines follow; nothing where those before are of the same work."""
        if work is self._work:
            return []
        if work.number in self._known or work.delivered is None:
            return [self._row(None, [(work.role, BOLD), (" goes on", DIM)])]
        by = f"handed over by {work.origin}" if work.handed_over else work.origin
        said = [(work.role, BOLD), (f" ← {by}: ", DIM), (_content(work.delivered), PLAIN)]
        return [self._row(work.delivered, said)]

    def _turn(self, turn: Turn, width: int, now: datetime | None = None) -> Iterator[Line]:
        """`now`: while it goes on."""
        closed = not turn.said and _says_all(turn)
        stem = ""
        if turn.completion is not None:
            yield self._completion(turn, turn.completion, width, now, closed=closed)
            stem = "│  "
        said = turn.said if now is None else _foremost(turn.said)
        for place, one in enumerate(said, 1):
            branch = f"{stem}└─ " if stem and place == len(said) else f"{stem}├─ "
            if isinstance(one, Call):
                yield self._call(one, branch, width, now)
            else:
                yield self._row(one.event, [(branch, DIM), (_told(one), YELLOW)])
        if len(said) < len(turn.said):
            yield self._row(None, [(f"{stem}   … {len(turn.said) - len(said)} more", DIM)])
        if turn.outcome is not None and not closed:
            yield self._row(turn.outcome, [("└─ ", DIM), _outcome(turn.outcome)])

    def _completion(
        self, turn: Turn, call: Call, width: int, now: datetime | None, *, closed: bool
    ) -> Line:
        model = call.asked.data.model if isinstance(call.asked.data, ModelRequested) else ""
        label: list[Piece] = [
            ("└─ " if closed else "├─ ", DIM),
            (f"turn {turn.number}", PLAIN),
            (f"  {model}", DIM),
        ]
        detail: list[Piece] = []
        if turn.waited_s >= WAIT_S:
            detail.append((f"waited {seconds(turn.waited_s)}  ", YELLOW))
        match call.answer and call.answer.data:
            case ModelCompleted(text=text, usage=usage):
                if usage.prompt_tokens or usage.completion_tokens:
                    tokens = f"{usage.prompt_tokens}+{usage.completion_tokens} tokens  "
                    detail.append((tokens, DIM))
                if closed and turn.outcome is not None:
                    detail.append(_outcome(turn.outcome))
                elif text:
                    detail.append((repr(_short(text)), PLAIN))
            case ModelFailed(error=error, message=message):
                detail.append((f"✗ {error}: {_short(message)}", RED))
            case _:
                pass
        return self._timed(call, label, detail, width, now)

    def _call(self, call: Call, branch: str, width: int, now: datetime | None) -> Line:
        who = "a person: " if isinstance(call.asked.data, HumanAsked) else ""
        label = [(branch, DIM), (who, YELLOW), (gist(call.asked), PLAIN)]
        detail: list[Piece] = []
        match call.answer and call.answer.data:
            case ToolFailed(error=error, message=message):
                detail.append((f"✗ {error}: {_short(message)}", RED))
            case ToolReturned(content=content):
                detail.append((f"→ {_short(as_text(content))}", PLAIN))
            case HumanAnswered(answer=answer):
                detail.append((f"→ {_short(answer)!r}", PLAIN))
            case _:
                pass
        return self._timed(call, label, detail, width, now)

    def _timed(
        self, call: Call, label: list[Piece], detail: list[Piece], width: int, now: datetime | None
    ) -> Line:
        """What took time, in columns: what it was, how long, what came of it."""
        took = ("no answer", YELLOW)
        if call.answer is not None:
            took = (seconds((call.answer.time - call.began).total_seconds()), PLAIN)
        elif now is not None:
            state = "waits" if isinstance(call.asked.data, HumanAsked) else "running"
            took = (_since(call.began, now), CYAN)
            detail = [*detail, (f"{state} …", CYAN)]
        times = f" {call.again}×" if call.again > 1 else ""
        again = f"made again{times}  " if call.again else ""
        text, style = took
        return [
            *self._place(call.answer or call.asked, call.began),
            *self._padded(label, min(max((width - INDENT) // 2, LABEL[0]), LABEL[1])),
            (f"{text:>{TOOK}}  ", style),
            (again, YELLOW),
            *detail,
        ]

    def _padded(self, label: list[Piece], room: int) -> Iterator[Piece]:
        """In exactly `room` columns."""
        for text, style in label:
            cut = self._look.fit(text, room)
            room -= cells(cut)
            yield cut, style
        yield " " * room, PLAIN

    def _handling(self, timeline: Timeline, now: datetime) -> Iterator[Line]:
        """Roles at work on something that is no turn, as an environment that scores."""
        busy = {turn.work.role for turn in timeline.open.values()}
        for (role, _), delivered in timeline.pending.items():
            if role not in busy and (now - delivered.time).total_seconds() >= SLOW_S:
                busy.add(role)
                does = "waits to handle" if timeline.paused else "handles"
                text = f" {does} {delivered.type}, {_since(delivered.time, now)}"
                yield self._row(delivered, [(role, BOLD), (text, CYAN)])

    def _row(self, event: Event | None, pieces: Sequence[Piece]) -> Line:
        return [*self._place(event, event and event.time), *pieces]

    def _place(self, event: Event | None, time: datetime | None) -> Line:
        """Where it is in the log, and when it began; not where that was before a fork's request."""
        if event is None or time is None:
            return [(f"{'':{INDENT}}", PLAIN)]
        offset = (time - (self._began or time)).total_seconds()
        began = f"{offset:.2f}" if offset >= 0 else ""
        return [(f"{event.seq:>{SEQ}} {began:>{OFFSET}}  ", DIM)]


def seconds(count: float) -> str:
    """A duration, in as many digits as one would say."""
    count = max(count, 0.0)
    if count < 9.995:
        return f"{count:.2f} s"
    if count < 99.95:
        return f"{count:.1f} s"
    minutes, rest = divmod(round(count), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h"


def _since(began: datetime, now: datetime) -> str:
    """In tenths, which is as often as it is drawn."""
    count = max((now - began).total_seconds(), 0.0)
    return f"{count:.1f} s" if count < 99.95 else seconds(count)


def _content(delivered: Event) -> str:
    """What a role was asked with."""
    if isinstance(delivered.data, MessagePosted):
        return _short(delivered.data.content)
    return f"{delivered.type} {_short(gist(delivered))}"


def _says_all(turn: Turn) -> bool:
    """Whether its completion's line can say what came of it: the answer, or that the model failed."""
    answer = turn.completion and turn.completion.answer
    if answer is None or turn.outcome is None:
        return False
    return isinstance(answer.data, ModelCompleted) == isinstance(turn.outcome.data, AnswerProposed)


def _outcome(event: Event) -> Piece:
    if isinstance(event.data, AnswerProposed):
        return f"answer {_short(gist(event))}", GREEN
    return f"✗ failed on {_short(gist(event))}", RED


def _told(moment: Moment) -> str:
    event, after = moment.event, seconds(moment.after_s)
    match event.data:
        case EpisodeTakenOver(worker=worker):
            lost = moment.former or "the worker before"
            return f"taken over by worker {worker}; {lost} had been silent for {after}"
        case EpisodePaused(reason=reason):
            return f"paused{_because(reason)}"
        case EpisodeResumed(reason=reason):
            return f"resumed after {after}{_because(reason)}"
        case MessagePosted():
            return f"{event.role} {_short(gist(event))}"
        case HandoffMade():
            return f"hands over {_short(gist(event))}"
        case _:
            return f"{event.type} by {event.role}: {_short(gist(event))}"


def _because(reason: str) -> str:
    return f": {_short(reason)}" if reason else ""


def _foremost(said: Sequence[Call | Moment]) -> Sequence[Call | Moment]:
    """Of very many, those that wait, and the last others."""
    if len(said) <= MOST_SAID:
        return said
    waiting = [one for one in said if isinstance(one, Call) and one.answer is None][:MOST_SAID]
    others = [one for one in said if not (isinstance(one, Call) and one.answer is None)]
    room = MOST_SAID - len(waiting)
    shown = {id(one) for one in (*waiting, *others[len(others) - room :])}
    return [one for one in said if id(one) in shown]


def _counts(totals: Totals) -> list[str]:
    counts = [
        counted(len(totals.agents), "agent"),
        counted(totals.turns, "turn"),
        counted(totals.calls, "tool call")
        + (f" ({totals.failed_calls} failed)" if totals.failed_calls else ""),
    ]
    if totals.tokens:
        counts.append(f"{totals.tokens:,} tokens")
    if totals.cost_usd:
        counts.append(f"${totals.cost_usd:.4f}")
    if totals.reward is not None:
        counts.insert(0, f"reward {totals.reward:g}")
    return counts


def _short(text: str) -> str:
    """On one line; no longer than any that is shown."""
    return " ".join(text[:MOST_SHOWN].split())
