"""A user's own project, with an `agents/` folder: from a checkout, from the wheel, in a notebook."""

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from aworld_runtime import Agent
from aworld_runtime.models.scripted import ScriptedModel

ROOT = Path(__file__).parents[2]
AGENTS = '''"""The user's own agents."""

from aworld_runtime import Agent, Swarm
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.scripted import ScriptedModel


def reply(request):
    """One call of the calculator, then its result."""
    if request.messages[-1].role == "tool":
        return request.messages[-1].content
    if request.tools:
        return ToolCall(id="c1", name="calculator", arguments={"expression": "17 * 23"})
    return "checked"


model = ScriptedModel(reply)
solver = Agent("solver", llm=model, tools=["calculator"])
team = Swarm(solver, Agent("verifier", llm=model))
'''
MAIN = """
from agents.solving import solver, team
from aworld_runtime import Agent, Swarm

assert isinstance(solver, Agent) and isinstance(team, Swarm)
print(solver.run("What is 17 * 23?").answer)
"""
NOTEBOOK = """
import asyncio

async def cell():
    from agents.solving import team
    return team.run("What is 17 * 23?").answer  # no await: a cell's loop is running

print(asyncio.run(cell()))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "agents").mkdir(parents=True)
    (folder / "agents" / "__init__.py").touch()
    (folder / "agents" / "solving.py").write_text(AGENTS)
    (folder / "main.py").write_text(MAIN)
    (folder / "notebook.py").write_text(NOTEBOOK)
    return folder


def output(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def use(python: Path, aworld: Path, project: Path) -> None:
    """What a user does first."""
    assert output(python, "main.py", cwd=project) == "391\n"
    assert output(python, "notebook.py", cwd=project) == "checked\n"
    assert output(aworld, "run", "agents.solving:team", "17 * 23?", cwd=project) == "checked\n"
    assert re.search(r"├─ calculator\(|└─ calculator\(", output(aworld, "log", "last", cwd=project))
    assert "identical 1" in output(aworld, "replay", "last", cwd=project)
    assert "usage: aworld train" in output(aworld, "train", "--help", cwd=project)


@pytest.mark.slow
def test_from_an_editable_install(project: Path) -> None:
    python = Path(sys.executable)
    use(python, python.with_name("aworld"), project)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_from_the_wheel_in_an_environment_of_its_own(project: Path, tmp_path: Path) -> None:
    """Installs from the package index."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist"]
    output(*build, cwd=ROOT)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    lock = ROOT / "requirements" / "lock.txt"
    pip = [binaries / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    output(*pip, "-c", lock, wheel, cwd=tmp_path)
    where = "import aworld_runtime; print(aworld_runtime.__file__)"
    assert output(binaries / "python", "-c", where, cwd=project).startswith(str(tmp_path / "venv"))
    use(binaries / "python", binaries / "aworld", project)


async def test_run_in_a_running_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook's cell."""
    monkeypatch.chdir(tmp_path)
    assert Agent(llm=ScriptedModel("hello")).run("hi").answer == "hello"
