"""The trainer on a memory bus, with a scripted policy: who is counted, what is repeated, what stops a run."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from aworld_runtime.archive.archiver import Archiver
from aworld_runtime.archive.logs import OpenedToRead
from aworld_runtime.bus import Bus, open_bus
from aworld_runtime.bus.base import read_all
from aworld_runtime.bus.server import PrivateServer
from aworld_runtime.errors import NonFiniteLossError, StaleSampleError, TrainingError
from aworld_runtime.events import (
    CheckpointSaved,
    EpisodeClaimed,
    EpisodeFinished,
    EpisodeTakenOver,
    Event,
    EventData,
    GroupCompleted,
    ModelCompleted,
    NodeLeft,
    RunFinished,
    StepFinished,
)
from aworld_runtime.names import EPISODES_QUEUE, episode_log, run_log
from aworld_runtime.nodes.environment import load_environment
from aworld_runtime.nodes.worker import Worker
from aworld_runtime.store import open_store
from aworld_runtime.training.config import TrainConfig
from aworld_runtime.training.rows import TrainingRow
from aworld_runtime.training.run_state import RunState
from aworld_runtime.training.task import TrainingTask
from aworld_runtime.training.trainer import Trainer
from tests.faults import restart_empty
from tests.training.trainer_case import (
    BARE,
    CASE,
    FAILING,
    GARBLED,
    SERVED,
    UNSCORABLE,
    RecordingLearner,
    RecordingPublisher,
    Report,
)
from tests.waiting import wait_until

CONFIG = TrainConfig(
    task="tests.training.trainer_case:CASE",
    steps=4,
    groups_per_step=2,
    group_size=3,
    evaluate_every=2,
    evaluate_tasks=2,
    checkpoint_every=2,
    stall_timeout_s=5,
)


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    SERVED[0] = 0
    FAILING.clear()
    UNSCORABLE.clear()
    async with open_bus("memory://") as bus:
        yield bus


@asynccontextmanager
async def working(bus: Bus) -> AsyncGenerator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Worker(bus, name="w1", slots=4).run)
        yield
        tasks.cancel_scope.cancel()


def store_of(folder: Path) -> str:
    return f"sqlite:///{folder}/store.db"


def trainer(
    bus: Bus,
    folder: Path,
    learner: RecordingLearner,
    config: TrainConfig = CONFIG,
    task: TrainingTask = CASE,
    *,
    restore_after_s: float = 6.0,
) -> Trainer:
    return Trainer(
        bus=bus,
        store=OpenedToRead(store_of(folder)),
        run_id="r",
        config=config,
        task=task,
        environment=load_environment(task.environment),
        model=None,
        learner=learner,
        publisher=RecordingPublisher(),
        folder=folder,
        restore_after_s=restore_after_s,
    )


async def log(bus: Bus) -> list[Event]:
    return await read_all(bus, run_log("r"))


async def test_a_run_takes_its_steps_and_counts_every_episode_once(
    bus: Bus, tmp_path: Path
) -> None:
    learner = RecordingLearner(tmp_path)
    async with working(bus):
        await trainer(bus, tmp_path, learner).run()
    state = RunState.of(await log(bus))
    assert state.finished is not None
    assert sorted(state.steps) == [1, 2, 3, 4]
    assert sorted(state.evaluations) == [0, 2, 4]
    assert state.published == 4
    trained = [rollout for batch in learner.seen for rollout in batch]
    assert len(trained) == len(set(trained)) == 4 * 2 * 3


async def test_a_runs_log_holds_no_password(bus: Bus, tmp_path: Path) -> None:
    servers = {"bus": "redis://me:secret@host/0", "store": "mongodb://me:secret@host/db"}
    config = CONFIG.model_copy(update={**servers, "steps": 1})
    async with working(bus):
        await trainer(bus, tmp_path, RecordingLearner(tmp_path), config).run()
    events = await log(bus)
    assert "redis://me:***@host/0" in repr(events[0].data)
    assert "secret" not in repr(events)


async def test_synchronous_training_samples_each_batch_with_the_newest_version(
    bus: Bus, tmp_path: Path
) -> None:
    learner = RecordingLearner(tmp_path)
    async with working(bus):
        await trainer(bus, tmp_path, learner).run()
    assert set(learner.staleness) == {0}


async def test_asynchronous_training_stays_within_its_bound(bus: Bus, tmp_path: Path) -> None:
    learner = RecordingLearner(tmp_path)
    async with working(bus):
        await trainer(bus, tmp_path, learner, CONFIG.model_copy(update={"max_staleness": 2})).run()
    assert max(learner.staleness) in (1, 2)


@pytest.mark.parametrize("slow", [1, 2, 3])
async def test_a_batch_waits_for_slow_groups_that_would_get_too_old(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: int
) -> None:
    """Even for more of them than a later batch has room for."""

    class Steady(RecordingLearner):
        def step(self, rows: Sequence[TrainingRow], *, policy_version: int) -> Report:
            time.sleep(0.1)  # until then, all that was requested has been sampled
            return super().step(rows, policy_version=policy_version)

    config = CONFIG.model_copy(update={"max_staleness": 2, "steps": 5})
    learner = Steady(tmp_path)
    held = list[Event]()
    send_mail = bus.send_mail

    async def hold(to: str, event: Event) -> None:
        """The end of training groups 4 ... is told only when nothing else is left to do."""
        number = int((event.group_id or "").rpartition(".g")[2]) - config.evaluate_tasks
        if 4 <= number < 4 + slow:
            held.append(event)
        else:
            await send_mail(to, event)

    async def release() -> None:
        while True:
            before = len(await log(bus))
            await anyio.sleep(0.3)
            if before == len(await log(bus)):
                for event in held:
                    await send_mail(run_log("r"), event)
                held.clear()

    monkeypatch.setattr(bus, "send_mail", hold)
    async with working(bus), anyio.create_task_group() as releasing:
        releasing.start_soon(release)
        await trainer(bus, tmp_path, learner, config).run()
        releasing.cancel_scope.cancel()
    assert sorted(RunState.of(await log(bus)).steps) == [1, 2, 3, 4, 5]
    assert max(learner.staleness) <= 2


async def test_a_failed_episode_is_tried_again_and_only_the_last_attempt_counts(
    bus: Bus, tmp_path: Path
) -> None:
    FAILING.update({"train 0", "test 1"})
    learner = RecordingLearner(tmp_path)
    async with working(bus):
        await trainer(bus, tmp_path, learner).run()
    groups = RunState.of(await log(bus)).groups.values()
    assert all(
        group.completed and len(group.completed.episodes) == group.requested.size
        for group in groups
    )
    again = [e for group in groups for e in group.finished.values() if e.endswith(".2")]
    assert len(again) == 2
    for episode in again:
        events = await read_all(bus, episode_log(episode))
        assert not [e for e in events if isinstance(e.data, EpisodeTakenOver)]  # queued once


async def test_a_task_that_cannot_be_scored_in_training_stops_the_run_and_is_resumed_once_mended(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After as many groups as three batches have, a kill in between included."""
    UNSCORABLE.add("train")
    async with working(bus):
        half_way = CONFIG.evaluate_tasks + 3
        killed, following, mended = (
            trainer(bus, tmp_path, RecordingLearner(tmp_path)) for _ in range(3)
        )
        await run_until_killed(killed, bus, monkeypatch, GroupCompleted, half_way)
        with pytest.raises(ExceptionGroup) as stopped:
            await following.run()
        why = r"no episode of the last [67] groups could be scored: .*no judge"
        assert stopped.group_contains(TrainingError, match=why)
        events = await log(bus)
        completed = [event for event in events if isinstance(event.data, GroupCompleted)]
        assert len(completed) - CONFIG.evaluate_tasks in (6, 7)  # two end at a time
        assert isinstance(events[-1].data, RunFinished)
        assert "no judge" in events[-1].data.detail
        UNSCORABLE.clear()
        await mended.run()
    state = RunState.of(await log(bus))
    assert state.finished is not None
    assert state.finished.reason == "done"


