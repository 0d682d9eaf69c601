"""An agent in five minutes: a model, tools, an answer. `ScriptedModel` stands in for a real one."""

from pathlib import Path

import pytest

from aworld_runtime import Agent, Runtime, tool
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.scripted import ScriptedModel


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are stored in .aworld/ of the current folder."""
    monkeypatch.chdir(tmp_path)


def test_an_agent_answers() -> None:
    agent = Agent(llm=ScriptedModel("Hello!"), system_prompt="Be kind.")
    assert agent.chat("Hi") == "Hello!"


def test_an_agent_uses_a_tool() -> None:
    """With a real model: llm=LLMClient("openai/gpt-5")."""
    call = ToolCall(id="c1", name="calculator", arguments={"expression": "17 * 23"})
    agent = Agent(llm=ScriptedModel([call, "391"]), tools=["calculator"])
    episode = agent.run("What is 17 * 23?")
    assert (episode.answer, episode.tool_calls) == ("391", 1)


def test_any_typed_function_is_a_tool() -> None:
    @tool
    def weather(city: str) -> str:
        """What the weather is like."""
        return f"sunny in {city}"

    call = ToolCall(id="c1", name="weather", arguments={"city": "Oslo"})
    episode = Agent(llm=ScriptedModel([call, "Sunny."]), tools=[weather]).run("Oslo?")
    (trajectory,) = episode.trajectories
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2].content == "sunny in Oslo"


async def test_many_tasks_at_once() -> None:
    agent = Agent(llm=ScriptedModel(lambda request: request.messages[-1].content.upper()))
    async with Runtime(slots=8) as runtime:
        ids = [await runtime.submit(agent, word) for word in ("one", "two", "three")]
        assert [(await runtime.result(i)).answer for i in ids] == ["ONE", "TWO", "THREE"]
