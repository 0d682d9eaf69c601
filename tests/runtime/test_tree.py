"""How a timeline looks, at fixed widths, and what a terminal is made to show."""

from __future__ import annotations

import io
import os
import random
import re
from collections.abc import Sequence

import pytest
from pydantic import JsonValue

from aworld_runtime.cli.screen import BOLD, CYAN, PLAIN, RED, Look, Screen, cells
from aworld_runtime.cli.tree import Tree, seconds
from aworld_runtime.events import (
    AnswerProposed,
    DeliveryDeadLettered,
    DeliveryHandled,
    EpisodeAnswered,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeForked,
    EpisodePaused,
    EpisodeRequested,
    EpisodeResumed,
    EpisodeTakenOver,
    Event,
    HandoffMade,
    HumanAnswered,
    HumanAsked,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    RewardGiven,
    SubscriptionChanged,
    ToolCalled,
    ToolFailed,
    ToolReturned,
)
from aworld_runtime.messages import Task, ToolCall, Usage
from aworld_runtime.timeline import Timeline, by_work
from tests.handmade import EPISODE, Log, at
from tests.terminal import Terminal

ROLES = {"solver": (), "verifier": (), "environment": ("episode.answered",)}
PLAINLY = Look()
TURN = ModelRequested(model="gpt-4o", prompt_sha256="")


def shown(
    events: Sequence[Event], width: int = 120, look: Look = PLAINLY, *, now: float | None = None
) -> str:
    """What is settled; with `now`, what goes on, too."""
    tree, timeline = Tree(look), Timeline()
    entries = by_work([entry for event in events for entry in timeline.add(event)])
    lines = [line for entry in entries for line in tree.settled(entry, timeline.totals, width)]
    if now is not None:
        lines += tree.going_on(timeline, at(now), width)
    return "\n".join(look.paint(line, width) for line in lines) + "\n"


def two_calls(arguments: dict[str, JsonValue] | None = None) -> tuple[Log, Event, Event, Event]:
    """A wait for a worker, a completion, two calls; returns the log, the message, the calls. Eight events, the last at 2.25."""
    log = Log()
    log.events.clear()
    task = Task(id="t", prompt="What is 17 * 23?")
    asked = EpisodeRequested(task=task, program="my:swarm")
    log.requested = log.add("user", asked, None, time=at(0), attempt=2)
    log.add("worker", EpisodeClaimed(worker="w1"), log.requested, time=at(0.8))
    log.add("worker", SubscriptionChanged(subscriptions=ROLES), log.requested, time=at(0.8))
    message = log.asked("solver", log.requested, time=at(0.8), text=task.prompt)
    request = log.add("solver", TURN, message, time=at(1))
    usage = Usage(prompt_tokens=1200, completion_tokens=28)
    said = ModelCompleted(text="I'll\nmultiply.", usage=usage)
    log.add("solver", said, message, request, time=at(2.24))
    sums = ToolCall(id="1", name="calculator", arguments=arguments or {"expression": "17 * 23"})
    search = ToolCall(id="2", name="search", arguments={"query": "17", "most": 3})
    first, second = (
        log.add("solver", ToolCalled(call=call), message, time=at(2.25)) for call in (sums, search)
    )
    log.add("solver", DeliveryHandled(seq=message.seq), message, time=at(2.25))
    return log, message, first, second


def told_to_go_on() -> tuple[Log, Event]:
    """After two calls, of which one fails: a takeover, a pause, and a person who is asked; returns the log and the answer."""
    log, _, first, second = two_calls()
    failed = ToolFailed(name="search", error="ToolTimeoutError", message="no answer in 2 s")
    told = log.add("search", failed, second, second, to="solver", time=at(4.25))
    log.add("solver", DeliveryHandled(seq=told.seq), told, time=at(4.25))
    log.add("worker", EpisodeTakenOver(worker="w2"), log.requested, time=at(6.75))
    returned = ToolReturned(name="calculator", content={"value": 391})
    last = log.add("calculator", returned, first, first, to="solver", time=at(7.25))
    log.add("user", EpisodePaused(reason="lunch"), None, time=at(7.3))
    log.add("user", EpisodeResumed(), None, time=at(127.3))
    request = log.add("solver", TURN, last, time=at(127.4))
    log.add("solver", ModelCompleted(text="Sure?"), last, request, time=at(128.4))
    question = log.add("solver", HumanAsked(question="Sure?"), last, time=at(128.4))
    log.handled("solver", last)
    word = log.add("ada", HumanAnswered(answer="yes"), None, question, to="solver", time=at(140.9))
    return log, word


