"""Folds of logs written by hand."""

from __future__ import annotations

from typing import Any

import pytest

from aworld_runtime.events import (
    AnswerProposed,
    EpisodeAnswered,
    EpisodeFinished,
    EpisodeRequested,
    Event,
    EventData,
    MessagePosted,
    ModelCompleted,
    ModelFailed,
    ModelRequested,
    RewardGiven,
    ToolCalled,
    ToolFailed,
    ToolReturned,
)
from aworld_runtime.messages import Message, Task, ToolCall, ToolSpec, Usage
from aworld_runtime.trajectory import Episode, TrajectoryFold, as_text, episode_of, message_of

TASK = Task(id="sum-1", prompt="What is 47 + 38?")
CALCULATOR = ToolSpec(name="calculator")
SYSTEM = Message(role="system", content="Use the calculator.")
USAGE = Usage(prompt_tokens=10, completion_tokens=2, cost_usd=0.5)


class Log:
    """A log as an owner writes it: each event gets the next seq."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, data: EventData, role: str = "solver", **metadata: Any) -> Event:
        event = Event.of(data, source=f"{role}/1", episode_id="e1", **metadata)
        self.events.append(event.at(len(self.events) + 1))
        return self.events[-1]

    def begin(self) -> Event:
        """The episode, and its task given to the solver."""
        request = EpisodeRequested(task=TASK, program="p:a", index=3)
        self.add(request, "run", run_id="r1", group_id="g1", attempt=2)
        return self.add(MessagePosted(content=TASK.prompt), "swarm", to="solver")

    def request(
        self, *sources: Event, previous: Event | None = None, role: str = "solver"
    ) -> Event:
        first = previous is None
        return self.add(
            ModelRequested(
                model="m",
                prompt_sha256="",
                previous=None if previous is None else previous.seq,
                sources=tuple(event.seq for event in sources),
                preamble=(SYSTEM,) if first else (),
                tools=(CALCULATOR,) if first else (),
            ),
            role,
        )

    def complete(self, request: Event, data: ModelCompleted, role: str = "solver") -> Event:
        return self.add(data, role, correlation_id=request.id, policy="p")


def two_turns() -> Log:
    """Asks the calculator, then answers. The second prompt holds the first, its completion, and the result."""
    log = Log()
    question = log.begin()
    call = ToolCall(id="call-1", name="calculator", arguments={"expression": "47 + 38"})
    asked = log.request(question)
    log.complete(
        asked,
        ModelCompleted(tool_calls=(call,), usage=USAGE, prompt_token_ids=(1, 2), token_ids=(3,)),
    )
    called = log.add(ToolCalled(call=call))
    result = log.add(
        ToolReturned(name="calculator", content=85),
        "calculator",
        to="solver",
        correlation_id=called.id,
    )
    asked_again = log.request(result, previous=asked)
    log.complete(
        asked_again,
        ModelCompleted(
            text="85", usage=USAGE, prompt_offset=3, prompt_token_ids=(4,), token_ids=(5,)
        ),
    )
    log.add(AnswerProposed(text="85"))
    log.add(EpisodeAnswered(answer="85"), "swarm")
    return log


def finished(log: Log) -> Episode:
    log.add(EpisodeFinished(answer="85", reason="answered"), "swarm")
    return episode_of(log.events)


def test_an_episode_knows_what_it_was_asked_and_how_it_ended() -> None:
    episode = finished(two_turns())
    assert (episode.id, episode.run_id, episode.group_id) == ("e1", "r1", "g1")
    assert (episode.index, episode.attempt, episode.task) == (3, 2, TASK)
    assert (episode.answer, episode.reason, episode.error) == ("85", "answered", None)
    assert episode.tool_calls == 1
    assert episode.usage == USAGE + USAGE


def test_an_episode_shows_how_it_went_in_one_line() -> None:
    task = Task(id="t", prompt="q")
    episode = Episode(id="e", task=task, reason="answered", answer="x" * 200, tool_calls=3)
    shown = f"id='e', reason='answered', answer='{'x' * 79}…', turns=0, tool_calls=3"
    assert repr(episode) == f"Episode({shown})"
    failed = Episode(id="e", task=task, reason="failed", error="no model")
    assert "error='no model'" in repr(failed)
    assert "trajectories" not in str(episode)


def test_an_episode_that_still_runs_has_no_reason() -> None:
    episode = episode_of(two_turns().events)
    assert (episode.answer, episode.reason) == ("85", None)


def test_a_trajectory_is_the_conversation_as_its_agent_saw_it() -> None:
    trajectory = finished(two_turns()).trajectory("solver")
    assert trajectory is not None
    assert trajectory.tools == (CALCULATOR,)
    assert [(m.role, m.content, m.tool_call_id) for m in trajectory.messages] == [
        ("system", "Use the calculator.", None),
        ("user", "What is 47 + 38?", None),
        ("assistant", "", None),
        ("tool", "85", "call-1"),
        ("assistant", "85", None),
    ]


def test_a_turn_has_the_messages_that_were_new_to_it() -> None:
    trajectory = finished(two_turns()).trajectory("solver")
    assert trajectory is not None
    new = [[message.role for message in turn.new_messages] for turn in trajectory.turns]
    assert new == [["system", "user"], ["tool"]]


def test_the_full_prompt_ids_of_a_turn_are_restored() -> None:
    trajectory = finished(two_turns()).trajectory("solver")
    assert trajectory is not None
    prompts = [turn.completion.prompt_token_ids for turn in trajectory.turns]
    assert prompts == [(1, 2), (1, 2, 3, 4)]
    assert {turn.completion.policy for turn in trajectory.turns} == {"p"}


def test_a_prompt_that_does_not_extend_the_previous_one_is_restored_too() -> None:
    """A template that strips thinking, or a compaction: only the shared beginning is not stored again."""
    log = Log()
    first = log.request(log.begin())
    log.complete(first, ModelCompleted(prompt_token_ids=(1, 2, 3), token_ids=(4, 5)))
    second = log.request(previous=first)
    log.complete(second, ModelCompleted(prompt_offset=2, prompt_token_ids=(9,), token_ids=(6,)))
    fold = TrajectoryFold("solver")
    for event in log.events:
        fold.add(event)
    assert fold.turns[1].completion.prompt_token_ids == (1, 2, 9)
    assert fold.previous_ids == (1, 2, 9, 6)


def test_what_nobody_has_answered_yet_is_kept_as_a_reply() -> None:
    log = two_turns()
    log.add(MessagePosted(content="Sure?"), "verifier", to="solver")
    trajectory = episode_of(log.events).trajectory("solver")
    assert trajectory is not None
    assert [message.content for message in trajectory.replies] == ["Sure?"]
    assert trajectory.messages[-1].content == "Sure?"


def test_each_agent_has_a_trajectory_of_its_own() -> None:
    log = two_turns()
    question = log.add(MessagePosted(content="Is 85 right?"), "solver", to="verifier")
    asked = log.request(question, role="verifier")
    log.complete(asked, ModelCompleted(text="yes"), role="verifier")
    episode = finished(log)
    assert [(t.role, len(t.turns)) for t in episode.trajectories] == [
        ("solver", 2),
        ("verifier", 1),
    ]
    verifier = episode.trajectory("verifier")
    assert verifier is not None
    assert [message.content for message in verifier.messages] == [
        SYSTEM.content,
        "Is 85 right?",
        "yes",
    ]
    assert episode.trajectory("nobody") is None


def test_an_agent_that_was_asked_and_never_took_a_turn_has_no_trajectory() -> None:
    log = two_turns()
    log.add(MessagePosted(content="hello"), "solver", to="silent")
    assert finished(log).trajectory("silent") is None


def test_a_failed_tool_tells_the_agent_why() -> None:
    log = Log()
    first = log.request(log.begin())
    call = ToolCall(id="call-1", name="calculator")
    log.complete(first, ModelCompleted(tool_calls=(call,)))
    called = log.add(ToolCalled(call=call))
    failed = ToolFailed(name="calculator", error="ToolArgumentsError", message="no expression")
    told = log.add(failed, "calculator", to="solver", correlation_id=called.id)
    log.complete(log.request(told, previous=first), ModelCompleted(text="sorry"))
    trajectory = finished(log).trajectory("solver")
    assert trajectory is not None
    [message] = trajectory.turns[1].new_messages
    assert (message.content, message.tool_call_id) == (
        "ToolArgumentsError: no expression",
        "call-1",
    )


def test_a_failed_model_call_is_no_turn() -> None:
    log = Log()
    asked = log.request(log.begin())
    log.add(ModelFailed(error="ModelTimeoutError", message="late"), correlation_id=asked.id)
    assert finished(log).trajectories == ()


def test_what_a_failed_model_call_was_asked_is_new_to_the_next_one() -> None:
    log = Log()
    question = log.begin()
    asked = log.request(question)
    log.add(ModelFailed(error="ModelTimeoutError", message="late"), correlation_id=asked.id)
    log.complete(log.request(question), ModelCompleted(text="85"))
    trajectory = finished(log).trajectory("solver")
    assert trajectory is not None
    assert [message.content for message in trajectory.turns[0].new_messages] == [
        SYSTEM.content,
        TASK.prompt,
    ]


def test_the_reward_of_a_role_stands_before_that_of_the_episode() -> None:
    log = two_turns()
    log.add(RewardGiven(reward=1.0, breakdown={"right": 1.0}), "environment")
    log.add(RewardGiven(role="solver", reward=0.5, breakdown={"style": 0.5}), "environment")
    episode = finished(log)
    solver = episode.trajectory("solver")
    assert solver is not None
    assert episode.reward == 1.0
    assert (solver.reward, solver.breakdown) == (0.5, {"style": 0.5})


def test_an_agent_without_a_reward_of_its_own_has_that_of_the_episode() -> None:
    log = two_turns()
    log.add(RewardGiven(reward=0.25), "environment")
    solver = finished(log).trajectory("solver")
    assert solver is not None
    assert solver.reward == 0.25


def test_an_unrewarded_episode_has_no_reward_and_not_zero() -> None:
    episode = finished(two_turns())
    solver = episode.trajectory("solver")
    assert solver is not None
    assert (episode.reward, solver.reward) == (None, None)


def test_a_log_without_its_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"episode\.requested"):
        episode_of(two_turns().events[1:])


def test_only_some_events_say_something_to_an_agent() -> None:
    log = two_turns()
    assert [event.type for event in log.events if message_of(event) is not None] == [
        "message.posted",
        "model.completed",
        "tool.returned",
        "model.completed",
    ]


def test_a_tools_text_is_told_as_it_is_and_anything_else_as_json() -> None:
    assert as_text("85 €") == "85 €"
    assert as_text({"value": 85, "unit": "€"}) == '{"value": 85, "unit": "€"}'
    assert as_text(None) == "null"
