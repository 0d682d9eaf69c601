"""The OpenAI-shaped completions API over a `Batcher`: token ids in, token ids and logprobs out.

Replies have vLLM's shape, so a client needn't know which sampler it talks to. Parameters that are
not honored are refused.
"""

# transformers is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path
from typing import Any, Literal

import anyio
import torch
from anyio.to_thread import run_sync
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from aworld_runtime import telemetry
from aworld_runtime.cli.health import metrics_answer
from aworld_runtime.errors import SamplerError
from aworld_runtime.models.tokens import ChatTokenizer
from aworld_runtime.training.sampler.batching import Batcher, Draft
from aworld_runtime.training.sampler.gate import App, Engine, PolicyGate, Scope
from aworld_runtime.training.sampler.transfer import Rendezvous, TensorInfo, WeightGroup


class CompletionRequest(BaseModel):
    """What `/v1/completions` understands."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: list[int] | str = Field(min_length=1)
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: Literal[-1, 0] = -1
    n: int = Field(default=1, ge=1, le=128)
    seed: int | None = None
    stop_token_ids: list[int] = Field(default_factory=list[int])
    ignore_eos: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=1)
    return_token_ids: bool = False
    stream: Literal[False] = False


def build(
    model: Path, *, policy: str, dtype: torch.dtype, max_model_len: int, max_batch: int
) -> tuple[App, Batcher]:
    """The ASGI app of a model folder, and the batcher whose `run` needs a thread."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    network.eval().requires_grad_(requires_grad=False)
    kinds = {type(layer) for layer in DynamicCache(config=network.config).layers}
    if kinds - {DynamicLayer}:
        raise SamplerError(
            f"{model}: the transformers sampler serves models with full attention only, "
            f"this one has {sorted(kind.__name__ for kind in kinds)}: use vLLM"
        )
    batcher = Batcher(network, max_batch=max_batch)
    api = CompletionsApi(batcher, ChatTokenizer(model), policy=policy, max_model_len=max_model_len)
    app = Starlette(
        routes=[
            Route("/health", api.health),
            Route("/metrics", api.metrics),
            Route("/v1/models", api.models),
            Route("/v1/completions", api.completions, methods=["POST"]),
        ]
    )
    return TransformersGate(app, TransformersEngine(batcher, policy)), batcher


