"""What every sampler promises, on each of them: exact ids and logprobs, and one version a completion."""

# transformers is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import anyio
import pytest
import torch

from aworld_runtime.errors import SamplerError
from aworld_runtime.models.tokens import ChatTokenizer
from aworld_runtime.runtime import run_sync
from aworld_runtime.training.sampler import (
    PolicyState,
    SamplerProcess,
    SamplerSettings,
    choose_sampler,
)
from aworld_runtime.training.smollm2 import resolve_model
from tests.training.sampling import (
    Choice,
    Refused,
    Reply,
    changed,
    complete,
    complete_through_publishes,
    gap,
    gaps,
    load,
    next_token_logits,
    post,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

SETTINGS = SamplerSettings(host="127.0.0.2", max_model_len=1024, kv_cache_gb=1, publish_deadline=30)
QUESTIONS = [
    "What is 47 + 38?",
    "Tell me a story about a fox, a crow and a piece of cheese, please.",
    "Why is the sky blue?",
    "Name three colors.",
]
EOS = 2
MOVED_GAP = 0.08
"""Logprobs in bfloat16 against float32, of weights that were moved by chance: rounder than a trained model's 0.05."""
MANY = 100


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return resolve_model()


@pytest.fixture(scope="session")
def prompts(model_folder: Path) -> list[list[int]]:
    tokenizer = ChatTokenizer(model_folder)
    return [tokenizer.render([{"role": "user", "content": text}]) for text in QUESTIONS]


@pytest.fixture(
    scope="session",
    params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)],
)
def sampler(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SamplerProcess]:
    """Started once: what it samples is up to each test, which publishes what it needs."""
    if request.param == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    kind, _ = choose_sampler(request.param, SETTINGS)
    log = tmp_path_factory.mktemp("sampler") / f"{request.param}.log"
    sampler = kind(model_folder, log=log, settings=SETTINGS)
    run_sync(sampler.start)
    yield sampler
    run_sync(sampler.stop)


@pytest.fixture(scope="session")
def versions() -> Iterator[int]:
    """Version numbers that no test shares with another."""
    return itertools.count(1)


@pytest.fixture(scope="session")
def original(model_folder: Path) -> Any:
    return load(model_folder)


@pytest.fixture(scope="session")
def other(model_folder: Path) -> Any:
    """A model of the same shape with other weights."""
    return changed(load(model_folder), seed=5)


@pytest.fixture
async def serving(sampler: SamplerProcess, original: Any, versions: Iterator[int]) -> PolicyState:
    """The original weights, published."""
    version = next(versions)
    await sampler.publish(original.named_parameters(), version=version)
    return await sampler.health()


async def complete_all(
    sampler: SamplerProcess, prompts: list[list[int]], **parameters: Any
) -> list[Reply]:
    """All at once."""
    replies: dict[int, Reply] = {}

    async def one(index: int) -> None:
        replies[index] = await complete(sampler.url, prompts[index], **parameters)

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
    return [replies[index] for index in range(len(prompts))]


async def test_a_completion_carries_ids_logprobs_and_version(
    sampler: SamplerProcess, serving: PolicyState, prompts: list[list[int]]
) -> None:
    reply = await complete(sampler.url, prompts[0], max_tokens=12, ignore_eos=True)
    [choice] = reply.choices
    assert reply.prompt_token_ids == prompts[0]
    assert (reply.policy, reply.version) == ("policy", serving.version)
    assert len(choice.token_ids) == len(choice.logprobs) == 12
    assert all(logprob <= 0 for logprob in choice.logprobs)
    assert choice.finish_reason == "length"


async def test_logprobs_of_a_mixed_batch_agree_with_the_model(
    sampler: SamplerProcess, serving: PolicyState, prompts: list[list[int]], original: Any
) -> None:
    replies = await complete_all(sampler, prompts, max_tokens=24, seed=0)
    pairs = zip(prompts, replies, strict=True)
    found = [gap(original, prompt, reply.choices[0]) for prompt, reply in pairs]
    assert fmean(found) < 0.05, found


