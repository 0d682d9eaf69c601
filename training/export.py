"""A model folder that transformers and vLLM load: weights, configuration, and the source model's tokenizer."""

# torch and transformers annotate themselves only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

CARRIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
"""Files of the source folder that belong to the tokenizer or to sampling, not to the weights."""


def export_model(
    path: Path,
    weights: Iterable[tuple[str, Tensor]],
    config: PreTrainedConfig,
    source: Path,
    dtype: torch.dtype,
) -> None:
    """Write `weights` in `dtype`, under their Hugging Face names, with what else the folder needs."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in weights}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    written = type(config).from_dict(config.to_dict())
    written.dtype = dtype
    written.save_pretrained(path)
    # safetensors lets nobody else read what it writes, whatever the umask says.
    shutil.copymode(path / "config.json", path / "model.safetensors")
    for pattern in CARRIED:
        for file in source.glob(pattern):
            if file.is_file() and path != source:
                shutil.copyfile(file, path / file.name)
