"""The README's Python and the examples run as they stand; only the model is a scripted one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTED = """
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


def python(folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_ten_lines_of_the_readme_run_and_replay(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    block = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    code, replaced = re.subn(r"^llm = LLMClient\(.*$", SCRIPTED, block, flags=re.MULTILINE)
    assert replaced == 1
    script = tmp_path / "my_script.py"
    script.write_text(code)
    assert python(tmp_path, script).strip() == "870335"
    (replay,) = re.findall(r"^aworld (replay .*?) +#", readme, re.MULTILINE)
    replayed = python(tmp_path, "-m", "aworld_runtime.cli", *replay.split())
    assert "870335" not in replayed  # importing the script runs nothing
    assert "identical 1" in replayed


def test_the_examples_run(tmp_path: Path) -> None:
    for example in sorted((ROOT / "examples").glob("*.py")):
        assert python(tmp_path, example).strip()


def test_an_example_replays_by_the_command_that_it_prints(tmp_path: Path) -> None:
    """From where it is started, as its first line says."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    told = python(tmp_path, "examples/calculator.py")
    (replay,) = re.findall(r"aworld (replay .*)", told)
    assert "identical 1" in python(tmp_path, "-m", "aworld_runtime.cli", *replay.split())


def test_everything_the_readme_links_to_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
