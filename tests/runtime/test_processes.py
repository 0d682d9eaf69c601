"""A program we start never outlives us, whatever ends us."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from aworld_runtime.errors import ProcessError
from aworld_runtime.processes import PORTS, free_port, port_is_free, spawn
from tests.waiting import wait_until_sync

pytestmark = pytest.mark.anyio

# A program with a child in its group and a daemon in a session of its own, all deaf to SIGTERM.
# It writes their ids.
FAMILY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
out = open(sys.argv[1], "a", buffering=1)
if os.fork():
    if os.fork():
        print(os.getpid(), file=out)
    else:
        os.setsid()
        if os.fork():
            os._exit(0)
        print(os.getpid(), file=out)
else:
    print(os.getpid(), file=out)
time.sleep(600)
"""

# Starts the family through `spawn`, from a thread that then ends, and sleeps: the parent to be killed.
PARENT = """
import sys, threading, time
from pathlib import Path
import anyio
from aworld_runtime.processes import spawn

async def start():
    log = Path(sys.argv[2] + ".log")
    child = await spawn([sys.executable, "-c", sys.argv[1], sys.argv[2]], log=log)
    print(child._guardian.pid, file=open(sys.argv[2], "a"))

thread = threading.Thread(target=anyio.run, args=(start,))
thread.start()
thread.join()
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def pids_in(file: Path, count: int) -> list[int]:
    wait_until_sync(
        lambda: file.exists() and len(file.read_text().split()) == count,
        description=f"{count} processes started",
    )
    return [int(pid) for pid in file.read_text().split()]


async def test_output_goes_to_the_log_and_the_return_code_is_the_programs(tmp_path: Path) -> None:
    child = await spawn(
        [sys.executable, "-c", "print('hello'); raise SystemExit(3)"], log=tmp_path / "a" / "log"
    )
    assert await child.wait(deadline=10) == 3
    assert child.returncode == 3
    assert child.log_tail() == "hello"
    child.log.unlink()
    assert child.log_tail() == ""


async def test_the_environment_is_laid_over_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWORLD_TEST_KEPT", "kept")
    monkeypatch.setenv("AWORLD_TEST_GONE", "gone")
    code = "import os; print(sorted((k, v) for k, v in os.environ.items() if 'AWORLD_TEST' in k))"
    changes = {"AWORLD_TEST_NEW": "new", "AWORLD_TEST_GONE": None}
    child = await spawn([sys.executable, "-c", code], log=tmp_path / "log", env=changes)
    await child.wait(deadline=10)
    assert child.log_tail() == "[('AWORLD_TEST_KEPT', 'kept'), ('AWORLD_TEST_NEW', 'new')]"


async def test_pid_is_the_programs_own(tmp_path: Path) -> None:
    async with await spawn(
        [sys.executable, "-c", "import os; print(os.getpid())"], log=tmp_path / "log"
    ) as child:
        await child.wait(deadline=10)
        assert child.log_tail() == str(child.pid)


async def test_a_program_killed_by_a_signal_reports_it(tmp_path: Path) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM):
        child = await spawn(["sleep", "600"], log=tmp_path / "log")
        child.send_signal(number)
        assert await child.wait(deadline=10) == -number


async def test_a_signal_to_a_program_that_has_just_ended_does_nothing(tmp_path: Path) -> None:
    """Its guardian knows it earlier than we, while it ends what the program left: signals without a pause come then."""
    many = "for _ in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 60 & done"
    child = await spawn(["sh", "-c", many], log=tmp_path / "log")
    while child.returncode is None:
        child.send_signal(signal.SIGCONT)
    assert await child.wait() == 0


async def test_a_program_that_is_missing_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="no-such-program: No such file"):
        await spawn(["no-such-program"], log=tmp_path / "log")


async def test_a_wait_past_its_deadline_is_a_typed_error(tmp_path: Path) -> None:
    async with await spawn(["sleep", "600"], log=tmp_path / "log") as child:
        with pytest.raises(ProcessError, match=r"sleep .* still runs after 0.05 s"):
            await child.wait(deadline=0.05)


async def test_several_may_wait_for_one_program(tmp_path: Path) -> None:
    child = await spawn(["sleep", "600"], log=tmp_path / "log")
    codes: list[int] = []

    async def wait() -> None:
        codes.append(await child.wait(deadline=10))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        group.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        group.start_soon(child.stop)
    assert codes == [-signal.SIGTERM, -signal.SIGTERM]


async def test_stop_lets_the_program_finish_within_its_grace(tmp_path: Path) -> None:
    code = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(7));"
        "print('up', flush=True); signal.pause()"
    )
    child = await spawn([sys.executable, "-c", code], log=tmp_path / "log")
    wait_until_sync(lambda: child.log_tail() == "up", description="program is up")
    assert await child.stop(grace=10) == 7
    assert await child.stop() == 7


async def test_stop_kills_a_deaf_program_with_its_children_and_daemons(tmp_path: Path) -> None:
    child = await spawn([sys.executable, "-c", FAMILY, tmp_path / "pids"], log=tmp_path / "log")
    family = pids_in(tmp_path / "pids", 3)
    assert await child.stop(grace=0.1) == -signal.SIGKILL
    assert not any(map(alive, family))


async def test_children_end_when_the_program_does(tmp_path: Path) -> None:
    child = await spawn([sys.executable, "-c", FAMILY, tmp_path / "pids"], log=tmp_path / "log")
    family = pids_in(tmp_path / "pids", 3)
    child.send_signal(signal.SIGKILL)
    assert await child.wait(deadline=10) == -signal.SIGKILL
    assert not any(map(alive, family))


async def test_a_killed_guardian_takes_its_group_along(tmp_path: Path) -> None:
    child = await spawn(
        [sys.executable, "-c", "import os, time; os.fork(); time.sleep(600)"], log=tmp_path / "log"
    )
    os.kill(os.getpgid(child.pid), signal.SIGKILL)
    assert await child.wait(deadline=10) == -signal.SIGKILL
    wait_until_sync(lambda: not alive(child.pid), description="the program ended")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, FAMILY, tmp_path / "pids"], stderr=subprocess.DEVNULL
    )
    try:
        family = pids_in(
            tmp_path / "pids", 4
        )  # the program, its child, its daemon and the guardian
        assert all(map(alive, family))
        parent.send_signal(number)
        wait_until_sync(lambda: not any(map(alive, family)), description="the whole tree ended")
    finally:
        parent.kill()
        parent.wait()


def test_a_free_port_is_none_that_outgoing_connections_get() -> None:
    port = free_port()
    assert port in PORTS
    assert port_is_free(port)