async def test_an_episode_has_all_its_time_however_long_nobody_worked(
    bus: Bus, tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"episode_timeout_s": 0.2})
    async with anyio.create_task_group() as interrupted:
        interrupted.start_soon(trainer(bus, tmp_path, RecordingLearner(tmp_path), config).run)
        await anyio.sleep(0.3)  # longer than an episode may run
        interrupted.cancel_scope.cancel()
    async with working(bus):
        await trainer(bus, tmp_path, RecordingLearner(tmp_path)).run()
    state = RunState.of(await log(bus))
    assert state.finished is not None
    assert [group.finished for group in list(state.groups.values())[:2]] == [
        {0: f"r.g0000{number}.0.1"} for number in (1, 2)
    ]


async def test_a_new_trainer_repeats_the_recorded_batches_after_the_checkpoint(
    bus: Bus, tmp_path: Path
) -> None:
    whole = RecordingLearner(tmp_path)
    broken = RecordingLearner(tmp_path)
    async with working(bus):
        config = CONFIG.model_copy(update={"steps": 3})
        await trainer(bus, tmp_path, whole, config).run()
        # The run went on to step 3; its newest checkpoint but one is of step 2.
        (tmp_path / "checkpoint-3").unlink()
        await trainer(bus, tmp_path, broken, config).run()
    assert broken.seen == whole.seen
    state = RunState.of(await log(bus))
    assert len(state.batches) == 3


