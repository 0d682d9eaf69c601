"""A training step again, from the store alone: batch, advantages, loss and gradient, compared with what was recorded.

    run's log ─▶ batch.formed ─▶ episodes' logs ─▶ rows ─▶ learner ─▶ the step again ─┐
                                                     ▲ weights before the step        ├─▶ compared
    step.finished: fingerprints of the rows, advantages, gradient norms, metrics ─────┘

The weights before a step are those of the newest checkpoint before it, or the model that training began with, and the
recorded batches after that trained again. Nothing is written, published or stored.
"""

# torch annotates itself only in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from anyio.to_thread import run_sync

from aworld_runtime.errors import ConfigError, NotFoundError
from aworld_runtime.store.base import Store
from aworld_runtime.training.learner import Learner
from aworld_runtime.training.recorded_run import RecordedRun, RecordedStep
from aworld_runtime.training.rows import TrainingRow
from aworld_runtime.training.run_folder import RunFolder
from aworld_runtime.training.smollm2 import NAME, resolve_model
from aworld_runtime.training.step_comparison import StepComparison, compare
from aworld_runtime.training.step_record import record_of
from aworld_runtime.training.step_report import StepReport


@dataclass(frozen=True)
class RebuiltStep:
    """A step that was taken again."""

    rows: tuple[TrainingRow, ...]
    advantages: tuple[float, ...]
    """[R] of each row."""
    report: StepReport
    comparison: StepComparison


async def rebuild_step(
    store: Store, run: str, step: int, *, folder: Path | None = None, model: Path | None = None
) -> RebuiltStep:
    """Take step `step` of the training run called `run` again.

        async with open_store("sqlite:///.aworld/aworld.db") as store:
            rebuilt = await rebuild_step(store, "20260101-120000-abc", 3)
        print(rebuilt.comparison.difference, rebuilt.report.loss)

    Args:
        store: an opened store, which is only read.
        run: the run's id.
        step: a finished step; the first is 1.
        folder: the run's folder, if it was moved.
        model: the folder of the model that training began with, if it was moved.

    Raises:
        NotFoundError: something that the step needs isn't there any more; says what.
    """
    recorded = await RecordedRun.read(store, run)
    await recorded.step(store, step)  # what is missing is said before a model is loaded
    replay = await run_sync(lambda: StepReplay(recorded, step, folder=folder, model=model))
    while True:
        rebuilt = await run_sync(replay.take, await recorded.step(store, replay.next))
        if rebuilt.comparison.step == step:
            return rebuilt


class StepReplay:
    """A learner that takes the steps of a run again, in their order; it blocks."""

    def __init__(
        self,
        run: RecordedRun,
        first: int,
        *,
        folder: Path | None = None,
        model: Path | None = None,
    ) -> None:
        """Load the newest weights that lie before step `first`; `next` is the step to begin with."""
        self._run = run
        checkpoint = run.checkpoint_before(first, folder)
        source = _model(run, folder, model)
        self._learner = Learner(source, run.config.learner)
        self._weights = f"the model {source}"
        self._begin = self.next = 1
        if checkpoint is not None:
            number, path = checkpoint
            self._learner.load(path)
            self._weights = f"checkpoint {path}"
            self._begin = self.next = number + 1

    def take(self, recorded: RecordedStep) -> RebuiltStep:
        """Step `next`."""
        step = self.next
        with _threads(recorded.finished.computed_with.get("threads")):
            report = self._learner.step(recorded.rows, policy_version=step - 1)
        self.next = step + 1
        repeated = step - self._begin
        more = f", and {repeated} more step{'s' * (repeated != 1)}" if repeated else ""
        comparison = compare(
            self._run.run_id,
            recorded,
            record_of(step, report, recorded.episodes, recorded.rows),
            config=self._run.config,
            parameters=[name for name, _ in self._learner.named_weights()],
            weights=f"{self._weights}{more}",
        )
        return RebuiltStep(recorded.rows, report.advantages, report, comparison)


def _model(run: RecordedRun, folder: Path | None, given: Path | None) -> Path:
    """The model that training began with: as given, or as the run's folder or its configuration says."""
    name: str | Path = given or run.config.model
    if name != NAME and given is None:
        where = RunFolder(folder or _folder(run))
        name = where.wiring.model if where.started else name
    try:
        return resolve_model(name)
    except ConfigError as error:
        raise NotFoundError(
            f"the model that run {run.run_id} began with is not there: {error}; say with --model where it is"
        ) from error


def _folder(run: RecordedRun) -> Path:
    """Where the run was written."""
    checkpoint = next(iter(run.state.checkpoints.values()), None)
    if checkpoint is not None:
        return Path(checkpoint).parent.parent
    return run.config.out or Path("runs") / run.run_id


@contextmanager
def _threads(recorded: str | None) -> Generator[None]:
    """In as many threads as it was computed then: they cut the sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(recorded or before))
    try:
        yield
    finally:
        torch.set_num_threads(before)
