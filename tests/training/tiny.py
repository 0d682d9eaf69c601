"""A tiny random Llama and batches for it, which the learner's tests and their rank processes share."""

import math
import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aworld_runtime.training.rows import TrainingRow

VOCABULARY = 97


def save_tiny_model(path: Path) -> Path:
    """Two layers, grouped heads, tied embeddings: what SmolLM2 has, in small."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def make_rows(
    groups: int = 3, size: int = 4, *, seed: int = 1, version: int = 0
) -> list[TrainingRow]:
    """Groups that share a system text and each a question; two sampled turns with a tool's reply between them."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCABULARY) for _ in range(count))

    system, rows = tokens(70), list[TrainingRow]()
    for group in range(groups):
        question = tokens(5 + group)
        for index in range(size):
            parts = [
                (False, system + question),
                (True, tokens(draw.randint(3, 9))),
                (False, tokens(4)),
                (True, tokens(draw.randint(1, 6))),
                (False, tokens(draw.randint(0, 2))),
            ]
            loss_mask = tuple(trained for trained, part in parts for _ in part)
            rows.append(
                TrainingRow(
                    rollout_id=f"episode-{group}-{index}/solver",
                    group_id=f"group-{group}",
                    role="solver",
                    token_ids=tuple(token for _, part in parts for token in part),
                    loss_mask=loss_mask,
                    behavior_logprobs=tuple(
                        draw.uniform(-6.0, -2.0) if trained else math.nan for trained in loss_mask
                    ),
                    policy="policy",
                    policy_version=version,
                    reward=float((index + group) % 3),
                )
            )
    return rows