def to_its_end() -> list[Event]:
    """And then: a handoff, an answer, a reward."""
    log, word = told_to_go_on()
    request = log.add("solver", TURN, word, time=at(140.9))
    log.add("solver", ModelCompleted(text="391"), word, request, time=at(141.4))
    handoff = log.add(
        "solver", HandoffMade(target="verifier", reason="check"), word, time=at(141.4)
    )
    log.handled("solver", word)
    check = log.asked("verifier", handoff, time=at(141.5), text="Is it 391?")
    request = log.add("verifier", TURN, check, time=at(141.5))
    log.add("verifier", ModelCompleted(text="391"), check, request, time=at(142))
    log.add("verifier", AnswerProposed(text="391"), check, time=at(142))
    log.handled("verifier", check)
    answered = log.add("swarm", EpisodeAnswered(answer="391"), log.requested, time=at(142))
    log.add("environment", RewardGiven(reward=1), answered, time=at(143))
    log.add("environment", EpisodeFinished(answer="391"), answered, time=at(143))
    return log.events


def test_a_run_with_everything_as_it_looks_afterwards() -> None:
    assert (
        shown(to_its_end())
        == f"""\
    1     0.00  episode {EPISODE} · worker w1 after 0.80 s · attempt 2 · my:swarm
    4     0.80  solver ← task: What is 17 * 23?
    6     1.00  ├─ turn 1  gpt-4o                                  1.24 s  waited 0.20 s  1200+28 tokens  "I'll multipl…
   13     2.25  │  ├─ calculator("17 * 23")                        5.00 s  made again  → {{"value": 391}}
   10     2.25  │  ├─ search(query="17", most=3)                   2.00 s  ✗ ToolTimeoutError: no answer in 2 s
   12     6.75  │  └─ taken over by worker w2; w1 had been silent for 2.50 s
   14     7.30  ├─ paused: lunch
   15   127.30  ├─ resumed after 2:00 min
   17   127.40  ├─ turn 2  gpt-4o                                  1.00 s  waited 2:00 min  'Sure?'
   20   128.40  │  └─ a person: 'Sure?'                            12.5 s  → 'yes'
   22   140.90  ├─ turn 3  gpt-4o                                  0.50 s  '391'
   23   141.40  │  └─ hands over to verifier: check
   25   141.50  verifier ← handed over by solver: Is it 391?
   27   141.50  └─ turn 1  gpt-4o                                  0.50 s  answer '391'
   32   143.00  answered '391' · 2:23 min · reward 1 · 2 agents · 4 turns · 2 tool calls (1 failed) · 1,228 tokens
"""
    )


def test_a_log_in_any_order_and_with_any_part_missing_is_shown() -> None:
    whole = to_its_end()
    for seed in range(50):
        draw = random.Random(seed)
        events = [event for event in whole if draw.random() < 0.8]
        if seed % 2:
            draw.shuffle(events)
        assert shown([event.at(seq) for seq, event in enumerate(events, 1)], now=200)


def test_what_runs_is_shown_with_its_time_so_far() -> None:
    log, *_ = two_calls()
    whole = shown(log.events, 100, now=5).splitlines()
    assert whole[3:] == [
        '    7     2.25  │  ├─ calculator("17 * 23")                   2.8 s  running …',
        '    8     2.25  │  └─ search(query="17", most=3)              2.8 s  running …',
        "                running for 5.0 s · 1 agent · 1 turn · 2 tool calls · 1,228 tokens",
    ]


