"""The README's blocks and the examples run as they stand; only the model is a scripted one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from aworld_runtime.bus.server import PrivateServer

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}")
TEAM = """
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.scripted import ScriptedModel

def reply(request):
    last = request.messages[-1]
    if "Answer of solver" in last.content:
        return last.content.split()[-1]
    results = [m.content for m in request.messages if m.role == "tool"]
    calls = [
        ToolCall(id="1", name="population", arguments={"city": "Lyon"}),
        ToolCall(id="2", name="population", arguments={"city": "Nice"}),
        ToolCall(id="3", name="calculator", arguments={"expression": "+".join(results)}),
    ]
    return calls[len(results)] if len(results) < 3 else results[-1]

llm = ScriptedModel(reply)
"""
LIBRARIAN = """
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.scripted import ScriptedModel

def reply(request):
    last = request.messages[-1]
    return last.content if last.role == "tool" else ToolCall(id="1", name="search", arguments={"query": "Emma"})

llm = ScriptedModel(reply)
"""


def python(folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "120"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(language: str, page: str = README) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [block for of, block in fenced if of == language]


def with_model(model: str, code: str) -> str:
    scripted, replaced = re.subn(r"^llm = LLMClient\(.*$", model, code, flags=re.MULTILINE)
    assert replaced == 1
    return scripted


def write_team(folder: Path) -> Path:
    (block,) = blocks("python")
    script = folder / "my_script.py"
    script.write_text(with_model(TEAM, block))
    return script


def without_chance(line: str) -> str:
    """A line of an output without what differs each time: ids, workers, seconds, bytes, hashes, widths."""
    line = re.sub(ID, "ID", line)
    line = re.sub(r"(worker |by worker )\w+", r"\1W", line)
    line = re.sub(r"\b\d+\.\d+\b( → \d+\.\d+\b)?|[\d,]+ bytes|[0-9a-f]{20,}|…", "~", line)
    line = re.sub(r" after ~ s|  waited ~ s", "", line)  # on a machine that is busy
    return " ".join(line.split())


def said(output: str) -> set[str]:
    return {without_chance(line) for line in output.splitlines()}


def test_the_first_minute_of_the_readme_is_as_shown(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for block in blocks("console"):
        command, _, output = block.partition("\n")
        _, program, *arguments = command.split()
        if program == "aworld":
            arguments = ["-m", "aworld_runtime.cli", *arguments]
        assert said(output) <= said(python(tmp_path, *arguments)), command


def test_the_team_of_the_readme_runs_and_replays(tmp_path: Path) -> None:
    assert python(tmp_path, write_team(tmp_path)).strip() == "870335"
    (replay,) = re.findall(r"^aworld (replay .*?) +#", README, re.MULTILINE)
    replayed = python(tmp_path, "-m", "aworld_runtime.cli", *replay.split())
    assert "870335" not in replayed  # importing the script runs nothing
    assert "identical 1" in replayed


async def on_a_server(folder: Path, block: str) -> list[str]:
    """Run the block's commands as a shell does, on a bus of their own; returns the lines of their output."""
    aworld = folder / "aworld"
    aworld.write_text(f'#!/bin/sh\nexec {sys.executable} -m aworld_runtime.cli "$@"\n')
    aworld.chmod(0o755)
    commands = re.findall(r"^aworld .*$", block, re.MULTILINE)
    script = "\n".join([f"PATH={folder}:$PATH", *commands, "kill $!", "wait"])
    async with PrivateServer(folder / "bus") as server:
        env = os.environ | {"AWORLD_BUS": server.url}
        with anyio.fail_after(15):
            done = await anyio.run_process(["bash", "-c", script], cwd=folder, env=env)
    return [*done.stdout.decode().splitlines(), done.stderr.decode()]


@pytest.mark.anyio
async def test_the_workers_of_the_readme_run_its_team(tmp_path: Path) -> None:
    write_team(tmp_path)
    (block,) = (block for block in blocks("") if "aworld worker" in block)
    answer, *nodes = told = await on_a_server(tmp_path, block)
    assert answer == "870335", told
    assert any(node.startswith("worker/") for node in nodes)


@pytest.mark.anyio
async def test_the_tool_of_another_worker_is_called(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "workers.md").read_text()
    search, librarian = blocks("python", page)
    project = tmp_path / "my_project"
    project.mkdir()
    (project / "tools.py").write_text(search)
    (project / "agents.py").write_text(with_model(LIBRARIAN, librarian))
    (block,) = (block for block in blocks("", page) if "--tools" in block)
    told = await on_a_server(tmp_path, block)
    assert told[0] == '["Emma"]', told


def test_the_examples_run(tmp_path: Path) -> None:
    for example in sorted((ROOT / "examples").glob("*.py")):
        assert python(tmp_path, example).strip()


def test_an_example_replays_by_the_command_that_it_prints(tmp_path: Path) -> None:
    """From where it is started, as its first line says."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    told = python(tmp_path, "examples/calculator.py")
    (replay,) = re.findall(r"aworld (replay .*)", told)
    assert "identical 1" in python(tmp_path, "-m", "aworld_runtime.cli", *replay.split())


def test_the_example_of_debugging_replays_and_forks(tmp_path: Path) -> None:
    told = python(tmp_path, ROOT / "examples" / "debugging.py")
    assert "identical=True" in told
    assert "If it rained: Take an umbrella." in told
    assert "They share 9 events" in told


def test_everything_the_readme_links_to_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
