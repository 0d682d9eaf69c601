"""Sampling from logits, and batches whose rows come and go."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from aworld_runtime.training.sampler.batching import Batcher, Draft, draw
from tests.training.sampling import logprobs_of

VOCABULARY = 64


def drawn(logits: list[float], uniform: float, **settings: float) -> tuple[int, float]:
    tokens, logprobs = draw(
        torch.tensor([logits]),
        temperatures=torch.tensor([settings.get("temperature", 1.0)]),
        top_ps=torch.tensor([settings.get("top_p", 1.0)]),
        uniforms=torch.tensor([uniform], dtype=torch.float64),
    )
    return int(tokens), float(logprobs)


def test_a_uniform_number_picks_by_the_cumulative_distribution() -> None:
    logits = [math.log(each) for each in (0.5, 0.3, 0.2)]
    assert [drawn(logits, u)[0] for u in (0.0, 0.49, 0.51, 0.79, 0.81, 0.999)] == [0, 0, 1, 1, 2, 2]
    assert drawn(logits, 0.6)[1] == pytest.approx(math.log(0.3))


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = [float("-inf"), 0.0, float("-inf")]
    assert [drawn(logits, u)[0] for u in (0.0, 0.5, 1 - 1e-12)] == [1, 1, 1]


def test_temperature_is_part_of_the_logprob() -> None:
    token, logprob = drawn([2.0, 0.0], 0.0, temperature=2.0)
    assert token == 0
    assert logprob == pytest.approx(torch.tensor([1.0, 0.0]).log_softmax(0)[0].item())


def test_temperature_zero_takes_the_likeliest() -> None:
    assert drawn([0.0, 1.0, 0.5], 0.999, temperature=0.0)[0] == 1


def test_top_p_keeps_the_fewest_that_reach_it_and_shares_out_the_rest() -> None:
    logits = [math.log(each) for each in (0.5, 0.3, 0.2)]
    assert {drawn(logits, u / 100, top_p=0.6)[0] for u in range(100)} == {0, 1}
    assert drawn(logits, 0.0, top_p=0.6)[1] == pytest.approx(math.log(0.625))
    assert {drawn(logits, u / 100, top_p=0.45)[0] for u in range(100)} == {0}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)


@pytest.fixture
def batcher(model: Any) -> Iterator[Batcher]:
    batcher = Batcher(model, max_batch=3)
    thread = threading.Thread(target=batcher.run)
    thread.start()
    yield batcher
    batcher.close()
    thread.join()


class Finished:
    """Collects drafts as they finish."""

    def __init__(self) -> None:
        self._counted = threading.Semaphore(0)

    def done(self, _: Draft) -> None:
        self._counted.release()

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self._counted.acquire(timeout=20)


def draft(finished: Finished, prompt: list[int], max_tokens: int, seed: int = 0) -> Draft:
    return Draft(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=1.0,
        top_p=1.0,
        stop_ids=frozenset(),
        generator=torch.Generator().manual_seed(seed),
        done=finished.done,
    )


def test_rows_that_join_and_leave_sample_as_if_alone(model: Any, batcher: Batcher) -> None:
    finished = Finished()
    lengths = [(3, 9), (17, 2), (8, 30), (1, 14), (17, 5), (5, 1), (40, 11), (2, 25)]
    drafts = [
        draft(finished, [(7 * n + i) % VOCABULARY for i in range(size)], wanted, seed=n)
        for n, (size, wanted) in enumerate(lengths)
    ]
    for each in drafts:
        batcher.submit(each)
    finished.wait(len(drafts))
    for each in drafts:
        assert len(each.token_ids) == each.max_tokens
        assert each.finish_reason == "length"
        expected = logprobs_of(model, each.prompt, each.token_ids)
        torch.testing.assert_close(Tensor(each.logprobs), expected, atol=1e-4, rtol=1e-4)

    alone = draft(finished, drafts[2].prompt, 30, seed=2)
    batcher.submit(alone)
    finished.wait(1)
    assert alone.token_ids == drafts[2].token_ids


def test_equal_prompts_share_a_prefill_and_differ_in_what_they_sample(batcher: Batcher) -> None:
    finished = Finished()
    drafts = [draft(finished, [4, 5, 6], 8, seed=seed) for seed in range(3)]
    for each in drafts:
        batcher.submit(each)
    finished.wait(3)
    assert len({tuple(each.token_ids) for each in drafts}) == 3


def test_abort_ends_running_and_waiting_with_what_they_have(batcher: Batcher) -> None:
    finished = Finished()
    drafts = [draft(finished, [seed + 1], 100_000, seed=seed) for seed in range(5)]
    for each in drafts:
        batcher.submit(each)
    quick = draft(finished, [9], 1)
    batcher.call(batcher.abort).result(timeout=20)
    finished.wait(5)
    assert {each.finish_reason for each in drafts} == {"abort"}
    batcher.submit(quick)
    finished.wait(1)
    assert quick.finish_reason == "length"


def test_a_cancelled_draft_makes_room(batcher: Batcher) -> None:
    finished = Finished()
    running = [draft(finished, [seed + 1], 100_000, seed=seed) for seed in range(3)]
    waiting = draft(finished, [9], 2)
    for each in [*running, waiting]:
        batcher.submit(each)
    for each in running:
        each.cancelled = True
    finished.wait(4)
    assert waiting.finish_reason == "length"


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_p": 0.5}])
def test_logits_that_are_no_numbers_give_no_logprob(settings: dict[str, float]) -> None:
    _, logprob = drawn([math.nan] * 3, 0.5, **settings)
    assert math.isnan(logprob)


def test_a_completion_that_cannot_be_sampled_ends_with_an_error_and_no_token(
    batcher: Batcher,
) -> None:
    finished = Finished()
    norm = batcher.model.model.norm.weight
    failing, sound = (draft(finished, [4, 5, 6], 8) for _ in range(2))
    weights = norm.clone()
    batcher.call(lambda: norm.fill_(math.nan)).result(timeout=20)
    batcher.submit(failing)
    finished.wait(1)
    batcher.call(lambda: norm.copy_(weights)).result(timeout=20)
    batcher.submit(sound)
    finished.wait(1)
    assert (failing.finish_reason, failing.token_ids) == ("error", [])
    assert (sound.finish_reason, len(sound.token_ids)) == ("length", 8)


def test_an_error_in_a_call_reaches_its_caller(batcher: Batcher) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        batcher.call(fail).result(timeout=20)