async def test_a_step_is_repeated_with_episodes_that_only_the_store_still_has(
    bus: Bus, tmp_path: Path
) -> None:
    whole, broken = RecordingLearner(tmp_path), RecordingLearner(tmp_path)
    config = CONFIG.model_copy(update={"steps": 3})
    async with open_store(store_of(tmp_path)) as store, working(bus):
        async with Archiver(bus, store) as archiver:
            await trainer(bus, tmp_path, whole, config).run()
            await archiver.drain()
        for name in await store.logs("episode:"):
            await bus.unlink(name)
        (tmp_path / "checkpoint-3").unlink()
        await trainer(bus, tmp_path, broken, config).run()
    assert broken.seen == whole.seen


async def run_until_killed(
    run: Trainer, bus: Bus, patches: pytest.MonkeyPatch, kind: type[EventData], count: int
) -> None:
    """It dies with the append that holds the `count`th event of this kind."""
    append, seen = bus.append, 0

    async def last(log: str, seq: int, events: Sequence[Event], **options: Any) -> int:
        nonlocal seen
        done = await append(log, seq, events, **options)
        seen += sum(isinstance(event.data, kind) for event in events)
        if seen >= count and log == run_log("r"):
            raise Killed
        return done

    with patches.context() as patch:
        patch.setattr(bus, "append", last)
        with pytest.raises(ExceptionGroup) as died:
            await run.run()
    assert died.group_contains(Killed)


class Killed(Exception):
    """As by a kill -9."""


@pytest.mark.parametrize("kind", [StepFinished, CheckpointSaved])
@pytest.mark.parametrize("steps", [2, 4])
async def test_a_kill_around_a_checkpoint_loses_neither_its_step_nor_its_evaluation(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[EventData], steps: int
) -> None:
    config = CONFIG.model_copy(update={"steps": steps})
    async with working(bus):
        at_step_2 = 2 if kind is StepFinished else 1
        await run_until_killed(
            trainer(bus, tmp_path, RecordingLearner(tmp_path), config),
            bus,
            monkeypatch,
            kind,
            at_step_2,
        )
        await trainer(bus, tmp_path, RecordingLearner(tmp_path), config).run()
    events = await log(bus)
    taken = [e.data.step for e in events if isinstance(e.data, StepFinished)]
    assert taken == list(range(1, steps + 1))
    assert sorted(RunState.of(events).evaluations) == list(range(0, steps + 1, 2))


