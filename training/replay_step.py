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
from aworld_runtime.training.other_ranks import learner_of
from aworld_runtime.training.rank import AllRanks
from aworld_runtime.training.recorded_run import RecordedRun, RecordedStep, Start
from aworld_runtime.training.rows import TrainingRow
from aworld_runtime.training.run_folder import RunFolder
from aworld_runtime.training.smollm2 import NAME, resolve_model
from aworld_runtime.training.step_comparison import StepComparison, compare
from aworld_runtime.training.step_record import record_of
from aworld_runtime.training.step_report import StepReport, TokenTerms


@dataclass(frozen=True)
class RebuiltStep:
    """A step that was taken again."""

    rows: tuple[TrainingRow, ...]
    advantages: tuple[float, ...]
    """[R] of each row."""
    tokens: tuple[TokenTerms | None, ...]
    """[R] None for a row that was not trained on, as its group had nothing to learn from, or by another rank."""
    report: StepReport
    comparison: StepComparison


async def rebuild_step(
    store: Store,
    run: str,
    step: int,
    *,
    folder: Path | None = None,
    model: Path | None = None,
    ranks: int | None = None,
) -> RebuiltStep:
    """Take step `step` of the training run called `run` again.

        async with open_store("sqlite:///.aworld/aworld.db") as store:
            rebuilt = await rebuild_step(store, "20260101-120000-abc", 3)
        print(rebuilt.report.loss, rebuilt.comparison.first)

    Args:
        store: an opened store, which is only read.
        run: the run's id.
        step: a finished step; the first is 1.
        folder: the run's folder, if it was moved.
        model: the folder of the model that training began with, if it was moved.
        ranks: processes of the learner; as many as then if not given.

    Raises:
        NotFoundError: something that the step needs isn't there any more; says what.
    """
    recorded = await RecordedRun.read(store, run)
    wanted = await recorded.step(store, step)
    start = recorded.start_of(step, folder)
    batches = [await recorded.step(store, number) for number in range(start.after + 1, step)]

    def take() -> RebuiltStep:
        with replaying(recorded, start, folder=folder, model=model, ranks=ranks) as replay:
            for batch in batches:
                replay.take(batch)
            return replay.take(wanted)

    return await run_sync(take)


@contextmanager
def replaying(
    run: RecordedRun,
    start: Start,
    *,
    folder: Path | None = None,
    model: Path | None = None,
    ranks: int | None = None,
) -> Generator[StepReplay]:
    """A learner of the run, at `start`, in as many threads and ranks as it had after that."""
    source = _model(run, folder, model)
    then = run.finished(start.after + 1).computed_with
    threads = torch.get_num_threads()
    config = run.config.learner
    config = config.model_copy(
        update={"threads": int(then.get("threads", config.threads or threads))}
    )
    ranks = ranks or int(then.get("ranks", run.config.learner_ranks))
    try:
        with learner_of(source, config, ranks=ranks) as learner:
            every_rank = AllRanks(learner, RunFolder(folder or run.folder))
            if start.checkpoint is not None:
                every_rank.load(start.checkpoint)
            yield StepReplay(run, learner, every_rank, start.after, start.checkpoint or source)
    finally:
        torch.set_num_threads(threads)


class StepReplay:
    """Takes the steps of a run again, in their order; each blocks."""

    def __init__(
        self, run: RecordedRun, learner: Learner, every_rank: AllRanks, after: int, weights: Path
    ) -> None:
        """The learner has the weights after step `after`, loaded from `weights`; `every_rank` asks all of its ranks."""
        self._run = run
        self._parameters = [name for name, _ in learner.named_weights()]
        self._every_rank = every_rank
        self._tokens: dict[int, TokenTerms] = {}
        """By the row's identity: rows may be equal."""
        learner.watch = lambda row, terms: self._tokens.update({id(row): terms})
        self._begin = after + 1
        self._weights = weights
        self.next = self._begin
        """The step to take next."""

    def take(self, recorded: RecordedStep) -> RebuiltStep:
        """Step `next`."""
        step = self.next
        self._tokens.clear()
        report = self._every_rank.step(recorded.rows, policy_version=step - 1)
        self.next += 1
        repeated = step - self._begin
        more = f", and {repeated} more step{'s' * (repeated != 1)}" if repeated else ""
        comparison = compare(
            self._run.run_id,
            recorded,
            record_of(step, report, recorded.episodes, recorded.rows),
            config=self._run.config,
            parameters=self._parameters,
            weights=f"{self._weights}{more}",
        )
        return RebuiltStep(
            rows=recorded.rows,
            advantages=report.advantages,
            tokens=tuple(self._tokens.get(id(row)) for row in recorded.rows),
            report=report,
            comparison=comparison,
        )


def _model(run: RecordedRun, folder: Path | None, given: Path | None) -> Path:
    """The model that training began with: as given, or as the run's folder or its configuration says."""
    name: str | Path = given or run.config.model
    if name != NAME and given is None:
        where = RunFolder(folder or run.folder)
        name = where.wiring.model if where.started else name
    try:
        return resolve_model(name)
    except ConfigError as error:
        raise NotFoundError(
            f"the model that run {run.run_id} began with is not there: {error}; say with --model where it is"
        ) from error
