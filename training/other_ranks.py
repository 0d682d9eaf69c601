"""A learner outside of a run: this process is rank 0, and starts the others itself, which follow it as in a run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from aworld_runtime.errors import TrainingError
from aworld_runtime.processes import HOST, ChildProcess, free_port, spawn
from aworld_runtime.training.config import TrainConfig
from aworld_runtime.training.learner import Learner
from aworld_runtime.training.learner_config import LearnerConfig
from aworld_runtime.training.ranks import ALONE, Ranks, join_ranks
from aworld_runtime.training.run_folder import RunFolder, Wiring

STOP_GRACE_S = 0.5
"""Nothing of theirs is to be kept."""
LAST_WORDS = 5
"""Lines of a log."""


@contextmanager
def learner_of(model: Path, config: LearnerConfig, *, ranks: int) -> Generator[Learner]:
    """A learner that begins with `model`; what it is asked goes to its other ranks too by way of `AllRanks`.

    Raises:
        TrainingError: a rank died.
    """
    with (
        _others(model, config, ranks) if ranks > 1 else nullcontext(ALONE) as joined,
        closing(Learner(model, config, ranks=joined)) as learner,
    ):
        yield learner


@contextmanager
def _others(model: Path, config: LearnerConfig, ranks: int) -> Generator[Ranks]:
    """The ranks from 1 on, each a process; this one's place among them."""
    with TemporaryDirectory(prefix="aworld-ranks-") as place:
        folder = RunFolder.create(Path(place), TrainConfig(learner=config), "ranks", [])
        folder.wiring = Wiring(
            run_id="ranks",
            code_version="",
            bus="",
            model=str(model),
            sampler="transformers",
            sampler_port=0,
        )
        port = free_port()
        children: list[ChildProcess] = []
        try:
            children.extend(_start(folder, rank, ranks, port) for rank in range(1, ranks))
            address = f"tcp://{HOST}:{port}"
            with join_ranks(rank=0, world_size=ranks, init_method=address) as joined:
                yield joined
        except RuntimeError as error:  # of torch, where a rank is gone
            words = "\n".join(child.log_tail(LAST_WORDS) for child in children)
            raise TrainingError(
                f"a rank of the learner died: {error}; their last words:\n{words}"
            ) from error
        finally:
            for child in children:
                asyncio.run(child.stop(grace=STOP_GRACE_S))


def _start(folder: RunFolder, rank: int, ranks: int, port: int) -> ChildProcess:
    environment = {
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{ranks}",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": f"{port}",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    argv = [sys.executable, "-m", "aworld_runtime.training.rank", str(folder.path)]
    log = folder.log / f"rank-{rank}.log"
    return asyncio.run(spawn(argv, log=log, name=f"rank {rank}", env=environment))
