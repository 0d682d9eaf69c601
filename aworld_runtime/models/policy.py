"""A policy in training, sampled token by exact token.

Speaks the completions API of an inference engine with token ids in and token ids out. What was
sampled and how likely it was comes from the engine and is never tokenized again. Two things happen
to an engine in training that don't happen elsewhere, and are waited out here: its weights change
(it answers 503 while paused, or ends a request with `abort`, and the rest is asked for again), and
it may be restarted.

Tools are called in the Hermes text format. A chat template may describe the tools or not; where it
doesn't, that is the system prompt's job (`hermes.render_tools`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, cast

import httpx2

from aworld_runtime.errors import (
    ConfigError,
    ModelRejectedError,
    ModelTimeoutError,
    ModelUnavailableError,
    TemplateError,
)
from aworld_runtime.messages import (
    Completion,
    FinishReason,
    Message,
    ModelSpec,
    ToolSpec,
    Usage,
    VersionSpan,
)
from aworld_runtime.models import hermes
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.http import (
    Connections,
    TryAgain,
    new_client,
    retry_after,
    shown,
    until_answered,
)
from aworld_runtime.offline import expect_online

PATIENCE_S = 180.0
"""How long a sampler may be away: paused for new weights, or restarting."""
MAX_RESUBMITS = 64
"""How often one completion may be cut by new weights before it counts as failed."""
TOO_MANY = 429
MASKED_LOGPROB = -9000.0
"""vLLM reports minus infinity as -9999: no sampled token has that."""


class Tokenizer(Protocol):
    """What is needed of `tokens.ChatTokenizer`."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def render(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]: ...

    def extend(
        self,
        previous_ids: Sequence[int],
        messages: Sequence[dict[str, Any]],
        *,
        new_from: int,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one request gave."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int | None


@dataclass(slots=True)
class _Sampled:
    """The pieces of one completion, joined."""

    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])

    def add(self, piece: _Piece) -> None:
        start = len(self.token_ids)
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs
        if piece.version is None or not piece.token_ids:
            return
        if self.spans and self.spans[-1].version == piece.version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version=piece.version, start=start, end=len(self.token_ids)))


