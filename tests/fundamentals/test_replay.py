"""Replay in two minutes: every run is a log, and the log runs again, without a model.

On the command line: `aworld log last`, `aworld replay last`, and what is beside the tests.
"""

from pathlib import Path

import pytest

from aworld_runtime import Agent, Runtime
from aworld_runtime.bus.base import read_all
from aworld_runtime.events import Event, Registry
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import episode_log
from aworld_runtime.replay.diff import compare_episodes
from aworld_runtime.replay.export import export
from aworld_runtime.replay.exported import ExportedFile
from aworld_runtime.replay.importing import put_into
from aworld_runtime.replay.replay import inspect, replay
from aworld_runtime.store import open_store


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
    assert report.divergence.cause == "changed prompt"


async def test_a_run_goes_into_a_file_and_replays_elsewhere(log: list[Event]) -> None:
    """As `aworld export last -o episode.zip` and `aworld import episode.zip --store mongodb://…` do."""
    recorded, file = episode_log(log[0].episode_id or ""), Path("episode.zip")
    async with open_store("sqlite:///.aworld/aworld.db") as here:
        await export(here, recorded, file)
    with ExportedFile(file, Registry()) as exported:
        await exported.check()
        async with open_store("sqlite:///elsewhere.db") as there:
            await put_into(there, exported)
            events = await read_all(there, recorded)
    assert (await replay(events, agent("Be brief.").program())).identical


async def test_two_runs_are_compared_by_what_happened(log: list[Event]) -> None:
    """As `aworld diff EPISODE EPISODE` does."""
    async with Runtime() as runtime:
        episode = await runtime.run(agent("Be verbose."), "Hi")
        other = await read_all(runtime.bus, episode_log(episode.id))
    found = compare_episodes(log, other)
    assert found.first is not None
    assert found.first.what == "model.requested differs in data.preamble"
