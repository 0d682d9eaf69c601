"""A serial swarm, and its rules as a pure function."""

from pathlib import Path
from typing import Any

import pytest

from aworld_runtime import Agent, MultiAgentGroup, Swarm
from aworld_runtime.bus.open import open_bus
from aworld_runtime.errors import ConfigError
from aworld_runtime.events import AnswerProposed, EpisodeAnswered, Event, MessagePosted
from aworld_runtime.messages import Task, ToolCall
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.nodes.serial import Serial
from aworld_runtime.trajectory import Episode, episode_of
from tests.episodes import Adder, request_episode, run_episode

TASK = Task(id="t", prompt="What is 1 + 2?")


async def run(swarm: Swarm) -> Episode:
    async with open_bus("memory://") as bus:
        return episode_of(await run_episode(bus, request_episode("What?"), swarm.program()))


def proposed(role: str, answer: AnswerProposed) -> Event:
    return Event.of(answer, source=f"{role}/1")


def test_the_task_goes_to_the_first_role() -> None:
    requested = request_episode(TASK.prompt)
    assert Serial(["a", "b"]).decide(TASK, requested) == [(MessagePosted(content=TASK.prompt), "a")]


def test_an_answer_goes_to_the_next_role_with_the_task() -> None:
    (decided,) = Serial(["a", "b"]).decide(TASK, proposed("a", AnswerProposed(text="3")))
    assert decided == (MessagePosted(content=f"{TASK.prompt}\n\nAnswer of a:\n3"), "b")


def test_the_last_answer_is_the_swarms() -> None:
    (decided,) = Serial(["a", "b"]).decide(TASK, proposed("b", AnswerProposed(text="3")))
    assert decided == (EpisodeAnswered(answer="3"), None)


def test_a_role_that_gave_up_ends_the_line() -> None:
    gave_up = AnswerProposed(text="", reason="turn_limit")
    (decided,) = Serial(["a", "b"]).decide(TASK, proposed("a", gave_up))
    assert decided == (EpisodeAnswered(answer="", reason="turn_limit"), None)


async def test_each_agent_sees_the_task_and_the_answer_before() -> None:
    first, second = ScriptedModel("3"), ScriptedModel("3 is right")
    episode = await run(Swarm(Agent("solver", llm=first), Agent("verifier", llm=second)))
    assert episode.answer == "3 is right"
    assert [m.content for m in second.requests[0].messages] == ["What?\n\nAnswer of solver:\n3"]
    assert [t.role for t in episode.trajectories] == ["solver", "verifier"]


async def test_agents_have_tools_of_their_own_and_share_one_by_name() -> None:
    tool = Adder()
    call = ToolCall(id="c1", name="add", arguments={"a": 1, "b": 2})
    solver = Agent("solver", llm=ScriptedModel([call, "3"]), tools=[tool])
    verifier = Agent("verifier", llm=ScriptedModel([call, "yes"]), tools=[tool])
    assert (await run(Swarm(solver, verifier))).tool_calls == 2
    assert len(tool.ran) == 2


async def test_two_agents_may_have_different_tools_of_one_name() -> None:
    call = ToolCall(id="c1", name="add", arguments={"a": 1, "b": 2})
    tools = Adder(), Adder()
    agents = [
        Agent(name, llm=ScriptedModel([call, "3"]), tools=[tool])
        for name, tool in zip(("solver", "verifier"), tools, strict=True)
    ]
    await run(Swarm(*agents))
    assert [len(tool.ran) for tool in tools] == [1, 1]


async def test_a_tool_of_another_agent_is_unknown() -> None:
    call = ToolCall(id="c1", name="add", arguments={"a": 1, "b": 2})
    model = ScriptedModel([call, "I can't"])
    tool = Adder()
    solver = Agent("solver", llm=ScriptedModel("3"), tools=[tool])
    await run(Swarm(solver, Agent("verifier", llm=model)))
    assert "no tool 'add'; there are: none" in model.requests[1].messages[-1].content
    assert tool.ran == []


def test_a_swarm_of_nobody_or_of_namesakes_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one agent"):
        Swarm()
    with pytest.raises(ConfigError, match="share the name a"):
        Swarm(Agent("a"), Agent("a"))


@pytest.mark.parametrize("given", ["a", [Agent("a"), Agent("b")]])
def test_a_swarm_of_something_else_is_refused_and_told_how_it_is_made(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"Swarm\(solver, verifier\); this one was given ['\[]"):
        Swarm(given)


def test_multi_agent_group_is_a_swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    group = MultiAgentGroup(agents=[Agent("a", llm=ScriptedModel("done"))])
    assert group.run("q").answer == "done"
