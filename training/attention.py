"""Attention over a `Pack`, plugged into transformers' models by name.

Any model that takes its attention from transformers' registry runs unchanged: Llama, SmolLM2, Qwen, Mistral. What this
layout can't express (a window shorter than the row, sinks, soft caps) is refused, not approximated.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from aworld_runtime.errors import TrainingError
from aworld_runtime.training.packing import Pack

NAME = "aworld_pack"


def pack_attention(
    module: nn.Module,  # noqa: ARG001 - the registry's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the pack says who attends to whom
    *,
    pack: Pack,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[1, H, P, D] queries, [1, H_kv, P, D] keys and values, to [1, P, H, D].

    Query heads that share a key head are laid one after another along the block's queries, so keys are never repeated.
    """
    _refuse_what_a_pack_cannot_express(pack, options)
    heads, kv_heads, width = query.shape[1], key.shape[1], query.shape[3]
    blocks, size = pack.queries.shape
    share = heads // kv_heads
    # [B, S, H, D] -> [B, H_kv, share * S, D]
    queries = _rows(query, pack.queries).view(blocks, size, kv_heads, share, width)
    queries = queries.permute(0, 2, 3, 1, 4).reshape(blocks, kv_heads, share * size, width)
    keys = _rows(key, pack.keys).transpose(1, 2)
    values = _rows(value, pack.keys).transpose(1, 2)
    out = scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=pack.attends.repeat(1, share, 1)[:, None],
        scale=scaling,
    )
    out = out.view(blocks, kv_heads, share, size, width).permute(0, 3, 1, 2, 4)
    return out.reshape(blocks * size, heads, width).index_select(0, pack.outputs)[None], None


def _rows(states: Tensor, index: Tensor) -> Tensor:
    """[1, H, P, D] at the flat positions [B, L], to [B, L, H, D]. The backward of `index_select` is the faster one."""
    picked = states[0].transpose(0, 1).index_select(0, index.flatten())
    return picked.view(*index.shape, *picked.shape[1:])


def _refuse_what_a_pack_cannot_express(pack: Pack, options: dict[str, Any]) -> None:
    window = options.get("sliding_window")
    if window is not None and pack.keys.shape[1] > window:
        raise TrainingError(
            f"a row of {pack.keys.shape[1]} tokens is longer than the model's attention window of "
            f"{window}; shorten the rows"
        )
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise TrainingError(f"the learner's attention doesn't know this model's {name!r}")


AttentionInterface.register(NAME, pack_attention)
