"""Continuous batching over a transformers model: completions join and leave between steps.

    submit ─▶ waiting ─▶ prefill (equal prompts once) ─┐
                                                       ▼
                         running: one token for each, a step at a time ─▶ done(draft)

One thread owns the model. Prompts are padded on the left; attention masks and positions leave the
padding out, so a completion's ids and logprobs don't depend on its neighbors beyond rounding.
"""

# transformers is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

GATHER_SECONDS = 0.004
"""An idle batcher waits this long for companions of the first arrival."""


@dataclass(eq=False)
class Draft:
    """A completion in the making."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    stop_ids: frozenset[int]
    generator: torch.Generator
    """Its own source of randomness, so that a seed means the same in any batch."""
    done: Callable[[Draft], None]
    """Called once, in the batcher's thread, when `finish_reason` is set."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: Literal["stop", "length", "abort", "error"] | None = None
    """`error`: the logits are not finite, as with weights that are not."""
    cancelled: bool = False
    """Set by anyone to end it at the next step."""

    def add(self, token: int, logprob: float) -> None:
        """Take one sampled token; one whose logprob is not a number can't have been sampled."""
        if math.isnan(logprob):
            self.finish_reason = "error"
            return
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_tokens:
            self.finish_reason = "length"


@dataclass
class _Batch:
    """Running drafts, a row each; positions run from the left padding's end."""

    drafts: list[Draft]
    cache: DynamicCache
    mask: Tensor
    """Rows by positions so far: 1 where a token is, 0 where padding is."""
    last: Tensor
    """Each row's newest token, which the cache does not hold yet."""


class Batcher:
    """Owns a model; `run` is its thread."""

    def __init__(self, model: Any, *, max_batch: int) -> None:
        self.model = model
        self._max_batch = max_batch
        self._waiting: deque[Draft] = deque()
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._arrived = threading.Condition()
        self._closing = False
        self._aborting = False
        self._batch: _Batch | None = None

    def submit(self, draft: Draft) -> None:
        """Queue a completion."""
        with self._arrived:
            self._waiting.append(draft)
            self._arrived.notify()

    def abort(self) -> None:
        """End all completions, running and waiting, with what they have."""
        with self._arrived:
            self._aborting = True
            self._arrived.notify()

    def call(self, action: Callable[[], None]) -> Future[None]:
        """Run something between two steps, in the thread that owns the model."""
        future: Future[None] = Future()
        with self._arrived:
            self._calls.append((action, future))
            self._arrived.notify()
        return future

    def close(self) -> None:
        """Let `run` return after the present step."""
        with self._arrived:
            self._closing = True
            self._arrived.notify()

    @torch.inference_mode()
    def run(self) -> None:
        """Sample until closed."""
        while self._wait_for_work():
            for action, future in self._take_calls():
                try:
                    action()
                except Exception as error:  # noqa: BLE001 - it belongs to whoever called
                    future.set_exception(error)
                else:
                    future.set_result(None)
            self._drop_aborted()
            newcomers = self._admit()
            if newcomers:
                self._batch = _joined(self._batch, self._prefill(newcomers))
            elif self._batch is not None:
                self._step(self._batch)
            self._release_finished()

    def _wait_for_work(self) -> bool:
        with self._arrived:
            while not (self._waiting or self._calls or self._closing or self._aborting):
                if self._batch is not None:
                    return True
                self._arrived.wait()
            if self._batch is None and self._waiting and not self._aborting:
                self._arrived.wait(GATHER_SECONDS)
            return not self._closing

    def _take_calls(self) -> list[tuple[Callable[[], None], Future[None]]]:
        with self._arrived:
            calls = list(self._calls)
            self._calls.clear()
            return calls

    def _drop_aborted(self) -> None:
        with self._arrived:
            everyone, self._aborting = self._aborting, False
            waiting = list(self._waiting)
            dropped = [draft for draft in waiting if everyone or draft.cancelled]
            self._waiting = deque(draft for draft in waiting if draft not in dropped)
        for draft in dropped:
            draft.finish_reason = "abort"
            draft.done(draft)
        if self._batch is not None:
            for draft in self._batch.drafts:
                if everyone or draft.cancelled:
                    draft.finish_reason = "abort"
            self._release_finished()

    def _admit(self) -> list[Draft]:
        running = 0 if self._batch is None else len(self._batch.drafts)
        with self._arrived:
            count = min(len(self._waiting), self._max_batch - running)
            return [self._waiting.popleft() for _ in range(count)]

    def _prefill(self, drafts: list[Draft]) -> _Batch:
        prompts = {tuple(draft.prompt): None for draft in drafts}
        index = {prompt: row for row, prompt in enumerate(prompts)}
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(ids, mask, cache)
        rows = torch.tensor([index[tuple(draft.prompt)] for draft in drafts])
        cache.batch_select_indices(rows)
        last = _sample(drafts, logits[rows])
        return _Batch(drafts, cache, mask[rows], last)

    def _step(self, batch: _Batch) -> None:
        batch.mask = pad(batch.mask, (0, 1), value=1)
        logits = self._forward(batch.last[:, None], batch.mask, batch.cache)
        batch.last = _sample(batch.drafts, logits)

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of each row's next token."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()

    def _release_finished(self) -> None:
        batch = self._batch
        if batch is None:
            return
        finished = [draft for draft in batch.drafts if draft.finish_reason is not None]
        if finished:
            self._batch = _kept(batch)
        for draft in finished:
            draft.done(draft)


