"""Logprobs and entropies of chosen tokens, without ever holding [tokens, vocabulary] for all of them.

The vocabulary's matrix product is done `chunk` tokens at a time and done again in the backward pass, so memory does not
grow with tokens * vocabulary. For logits z = W h, p = softmax(z), target y:

    logprob = z_y - logsumexp(z)          d logprob / dz = onehot(y) - p
    entropy = logsumexp(z) - sum_j p_j z_j    d entropy / dz = -p (log p + entropy)

Softmax and sums are in float32 or wider. In bfloat16 the product's inputs are rounded, its result is not (a logit of 20
rounded to bfloat16 is off by up to 0.06): see `_logits`.
"""

# torch and transformers annotate themselves only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """[U, D] hidden states, [V, D] output weights, [U] targets to [U] logprobs and [U] entropies.

    `dtype` is that of the matrix products' inputs.
    """
    return cast(
        "tuple[Tensor, Tensor]", _TokenLogprobs.apply(hidden, weight, targets, chunk, dtype)
    )


class _TokenLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        ctx.chunk, ctx.dtype = chunk, dtype
        parts = [
            _logprobs_and_entropy(_logits(rows, weight, dtype), wanted)
            for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True)
        ]
        logprobs = torch.cat([logprob for logprob, _ in parts])
        entropies = torch.cat([entropy for _, entropy in parts])
        ctx.save_for_backward(hidden, weight, targets, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, targets, entropies = ctx.saved_tensors
        grad_logprobs, grad_entropies = grads
        narrow = weight.to(ctx.dtype)
        grad_weight = torch.zeros_like(weight)
        grad_hidden = torch.empty_like(hidden)
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            grad_logits = _grad_logits(
                _logits(hidden[part], weight, ctx.dtype),
                targets[part],
                entropies[part],
                grad_logprobs[part],
                grad_entropies[part],
            ).to(ctx.dtype)
            grad_hidden[part] = grad_logits @ narrow
            grad_weight += grad_logits.T @ hidden[part].to(ctx.dtype)
        return grad_hidden, grad_weight, None, None, None


def _logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """[c, D] and [V, D] to [c, V], accumulated and kept in float32 or wider."""
    if dtype in (torch.float32, torch.float64):
        return hidden.to(dtype) @ weight.to(dtype).T
    if hidden.is_cuda:
        return torch.mm(hidden.to(dtype), weight.to(dtype).T, out_dtype=torch.float32)
    matmul: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        return hidden.float() @ weight.float().T
    finally:
        matmul.fp32_precision = before


def _logprobs_and_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = logits.logsumexp(dim=1)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - total
    mean = (torch.exp(logits - total[:, None]) * logits).sum(dim=1)
    return logprobs, total - mean


def _grad_logits(
    logits: Tensor,
    targets: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor,
    grad_entropies: Tensor,
) -> Tensor:
    log_p = logits.log_softmax(dim=1)
    factor = -grad_logprobs[:, None]
    if grad_entropies.any():
        factor = factor - grad_entropies[:, None] * (log_p + entropies[:, None])
    grad = log_p.exp().mul_(factor)
    return grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
