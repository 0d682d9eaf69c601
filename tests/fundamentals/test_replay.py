"""Replay in two minutes: every run is a log, and the log runs again, without a model.

On the command line: `aworld log last`, `aworld replay last`.
"""

from pathlib import Path

import pytest

from aworld_runtime import Agent, Runtime
from aworld_runtime.bus.base import read_all
from aworld_runtime.events import Event
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import episode_log
from aworld_runtime.replay.replay import inspect, replay


@pytest.fixture
async def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What one run of an agent left."""
    monkeypatch.chdir(tmp_path)
    async with Runtime() as runtime:
        episode = await runtime.run(agent("Be brief."), "Hi")
        return await read_all(runtime.bus, episode_log(episode.id))


def agent(instructions: str) -> Agent:
    return Agent(llm=ScriptedModel("Hello!"), system_prompt=instructions)


async def test_the_log_tells_what_happened(log: list[Event]) -> None:
    assert inspect(log).answer == "Hello!"


async def test_the_same_code_does_the_same_again(log: list[Event]) -> None:
    report = await replay(log, agent("Be brief.").program())
    assert (report.identical, report.live_calls) == (True, 0)


async def test_other_code_is_caught_at_the_first_difference(log: list[Event]) -> None:
    report = await replay(log, agent("Be verbose.").program())
    assert report.divergence is not None
    assert "data.preamble" in report.divergence.message
