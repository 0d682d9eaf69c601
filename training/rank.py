"""One rank of the learner, a process of its own: `python -m aworld_runtime.training.rank FOLDER`.

Rank 0 is the trainer as well: what it asks of the learner it first tells the other ranks, over their own collectives,
so that all of them do the same. Several ranks are started by torchrun, which ends all of them when one dies. An error
that would come again ends the run, not only the process: the trainer writes it into the run's log.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from enum import IntEnum
from pathlib import Path

import anyio

from aworld_runtime.archive.logs import OpenedToRead
from aworld_runtime.bus.open import open_bus
from aworld_runtime.cli.health import health_beside
from aworld_runtime.cli.log_lines import set_up_logging
from aworld_runtime.config import RankSettings, Settings
from aworld_runtime.errors import SamplerError, TrainingError, UsageError
from aworld_runtime.messages import ModelSpec
from aworld_runtime.nodes.environment import load_environment
from aworld_runtime.telemetry import about
from aworld_runtime.training.learner import Learner
from aworld_runtime.training.ranks import ALONE, join_ranks
from aworld_runtime.training.rows import TrainingRow, decode_rows, encode_rows
from aworld_runtime.training.run_folder import RunFolder
from aworld_runtime.training.sampler.base import SamplerProcess
from aworld_runtime.training.sampler.of_run import sampler_of_run
from aworld_runtime.training.step_report import StepReport
from aworld_runtime.training.task import find_task
from aworld_runtime.training.trainer import Trainer

logger = logging.getLogger(__name__)


class Order(IntEnum):
    """What rank 0 can ask of the others."""

    STEP = 0
    SAVE = 1
    LOAD = 2
    EXPORT = 3
    STOP = 4


SAMPLER_PATIENCE_S = 600.0
"""How long a publish waits for a sampler that is being started again."""


class AllRanks:
    """The learner as the trainer sees it: every call is made on every rank."""

    def __init__(self, learner: Learner, folder: RunFolder) -> None:
        self._learner = learner
        self._folder = folder

    def step(self, rows: Sequence[TrainingRow], *, policy_version: int) -> StepReport:
        self._tell(Order.STEP, policy_version, encode_rows(rows))
        return self._learner.step(rows, policy_version=policy_version)

    def save(self, policy_version: int) -> Path:
        self._tell(Order.SAVE, policy_version)
        path = save(self._learner, self._folder, policy_version)
        if path is None:
            raise TrainingError("a checkpoint is written by rank 0 only")
        return path

    def load(self, path: Path) -> int:
        self._tell(Order.LOAD, 0, str(path).encode())
        return self._learner.load(path).policy_version

    def export(self, folder: Path) -> None:
        self._tell(Order.EXPORT, 0, str(folder).encode())
        self._learner.export(folder)

    def stop(self) -> None:
        self._tell(Order.STOP, 0)

    def _tell(self, order: Order, number: int, content: bytes = b"") -> None:
        self._learner.ranks.broadcast(b"%d %d " % (order, number) + content)


def follow(learner: Learner, folder: RunFolder) -> None:
    """Be another rank: do what rank 0 does, until it says stop."""
    while True:
        kind, number, content = learner.ranks.broadcast(None).split(b" ", 2)
        if (order := Order(int(kind))) is Order.STOP:
            return
        try:
            obey(learner, folder, order, int(number), content)
        except TrainingError:  # rank 0 has met the same, and says what becomes of it
            logger.exception("order %s", order.name)


def obey(learner: Learner, folder: RunFolder, order: Order, number: int, content: bytes) -> None:
    match order:
        case Order.STEP:
            learner.step(decode_rows(content), policy_version=number)
        case Order.SAVE:
            save(learner, folder, number)
        case Order.LOAD:
            learner.load(Path(content.decode()))
        case Order.EXPORT:
            learner.export(Path(content.decode()))
        case Order.STOP:
            pass


def save(learner: Learner, folder: RunFolder, policy_version: int) -> Path | None:
    return learner.save(
        folder.checkpoints, policy_version=policy_version, keep=folder.config.keep_checkpoints
    )


class SamplerPublisher:
    """Publishes the learner's weights; waits for a sampler that is being started again."""

    def __init__(self, learner: Learner, sampler: SamplerProcess) -> None:
        self._learner = learner
        self._sampler = sampler

    async def publish(self, version: int) -> Sequence[str]:
        """Put the learner's weights in force.

        Raises:
            TrainingError: the sampler stays away.
        """
        with self._patience():
            while True:
                try:
                    await self._sampler.publish(self._learner.named_weights(), version=version)
                except SamplerError as error:
                    logger.warning("publish of version %d: %s; trying again", version, error)
                    await anyio.sleep(1)
                else:
                    return [self._sampler.url]

    async def wait_until_ready(self) -> None:
        """Until the sampler answers; it starts while the learner does.

        Raises:
            TrainingError: it doesn't.
        """
        with self._patience():
            while not await self.versions():  # noqa: ASYNC110 - it is another process
                await anyio.sleep(0.5)

    async def versions(self) -> Sequence[int]:
        try:
            return [(await self._sampler.policy_state()).version]
        except SamplerError:
            return []

    @contextmanager
    def _patience(self) -> Generator[None]:
        with anyio.move_on_after(SAMPLER_PATIENCE_S) as waiting:
            yield
        if waiting.cancelled_caught:
            raise TrainingError(
                f"the sampler at {self._sampler.url} has been away for {SAMPLER_PATIENCE_S:g} s; its log: {self._sampler.log}"
            )