def last_lines(events: Sequence[Event], now: float) -> list[str]:
    return [line[16:] for line in shown(events, now=now).splitlines()[-2:]]


def test_what_is_waited_for_is_shown_with_its_time_so_far() -> None:
    log, _ = told_to_go_on()
    events = log.events
    assert last_lines(events[:1], 5)[-1] == f"episode {EPISODE} · waits for a worker, 5.0 s"
    paused = events[:14]
    assert paused[-1].type == "episode.paused"
    assert last_lines(paused, 9)[0] == "solver waits to handle tool.returned, 1.8 s"
    assert last_lines(paused, 9)[1].startswith("running for 9.0 s · paused for 1.7 s · 1 agent")
    question, _ = last_lines(events[:-1], 130)
    assert question.split() == ["│", "└─", "a", "person:", "'Sure?'", "1.6", "s", "waits", "…"]
    scoring = to_its_end()[:-2]
    assert last_lines(scoring, 145)[0] == "environment handles episode.answered, 3.0 s"


def test_agents_that_work_at_the_same_time_are_told_apart_as_their_turns_end() -> None:
    log = Log()
    log.add("worker", EpisodeClaimed(worker="w1"), log.requested)
    log.add("worker", SubscriptionChanged(subscriptions=ROLES), log.requested)
    told = {role: log.asked(role, log.requested) for role in ("solver", "verifier")}
    for role in ("solver", "verifier", "solver", "verifier"):
        request = log.add(role, TURN, told[role])
        log.add(role, ModelCompleted(text=role), told[role], request)
        called = log.add(role, ToolCalled(call=ToolCall(id="1", name="t")), told[role])
        log.handled(role, told[role])
        data = ToolReturned(name="t", content="")
        told[role] = log.add("t", data, called, called, to=role)
    tree, timeline = Tree(PLAINLY), Timeline()
    lines = [
        PLAINLY.paint(line, 120)[16:]
        for event in log.events
        for entry in timeline.add(event)
        for line in tree.settled(entry, timeline.totals, 120)
    ]
    headings = [line for line in lines[1:] if line[0] not in "├│"]
    assert headings == [
        "solver ← task: Add.",
        "verifier ← task: Add.",
        "solver goes on",
        "verifier goes on",
    ]
    whole = [line[16:] for line in shown(log.events).splitlines()[1:]]
    assert [line for line in whole if line[0] not in "├│"] == headings[:2]


def test_a_fork_shows_what_it_shares_and_its_own_times() -> None:
    log, _, first, second = two_calls()
    returned = ToolReturned(name="search", content="none")
    log.add("search", returned, second, second, to="solver", time=at(3))
    forked = EpisodeForked(parent="episode:p", at=10, edited=("data.content",))
    log.add("runtime", forked, None, time=at(1000))
    request = EpisodeRequested(task=Task(id="t", prompt="What?"), program="my:swarm")
    log.requested = log.add("user", request, None, time=at(1000))
    log.add("worker", EpisodeClaimed(worker="w3"), log.requested, time=at(1001))
    returned = ToolReturned(name="calculator", content=400)
    last = log.add("calculator", returned, first, first, to="solver", time=at(1003))
    request = log.add("solver", TURN, last, time=at(1003))
    log.add("solver", ModelCompleted(text="400"), last, request, time=at(1004))
    log.add("solver", AnswerProposed(text="400"), last, time=at(1004))
    log.handled("solver", last)
    assert (
        shown(log.events)
        == f"""\
    1     0.00  episode {EPISODE} · worker w1 after 0.80 s · attempt 2 · my:swarm
   11     0.00  forked from episode:p after event 10, with another data.content in the next
   12     0.00  episode {EPISODE} · worker w3 after 1.00 s · my:swarm
    4           solver ← task: What is 17 * 23?
    6           ├─ turn 1  gpt-4o                                  1.24 s  waited 0.20 s  1200+28 tokens  "I'll multipl…
   14     1.00  │  ├─ calculator("17 * 23")                        2.00 s  made again  → 400
   10           │  └─ search(query="17", most=3)                   0.75 s  → none
   16     3.00  └─ turn 2  gpt-4o                                  1.00 s  answer '400'
"""
    )


