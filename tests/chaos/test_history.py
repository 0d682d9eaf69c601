"""A history outlives its process, and says no more than that process knew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aworld_runtime.bus.open import open_bus
from aworld_runtime.chaos.history import History, HistoryReader, recorded
from aworld_runtime.errors import Fenced
from aworld_runtime.events import Event, ValueRecorded

pytestmark = pytest.mark.anyio

DIES = """
import os, signal, sys
from pathlib import Path
import anyio
from aworld_runtime.chaos.history import History
from aworld_runtime.events import Event, ValueRecorded

async def main():
    history = History(Path(sys.argv[1]))
    for number in (1, 2):
        async with history.call("append", "log", [Event.of(ValueRecorded(kind="x"), source="a/b")]):
            if number == 2:
                os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


def value() -> Event:
    return Event.of(ValueRecorded(kind="x"), source="test/1")


def read(path: Path) -> HistoryReader:
    reader = HistoryReader(path)
    reader.read()
    return reader


def test_kill_9_in_a_call_leaves_its_outcome_unknown(tmp_path: Path) -> None:
    path = tmp_path / "dies.jsonl"

    died = subprocess.run([sys.executable, "-c", DIES, str(path)], check=False)

    assert died.returncode == -signal.SIGKILL
    assert [op.outcome for op in read(path).operations.values()] == ["ok", "unknown"]


async def test_what_a_bus_is_told_and_answers_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    async with open_bus("memory://") as bus:
        watched = recorded(bus, History(path))
        event = value()
        await watched.append("log", 0, [event])
        with pytest.raises(Fenced):
            await watched.append("log", 7, [value()])
        await watched.put("queue", event)
        async with watched.consume("queue", consumer="one") as consumer:
            await (await consumer.take()).ack()

    reader = read(path)
    calls = [(op.call, op.target, op.after, op.outcome) for op in reader.operations.values()]
    assert calls == [
        ("append", "log", 0, "ok"),
        ("append", "log", 7, "fail"),
        ("put", "queue", 0, "ok"),
        ("take", "queue", 0, "unknown"),
    ]
    assert reader.operations[1].ids == [event.id]


def test_a_reader_goes_on_where_the_file_ended_even_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    History(path).taken("queue", [value()])
    whole = path.read_bytes()
    History(path).taken("queue", [value()])
    cut = path.read_bytes()[:-10]
    rest = path.read_bytes()[-10:]
    path.write_bytes(cut)
    reader = read(path)
    assert reader.process == "one"
    assert len(cut) > len(whole)
    assert len(reader.operations) == 1

    with path.open("ab") as file:
        file.write(rest)
        os.fsync(file.fileno())
    reader.read()

    assert len(reader.operations[1].ids) == 1