async def train(folder: RunFolder, learner: Learner) -> None:
    """Be the trainer."""
    config, wiring = folder.config, folder.wiring
    task = find_task(config.task)
    sampler = sampler_of_run(folder, wiring)
    model = ModelSpec(
        model=config.policy,
        base_url=f"{sampler.url}/v1",
        policy=config.policy,
        tokenizer=wiring.model,
        max_tokens=task.max_tokens,
        timeout_s=config.episode_timeout_s,
    )
    settings = Settings.from_env()
    async with open_bus(wiring.bus, keys=settings.bus_keys) as bus:
        trainer = Trainer(
            bus=bus,
            store=OpenedToRead(config.store or settings.store),
            run_id=wiring.run_id,
            config=config,
            task=task,
            environment=load_environment(task.environment),
            model=model,
            learner=AllRanks(learner, folder),
            publisher=SamplerPublisher(learner, sampler),
            folder=folder.path,
            code_version=wiring.code_version,
            restore_after_s=settings.restore_after_s,
        )
        await trainer.run()


async def train_or_say_why(folder: RunFolder, learner: Learner) -> None:
    """Be the trainer; what ends the run for good is in its log by now."""
    try:
        await train(folder, learner)
    except* (TrainingError, UsageError):
        logger.exception("the run has stopped")


def answering(folder: RunFolder, rank: int) -> AbstractContextManager[object]:
    """With `/healthz` and `/metrics` of this rank, if they are wanted."""
    config, run_id = folder.config, folder.wiring.run_id
    if not config.health_port:
        return nullcontext()
    address = config.health_host, config.health_port + 1 + rank
    return health_beside(address, lambda: {"status": "ok", "run": run_id, "rank": rank})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = RunFolder.open(parser.parse_args().folder)
    set_up_logging(usual_level="info")
    place = RankSettings.from_env()
    init = f"tcp://{place.master_addr}:{place.master_port}"
    joined = join_ranks(rank=place.rank, world_size=place.world_size, init_method=init)
    with (
        about(run=folder.wiring.run_id),
        answering(folder, place.rank),
        joined if place.world_size > 1 else nullcontext(ALONE) as ranks,
        closing(
            Learner(
                Path(folder.wiring.model),
                folder.config.learner,
                ranks=ranks,
                failures=folder.path / "failures",
            )
        ) as learner,
    ):
        if ranks.first:
            anyio.run(train_or_say_why, folder, learner)
            AllRanks(learner, folder).stop()
        else:
            follow(learner, folder)


if __name__ == "__main__":
    main()