def crashed(answer: ModelCompleted | ModelFailed, error: str) -> list[str]:
    log = Log()
    log.add("worker", EpisodeClaimed(worker="w1"), log.requested)
    log.add("worker", SubscriptionChanged(subscriptions=ROLES), log.requested)
    message = log.asked("solver", log.requested)
    request = log.add("solver", TURN, message)
    log.add("solver", answer, message, request)
    dead = DeliveryDeadLettered(seq=message.seq, error=error, message="no", attempts=1)
    log.add("solver", dead, message)
    log.add("environment", RewardGiven(role="solver", reward=0), None)
    log.finished("failed", f"solver: {error}: no")
    return [line[16:] for line in shown(log.events).splitlines()[2:]]


def test_a_failure_is_told_where_it_happened_and_at_the_end() -> None:
    model, reward, end = crashed(ModelFailed(error="ModelError", message="no"), "ModelError")
    assert re.fullmatch(r"└─ turn 1  gpt-4o +1.00 s  waited 1.00 s  ✗ ModelError: no", model)
    assert reward == "reward.given by environment: 0"  # of no agent's lines any more
    assert end.startswith("failed: solver: ModelError: no · 8.00 s · 1 agent")
    said, own, *_ = crashed(ModelCompleted(text="3"), "ValueError")
    assert re.fullmatch(r"├─ turn 1  gpt-4o +1.00 s  waited 1.00 s  '3'", said)
    assert own == "└─ ✗ failed on seq 4: ValueError: no"