class PolicyModel:
    """Samples a policy from an engine's `/v1/completions`; a `ChatModel`.

    Raises:
        ConfigError: the spec lacks the engine's address or the tokenizer's folder.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        tokenizer: Tokenizer | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if spec.base_url is None:
            raise ConfigError(f"policy {spec.policy!r}: no base_url of the engine that samples it")
        if tokenizer is None and spec.tokenizer is None:
            raise ConfigError(f"policy {spec.policy!r}: no tokenizer folder")
        self._spec = spec
        self._tokenizer = tokenizer
        self._patience_s = patience_s
        self._url = f"{spec.base_url.rstrip('/')}/completions"
        self._connections = Connections(spec.base_url)

    @property
    def name(self) -> str:
        """Model name, as logged."""
        return self._spec.model

    @property
    def policy(self) -> str | None:
        """Name of the policy."""
        return self._spec.policy

    async def complete(self, request: ModelRequest) -> Completion:
        """Sample one turn.

        Raises:
            ModelRejectedError: the engine refuses the request, or its answer lacks exact tokens.
            ModelUnavailableError: the engine was away for longer than `patience_s`.
            ModelTimeoutError: no whole answer within the spec's `timeout_s`.
        """
        expect_online(f"model {self.name}")
        tokenizer = self._tokenizer = self._tokenizer or _load(self._spec.tokenizer or "")
        prompt = _prompt_ids(tokenizer, request)
        wanted = request.max_tokens or self._spec.max_tokens
        deadline = time.monotonic() + self._spec.timeout_s
        sampled = _Sampled()
        for resubmit in range(MAX_RESUBMITS + 1):
            body = self._body(request, tokenizer, [*prompt, *sampled.token_ids], resubmit)
            body["max_tokens"] = wanted - len(sampled.token_ids)
            piece = await self._sample(body, deadline)
            sampled.add(piece)
            done = len(sampled.token_ids) >= wanted
            if piece.finish_reason != "abort" or done:
                cut = done and piece.finish_reason != "stop"
                return self._completion(tokenizer, prompt, sampled, "length" if cut else "stop")
        raise ModelUnavailableError(
            f"{shown(self._url)}: the completion was cut {MAX_RESUBMITS + 1} times by new weights;"
            " publish less often than a completion takes"
        )

    async def aclose(self) -> None:
        """Release connections."""
        await self._connections.aclose()

    def _body(
        self, request: ModelRequest, tokenizer: Tokenizer, prompt: list[int], resubmit: int
    ) -> dict[str, Any]:
        """No filters: the logprobs must belong to the distribution that was sampled from.

        vLLM takes further ones from the model's folder unless told `--generation-config vllm`.
        """
        temperature = request.temperature
        return {
            "model": self._spec.model,
            "prompt": prompt,
            "temperature": self._spec.temperature if temperature is None else temperature,
            "top_p": 1.0,
            "top_k": -1,
            "seed": None if request.seed is None else request.seed + resubmit,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": sorted(tokenizer.eos_ids),
        }

    async def _sample(self, body: dict[str, Any], deadline: float) -> _Piece:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ModelTimeoutError(
                f"{shown(self._url)}: no whole answer within {self._spec.timeout_s:g} s"
            )

        async def attempt(fresh: bool) -> _Piece:
            if not fresh:
                return self._read(await _post(self._connections.client(), self._url, body), body)
            async with new_client(self._url) as client:
                return self._read(await _post(client, self._url, body), body)

        return await until_answered(
            attempt,
            where=shown(self._url),
            timeout_s=left,
            patience_s=self._patience_s,
            told=logging.DEBUG,  # the engine is paused whenever the policy gets new weights
        )

    def _read(self, response: httpx2.Response, body: dict[str, Any]) -> _Piece:
        """Check the answer: ids and logprobs are the engine's own, one for one.

        Raises:
            ModelRejectedError: they aren't.
        """
        try:
            choice: dict[str, Any] = response.json()["choices"][0]
            details: dict[str, Any] = choice.get("logprobs") or {}
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._refuse(f"no completion but {response.text!r:.200}") from None
        ids: list[int] | None = choice.get("token_ids")
        logprobs: list[float | None] | None = details.get("token_logprobs")
        finish_reason = str(choice.get("finish_reason"))
        if finish_reason == "abort" and not ids:
            ids, logprobs = [], []
        if ids is None:
            raise self._refuse("no token_ids; the engine must know return_token_ids")
        if logprobs is None:
            raise self._refuse("no logprobs.token_logprobs")
        if len(ids) != len(logprobs):
            raise self._refuse(f"{len(ids)} token_ids but {len(logprobs)} logprobs")
        for logprob in logprobs:
            if logprob is None or not math.isfinite(logprob) or logprob < MASKED_LOGPROB:
                raise self._refuse(f"the logprob {logprob} of a sampled token")
        if choice.get("prompt_token_ids") not in (None, body["prompt"]):
            raise self._refuse("other prompt_token_ids than it was sent")
        return _Piece(ids, cast("list[float]", logprobs), finish_reason, self._version(response))

    def _version(self, response: httpx2.Response) -> int | None:
        policy = response.headers.get("x-policy")
        if policy is not None and policy != self._spec.policy:
            raise self._refuse(f"policy {policy!r}, but {self._spec.policy!r} was asked for")
        version = response.headers.get("x-policy-version")
        if version is None:
            return None
        if not version.isdecimal():
            raise self._refuse(f"x-policy-version {version!r}")
        return int(version)

    def _refuse(self, what: str) -> ModelRejectedError:
        return ModelRejectedError(f"{shown(self._url)} answered with {what}")

    def _completion(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        sampled: _Sampled,
        finish_reason: FinishReason,
    ) -> Completion:
        text = tokenizer.decode(sampled.token_ids)
        # The prompt grows from turn to turn, so its length tells the turns' calls apart.
        text, calls = hermes.parse(text, id_prefix=f"call_{len(prompt)}_")
        return Completion(
            text=text,
            tool_calls=calls,
            finish_reason="tool_calls" if calls and finish_reason == "stop" else finish_reason,
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(sampled.token_ids)),
            prompt_token_ids=tuple(prompt),
            token_ids=tuple(sampled.token_ids),
            behavior_logprobs=tuple(sampled.logprobs),
            policy=self._spec.policy,
            version_spans=tuple(sampled.spans),
        )


@lru_cache(maxsize=8)
def _load(folder: str) -> Tokenizer:
    """Shared by all models of the process: it holds no state."""
    from aworld_runtime.models.tokens import ChatTokenizer

    return ChatTokenizer(folder)


def _prompt_ids(tokenizer: Tokenizer, request: ModelRequest) -> list[int]:
    """Previous ids and the new messages' tokens; rendered anew where the template allows no more."""
    messages = [_chat(message) for message in request.messages]
    tools = [_function(spec) for spec in request.tools] or None
    try:
        if request.previous_ids:
            try:
                return tokenizer.extend(
                    request.previous_ids, messages, new_from=request.new_from, tools=tools
                )
            except TemplateError:
                pass  # a new training row starts here; the rate of these is a metric
        return tokenizer.render(messages, tools=tools)
    except TemplateError as error:
        raise ModelRejectedError(str(error)) from error


def _chat(message: Message) -> dict[str, Any]:
    """As templates take it. Calls are part of the text: that is how they were sampled."""
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "assistant":
        chat["content"] = hermes.write(message)
    if message.role == "tool" and message.name:
        chat["name"] = message.name
    return chat


def _function(spec: ToolSpec) -> dict[str, Any]:
    return {"type": "function", "function": spec.model_dump(mode="json")}


async def _post(client: httpx2.AsyncClient, url: str, body: dict[str, Any]) -> httpx2.Response:
    try:
        response = await client.post(url, json=body)
    except httpx2.TransportError as error:
        raise TryAgain(f"{type(error).__name__} {error}".strip(), broken=True) from error
    if response.is_success:
        return response
    reason = f"HTTP {response.status_code} {response.text:.300}"
    if response.status_code == TOO_MANY or response.is_server_error:
        raise TryAgain(reason, after=retry_after(response.headers))
    raise ModelRejectedError(f"{shown(url)}: {reason}")