def _kept(batch: _Batch) -> _Batch | None:
    """The rows that go on, without the padding that only the others needed."""
    rows = [row for row, draft in enumerate(batch.drafts) if draft.finish_reason is None]
    if not rows:
        return None
    index = torch.tensor(rows)
    mask = batch.mask[index]
    start = int(mask.argmax(1).min())
    for layer in _layers(batch.cache):
        layer.keys = layer.keys[index, :, start:]
        layer.values = layer.values[index, :, start:]
    drafts = [batch.drafts[row] for row in rows]
    return _Batch(drafts, batch.cache, mask[:, start:], batch.last[index])


def _joined(batch: _Batch | None, new: _Batch) -> _Batch:
    """Both as one, the shorter padded on the left."""
    if batch is None:
        return new
    width = max(batch.mask.shape[1], new.mask.shape[1])
    for layer, other in zip(_layers(batch.cache), _layers(new.cache), strict=True):
        layer.keys = torch.cat([_widened(layer.keys, width), _widened(other.keys, width)])
        layer.values = torch.cat([_widened(layer.values, width), _widened(other.values, width)])
    masks = [pad(each.mask, (width - each.mask.shape[1], 0)) for each in (batch, new)]
    return _Batch(
        batch.drafts + new.drafts,
        batch.cache,
        torch.cat(masks),
        torch.cat([batch.last, new.last]),
    )


def _layers(cache: DynamicCache) -> Sequence[Any]:
    return cache.layers


def _widened(states: Tensor, width: int) -> Tensor:
    """Keys or values (rows, heads, positions, size) with empty positions on the left."""
    return pad(states, (0, 0, width - states.shape[2], 0))


def _sample(drafts: list[Draft], logits: Tensor) -> Tensor:
    """Give each draft its next token; the tokens of all rows."""
    uniforms = [torch.rand((), generator=draft.generator, dtype=torch.float64) for draft in drafts]
    tokens, logprobs = draw(
        logits,
        temperatures=torch.tensor([draft.temperature for draft in drafts]),
        top_ps=torch.tensor([draft.top_p for draft in drafts]),
        uniforms=torch.stack(uniforms),
    )
    sampled: list[int] = tokens.tolist()
    theirs: list[float] = logprobs.tolist()
    for draft, token, logprob in zip(drafts, sampled, theirs, strict=True):
        draft.add(token, logprob)
    return tokens


def draw(
    logits: Tensor, *, temperatures: Tensor, top_ps: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample a token per row; with each its logprob in the distribution it was drawn from.

    `uniforms` in [0, 1) decide, by the inverse of the cumulative distribution. Temperature 0 takes
    the likeliest token and reports its logprob at temperature 1. A row without finite logits gives logprob NaN.
    """
    greedy = temperatures == 0
    scaled = logits / torch.where(greedy, 1.0, temperatures)[:, None]
    logprobs = scaled.log_softmax(-1)
    if bool((top_ps < 1).any()):
        logprobs = _nucleus(logprobs, top_ps)
    cumulative = logprobs.double().exp().cumsum(-1)
    # Against the total, not 1, so that rounding can't point behind the last token.
    points = (uniforms * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, points, right=True)[:, 0]
    tokens = tokens.clamp(max=logits.shape[1] - 1)  # NaN stands behind the last token
    tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _nucleus(logprobs: Tensor, top_ps: Tensor) -> Tensor:
    """Keep the fewest likeliest tokens that together reach top_p, and share out the rest."""
    ordered, order = logprobs.sort(-1, descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    outside = torch.zeros_like(logprobs, dtype=torch.bool).scatter(
        1, order, before >= top_ps[:, None]
    )
    return logprobs.masked_fill(outside, float("-inf")).log_softmax(-1)
