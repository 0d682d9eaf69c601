"""The stage of a chaos run: who is struck."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio

from aworld_runtime.chaos.stage import Part, Stage
from aworld_runtime.processes import spawn


async def test_a_part_that_died_by_itself_is_no_victim_while_it_is_started_again(
    tmp_path: Path,
) -> None:
    """Seed 38: it was killed and started by the fault, too, and nobody stopped one of the two."""
    async with anyio.create_task_group() as tasks:
        stage = Stage(tmp_path, 38, 1, None, tasks)
        async with await spawn(["sleep", "60"], log=tmp_path / "log") as process:
            stage.parts["worker-1"] = part = Part("worker", "worker-1", process=process)

            assert stage.some_part(("worker",), 0.0) is part
            os.kill(process.pid, signal.SIGKILL)
            await process.wait(deadline=10)

            assert stage.some_part(("worker",), 0.0) is None
