"""Commands and the event types of a user's own, in processes that have not imported them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

LETTERS = """
from aworld_runtime.events import EpisodeFinished, EventData
from aworld_runtime.nodes.node import Program
print("imported")
class LetterSent(EventData):
    type = "letter.sent"
    to: str
class Clerk:
    role, subscriptions = "clerk", ("episode.requested",)
    async def handle(self, ctx, event):
        ctx.emit(LetterSent(to="ada"))
        ctx.emit(EpisodeFinished(answer="sent"))
    def program(self):
        return Program(nodes=(self,))
clerk = Clerk()
"""
FROM_A_SCRIPT = """
from letters import clerk
from aworld_runtime.runtime import Runtime, run_sync
async def main():
    async with Runtime(store="sqlite:///.aworld/aworld.db") as runtime:
        await runtime.run(clerk, "Write.")
run_sync(main)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "letters.py").write_text(LETTERS)
    return tmp_path


def python(*arguments: str, cwd: Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )


def aworld(command: str, cwd: Path, *, code: int = 0, typed: str = "") -> str:
    done = python("-m", "aworld_runtime.cli", *shlex.split(command), cwd=cwd, typed=typed)
    assert done.returncode == code, done
    return done.stdout if code < 2 else done.stderr


def test_the_program_that_a_log_names_is_imported_to_read_it(folder: Path) -> None:
    aworld("run letters:clerk Write.", folder)
    assert aworld("log --json", folder).startswith('{"seq":1,')  # what it prints is kept apart
    shown = aworld("debug", folder, typed="until letter.sent\n")
    (sent,) = re.findall(r"^→ +(\d+) .* letter.sent ", shown, re.MULTILINE)
    aworld("export last -o letters.zip", folder)
    told = aworld(f"fork --at {int(sent) - 1} --set data.to=bob", folder)
    log, diff = re.findall(r"aworld (.*)", told)
    assert '"bob"' in aworld(log, folder)
    (folder / "letters.py").write_text("1 / 0")
    error = aworld(diff, folder, code=2)
    assert "unknown event type 'letter.sent': import the module that defines it, with" in error
    assert "the log's program is 'letters:clerk': ZeroDivisionError: division by zero" in error


def test_an_object_of_another_process_is_named_by_an_option(folder: Path) -> None:
    assert python("-c", FROM_A_SCRIPT, cwd=folder).returncode == 0
    error = aworld("log", folder, code=2)
    assert "with --program MODULE:ATTRIBUTE (the log's program is 'local:" in error
    assert "an object of another process" in error
    store = f"--store sqlite:///{folder}/.aworld/aworld.db"
    told = aworld(f"fork --at 3 --program letters:clerk {store}", folder)
    log, diff = re.findall(r"aworld (.*)", told)
    assert log.endswith(f" --program letters:clerk {store}")
    assert "letter.sent" in aworld(log, folder)
    assert "asked otherwise: program" in aworld(diff, folder, code=1)
