"""The trainer: rank 0 of the learner, and the owner of the run's log.

    admit ─▶ queue "episodes" ─▶ workers ─▶ mail: episode.finished ─▶ groups ─┐
      ▲                                                                       ▼
      └── policy.published ◀── publish ◀── step ◀── batch.formed ◀── groups completed, oldest first

What has happened is in the log and nowhere else: `RunState` is its fold, so a trainer that starts on a log goes on where
that log ends, repeating the recorded batches after the last checkpoint. Admission is paced: groups requested stay within
(policy_version + max_staleness + 1) x groups per batch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import anyio
from anyio.to_thread import run_sync

from aworld_runtime import telemetry
from aworld_runtime.archive.logs import Kept, Logs
from aworld_runtime.archive.run_log import RunLog
from aworld_runtime.bus.base import LEASE_S, Bus, Mail, NodeInfo
from aworld_runtime.bus.presence import announce
from aworld_runtime.bus.room import when_there_is_room
from aworld_runtime.environments.base import Environment
from aworld_runtime.errors import (
    EventError,
    Fenced,
    StaleSampleError,
    TrainingError,
    UsageError,
    first_error,
)
from aworld_runtime.events import (
    BatchFormed,
    CheckpointSaved,
    EpisodeFinished,
    EpisodeRequested,
    EvaluationFinished,
    Event,
    EventData,
    GroupCompleted,
    GroupRequested,
    NodeJoined,
    NodeLeft,
    PolicyPublished,
    RunFinished,
    RunStarted,
    RunTakenOver,
    utc_now,
)
from aworld_runtime.messages import ModelSpec, Task
from aworld_runtime.names import EPISODES_QUEUE, episode_log
from aworld_runtime.training.config import TrainConfig
from aworld_runtime.training.projection import rows_of
from aworld_runtime.training.rows import TrainingRow
from aworld_runtime.training.run_state import (
    Group,
    RunState,
    episode_name,
    group_name,
    parse_episode_name,
)
from aworld_runtime.training.step_record import Report, record_of
from aworld_runtime.training.task import TrainingTask, tasks_of
from aworld_runtime.trajectory import Episode, episode_of

logger = logging.getLogger(__name__)
LOOK_AT_SAMPLERS_S = 1.0
UNSCORED_BATCHES = 3
"""A run in which no episode of so many batches' groups, one after another, could be scored, stops."""


class Learner(Protocol):
    """What the trainer needs of the learner. Every call blocks, and is made by one thread at a time."""

    def step(self, rows: Sequence[TrainingRow], *, policy_version: int) -> Report:
        """Train on one batch."""
        ...

    def save(self, policy_version: int) -> Path:
        """Write a checkpoint."""
        ...

    def load(self, path: Path) -> int:
        """Go on from a checkpoint; returns its policy version."""
        ...

    def export(self, folder: Path) -> None:
        """Write the model as others load it."""
        ...


class Publisher(Protocol):
    """Puts the learner's weights into every sampler."""

    async def publish(self, version: int) -> Sequence[str]:
        """Returns the samplers, all of which have acknowledged the version."""
        ...

    async def wait_until_ready(self) -> None:
        """Until every sampler answers."""
        ...

    async def versions(self) -> Sequence[int]:
        """What each sampler that answers serves now."""
        ...


