"""A training run as the store has it: its log, and each step's batch made again from the logs of its episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pydantic import ValidationError

from aworld_runtime.bus.base import read_all
from aworld_runtime.errors import NotFoundError, UsageError
from aworld_runtime.events import EpisodeRequested, Event, GroupCompleted, RunStarted, StepFinished
from aworld_runtime.names import episode_log, run_log
from aworld_runtime.store.base import RolloutRow, Store
from aworld_runtime.training.config import TrainConfig
from aworld_runtime.training.projection import rows_of
from aworld_runtime.training.rows import TrainingRow, fingerprint, row_ids
from aworld_runtime.training.run_state import RunState
from aworld_runtime.training.task import find_task
from aworld_runtime.trajectory import Episode, episode_of


@dataclass(frozen=True)
class RecordedStep:
    """One finished step."""

    finished: StepFinished
    groups: tuple[GroupCompleted, ...]
    """Of its batch, in order, with the rewards that the trainer saw."""
    episodes: tuple[Episode, ...]
    rows: tuple[TrainingRow, ...]
    """By the same projection as the trainer's."""
    code_version: str
    """Of the workers and of the trainer."""
    stored: int = 0
    """How many of the rows are in the rollouts collection, which is written at a run's end."""
    stored_otherwise: Mapping[int, TrainingRow] = field(default_factory=dict[int, TrainingRow])
    """Those that are others there, by their place in `rows`."""


@dataclass(frozen=True, slots=True)
class Start:
    """Weights from which steps can be taken again."""

    after: int
    """The step that they are those after."""
    checkpoint: Path | None
    """None: the model that training began with."""


class RecordedRun:
    """Its log, read once."""

    def __init__(self, run_id: str, config: TrainConfig, state: RunState) -> None:
        self.run_id = run_id
        self.config = config
        """As the run began with it."""
        self.state = state
        self._fingerprints: dict[str, str] | None = None
        """Of the rollouts collection, by row."""

    @classmethod
    async def read(cls, store: Store, run_id: str) -> Self:
        """The run called `run_id`.

        Raises:
            NotFoundError: the store has no such run.
            UsageError: it is no training, or one of another version of this product.
        """
        events = await read_all(store, run_log(run_id))
        started = next((e.data for e in events if isinstance(e.data, RunStarted)), None)
        if started is None:
            raise NotFoundError(f"no run {run_id!r} in {store.url}; list them with: aworld runs")
        if started.kind != "train":
            raise UsageError(f"run {run_id} is no training but {started.kind!r}: it has no steps")
        try:
            config = TrainConfig.model_validate(started.config)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in fault["loc"])
            raise UsageError(
                f"run {run_id}: its configuration is of another version: {where}: {fault['msg']}"
            ) from error
        return cls(run_id, config, RunState.of(events))

    @property
    def last(self) -> int:
        """The newest finished step.

        Raises:
            NotFoundError: there is none.
        """
        if not self.state.steps:
            raise NotFoundError(f"run {self.run_id} has finished no step yet")
        return max(self.state.steps)

    @property
    def folder(self) -> Path:
        """Where it was written."""
        for path in self.state.checkpoints.values():
            return Path(path).parent.parent
        return self.config.out or Path("runs") / self.run_id

    def start_of(self, step: int, folder: Path | None) -> Start:
        """The newest weights before `step` that are still there; `folder` is the run's, if it was moved."""
        for number in sorted(self.state.checkpoints, reverse=True):
            path = Path(self.state.checkpoints[number])
            path = path if folder is None else folder / path.parent.name / path.name
            if number < step and path.is_dir():
                return Start(number, path)
        return Start(0, None)

    def finished(self, number: int) -> StepFinished:
        """What its end says.

        Raises:
            NotFoundError: it is not in the log, or not finished.
        """
        if number in self.state.steps:
            return self.state.steps[number]
        if number in self.state.batches:
            raise NotFoundError(
                f"step {number} of run {self.run_id} is not finished: its batch was formed, and no step.finished follows"
            )
        raise NotFoundError(f"run {self.run_id} has no step {number}; its last is {self.last}")

    async def step(self, store: Store, number: int) -> RecordedStep:
        """One step and its batch.

        Raises:
            NotFoundError: it is not in the log, or not finished, or an episode of its batch is not in the store.
            TrainingError: an episode can't be trained on, as the store has it.
        """
        finished = self.finished(number)
        groups = tuple(
            done
            for name in self.state.batches[number].group_ids
            if (done := self.state.groups[name].completed)
        )
        names = [episode for group in groups for episode in group.episodes]
        logs = [await self._episode_log(store, name, number) for name in names]
        request = logs[0][0].data if logs else None
        asked = request if isinstance(request, EpisodeRequested) else None
        # Trained roles were given the policy as their model, unless the program has it already.
        roles = tuple(asked.models) if asked else ()
        roles = roles or find_task(self.config.task).roles
        episodes = tuple(episode_of(log) for log in logs)
        rows = tuple(row for episode in episodes for row in rows_of(episode, roles))
        stored, otherwise = await self._rollouts(store, rows)
        return RecordedStep(
            finished=finished,
            groups=groups,
            episodes=episodes,
            rows=rows,
            code_version=asked.code_version if asked else "",
            stored=stored,
            stored_otherwise=otherwise,
        )

    async def _episode_log(self, store: Store, episode: str, step: int) -> list[Event]:
        events = await read_all(store, episode_log(episode))
        if not events or events[0].seq != 1:
            raise NotFoundError(
                f"step {step} of run {self.run_id}: episode {episode} of its batch is not in {store.url}"
            )
        return events

    async def _rollouts(
        self, store: Store, rows: Sequence[TrainingRow]
    ) -> tuple[int, Mapping[int, TrainingRow]]:
        """How many of `rows` are stored, and those that are stored otherwise."""
        if self._fingerprints is None:  # all of the run's rows at once, of which only this is kept
            self._fingerprints = {
                row.id: fingerprint(_row(row)) async for row in store.rollouts(self.run_id)
            }
        ids = row_ids(rows)
        there = [self._fingerprints.get(name) for name in ids]
        others = {
            name: index
            for index, (name, found) in enumerate(zip(ids, there, strict=True))
            if found not in (None, fingerprint(rows[index]))
        }
        found: dict[int, TrainingRow] = {}
        if others:
            async for row in store.rollouts(self.run_id):
                if row.id in others:
                    found[others[row.id]] = _row(row)
        return len(rows) - there.count(None), found


def _row(stored: RolloutRow) -> TrainingRow:
    return TrainingRow(
        rollout_id=f"{stored.episode_id}/{stored.role}",
        group_id=stored.group_id,
        role=stored.role,
        token_ids=stored.token_ids,
        loss_mask=stored.loss_mask,
        behavior_logprobs=stored.behavior_logprobs,
        policy=stored.policy,
        policy_version=stored.policy_version,
        reward=stored.reward,
        weight=stored.weight,
    )
