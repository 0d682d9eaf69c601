"""The learner's ranks: processes that hold the same weights and average their gradients.

Thin over torch.distributed: gloo on CPU, NCCL on GPU, both by ring all-reduce. A rank is told its number; nothing here
reads the environment. Only plain bytes and numbers travel, never pickles. A dead peer shows as an error of the next
collective within seconds (its connections close), a hung one after `timeout`.
"""

# torch and transformers annotate themselves only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from aworld_runtime.errors import ConfigError, TrainingError

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, at every rank."""
        total = values.to(self.device)
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.cpu()

    def broadcast(self, data: bytes | None = None) -> bytes:
        """Rank 0's `data` at every rank; the others pass nothing."""
        if self.first and data is None:
            raise TrainingError("rank 0 broadcasts, and was given nothing to send")
        if self.world_size == 1 and data is not None:
            return data
        size = torch.tensor(
            [len(data) if self.first and data is not None else 0], device=self.device
        )
        dist.broadcast(size, src=0)
        buffer = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
        if self.first and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()

    def wait(self) -> None:
        """Until every rank is here."""
        self.sum(torch.zeros(1))


ALONE = Ranks()


@contextmanager
def join_ranks(
    *,
    rank: int,
    world_size: int,
    init_method: str,
    timeout_s: float = 600.0,
    backend: Literal["gloo", "nccl"] = "gloo",
) -> Generator[Ranks]:
    """Meet the other ranks at `init_method` (`tcp://host:port` or `file:///path`), and part from them at the end.

    Every rank must arrive, and every collective must end, within `timeout_s`.
    """
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank={rank} is not in 0..{world_size - 1} (world_size={world_size})")
    device = CPU
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise ConfigError("backend='nccl' needs a GPU and there is none; use 'gloo'")
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield Ranks(rank=rank, world_size=world_size, device=device)
    finally:
        dist.destroy_process_group()
