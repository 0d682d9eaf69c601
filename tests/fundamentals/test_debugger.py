"""The debugger in two minutes: stop anywhere in a run, look at what was known there, change it and go on.

On the command line: `aworld debug last`.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aworld_runtime import Agent, Runtime
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.replay.debugger import Debugger


def think(request: ModelRequest) -> Reply:
    """Computes once, then answers with the result."""
    last = request.messages[-1]
    if last.role == "tool":
        return f"It is {last.content}."
    return ToolCall(id="c1", name="calculator", arguments={"expression": "17 * 23"})


agent = Agent("solver", llm=ScriptedModel(think), tools=["calculator"])


@pytest.fixture
async def debugger(tmp_path: Path) -> AsyncIterator[Debugger]:
    """Of an episode that has ended."""
    async with Runtime(store=f"sqlite:///{tmp_path}/aworld.db") as runtime:
        episode = await runtime.run(agent, "What is 17 * 23?")
        assert episode.answer == "It is 391."
        async with runtime.debug(episode.id, agent) as opened:
            yield opened


async def test_it_stops_at_a_breakpoint(debugger: Debugger) -> None:
    await debugger.break_at("type=tool.called and data.name=calculator")
    stop = await debugger.continue_()
    assert (stop.why, stop.event.type) == ("breakpoint", "tool.called")


async def test_it_knows_what_an_agent_knew_at_any_event(debugger: Debugger) -> None:
    await debugger.until("tool.returned")
    assert [message.content for message in debugger.role("solver").pending] == ["391"]
    debugger.goto(1)
    assert debugger.role("solver").messages == ()


async def test_an_edited_event_goes_on_live(debugger: Debugger) -> None:
    await debugger.until("tool.returned")
    await debugger.edit({"data.content": 42})
    await debugger.continue_()
    assert debugger.state().answer == "It is 42."


async def test_an_episode_is_stepped_while_it_runs(tmp_path: Path) -> None:
    async with Runtime(store=f"sqlite:///{tmp_path}/aworld.db") as runtime:
        episode = await runtime.submit(agent, "What is 17 * 23?", paused=True)
        async with runtime.debug(episode) as debugger:
            await debugger.next("solver")
            assert debugger.role("solver").open_calls[0].call.name == "calculator"
            await debugger.continue_()
    assert debugger.state().answer == "It is 391."
