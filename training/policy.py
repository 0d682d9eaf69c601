"""The policy as the learner sees it: a Hugging Face causal language model that gives logprobs of a pack's trained tokens."""

# torch and transformers annotate themselves only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from aworld_runtime.errors import TrainingError
from aworld_runtime.training import attention
from aworld_runtime.training.logprobs import token_logprobs
from aworld_runtime.training.packing import Pack


class PolicyModel(nn.Module):
    """Wraps the model so that one call, the one that DDP sees, ends in logprobs."""

    def __init__(self, model: PreTrainedModel, *, dtype: torch.dtype, logits_chunk: int) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.logits_chunk = logits_chunk

    def forward(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """[U] logprobs and [U] entropies of the pack's (prefix, token) pairs."""
        device_type = pack.input_ids.device.type
        with torch.autocast(device_type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            decoder = cast("nn.Module", self.model.get_decoder())
            hidden: Tensor = decoder(
                input_ids=pack.input_ids,
                position_ids=pack.position_ids,
                use_cache=False,
                pack=pack,
            ).last_hidden_state
        return token_logprobs(
            hidden[0][pack.predictors],
            cast("nn.Linear", self.model.get_output_embeddings()).weight,
            pack.targets,
            chunk=self.logits_chunk,
            dtype=self.dtype,
        )


def load_model(path: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a Hugging Face folder, without dropout, with attention over packs."""
    if not (path / "config.json").is_file():
        raise TrainingError(f"{path} is no model folder: it has no config.json")
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=dtype, attn_implementation=attention.NAME
    )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model
