"""Log lines, as a machine reads them."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from aworld_runtime import telemetry
from aworld_runtime.cli.log_lines import JsonLines, TextLines

URL = "redis://user:hunter2@host:6379"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a logger of the name `told` writes as JSON."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("told")
    logger.addHandler(handler)
    logger.propagate = False
    yield out
    logger.removeHandler(handler)
    logger.propagate = True


def read(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_line_has_time_level_logger_and_message(lines: io.StringIO) -> None:
    logging.getLogger("told").warning("%d leases\nlost", 2)
    (line,) = read(lines)
    assert line.pop("time").endswith("+00:00")
    assert line == {"level": "warning", "logger": "told", "message": "2 leases\nlost"}


def test_exception_is_a_field_of_the_same_line(lines: io.StringIO) -> None:
    try:
        raise ValueError(f"no answer from {URL}")
    except ValueError:
        logging.getLogger("told").exception("failed on %s", URL)
    (line,) = read(lines)
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: no answer from redis://user:***@host:6379")
    assert line["message"] == "failed on redis://user:***@host:6379"


def test_text_shows_no_password_either() -> None:
    record = logging.LogRecord("told", logging.INFO, "", 0, "on %s", (URL,), None)
    assert TextLines().format(record).endswith(" INFO told: on redis://user:***@host:6379")


@pytest.mark.anyio
async def test_line_names_the_episode_of_its_task_and_of_no_other(lines: io.StringIO) -> None:
    async def work(episode: str | None) -> None:
        with telemetry.about(episode=episode, run="r1", worker="w1"):
            await checkpoint()
            async with anyio.create_task_group() as started:
                started.start_soon(say)

    async def say() -> None:
        logging.getLogger("told").warning("here")

    async with anyio.create_task_group() as tasks:
        for episode in ("e1", "e2", None):
            tasks.start_soon(work, episode)
    await say()
    told = [(x.get("episode"), x.get("run"), x.get("worker")) for x in read(lines)]
    assert told == [("e1", "r1", "w1"), ("e2", "r1", "w1"), (None, "r1", "w1"), (None, None, None)]


FAILING = """
from aworld_runtime import Agent
from aworld_runtime.models.scripted import ScriptedModel

def fail(request):
    raise ValueError("broken")

agent = Agent("breaks", llm=ScriptedModel(fail))
"""


def run_failing(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(FAILING)
    command = [sys.executable, "-m", "aworld_runtime.cli", "run", "mine:agent", "q", *flags]
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_every_command_writes_json_when_asked_by_a_flag(tmp_path: Path) -> None:
    done = run_failing(tmp_path, "--log-format", "json")
    first, *_ = done.stderr.splitlines()
    line = json.loads(first)
    assert (line["level"], line["logger"]) == ("warning", "aworld_runtime.nodes.owner")
    assert line["run"]
    assert line["episode"]


def test_every_command_writes_json_when_asked_by_the_environment(tmp_path: Path) -> None:
    done = run_failing(tmp_path, AWORLD_LOG_FORMAT="json", AWORLD_LOG_LEVEL="info")
    assert json.loads(done.stderr.splitlines()[0])["level"] in {"info", "warning"}


def test_wrong_level_in_the_environment_is_named(tmp_path: Path) -> None:
    done = run_failing(tmp_path, AWORLD_LOG_LEVEL="loud")
    assert done.returncode == 2
    assert done.stderr.startswith("aworld: error: AWORLD_LOG_LEVEL='loud': ")