class Trainer:
    """Runs one training to its end; `run` may be called once.

    `model` is the sampler that trained roles use; None leaves them the models their program gives them. `store` is read
    where the bus has let a log go, or lost it; `restore_after_s` is as in `Settings`.
    """

    def __init__(  # noqa: PLR0913 - what a run is made of
        self,
        *,
        bus: Bus,
        store: Kept,
        run_id: str,
        config: TrainConfig,
        task: TrainingTask,
        environment: Environment,
        model: ModelSpec | None,
        learner: Learner,
        publisher: Publisher,
        folder: Path,
        code_version: str = "",
        restore_after_s: float = 6.0,
    ) -> None:
        self._bus = bus
        self._logs = Logs(bus, store)
        self._run_id = run_id
        self._config = config
        self._task = task
        self._models = {} if model is None else dict.fromkeys(task.roles, model)
        self._learner = learner
        self._publisher = publisher
        self._folder = folder
        self._code_version = code_version
        self._train_tasks = tasks_of(
            task, environment, "train", count=config.train_tasks, seed=config.seed
        )
        self._test_tasks = tasks_of(
            task, environment, "test", count=config.evaluate_tasks, seed=config.seed
        )
        self._log = RunLog(bus, store, run_id, patience_s=config.stall_timeout_s)
        self._patience_s = restore_after_s + LEASE_S
        """Until owners have put their logs back, or the janitor has."""
        self._state = RunState()
        self._changed = anyio.Event()
        self._weights = anyio.Lock()
        self._completing = anyio.Lock()
        self._version = 0
        self._since = utc_now()
        telemetry.POLICY_VERSION.watch(self, lambda trainer: trainer.policy_version)

    @property
    def policy_version(self) -> int:
        """Of the learner's weights."""
        return self._version

    async def run(self) -> None:
        """Train to the last step; everything is in the log when it returns.

        Raises:
            TrainingError: the run can't go on (perhaps in an exception group). The log ends with the reason.
        """
        async with self._bus.mailbox(self._log.name) as mail:
            await self._claim()
            try:
                await self._train(mail)
            except* (TrainingError, UsageError) as stopped:
                # Trying again would not help: whoever follows the log stops the run.
                why = str(first_error(stopped))
                await self._append(RunFinished(reason="failed", detail=why))
                raise

    async def _train(self, mail: AsyncIterator[list[Mail]]) -> None:
        async with anyio.create_task_group() as background:
            await self._publisher.wait_until_ready()
            first = await self._restore()
            background.start_soon(self._receive, mail)
            here = partial(announce, self._bus, self._nodes, who=f"trainer {self._run_id}")
            background.start_soon(here)
            background.start_soon(self._keep_samplers_current)
            background.start_soon(self._watch_server)
            await self._requeue_unfinished()
            await self._evaluate_if_due(first - 1)
            for step in range(first, self._config.steps + 1):
                await self._step(step)
            await run_sync(self._learner.export, self._folder / "model")
            await self._append(RunFinished(reason="done", detail=f"{self._config.steps} steps"))
            background.cancel_scope.cancel()

    # --- one step --------------------------------------------------------------------------------------------------

    async def _step(self, step: int) -> None:
        started = time.monotonic()
        repeated = step in self._state.steps
        if step not in self._state.batches:
            await self._form_batch(step)
        episodes = await self._episodes(self._state.batches[step])
        generated = time.monotonic()
        rows = [row for episode in episodes for row in rows_of(episode, self._task.roles)]
        self._check_staleness(rows, step)
        async with self._weights:
            report = await run_sync(lambda: self._learner.step(rows, policy_version=step - 1))
            self._version = step
        trained = time.monotonic()
        if not repeated or step == max(self._state.steps):
            await self._publish(step)
        published = time.monotonic()
        record: list[EventData] = []
        if step % self._config.checkpoint_every == 0 or step == self._config.steps:
            path = await run_sync(self._learner.save, step)
            record.append(CheckpointSaved(step=step, path=str(path)))
        if not repeated:
            finished = record_of(step, report, episodes, rows)
            seconds = {
                "perf/generate_s": generated - started,
                "perf/train_s": trained - generated,
                "perf/publish_s": published - trained,
                "perf/rest_s": time.monotonic() - published,
                "perf/step_s": time.monotonic() - started,
            }
            metrics = finished.metrics | seconds
            record.insert(0, finished.model_copy(update={"metrics": metrics}))
        if record:
            # At once: a step with a checkpoint is not taken again, so it could not be recorded later.
            await self._append(*record, version=step)
        await self._evaluate_if_due(step)

    async def _form_batch(self, step: int) -> None:
        """Wait for the step's groups, oldest first, and record which they are before they are used."""
        size = self._config.groups_per_step
        await self._admit()
        while len(self._state.waiting()) < size or self._must_wait(step):
            await self._change()
            await self._admit()
        await self._append(
            BatchFormed(step=step, group_ids=tuple(self._state.waiting()[:size])), version=step - 1
        )

    def _must_wait(self, step: int) -> bool:
        """Whether a batch of the groups completed by now would leave one behind that then gets too old.

        What was requested at version v is used by step v + 1 + max_staleness at the latest, and each step until then uses
        no more than its number of groups.
        """
        size, staleness = self._config.groups_per_step, self._config.max_staleness
        batch = self._state.waiting()[:size]
        left = [group for name, group in self._state.untrained() if name not in batch]
        for last in range(step, step + staleness + 1):
            due = [g for g in left if g.version is not None and g.version + 1 + staleness <= last]
            if len(due) > (last - step) * size and any(g.completed is None for g in due):
                return True
        return False

    async def _admit(self) -> None:
        """Request as many groups as the staleness bound allows. One that lost every episode doesn't count.

        Raises:
            TrainingError: too many of those, one after another: no more would help.
        """
        config, state = self._config, self._state
        if len(state.unscored) >= UNSCORED_BATCHES * config.groups_per_step:
            raise TrainingError(
                f"no episode of the last {len(state.unscored)} groups could be scored:"
                f" {state.groups[state.unscored[-1]].failure or 'their scores hold no reward'}"
            )
        allowed = (
            min(self._version + config.max_staleness + 1, config.steps) * config.groups_per_step
        )
        empty = sum(
            g.completed is not None and not g.completed.episodes and g.requested.purpose == "train"
            for g in self._state.groups.values()
        )
        for number in range(self._state.requested_for_training(), allowed + empty):
            task = self._train_tasks[number % len(self._train_tasks)]
            await self._request(task, purpose="train", size=config.group_size)

    def _check_staleness(self, rows: Sequence[TrainingRow], step: int) -> None:
        oldest = min((row.policy_version for row in rows), default=step - 1)
        if step - 1 - oldest > self._config.max_staleness:
            raise StaleSampleError(
                f"step {step}: a sample has policy_version={oldest}, {step - 1 - oldest} versions old;"
                f" max_staleness={self._config.max_staleness}"
            )

    async def _evaluate_if_due(self, step: int) -> None:
        """Unless it has been done, or the samplers are further than `step`, as they are while a run repeats its steps."""
        due = step % self._config.evaluate_every == 0 or step == self._config.steps
        further = step < max(self._state.steps, default=0)
        if due and not further and step not in self._state.evaluations:
            await self._evaluate(step)

    async def _evaluate(self, step: int) -> None:
        started = time.monotonic()
        requested = self._evaluation_groups(step)
        for task in self._test_tasks[len(requested) :]:
            await self._request(task, purpose="evaluate", size=1)
        names = self._evaluation_groups(step)
        while any(self._state.groups[name].completed is None for name in names):
            await self._change()
        rewards = [
            r
            for name in names
            if (done := self._state.groups[name].completed)
            for r in done.rewards
        ]
        if not rewards:
            failures = [failure for name in names if (failure := self._state.groups[name].failure)]
            raise TrainingError(
                f"evaluation after step {step}: no episode could be scored:"
                f" {failures[0] if failures else 'none has a reward'}; see aworld runs --run {self._run_id}"
            )
        metrics = {
            "reward/mean": sum(rewards) / len(rewards),
            "reward/max": max(rewards),
            "episodes": float(len(rewards)),
            "perf/evaluate_s": time.monotonic() - started,
        }
        await self._append(
            EvaluationFinished(step=step, groups=tuple(names), metrics=metrics), version=step
        )

    def _evaluation_groups(self, step: int) -> list[str]:
        """Those sampled with the weights after `step`, also before an interruption."""
        return [
            name
            for name, group in self._state.groups.items()
            if group.requested.purpose == "evaluate" and group.version == step
        ]

    # --- groups ----------------------------------------------------------------------------------------------------

    async def _request(
        self, task: Task, *, purpose: Literal["train", "evaluate"], size: int
    ) -> None:
        name = group_name(self._run_id, len(self._state.groups) + 1)
        requested = GroupRequested(group=name, task=task, size=size, purpose=purpose)
        try:
            await self._append(requested, version=self._version)
        except EventError as error:
            raise TrainingError(f"task {task.id!r} can't be requested: {error}") from error
        for index in range(size):
            await self._queue_episode(self._state.groups[name], index, attempt=1)

    async def _queue_episode(self, group: Group, index: int, *, attempt: int) -> None:
        name, task = group.requested.group, group.requested.task
        digest = hashlib.sha256(
            f"{self._config.seed}:{name.rpartition('.')[2]}:{index}:{attempt}".encode()
        ).digest()
        request = EpisodeRequested(
            task=task,
            program=self._config.program or self._task.program,
            models=self._models,
            seed=int.from_bytes(digest[:4], "big"),
            index=index,
            code_version=self._code_version,
            timeout_s=self._config.episode_timeout_s,
        )
        event = Event.of(
            request,
            source=f"trainer/{self._run_id}",
            run_id=self._run_id,
            task_id=task.id,
            group_id=name,
            episode_id=episode_name(name, index, attempt),
            attempt=attempt,
        )
        await when_there_is_room(
            partial(self._bus.put, EPISODES_QUEUE, event),
            who=f"run {self._run_id}",
            patience_s=self._config.stall_timeout_s,
        )

    async def _receive(self, mail: AsyncIterator[list[Mail]]) -> None:
        """Count finished episodes, each once; try failed ones again; complete groups."""
        async for batch in mail:
            news = {item.event.id: item.event for item in batch}
            fresh = [event for event in news.values() if self._is_news(event)]
            await self._append_events(fresh, acks=batch)
            for event in fresh:
                if isinstance(event.data, EpisodeFinished):
                    await self._advance(event.episode_id or "", event.data)

    def _is_news(self, event: Event) -> bool:
        """Whether mail belongs into the log; what doesn't is acknowledged all the same."""
        if self._state.is_stray(event):
            logger.warning(
                "mail from %s ignored: %r is no episode of this run's groups",
                event.source,
                event.episode_id,
            )
            return False
        return not self._state.knows(event)

    async def _advance(self, episode: str, ended: EpisodeFinished) -> None:
        """Try an episode again that failed, or complete its group when nothing is left to wait for."""
        name, index, attempt = parse_episode_name(episode)
        group = self._state.groups[name]
        if index not in group.finished and attempt < self._config.attempts:
            logger.warning("%s %s (%s); trying again", episode, ended.reason, ended.error)
            await self._queue_episode(group, index, attempt=attempt + 1)
        else:
            await self._complete(group)

    async def _complete(self, group: Group) -> None:
        """If every place has an episode that counts, or has used up its attempts."""
        async with self._completing:
            used_up = {i for i, ended in group.attempts.items() if ended >= self._config.attempts}
            done = len(group.finished.keys() | used_up) == group.requested.size
            if group.completed is not None or not done:
                return
            episodes = [group.finished[i] for i in sorted(group.finished)]
            scored = [await self._episode(e) for e in episodes]
            rewards = [e.reward for e in scored]
            known = [(e, r) for e, r in zip(episodes, rewards, strict=True) if r is not None]
            await self._append(
                GroupCompleted(
                    group=group.requested.group,
                    episodes=tuple(e for e, _ in known),
                    rewards=tuple(r for _, r in known),
                )
            )

    async def _requeue_unfinished(self, *, begun_too: bool = False) -> None:
        """What the log wants and perhaps no queue holds. An episode counts once, however often queued.

        One that goes on is in the queue until its end is told, unless the queue has lost it. The end of another may have
        been told to a server that lost it: who claims it again tells it again.
        """
        for name, group in list(self._state.groups.items()):
            for index in set(range(group.requested.size)) - group.finished.keys():
                attempt = group.attempts.get(index, 0) + 1
                goes_on = await self._goes_on(episode_name(name, index, attempt))
                if (
                    group.completed is None
                    and attempt <= self._config.attempts
                    and (begun_too or not goes_on)
                ):
                    await self._queue_episode(group, index, attempt=attempt)
            await self._complete(group)

    async def _goes_on(self, episode: str) -> bool:
        """Whether it has begun, and not ended."""
        log = episode_log(episode)
        last = await self._bus.last_seq(log)
        newest = await self._bus.read(log, last, limit=1) if last else []
        return any(not isinstance(event.data, EpisodeFinished) for event in newest)

    async def _episodes(self, batch: BatchFormed) -> list[Episode]:
        names = [
            e
            for g in batch.group_ids
            if (done := self._state.groups[g].completed)
            for e in done.episodes
        ]
        return [await self._episode(name) for name in names]

    async def _episode(self, name: str) -> Episode:
        log = episode_log(name)
        events = await self._logs.read_all(log)
        if not events:
            raise TrainingError(
                f"episode {name} is neither on the bus nor in the store: the server lost it"
            )
        return episode_of(events)

    # --- policy ----------------------------------------------------------------------------------------------------

    async def _publish(self, version: int) -> None:
        async with self._weights:
            samplers = await self._publisher.publish(version)
        await self._append(PolicyPublished(samplers=tuple(samplers)), version=version)

    async def _keep_samplers_current(self) -> None:
        """A sampler that was started anew holds old weights, and waits for ours."""
        while True:
            await anyio.sleep(LOOK_AT_SAMPLERS_S)
            if await self._outdated():
                async with self._weights:
                    if await self._outdated():
                        logger.warning("a sampler is not at version %d: publishing", self._version)
                        await self._publisher.publish(self._version)

    async def _outdated(self) -> bool:
        """Whether a sampler must be given the learner's weights.

        Not while a resumed run repeats its steps: what was sampled meanwhile would be too old for what comes after them.
        """
        if self._version < self._state.published:
            return False
        return any(version != self._version for version in await self._publisher.versions())

    # --- the log ---------------------------------------------------------------------------------------------------

    async def _claim(self) -> None:
        """Become the owner of the run's log: begin it, or fold it and take it over."""
        while True:
            past = await self._log.resume()
            self._state = RunState.of(past)
            data: EventData = RunTakenOver(node=f"trainer/{self._run_id}")
            if not past:
                data = RunStarted(kind="train", config=self._config.shown())
            try:
                await self._append(data)
            except Fenced:
                continue  # the former trainer appended since we read, for the last time
            return

    async def _restore(self) -> int:
        """Load the newest checkpoint; returns the first step to take (perhaps again)."""
        step = await run_sync(self._newest_checkpoint)
        if step is None:
            return 1
        # Where a step changed nothing its checkpoint replaces the one before: the log says which step, not the file.
        await run_sync(self._learner.load, Path(self._state.checkpoints[step]))
        self._version = step
        if not self._state.steps or step >= max(self._state.steps):
            await self._publish(step)
        return step + 1

    def _newest_checkpoint(self) -> int | None:
        """The step of it."""
        there = (step for step, path in self._state.checkpoints.items() if Path(path).exists())
        return max(there, default=None)

    async def _append(self, *data: EventData, version: int | None = None) -> None:
        events = [
            Event.of(
                one,
                source=f"trainer/{self._run_id}",
                run_id=self._run_id,
                policy=self._config.policy if version is not None else None,
                policy_version=version,
            )
            for one in data
        ]
        await self._append_events(events)

    async def _append_events(self, events: Sequence[Event], *, acks: Sequence[Mail] = ()) -> None:
        for event in await self._log.append(events, acks=acks):
            self._state.add(event)
        if any(not isinstance(event.data, NodeJoined | NodeLeft) for event in events):
            changed, self._changed = self._changed, anyio.Event()
            changed.set()

    async def _watch_server(self) -> None:
        """See to what a server that was restarted may have lost: requests that nobody had begun, and the news that an
        episode has ended. What goes on is its owner's business, then the janitor's.
        """
        async for lost_all in self._log.losses(patience_s=self._patience_s):
            # What may still be queued is not queued again before the queue is empty.
            while not lost_all and await self._bus.backlog(EPISODES_QUEUE):  # noqa: ASYNC110 - it is other processes'
                await anyio.sleep(LEASE_S)
            await self._requeue_unfinished()

    async def _change(self) -> None:
        """Wait until the log has grown by more than comings and goings of its parts.

        Half-way through its patience, ask for what is missing once more.

        Raises:
            TrainingError: nothing has happened for `stall_timeout_s`.
        """
        patience, changed = self._config.stall_timeout_s, self._changed
        with anyio.move_on_after(patience / 2):
            await changed.wait()
            return
        logger.warning(
            "no episode has ended for %g s: queueing every unfinished one again", patience / 2
        )
        await self._requeue_unfinished(begun_too=True)
        with anyio.move_on_after(patience / 2):
            await changed.wait()
            return
        backlog = await self._bus.backlog(EPISODES_QUEUE)
        raise TrainingError(
            f"no episode has ended for {patience:g} s, {backlog} wait in the queue: are workers and sampler running?"
            f" See aworld nodes --bus {self._bus.url}, and the run's log folder"
        )

    def _nodes(self) -> Iterable[NodeInfo]:
        yield NodeInfo(
            name=f"trainer/{self._run_id}",
            kind="trainer",
            version=self._code_version,
            pid=os.getpid(),
            host=socket.gethostname(),
            since=self._since,
            detail={"policy_version": self._version},
        )
