"""What a learner's numbers are computed with: where it is the same again, so are they, to the last bit."""

# torch annotates itself only in part.
# pyright: reportUnknownMemberType=false

import platform
from functools import cache
from pathlib import Path

import torch
import transformers

from aworld_runtime.training.ranks import Ranks

CPU_INFO = Path("/proc/cpuinfo")


def arithmetic(ranks: Ranks) -> dict[str, str]:
    """Library versions, processor, and in how many parts a sum is taken: threads and ranks."""
    return {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "processor": processor()
        if ranks.device.type == "cpu"
        else torch.cuda.get_device_name(ranks.device),
        "threads": str(torch.get_num_threads()),
        "ranks": str(ranks.world_size),
    }


@cache
def processor() -> str:
    """Its name where the kernel tells it, and the widest instructions that torch uses on it."""
    name = platform.machine()
    if CPU_INFO.is_file():
        lines = CPU_INFO.read_text().splitlines()
        name = next(
            (x.partition(":")[2].strip() for x in lines if x.startswith("model name")), name
        )
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"