@pytest.mark.parametrize("width", [30, 50, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    log, _, first, _ = two_calls({"expression": "数学 👩‍🔬 e\u0301" * 50})
    returned = ToolReturned(name="calculator", content="é" * 500)
    log.add("calculator", returned, first, first, to="solver")
    for line in shown(log.events, width, now=5).splitlines():
        assert cells(line) <= width


def test_columns_stay_where_they_are_behind_wide_characters() -> None:
    def column(expression: str) -> int:
        log, *_ = two_calls({"expression": expression})
        (line,) = [one for one in shown(log.events, now=5).splitlines() if "calculator" in one]
        return cells(line[: line.index(" running")])

    assert column("数学") == column("ab") == column("e\u0301") == column("x" * 200)


def test_what_a_tool_says_is_shown_and_not_obeyed() -> None:
    log, _, first, _ = two_calls({"expression": "\x1b[2J\x9b1m\u202e"})
    failed = ToolFailed(name="calculator", error="E", message="\x1b]0;title\x07\ud800")
    log.add("calculator", failed, first, first, to="solver")
    text = shown(log.events, now=5)
    assert text.encode()
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "\\x1b[2J" in text.replace("\\\\", "\\") or "\\u001b[2J" in text
    assert r"\x1b]0;title\x07\ud800" in text


def test_many_calls_of_a_turn_are_not_all_shown_while_it_goes_on() -> None:
    log, message, *_ = two_calls()
    handled = log.events.pop()
    for number in range(100):
        call = ToolCall(id=str(number), name=f"t{number}")
        called = log.add("solver", ToolCalled(call=call), message, time=at(2.3))
        if number % 2:
            data = ToolReturned(name=call.name, content="")
            log.add(call.name, data, called, called, to="solver", time=at(2.4))
    log.events.append(handled)
    going_on = [line for line in shown(log.events, now=5).splitlines() if "running …" in line]
    assert len(going_on) == 12
    assert "… 90 more" in shown(log.events, now=5)


def test_a_terminal_that_has_only_ascii_gets_lines_that_it_can_show() -> None:
    text = shown(to_its_end(), look=Look(encoding="ascii"))
    assert text.isascii()
    lines = text.splitlines()
    assert lines[1][16:] == "solver < task: What is 17 * 23?"
    assert lines[4][16:32] == "|  |- search(que"
    assert lines[5][16:].startswith("|  `- taken over")


def test_colours_change_nothing_but_colours() -> None:
    look = Look(colour=True)
    assert (
        look.paint([("a", RED), ("b", PLAIN), ("c", BOLD)], 9) == "\x1b[31ma\x1b[0mb\x1b[1mc\x1b[0m"
    )
    terminal = Terminal()
    terminal.feed(shown(to_its_end(), look=look))
    assert str(terminal) == shown(to_its_end())


@pytest.mark.parametrize(
    "environment, colour, redraw",
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, False, False),
        ({}, False, False),
    ],
)
def test_a_terminal_is_used_as_the_environment_says(
    environment: dict[str, str], colour: bool, redraw: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TERM", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    inside, outside = os.openpty()
    with open(outside, "w", encoding="latin-1") as terminal:  # noqa: PTH123 - it has no path
        assert Look.of(terminal) == Look(colour, redraw, "latin-1")
    os.close(inside)
    assert Look.of(io.TextIOWrapper(io.BytesIO(), encoding="utf-8")) == Look()


class Drawn:
    """A screen, and the terminal that shows what it writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, columns: int = 20, rows: int = 5) -> None:
        self._monkeypatch = monkeypatch
        self.resize(columns, rows)
        self._out = io.StringIO()
        self.screen = Screen(self._out, Look(redraw=True))
        self.terminal = Terminal(rows)

    def resize(self, columns: int, rows: int = 5) -> None:
        self._monkeypatch.setenv("COLUMNS", str(columns))
        self._monkeypatch.setenv("LINES", str(rows))

    def write(self, settled: Sequence[str], live: Sequence[str] = ()) -> str:
        """Returns the bytes that it took; the terminal shows them."""
        begin = self._out.tell()
        self.screen.write([[(line, PLAIN)] for line in settled], [[(line, CYAN)] for line in live])
        written = self._out.getvalue()[begin:]
        self.terminal.feed(written)
        return written


def test_what_is_live_is_drawn_again_and_what_is_settled_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = Drawn(monkeypatch)
    drawn.write(["one"], ["a 1", "b 1"])
    assert str(drawn.terminal) == "one\na 1\nb 1\n"
    assert not drawn.terminal.shows_cursor
    drawn.write(["two", "three"], ["b 2"])
    assert str(drawn.terminal) == "one\ntwo\nthree\nb 2\n"
    assert drawn.write([], ["b 2"]) == ""
    assert "two" not in drawn.write([], ["b 3"])
    drawn.write(["end"])
    assert str(drawn.terminal) == "one\ntwo\nthree\nend\n"


def test_no_more_is_live_than_the_terminal_has_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Drawn(monkeypatch, rows=5)
    for number in range(3):
        drawn.write([f"line {number}"], [f"{letter} {number}" for letter in "abcdefgh"])
    lines = ["line 0", "line 1", "line 2", "a 2", "b 2", "… 5 more lines", "h 2", ""]
    assert drawn.terminal.lines == lines
    drawn.resize(20, rows=2)
    drawn.write([], ["a", "b", "c"])
    assert drawn.terminal.lines[3:] == ["c", ""]
    drawn.resize(20, rows=1)
    drawn.write([], ["a", "b", "c"])
    assert drawn.terminal.lines[3:] == [""]


def test_a_terminal_made_narrower_has_wrapped_what_was_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = Drawn(monkeypatch, columns=20, rows=9)
    drawn.write(["stays"], ["x" * 30, "short"])
    drawn.resize(10, rows=9)
    drawn.terminal.narrow(10)
    assert drawn.terminal.lines == ["stays", "x" * 10, "x" * 8 + "…", "short", ""]
    drawn.write([], ["y" * 30, "short"])
    assert drawn.terminal.lines == ["stays", "y" * 8 + "…", "short", ""]


def test_durations_are_told_as_one_says_them() -> None:
    times = {0.004: "0.00 s", 9.99: "9.99 s", 9.996: "10.0 s", 99.94: "99.9 s", 99.96: "1:40 min"}
    times |= {3599.4: "59:59 min", 3600: "1:00 h", 90000: "25:00 h", -1: "0.00 s"}
    assert {count: seconds(count) for count in times} == times