@pytest.mark.parametrize("checkpoint_every", [2, 3])
async def test_an_interrupted_evaluation_is_finished_with_the_same_weights(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint_every: int
) -> None:
    config = CONFIG.model_copy(update={"checkpoint_every": checkpoint_every})
    of_evaluation_0, of_steps = config.evaluate_tasks, 2 * config.groups_per_step
    async with working(bus):
        first_of_step_2 = of_evaluation_0 + of_steps + 1
        await run_until_killed(
            trainer(bus, tmp_path, RecordingLearner(tmp_path), config),
            bus,
            monkeypatch,
            GroupCompleted,
            first_of_step_2,
        )
        await trainer(bus, tmp_path, RecordingLearner(tmp_path), config).run()
    state = RunState.of(await log(bus))
    assert sorted(state.evaluations) == [0, 2, 4]
    for step, evaluation in state.evaluations.items():
        assert len(evaluation.groups) == config.evaluate_tasks
        assert await versions_of(bus, state, evaluation.groups) == {step}
    evaluated = [name for e in state.evaluations.values() for name in e.groups]
    requested = [n for n, g in state.groups.items() if g.requested.purpose == "evaluate"]
    assert evaluated == requested  # nothing asked for twice, nothing left over


async def test_groups_of_an_interrupted_evaluation_serve_no_other_one(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(bus):
        first_of_step_2 = CONFIG.evaluate_tasks + 2 * CONFIG.groups_per_step + 1
        await run_until_killed(
            trainer(bus, tmp_path, RecordingLearner(tmp_path)),
            bus,
            monkeypatch,
            GroupCompleted,
            first_of_step_2,
        )
        config = CONFIG.model_copy(update={"evaluate_every": 3})  # step 2 is not evaluated now
        await trainer(bus, tmp_path, RecordingLearner(tmp_path), config).run()
    state = RunState.of(await log(bus))
    assert sorted(state.evaluations) == [0, 3, 4]
    for step, evaluation in state.evaluations.items():
        assert await versions_of(bus, state, evaluation.groups) == {step}


async def versions_of(bus: Bus, state: RunState, groups: Sequence[str]) -> set[int]:
    """Versions that the groups' episodes were sampled with."""
    episodes = [e for g in groups if (done := state.groups[g].completed) for e in done.episodes]
    return {
        span.version
        for episode in episodes
        for event in await read_all(bus, episode_log(episode))
        if isinstance(event.data, ModelCompleted)
        for span in event.data.version_spans
    }


async def test_a_loss_that_is_not_finite_ends_the_run_with_the_reason_and_can_be_resumed(
    bus: Bus, tmp_path: Path
) -> None:
    class Exploding(RecordingLearner):
        def step(self, rows: Sequence[TrainingRow], *, policy_version: int) -> Report:
            if policy_version == 2:
                raise NonFiniteLossError("step 3: loss=nan")
            return super().step(rows, policy_version=policy_version)

    whole = RecordingLearner(tmp_path)
    async with working(bus):
        with pytest.raises(ExceptionGroup) as stopped:
            await trainer(bus, tmp_path, Exploding(tmp_path)).run()
        assert stopped.group_contains(NonFiniteLossError)
        assert (await log(bus))[-1].data == RunFinished(reason="failed", detail="step 3: loss=nan")
        await trainer(bus, tmp_path, whole).run()
    events = await log(bus)
    assert [e.data.step for e in events if isinstance(e.data, StepFinished)] == [1, 2, 3, 4]
    assert len(whole.seen) == len(set(whole.seen)) == 4


async def test_a_sample_older_than_the_bound_stops_the_run(bus: Bus, tmp_path: Path) -> None:
    class Forgetful(RecordingPublisher):
        async def publish(self, version: int) -> list[str]:  # noqa: ARG002
            return ["keeps sampling with version 0"]

    slow = trainer(bus, tmp_path, RecordingLearner(tmp_path))
    slow._publisher = Forgetful()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(ExceptionGroup) as stopped:
        async with working(bus):
            await slow.run()
    assert stopped.group_contains(StaleSampleError, match="max_staleness=0")


@pytest.mark.parametrize(
    "episode",
    [
        None,
        "nonsense",
        "r.g00001.x.1",
        "r.g00099.0.1",
        "r.g00001.7.1",
        "r.g00001.-1.1",
        "r.g00001.0.0",
        "r.g00001.00.1",
        "r.g00001.0.9",
    ],
)
async def test_mail_about_an_episode_that_nobody_asked_for_is_ignored_with_a_warning(
    bus: Bus, tmp_path: Path, caplog: pytest.LogCaptureFixture, episode: str | None
) -> None:
    stray = Event.of(EpisodeFinished(answer="yes"), source="somebody/1", episode_id=episode)
    async with working(bus), anyio.create_task_group() as tasks:

        async def tell() -> None:
            while "group.requested" not in [event.type for event in await log(bus)]:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            await bus.send_mail(run_log("r"), stray)

        tasks.start_soon(tell)
        await trainer(bus, tmp_path, RecordingLearner(tmp_path)).run()
    events = await log(bus)
    state = RunState.of(events)
    assert state.finished is not None
    assert state.finished.reason == "done"
    assert stray.id not in [event.id for event in events]
    assert f"mail from somebody/1 ignored: {episode!r} is no episode" in caplog.text


async def test_a_log_with_the_end_of_an_unknown_episode_can_be_read() -> None:
    stray = Event.of(EpisodeFinished(), source="somebody/1", episode_id="r.g00099.0.1")
    assert RunState.of([stray]) == RunState()


@pytest.mark.parametrize("begun", [False, True])
async def test_an_episode_that_the_queue_lost_is_queued_again(
    bus: Bus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    begun: bool,
) -> None:
    lost, put = "r.g00003.1.1", bus.put
    queued = list[str | None]()

    async def lose(queue: str, event: Event) -> None:
        queued.append(event.episode_id)
        if queued.count(lost) != 1 or event.episode_id != lost:
            await put(queue, event)
        elif begun:
            claimed = Event.of(EpisodeClaimed(worker="dead"), source="worker/dead")
            await bus.append(episode_log(lost), 0, [event, claimed])

    monkeypatch.setattr(bus, "put", lose)
    async with working(bus):
        config = CONFIG.model_copy(update={"stall_timeout_s": 2})
        await trainer(bus, tmp_path, RecordingLearner(tmp_path), config).run()
    state = RunState.of(await log(bus))
    assert state.finished is not None
    assert state.groups["r.g00003"].finished[1] == lost
    assert queued.count(lost) >= 2
    assert "queueing every unfinished one again" in caplog.text


class StoppedLearner(RecordingLearner):
    """Takes its second step once it may."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stopped = threading.Event()
        self.may_go_on = threading.Event()

    def step(self, rows: Sequence[TrainingRow], *, policy_version: int) -> Report:
        if policy_version == 1:
            self.stopped.set()
            self.may_go_on.wait(30)
        return super().step(rows, policy_version=policy_version)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PrivateServer]:
    """A server for one test, which may do to it what it likes."""
    async with PrivateServer(tmp_path / "server") as server:
        yield server


async def test_a_log_that_the_server_lost_is_put_back_and_the_run_goes_on(
    server: PrivateServer, tmp_path: Path
) -> None:
    learner = StoppedLearner(tmp_path)
    config = CONFIG.model_copy(update={"steps": 3})
    async with open_bus(server.url) as bus:
        async with working(bus), anyio.create_task_group() as tasks:
            tasks.start_soon(trainer(bus, tmp_path, learner, config).run)
            await wait_until(learner.stopped.is_set, 20, "the second step")
            before = await log(bus)
            await restart_empty(server)

            async def is_back() -> bool:
                return await log(bus) == before

            await wait_until(is_back, 10, "the log put back")
            learner.may_go_on.set()
        state = RunState.of(await log(bus))
    assert state.finished is not None
    assert sorted(state.steps) == [1, 2, 3]


async def test_requests_that_the_server_lost_are_queued_again(
    server: PrivateServer, tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"steps": 1, "stall_timeout_s": 60})
    async with open_bus(server.url) as bus, anyio.create_task_group() as tasks:
        run = trainer(bus, tmp_path, RecordingLearner(tmp_path), config, restore_after_s=0.0)
        tasks.start_soon(run.run)

        async def are_queued() -> bool:
            return await bus.backlog(EPISODES_QUEUE) >= config.evaluate_tasks

        await wait_until(are_queued, 10, "requests in the queue")
        await restart_empty(server)
        async with working(bus):
            await wait_until(lambda: (tmp_path / "model").exists(), 20, "the end of the run")


async def test_an_episode_queued_again_while_it_runs_counts_once(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send_mail, told = bus.send_mail, list[str | None]()

    async def late(to: str, event: Event) -> None:
        told.append(event.episode_id)
        if len(told) <= 2:
            await anyio.sleep(1.2)
        await send_mail(to, event)

    monkeypatch.setattr(bus, "send_mail", late)
    async with working(bus):
        config = CONFIG.model_copy(update={"stall_timeout_s": 2})
        await trainer(bus, tmp_path, RecordingLearner(tmp_path), config).run()
    ended = [e.episode_id for e in await log(bus) if isinstance(e.data, EpisodeFinished)]
    assert len(ended) == len(set(ended)) < len(told)


async def test_a_run_none_of_whose_episodes_can_be_scored_says_why(
    bus: Bus, tmp_path: Path
) -> None:
    with pytest.raises(ExceptionGroup) as stopped:
        async with working(bus):
            await trainer(bus, tmp_path, RecordingLearner(tmp_path), task=BARE).run()
    why = (
        r"scored: r.g00001.0.3 failed .environment: TypeError: .*score returned 1\.0, not a Reward"
    )
    assert stopped.group_contains(TrainingError, match=why)


async def test_a_task_that_no_event_can_hold_stops_the_run_and_is_named(
    bus: Bus, tmp_path: Path
) -> None:
    with pytest.raises(ExceptionGroup) as stopped:
        await trainer(bus, tmp_path, RecordingLearner(tmp_path), task=GARBLED).run()
    why = "task 'test-0' can't be requested: .*can't be written"
    assert stopped.group_contains(TrainingError, match=why)
    assert isinstance((await log(bus))[-1].data, RunFinished)


@pytest.mark.parametrize("workers_die", [False, True])
async def test_a_run_without_workers_stops_with_a_message(
    bus: Bus, tmp_path: Path, workers_die: bool
) -> None:
    """Also where they are started again and again."""

    async def die() -> None:
        while workers_die:
            await bus.send_mail(run_log("r"), Event.of(NodeLeft(node="worker/w1"), source="l/r"))
            await anyio.sleep(0.02)

    config = CONFIG.model_copy(update={"stall_timeout_s": 0.2})
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(die)
        with pytest.raises(ExceptionGroup) as stopped:
            await trainer(bus, tmp_path, RecordingLearner(tmp_path), config).run()
        assert stopped.group_contains(TrainingError, match="are workers and sampler running")
        tasks.cancel_scope.cancel()
