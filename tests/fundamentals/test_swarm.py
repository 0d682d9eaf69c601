"""A swarm in two minutes: agents in a line, each with the answer of the one before."""

from pathlib import Path

import pytest

from aworld_runtime import Agent, Swarm
from aworld_runtime.models.scripted import ScriptedModel


def test_a_solver_and_a_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    solver = Agent("solver", llm=ScriptedModel("391"), system_prompt="Solve it.")
    verifier = Agent("verifier", llm=ScriptedModel("391 is right"), system_prompt="Check it.")

    episode = Swarm(solver, verifier).run("What is 17 * 23?")

    assert episode.answer == "391 is right"
    assert [trajectory.role for trajectory in episode.trajectories] == ["solver", "verifier"]
    checked = episode.trajectories[1].messages[1]
    assert checked.content == "What is 17 * 23?\n\nAnswer of solver:\n391"