class CompletionsApi:
    """The routes."""

    def __init__(
        self, batcher: Batcher, tokenizer: ChatTokenizer, *, policy: str, max_model_len: int
    ) -> None:
        self._batcher = batcher
        self._tokenizer = tokenizer
        self._policy = policy
        self._max_model_len = max_model_len
        self._random = torch.Generator()
        self._random.seed()

    async def health(self, _: Request) -> Response:
        """Alive."""
        return Response()

    async def metrics(self, _: Request) -> Response:
        """For Prometheus."""
        status, kind, content = metrics_answer()
        return Response(content, status, media_type=kind)

    async def models(self, _: Request) -> Response:
        """The one model."""
        model = {
            "id": self._policy,
            "object": "model",
            "owned_by": "aworld",
            "max_model_len": self._max_model_len,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        """Sample `n` completions of one prompt."""
        try:
            order = CompletionRequest.model_validate_json(await request.body())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            return _refusal(400, f"{where}: {first['msg']}")
        if order.model not in (None, self._policy):
            return _refusal(404, f"no model {order.model!r} here, only {self._policy!r}")
        prompt = order.prompt
        if isinstance(prompt, str):
            prompt = self._tokenizer.encode(prompt)
        if len(prompt) + order.max_tokens > self._max_model_len:
            return _refusal(
                400,
                f"{len(prompt)} prompt tokens and max_tokens={order.max_tokens} are more than "
                f"this model's {self._max_model_len}",
            )
        drafts = await self._sample(request, order, prompt)
        if any(draft.finish_reason == "error" for draft in drafts):
            return _refusal(422, "the model's logits are not finite: no token can be sampled")
        return JSONResponse(self._reply(order, drafts))

    async def _sample(
        self, request: Request, order: CompletionRequest, prompt: list[int]
    ) -> list[Draft]:
        """Finished drafts; cancelled if the client goes away."""
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()
        left = order.n

        def count_down() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                finished.set()

        def done(_: Draft) -> None:
            loop.call_soon_threadsafe(count_down)

        eos_ids = frozenset[int]() if order.ignore_eos else self._tokenizer.eos_ids
        drafts = [
            Draft(
                prompt=prompt,
                max_tokens=order.max_tokens,
                temperature=order.temperature,
                top_p=order.top_p,
                stop_ids=eos_ids | frozenset(order.stop_token_ids),
                generator=self._generator(order.seed, index),
                done=done,
            )
            for index in range(order.n)
        ]

        async def watch_client() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                continue
            for draft in drafts:
                draft.cancelled = True

        telemetry.SAMPLING.add(order.n)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(watch_client)
                for draft in drafts:
                    self._batcher.submit(draft)
                await finished.wait()
                group.cancel_scope.cancel()
        finally:
            telemetry.SAMPLING.add(-order.n)
            telemetry.SAMPLED_TOKENS.add(sum(len(draft.token_ids) for draft in drafts))
        return drafts

    def _generator(self, seed: int | None, index: int) -> torch.Generator:
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._random))
        # Distinct for each choice of each seed, unlike their sum.
        return torch.Generator().manual_seed(hash((seed, index)))

    def _reply(self, order: CompletionRequest, drafts: list[Draft]) -> dict[str, Any]:
        sampled = sum(len(draft.token_ids) for draft in drafts)
        prompt = len(drafts[0].prompt)
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._policy,
            "choices": [self._choice(order, *each) for each in enumerate(drafts)],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": sampled,
                "total_tokens": prompt + sampled,
            },
        }

    def _choice(self, order: CompletionRequest, index: int, draft: Draft) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": self._tokenizer.decode(draft.token_ids),
            "finish_reason": draft.finish_reason,
            "logprobs": None,
        }
        if order.logprobs is not None:
            tokens = [self._tokenizer.decode([token]) for token in draft.token_ids]
            choice["logprobs"] = {"tokens": tokens, "token_logprobs": draft.logprobs}
        if order.return_token_ids:
            choice["token_ids"] = draft.token_ids
            choice["prompt_token_ids"] = draft.prompt
        return choice


class TransformersEngine:
    """The batcher, as the gate sees it."""

    ranks = 1

    def __init__(self, batcher: Batcher, policy: str) -> None:
        self.policy = policy
        self._batcher = batcher
        self._rendezvous: Rendezvous | None = None
        self._group: WeightGroup | None = None

    async def abort(self) -> None:
        """End all drafts."""
        self._batcher.abort()

    async def load(self, rendezvous: Rendezvous, tensors: list[TensorInfo]) -> None:
        """Receive into the model, between two steps."""

        def receive() -> None:
            self._receive(rendezvous, tensors)

        await run_sync(self._batcher.call(receive).result)

    async def resume(self) -> None:
        """Nothing was paused: the gate kept new requests out."""

    def _receive(self, rendezvous: Rendezvous, tensors: list[TensorInfo]) -> None:
        if self._group is None or rendezvous != self._rendezvous:
            self._group = WeightGroup.join(rendezvous, rank=1)
            self._rendezvous = rendezvous
        parameters = dict(self._batcher.model.named_parameters())
        missing = parameters.keys() - {info["name"] for info in tensors}
        if missing:
            raise ValueError(f"no weights for {min(missing)} and {len(missing) - 1} more")
        try:
            for name, tensor in self._group.receive(tensors):
                if name in parameters:  # a tied one comes under its other name too
                    parameters[name].copy_(tensor)
        except BaseException:
            self._group = None
            raise


class TransformersGate(PolicyGate):
    """The gate in front of this server."""

    def __init__(self, app: App, engine: TransformersEngine) -> None:
        super().__init__(app)
        self._engine = engine

    def engine(self, scope: Scope) -> Engine:
        """The only one."""
        del scope
        return self._engine


def _refusal(status: int, message: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "code": status}
    return JSONResponse({"error": error}, status)
