"""Training while its parts are killed: it goes on by itself, or resumes; nothing is lost, nothing counted twice."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress

import pytest

from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.base import read_all
from aworld_runtime.events import EpisodeClaimed, EpisodeFinished, RunFinished
from aworld_runtime.names import episode_log
from aworld_runtime.store.open import open_store
from aworld_runtime.training.run_state import RunState, episode_name
from tests.e2e.conftest import NewRun
from tests.e2e.training_run import TrainingRun
from tests.waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.chaos, pytest.mark.timeout(120)]


async def begun(run: TrainingRun, text: str = "step 1/3") -> TrainingRun:
    """The run, in the middle of its work."""
    run.start()
    await run.until_told(text)
    return run


def kill(run: TrainingRun, command: str) -> None:
    """Kill -9 of the run's processes with this in their command line; their guardians stay."""
    pids = [pid for pid in run.processes(command) if pid not in run.processes("guardian.py")]
    assert pids, f"no {command} among the run's processes"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


async def ends_well(run: TrainingRun) -> RunState:
    """Wait for the end; all is there, once."""
    assert await run.finish() == 0, run.told()
    await run.no_process_left()
    return await run.assert_counted_once()


async def state_in_store(run: TrainingRun) -> str | None:
    """How the run ended; None while it goes on."""
    async with open_store(run.store) as store:
        [record] = await store.runs()
    return record.reason


@contextmanager
def writing_held_up(run: TrainingRun) -> Generator[None]:
    """Nothing can be written to its SQLite store."""
    with closing(sqlite3.connect(run.place / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


async def in_flight(run: TrainingRun, bus: Bus) -> dict[str, str]:
    """Episodes that have begun and not ended, and who began them."""
    groups = RunState.of(await run.log_on(bus)).groups.values()
    names = [
        episode_name(group.requested.group, index, 1)
        for group in groups
        if group.completed is None
        for index in range(group.requested.size)
    ]
    logs = {name: await read_all(bus, episode_log(name)) for name in names}
    return {
        name: event.data.worker
        for name, log in logs.items()
        if log and not isinstance(log[-1].data, EpisodeFinished)
        for event in log
        if isinstance(event.data, EpisodeClaimed)
    }


async def test_a_worker_killed_in_an_episode(new_run: NewRun) -> None:
    run = await begun(new_run())
    async with open_bus(run.wiring.bus) as bus:
        name = f"{run.folder.run_id.rpartition('-')[2]}-w1"
        [worker] = [node.pid for node in await bus.nodes() if node.name == f"worker/{name}"]

        async def stopped_in_an_episode() -> bool:
            """Stopped, so that it can't end what it has before it is killed."""
            os.kill(worker, signal.SIGSTOP)
            if name in (await in_flight(run, bus)).values():
                return True
            os.kill(worker, signal.SIGCONT)
            return False

        await wait_until(stopped_in_an_episode, 20, f"an episode in the hands of worker {name}")
        os.kill(worker, signal.SIGKILL)
    await ends_well(run)
    assert f"worker {name} died (exit code -9)" in run.told()
    assert await run.takeovers() >= 1


@pytest.mark.parametrize(
    "command, told",
    [
        ("-server 127.0.0.1:", "event bus died"),
        ("transformers_server", "sampler died"),
        ("training.rank", "learner died"),
    ],
)
async def test_a_part_killed_while_episodes_run(new_run: NewRun, command: str, told: str) -> None:
    run = await begun(new_run())
    async with open_bus(run.wiring.bus) as bus:

        async def busy() -> bool:
            return bool(await in_flight(run, bus))

        await wait_until(busy, 20, "an episode in flight")
    kill(run, command)
    await ends_well(run)
    assert told in run.told()


async def test_one_of_two_ranks_killed(new_run: NewRun) -> None:
    run = await begun(new_run(learner_ranks=2))
    last = max(run.processes("aworld_runtime.training.rank"))
    os.kill(last, signal.SIGKILL)
    await ends_well(run)
    assert "learner died" in run.told()


async def test_what_would_fail_again_stops_the_run_with_its_reason(new_run: NewRun) -> None:
    run = new_run(task="tests.e2e.vowels:BROKEN", learner_ranks=2)
    run.start()
    assert await run.finish() == 1
    assert "training stopped: evaluation after step 0: no episode could be scored" in run.told()
    assert "died" not in run.told()
    assert isinstance((await run.log())[-1].data, RunFinished)  # archived to its end
    await run.no_process_left()


async def test_a_learner_that_leaves_without_a_word_stops_the_run(new_run: NewRun) -> None:
    run = new_run(task="tests.e2e.vowels:ELSEWHERE")
    run.start()
    assert await run.finish() == 1
    assert "training stopped: the learner ended without ending the run" in run.told()
    assert "no judge in this place" in run.told()
    await run.no_process_left()


async def test_a_worker_that_dies_again_and_again_ends_the_run(new_run: NewRun) -> None:
    run = await begun(new_run(worker_num=1))

    def given_up() -> bool:
        for pid in set(run.processes("cli worker")) - set(run.processes("guardian.py")):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return run.code is not None

    await wait_until(given_up, 40, "the end of the run")
    assert run.code == 1
    assert "died 6 times" in run.told()
    assert await state_in_store(run) == "failed"
    await run.no_process_left()


async def test_ctrl_c_leaves_no_process_and_resumes(new_run: NewRun) -> None:
    run = await begun(new_run())
    began = time.monotonic()
    run.interrupt()
    assert await run.finish() == 130
    assert time.monotonic() - began <= 10
    await run.no_process_left()
    assert f"continue with aworld train --resume {run.path}" in run.told()
    assert "Traceback" not in run.told()
    assert await state_in_store(run) == "interrupted"
    run.resume()

    async def running() -> bool:
        return await state_in_store(run) is None

    await wait_until(running, 30, "the run goes on")
    await ends_well(run)
    assert await state_in_store(run) == "done"


async def test_sigterm_before_anything_has_started_is_a_ctrl_c(new_run: NewRun) -> None:
    """As a cluster ends a job: to the launcher alone."""
    run = await begun(new_run(), "event bus: private")
    assert run.process is not None
    run.process.terminate()
    assert await run.finish() == 130
    await run.no_process_left()
    assert "Traceback" not in run.told()
    run.resume()
    await ends_well(run)


async def test_the_launcher_killed_resumes_and_the_bus_killed_at_the_very_end_is_read_out(
    new_run: NewRun,
) -> None:
    run = await begun(new_run(checkpoint_every=2))
    run.kill()
    await run.no_process_left(3)
    run.resume()
    await run.until_told("step 3/3")
    with writing_held_up(run):
        await run.until_told("writing the last events to the store")
        kill(run, "-server 127.0.0.1:")
        await run.until_told("event bus died")
    await ends_well(run)