async def test_logprobs_belong_to_the_distribution_that_was_sampled(
    sampler: SamplerProcess, serving: PolicyState, prompts: list[list[int]], original: Any
) -> None:
    reply = await complete(
        sampler.url, prompts[1], max_tokens=32, temperature=0.7, top_p=0.8, ignore_eos=True
    )
    [choice] = reply.choices
    logits = next_token_logits(original, prompts[1], choice.token_ids) / 0.7
    probabilities, order = logits.softmax(-1).sort(-1, descending=True)
    outside = probabilities.cumsum(-1) - probabilities >= 0.8
    inside = probabilities.masked_fill(outside, 0.0)
    inside /= inside.sum(-1, keepdim=True)
    expected = torch.zeros_like(inside).scatter(1, order, inside)
    ours = expected.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0].log()
    kept = ours.isfinite()  # rounding may move a token over the edge of the nucleus
    assert kept.float().mean() > 0.9
    assert (torch.tensor(choice.logprobs) - ours)[kept].abs().mean() < 0.1


async def test_a_seed_repeats_and_choices_differ(
    sampler: SamplerProcess, serving: PolicyState, prompts: list[list[int]]
) -> None:
    # One at a time and the prompt known: in other company the same numbers are rounded otherwise.
    warm, first, again = [
        (await complete(sampler.url, prompts[2], max_tokens=6, seed=11)).choices[0]
        for _ in range(3)
    ]
    assert first.token_ids == again.token_ids
    several = await complete(sampler.url, prompts[2], max_tokens=6, n=4, seed=11)
    assert len({tuple(choice.token_ids) for choice in [warm, *several.choices]}) > 1


async def test_the_end_of_turn_is_a_sampled_token(
    sampler: SamplerProcess, serving: PolicyState, prompts: list[list[int]]
) -> None:
    reply = await complete(sampler.url, prompts[3], max_tokens=200, temperature=0)
    [choice] = reply.choices
    assert choice.finish_reason == "stop"
    assert choice.token_ids[-1] == EOS
    assert len(choice.logprobs) == len(choice.token_ids)
    assert "<|im_end|>" not in choice.text


async def test_a_stop_token_of_the_request_ends_it(
    sampler: SamplerProcess, serving: PolicyState, prompts: list[list[int]]
) -> None:
    whole = await complete(sampler.url, prompts[3], max_tokens=12, temperature=0)
    stop = whole.choices[0].token_ids[4]
    reply = await complete(
        sampler.url, prompts[3], max_tokens=12, temperature=0, stop_token_ids=[stop]
    )
    [choice] = reply.choices
    assert choice.token_ids[-1] == stop
    assert choice.finish_reason == "stop"


async def test_a_publish_changes_what_is_sampled_and_its_version(
    sampler: SamplerProcess,
    serving: PolicyState,
    prompts: list[list[int]],
    original: Any,
    other: Any,
    versions: Iterator[int],
) -> None:
    before = await complete(sampler.url, prompts[1], max_tokens=24, ignore_eos=True)
    version = next(versions)
    await sampler.publish(other.named_parameters(), version=version)
    after = await complete(sampler.url, prompts[1], n=6, max_tokens=24, ignore_eos=True, seed=0)
    assert await sampler.health() == PolicyState("policy", version)
    assert (before.version, after.version) == (serving.version, version)
    assert fmean(gap(other, prompts[1], choice) for choice in after.choices) < MOVED_GAP
    assert gap(original, prompts[1], after.choices[0]) > 0.2  # so the line above has teeth


async def test_nothing_computed_with_old_weights_is_used_after_a_publish(
    sampler: SamplerProcess,
    serving: PolicyState,
    original: Any,
    other: Any,
    versions: Iterator[int],
) -> None:
    # Long enough to fill blocks of a prefix cache, and without repetitions that any weights continue.
    random = torch.Generator().manual_seed(0)
    prompt: list[int] = torch.randint(1000, 40000, (600,), generator=random).tolist()
    await complete(sampler.url, prompt, max_tokens=1)
    await sampler.publish(other.named_parameters(), version=next(versions))
    reply = await complete(sampler.url, prompt, max_tokens=32, ignore_eos=True, seed=0)
    [choice] = reply.choices
    fresh = gap(other, prompt, choice)  # a prompt of noise makes bfloat16 rounder than usual
    assert fresh < 0.15
    assert stale_gap(original, other, prompt, choice) > 2 * fresh  # what a kept prefix would show


