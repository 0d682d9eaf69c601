"""What a timeline makes of logs written by hand: one event each second, unless another time is given."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from aworld_runtime.events import (
    AnswerProposed,
    DeliveryDeadLettered,
    EpisodeAnswered,
    EpisodeClaimed,
    EpisodeForked,
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
    RecordDropped,
    RewardGiven,
    SubscriptionChanged,
    TimerFired,
    ToolCalled,
    ToolFailed,
    ToolReturned,
)
from aworld_runtime.messages import Task, ToolCall, Usage
from aworld_runtime.timeline import Beginning, Call, End, Entry, Moment, Timeline, Turn, by_work
from tests.handmade import Log, at

ROLES = {
    "solver": (),
    "critic": (),
    "swarm": ("answer.proposed",),
    "environment": ("episode.answered",),
}


class Story(Log):
    """What agents, tools and workers do, in short."""

    def __init__(self) -> None:
        super().__init__()
        self.claimed()

    def claimed(self, worker: str = "w1") -> None:
        self.add("worker", EpisodeClaimed(worker=worker), self.requested)
        self.add("worker", SubscriptionChanged(subscriptions=ROLES), self.requested)

    def model(self, role: str, cause: Event, **fields: Any) -> Event:
        return self.add(role, ModelRequested(model="m", prompt_sha256=""), cause, **fields)

    def said(self, role: str, cause: Event, request: Event, text: str = "", **fields: Any) -> None:
        usage = Usage(prompt_tokens=10, completion_tokens=2, cost_usd=0.5)
        self.add(role, ModelCompleted(text=text, usage=usage), cause, request, **fields)

    def call(self, role: str, cause: Event, name: str, **fields: Any) -> Event:
        return self.add(role, ToolCalled(call=ToolCall(id=name, name=name)), cause, **fields)

    def returned(self, called: Event, content: str = "3", **fields: Any) -> Event:
        data = ToolReturned(name="t", content=content)
        return self.add("t", data, called, called, to=called.role, **fields)

    def answers(self, role: str, cause: Event, text: str) -> Event:
        """A turn without calls."""
        self.said(role, cause, self.model(role, cause), text)
        answer = self.add(role, AnswerProposed(text=text), cause)
        self.handled(role, cause)
        return answer


def told(events: Sequence[Event]) -> tuple[Timeline, list[Entry]]:
    timeline = Timeline()
    return timeline, [entry for event in events for entry in timeline.add(event)]


def turns(entries: Sequence[Entry]) -> list[Turn]:
    return [entry for entry in entries if isinstance(entry, Turn)]


def moments(within: Sequence[Entry | Call]) -> list[Moment]:
    return [one for one in within if isinstance(one, Moment)]


def calls(turn: Turn) -> list[Call]:
    return [one for one in turn.said if isinstance(one, Call)]


def two_calls_at_once() -> tuple[Story, Event, Event, Event]:
    """An agent that has called two tools; returns the log, the message it had, and the calls."""
    log = Story()
    message = log.asked("solver", log.requested)  # 4
    log.said("solver", message, log.model("solver", message), "Both.")
    first, second = (log.call("solver", message, name) for name in ("add", "search"))  # 7, 8
    log.handled("solver", message)
    return log, message, first, second


def test_a_turn_holds_its_calls_in_order_however_their_answers_arrive() -> None:
    log, message, first, second = two_calls_at_once()
    failed = ToolFailed(name="search", error="ToolError", message="no")
    log.add("search", failed, second, second, to="solver")  # 10, before the first's
    before_last, settled = told(log.events)
    assert len(turns(settled)) == 0
    assert len(before_last.open) == 1
    last = log.returned(first)  # 11
    answer = log.answers("solver", last, "3")  # 12 … 15
    log.handled("swarm", answer)

    timeline, entries = told(log.finished())
    begun, one, two, end = entries
    assert isinstance(begun, Beginning)
    assert (begun.requested, begun.waited_s) == (log.requested, 1)
    assert isinstance(one, Turn)
    assert isinstance(two, Turn)
    assert [(call.asked.seq, call.answer and call.answer.seq) for call in calls(one)] == [
        (7, 11),
        (8, 10),
    ]
    assert [call.again for call in calls(one)] == [0, 0]
    assert (one.number, one.waited_s, one.outcome) == (1, 1, None)
    assert (two.number, two.waited_s, two.outcome) == (2, 1, answer)
    assert one.work is two.work
    assert (one.work.role, one.work.origin, one.work.delivered) == ("solver", "task", message)
    assert isinstance(end, End)
    assert end.took_s == log.events[-1].seq - 1
    totals = timeline.totals
    assert (totals.agents, totals.turns, totals.calls, totals.failed_calls) == ({"solver"}, 2, 2, 1)
    assert (totals.tokens, totals.cost_usd) == (24, 1.0)
    assert not timeline.open


def test_a_turn_settles_with_the_event_that_answers_its_last_call() -> None:
    log, _, first, second = two_calls_at_once()
    log.returned(second)
    timeline, _ = told(log.events)
    (settled,) = timeline.add(log.returned(first))
    assert isinstance(settled, Turn)
    assert not timeline.open


def test_who_was_asked_by_whom_is_told_past_the_rules_of_the_swarm() -> None:
    log = Story()
    first = log.answers("solver", log.asked("solver", log.requested), "3")
    second = log.answers("critic", log.asked("critic", first), "no")
    direct = log.asked("solver", second, by="critic")
    handoff = log.add("solver", HandoffMade(target="critic"), direct)
    log.answers("critic", log.asked("critic", handoff), "yes")
    _, entries = told(log.events)
    works = [turn.work for turn in turns(entries)]
    assert [(work.role, work.origin, work.handed_over) for work in works] == [
        ("solver", "task", False),
        ("critic", "solver", False),
        ("critic", "solver", True),
    ]


def test_a_message_that_claims_to_be_its_own_cause_is_of_whoever_sent_it() -> None:
    log = Story()
    word = log.add("user", MessagePosted(content="Hurry."), None, to="solver")
    log.events[-1] = word = word.model_copy(update={"causation_id": word.id}).at(word.seq)
    log.answers("solver", word, "3")
    (turn,) = turns(told(log.events)[1])
    assert turn.work.origin == "user"


def test_a_takeover_says_how_long_the_log_stood_still_and_what_is_asked_again() -> None:
    log, message, first, second = two_calls_at_once()  # the last at 9
    log.returned(second)
    log.add("worker", EpisodeTakenOver(worker="w2"), log.requested, time=at(15))
    log.returned(first, time=at(16))
    timeline, entries = told(log.events)
    (turn,) = turns(entries)
    (moment,) = moments(turn.said)
    assert (moment.after_s, moment.former, timeline.worker) == (5, "w1", "w2")
    assert [call.again for call in calls(turn)] == [1, 0]
    assert turn.completion is not None
    assert turn.completion.again == 0
    assert message is turn.work.delivered


def test_a_completion_that_a_dead_worker_had_asked_for_is_asked_for_again() -> None:
    log = Story()
    message = log.asked("solver", log.requested)
    request = log.model("solver", message)
    for worker in ("w2", "w3"):
        log.add("worker", EpisodeTakenOver(worker=worker), log.requested)
    log.said("solver", message, request)
    log.handled("solver", message)
    _, entries = told(log.events)
    (turn,) = turns(entries)
    assert turn.completion is not None
    assert turn.completion.answer is not None
    assert (turn.completion.again, turn.completion.answer.seq) == (2, 8)


def test_to_pause_twice_is_to_pause_once_and_a_resumption_says_for_how_long() -> None:
    log = Story()
    for data in (EpisodePaused(), EpisodePaused()):
        log.add("user", data, None)
    paused, _ = told(log.events)
    assert paused.paused is not None
    assert paused.paused.seq == 4
    for data in (EpisodeResumed(), EpisodeResumed()):
        log.add("user", data, None)
    timeline, entries = told(log.events)
    assert timeline.paused is None
    assert [(one.event.type, one.after_s) for one in moments(entries)] == [
        ("episode.paused", 0),
        ("episode.resumed", 2),
    ]


def test_a_question_to_a_person_waits_as_a_call_does_and_is_not_asked_again() -> None:
    log = Story()
    message = log.asked("solver", log.requested)
    question = log.add("solver", HumanAsked(question="Go on?"), message)
    log.handled("solver", message)
    log.add("worker", EpisodeTakenOver(worker="w2"), log.requested)
    waiting, entries = told(log.events)
    assert len(waiting.open) == 1
    assert turns(entries) == []
    answer = log.add("user", HumanAnswered(answer="yes"), None, question, to="solver")
    log.answers("solver", answer, "done")
    timeline, entries = told(log.events)
    asked, last = turns(entries)
    (call,) = calls(asked)
    assert (call.asked, call.answer, call.again) == (question, answer, 0)
    assert (asked.number, asked.completion, last.number) == (0, None, 1)
    assert asked.work is last.work
    assert timeline.totals.calls == 0


def test_what_agents_do_at_the_same_time_is_put_in_order_by_agent() -> None:
    log = Story()
    one, other = (log.asked(role, log.requested) for role in ("solver", "critic"))
    requests = log.model("solver", one), log.model("critic", other)
    log.said("critic", other, requests[1])
    log.handled("critic", other)
    log.said("solver", one, requests[0])
    called = log.call("solver", one, "add")
    log.handled("solver", one)
    log.answers("critic", log.asked("critic", log.requested), "3")
    log.returned(called)
    log.add("user", EpisodePaused(), None)
    _, entries = told(log.finished())

    def names(entries: Sequence[Entry]) -> list[str]:
        return [
            entry.work.role if isinstance(entry, Turn) else type(entry).__name__
            for entry in entries
        ]

    assert names(entries) == ["Beginning", "critic", "critic", "solver", "Moment", "End"]
    # The solver's work began first, and the critic's second last.
    assert names(by_work(entries)) == ["Beginning", "solver", "Moment", "critic", "critic", "End"]


def test_a_fork_begins_anew_with_what_its_parent_left_open() -> None:
    log, _, first, second = two_calls_at_once()
    log.returned(second)
    log.add("runtime", EpisodeForked(parent="p", at=10), None, time=at(100))
    requested = EpisodeRequested(task=Task(id="t1", prompt="Add."), program="my:other")
    log.requested = log.add("runtime", requested, None, time=at(100))
    before, _ = told(log.events)
    assert before.worker is None
    log.add("worker", EpisodeClaimed(worker="w9"), log.requested, time=at(103))
    last = log.returned(first, time=at(104))
    log.model("solver", last, time=at(104.5))
    timeline, entries = told(log.events)
    assert [turn.waited_s for turn in timeline.open.values()] == [0.5]
    parent, fork, turn = entries
    assert isinstance(parent, Beginning)
    assert isinstance(fork, Beginning)
    assert parent.forked is None
    assert fork.forked is not None
    assert (fork.requested, fork.waited_s) == (log.requested, 3)
    assert isinstance(turn, Turn)
    assert [(call.again, call.began) for call in calls(turn)] == [(1, at(103)), (0, at(8))]


def test_what_a_forks_handler_took_back_is_waited_for_no_more() -> None:
    log = Story()
    message = log.asked("solver", log.requested)
    request = log.model("solver", message)
    log.said("solver", message, request)
    called = log.call("solver", message, "add")
    second = log.model("solver", message)
    log.add("runtime", EpisodeForked(parent="p", at=8), None)
    seqs = called.seq, second.seq
    log.add("solver", RecordDropped(seqs=seqs), message)
    log.answers("solver", message, "3")
    timeline, entries = told(log.events)
    first, left, answered = turns(entries)
    (call,) = calls(first)
    assert call.answer is None
    assert left.completion is not None
    assert left.completion.answer is None
    assert [one.event.type for one in moments(left.said)] == ["record.dropped"]
    assert answered.outcome is not None
    assert not timeline.open


def test_a_log_whose_beginning_is_missing_has_the_rest() -> None:
    log, _, first, second = two_calls_at_once()
    last = [log.returned(call) for call in (first, second)][-1]
    log.answers("solver", last, "3")
    _, entries = told(log.finished()[8:])  # from the handled delivery on
    (turn,) = turns(entries)
    assert (turn.number, turn.work.delivered, turn.waited_s) == (1, None, 0)


def test_a_crash_is_the_outcome_of_its_turn_and_of_none_where_no_model_was_asked() -> None:
    log = Story()
    message = log.asked("solver", log.requested)
    request = log.model("solver", message)
    log.add("solver", ModelFailed(error="ModelError", message="no"), message, request)
    dead = DeliveryDeadLettered(seq=message.seq, error="ModelError", message="no", attempts=1)
    log.add("solver", dead, message)
    other = log.asked("critic", log.requested)
    log.add("critic", dead, other)
    timeline, entries = told(log.events)
    failed, crashed = turns(entries)
    assert failed.outcome is not None
    assert (failed.number, failed.outcome.seq) == (1, 7)
    assert (crashed.completion, crashed.outcome and crashed.outcome.seq) == (None, 9)
    assert not timeline.pending


def test_what_comes_from_outside_is_a_moment_of_the_turn_that_goes_on_or_of_none() -> None:
    log, *called = two_calls_at_once()
    word = log.add("user", MessagePosted(content="Hurry."), None, to="solver")
    log.handled("solver", word)
    log.add("clock", TimerFired(name="t"), None)
    for call in called[1:]:
        log.returned(call)
    log.add("clock", TimerFired(name="t"), None)
    _, entries = told(log.events)
    (turn,) = turns(entries)
    assert [one.event.type for one in moments(turn.said)] == ["message.posted", "timer.fired"]
    assert [one.event.type for one in moments(entries)] == ["timer.fired"]


def test_what_a_role_has_not_handled_is_pending() -> None:
    log = Story()
    answered = log.add("swarm", EpisodeAnswered(answer="3"), log.requested)
    timeline, _ = told(log.events)
    assert timeline.pending == {("environment", answered.id): answered}
    log.add("environment", RewardGiven(reward=0.5), answered)
    log.handled("environment", answered)
    timeline, entries = told(log.events)
    assert timeline.pending == {}
    assert timeline.totals.reward == 0.5
    assert moments(entries) == []


def test_a_role_that_the_program_has_for_requests_is_given_that_which_came_before_it_was_known() -> (
    None
):
    log = Log()
    rules = SubscriptionChanged(subscriptions={"rules": ("episode.",)})
    log.add("worker", rules, log.requested)
    timeline, _ = told(log.events)
    assert list(timeline.pending.values()) == [log.requested]


def test_clocks_that_differ_give_no_negative_times() -> None:
    log = Story()
    message = log.asked("solver", log.requested, by="swarm")
    log.add("solver", ModelRequested(model="m", prompt_sha256=""), message, time=at(1))
    log.add("worker", EpisodeTakenOver(worker="w2"), log.requested, time=at(0))
    timeline, _ = told(log.events)
    (turn,) = timeline.open.values()
    assert turn.waited_s == 0
    assert [moment.after_s for moment in moments(turn.said)] == [0]


def test_a_long_log_leaves_only_what_still_goes_on() -> None:
    log = Story()
    cause = log.asked("solver", log.requested)
    draw = random.Random(3)
    timeline = Timeline()
    for event in log.events:
        timeline.add(event)
    for _ in range(300):
        told_so_far = len(log.events)
        log.said("solver", cause, log.model("solver", cause))
        called = [log.call("solver", cause, "add") for _ in range(draw.randint(1, 5))]
        log.handled("solver", cause)
        draw.shuffle(called)
        *others, cause = [log.returned(call) for call in called]
        for answer in others:
            log.handled("solver", answer)
        settled = [entry for event in log.events[told_so_far:] for entry in timeline.add(event)]
        assert len(settled) == 1
        assert not timeline.open
        assert len(timeline.pending) == 1
    assert timeline.totals.turns == 300
