"""One rank of the two-rank tests: `python learner_rank.py RANK WORLD_SIZE FOLDER MODE`.

FOLDER holds the model, the configuration, and a batch in `CASE.jsonl` for each case.
"""

# torch and transformers annotate themselves only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from aworld_runtime.training.learner import Learner
from aworld_runtime.training.learner_config import LearnerConfig
from aworld_runtime.training.ranks import join_ranks
from aworld_runtime.training.rows import TrainingRow, decode_rows


def two_steps(learner: Learner, rows: Sequence[TrainingRow]) -> dict[str, Tensor]:
    """The losses, the first step's gradient, and the weights after the second."""
    first = learner.step(rows, policy_version=0).loss
    parameters = learner._policy.model.named_parameters()  # pyright: ignore[reportPrivateUsage]
    grads = {f"grad {name}": p.grad.clone() for name, p in parameters if p.grad is not None}
    second = learner.step(rows, policy_version=0).loss
    return {"loss": torch.tensor([first, second]), **grads, **dict(learner.named_weights())}


def main(rank: int, world_size: int, folder: Path, mode: str) -> None:
    torch.set_num_threads(1)
    with join_ranks(
        rank=rank,
        world_size=world_size,
        init_method=f"file://{folder}/meeting",
        timeout_s=300,
    ) as ranks:
        config = LearnerConfig.model_validate_json((folder / "config.json").read_text())
        for case in sorted(folder.glob("*.jsonl")):
            with closing(Learner(folder / "model", config, ranks=ranks)) as learner:
                rows = decode_rows(ranks.broadcast(case.read_bytes() if ranks.first else None))
                if mode == "die" and rank == 1:
                    raise RuntimeError("rank 1 dies before its collective")
                save_file(two_steps(learner, rows), folder / f"{case.stem}-{rank}.safetensors")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