@torch.no_grad()
def stale_gap(old: Any, new: Any, prompt: list[int], choice: Choice) -> float:
    """The gap to the new model over the old one's keys and values of the prompt."""
    prefix = old(torch.tensor([prompt[:-1]]), use_cache=True).past_key_values
    rest = torch.tensor([[prompt[-1], *choice.token_ids[:-1]]])
    logprobs = new(rest, past_key_values=prefix).logits[0].float().log_softmax(-1)
    stale = logprobs.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    return float((torch.tensor(choice.logprobs) - stale).abs().mean())


async def test_running_completions_end_with_their_part_and_go_on_under_the_new_version(
    sampler: SamplerProcess,
    serving: PolicyState,
    prompts: list[list[int]],
    original: Any,
    other: Any,
    versions: Iterator[int],
) -> None:
    version = next(versions)
    finished: dict[int, tuple[Choice, list[int]]] = {}

    async def one(index: int) -> None:
        finished[index] = await complete_through_publishes(
            sampler.url, prompts[index], max_tokens=MANY, ignore_eos=True
        )

    async with anyio.create_task_group() as group:
        for index in range(len(prompts)):
            group.start_soon(one, index)
        # Long enough for some tokens of many, short enough for not all: no server says how far.
        await anyio.sleep(1.0)
        await sampler.publish(other.named_parameters(), version=version)

    split = 0
    by_old: list[float] = []
    by_new: list[float] = []
    for index, (choice, sampled_by) in finished.items():
        assert len(choice.token_ids) == len(choice.logprobs) == MANY
        assert set(sampled_by) <= {serving.version, version}
        assert sampled_by == sorted(sampled_by)
        cut = sampled_by.count(serving.version)
        split += 0 < cut < MANY
        old = Choice(choice.token_ids[:cut], choice.logprobs[:cut], "", "")
        new = Choice(choice.token_ids[cut:], choice.logprobs[cut:], "", "")
        by_old += gaps(original, prompts[index], old)
        by_new += gaps(other, prompts[index] + old.token_ids, new)
    assert split > 0
    assert fmean(by_old) < 0.08
    assert fmean(by_new) < MOVED_GAP


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1}, {"max_tokens": 5000}, {"top_p": 0}, {"n": 0}],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_a_wrong_request_is_refused_and_named(
    sampler: SamplerProcess, prompts: list[list[int]], wrong: dict[str, Any]
) -> None:
    with pytest.raises(Refused, match=next(iter(wrong))) as refusal:
        await complete(sampler.url, prompts[0], **wrong)
    assert refusal.value.status in (400, 422)


async def test_a_wrong_publish_order_changes_nothing(
    sampler: SamplerProcess, serving: PolicyState
) -> None:
    with pytest.raises(Refused, match="not a publish order"):
        await post(sampler.url, "/publish", {"version": 99})
    assert await sampler.health() == serving


async def test_a_failed_publish_stops_sampling_until_one_succeeds(
    sampler: SamplerProcess, prompts: list[list[int]], original: Any, versions: Iterator[int]
) -> None:
    nobody = {"host": "127.0.0.1", "port": 9, "size": 2, "deadline": 1.0}
    with pytest.raises(Refused, match="publish of version 98 failed"):
        await post(sampler.url, "/publish", {"version": 98, "rendezvous": nobody, "tensors": []})
    with pytest.raises(SamplerError, match="503"):
        await sampler.health()
    with pytest.raises(Refused, match="publish again"):
        await complete(sampler.url, prompts[0])
    version = next(versions)
    await sampler.publish(original.named_parameters(), version=version)
    assert (await complete(sampler.url, prompts[0])).version == version


async def test_weights_that_are_no_such_models_are_an_error_not_a_hang(
    sampler: SamplerProcess, original: Any, versions: Iterator[int]
) -> None:
    weights = [("model.no_such_layer.weight", torch.zeros(2, 2))]
    with pytest.raises(SamplerError, match=r"no_such_layer|no weights for"):
        await sampler.publish(weights, version=next(versions))
    await sampler.publish(original.named_parameters(), version=next(versions))


async def test_a_client_that_goes_away_frees_its_place(
    sampler: SamplerProcess, serving: PolicyState, prompts: list[list[int]]
) -> None:
    with anyio.move_on_after(0.5):
        await complete_all(sampler, prompts * 8, max_tokens=500, ignore_eos=True)

    async def answers() -> bool:
        with anyio.move_on_after(5):
            await complete(sampler.url, prompts[0], max_tokens=1)
            return True
        return False

    await wait_until(answers, timeout=20, description="a completion within 5 s")
