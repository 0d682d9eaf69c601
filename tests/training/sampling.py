"""A small client of a sampler's HTTP API, and the numbers it should give: for the samplers' tests."""

# transformers is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.parse import urlsplit

import anyio
import torch
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """One completion."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str


@dataclass(frozen=True)
class Reply:
    """What `/v1/completions` answered."""

    choices: list[Choice]
    policy: str | None
    version: int
    prompt_token_ids: list[int]


class Refused(Exception):
    """An answer that isn't 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def post(url: str, path: str, body: object) -> tuple[dict[str, Any], dict[str, str]]:
    """One request on a connection of its own, closed on cancellation: the answer, the headers."""
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    received = b""
    async with await anyio.connect_tcp(str(parts.hostname), int(parts.port or 80)) as stream:
        await stream.send(head.encode() + content)
        async for chunk in stream:
            received += chunk
    top, _, text = received.partition(b"\r\n\r\n")
    status, *lines = top.decode().split("\r\n")
    answer = json.loads(text)
    if status.split()[1] != "200":
        raise Refused(int(status.split()[1]), answer["error"]["message"])
    return answer, {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}


async def complete(url: str, prompt: list[int], **parameters: Any) -> Reply:
    """Sample completions of a prompt."""
    body = {"model": "policy", "prompt": prompt, "logprobs": 0, "return_token_ids": True}
    answer, headers = await post(url, "/v1/completions", body | parameters)
    choices = [
        Choice(
            token_ids=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            finish_reason=choice["finish_reason"],
            text=choice["text"],
        )
        for choice in answer["choices"]
    ]
    return Reply(
        choices=choices,
        policy=headers.get("x-policy"),
        version=int(headers["x-policy-version"]),
        prompt_token_ids=answer["choices"][0]["prompt_token_ids"],
    )


async def complete_through_publishes(
    url: str, prompt: list[int], *, max_tokens: int, **parameters: Any
) -> tuple[Choice, list[int]]:
    """One completion, sent again with its partial output after each abort; each token's version."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    while True:
        left = max_tokens - len(token_ids)
        reply = await complete(url, prompt + token_ids, max_tokens=left, **parameters)
        [part] = reply.choices
        token_ids += part.token_ids
        logprobs += part.logprobs
        versions += [reply.version] * len(part.token_ids)
        if part.finish_reason != "abort":
            return Choice(token_ids, logprobs, part.finish_reason, ""), versions


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The model, to compare with."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@torch.no_grad()
def changed(model: Any, *, seed: int, scale: float = 0.03) -> Any:
    """The same model with every weight moved, row by row: as a trained one, only more so."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.mul_(
            1
            + scale
            * torch.randn(len(parameter), generator=generator).view(
                -1, *[1] * (parameter.dim() - 1)
            )
        )
    return model


@torch.no_grad()
def next_token_logits(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """Logits that predict each token of the completion."""
    ids = torch.tensor([prompt + completion])
    return model(ids).logits[0, len(prompt) - 1 : -1].float()


def logprobs_of(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """The completion's logprobs at temperature 1."""
    logprobs = next_token_logits(model, prompt, completion).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0]


def gaps(model: Any, prompt: list[int], choice: Choice) -> list[float]:
    """Each token's absolute difference between a sampler's logprob and the model's own."""
    if not choice.token_ids:
        return []
    expected = logprobs_of(model, prompt, choice.token_ids)
    return (torch.tensor(choice.logprobs) - expected).abs().tolist()


def gap(model: Any, prompt: list[int], choice: Choice) -> float:
    """The mean of `gaps`."""
    return fmean(gaps(model, prompt, choice))
