"""Sampling a policy token by exact token, from an engine whose weights change and that restarts."""

from collections.abc import Sequence
from typing import Any

import pytest

from aworld_runtime.errors import (
    ConfigError,
    ModelRejectedError,
    ModelTimeoutError,
    ModelUnavailableError,
    TemplateError,
)
from aworld_runtime.messages import Message, ModelSpec, VersionSpan
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.policy import PolicyModel
from tests.engine import Answer, Request, engine

EOS = 0


class Letters:
    """A tokenizer of one token per character, whose template writes contents one after another."""

    eos_ids = frozenset({EOS})

    def render(
        self, messages: Sequence[dict[str, Any]], *, tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        assert not tools
        return [ord(letter) for message in messages for letter in message["content"]]

    def extend(
        self,
        previous_ids: Sequence[int],
        messages: Sequence[dict[str, Any]],
        *,
        new_from: int,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        if messages[0]["content"] == "unextendable":
            raise TemplateError("no")
        return [*previous_ids, *self.render(messages[new_from:], tools=tools)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids if token != EOS)


def model(url: str, *, patience_s: float = 5.0, timeout_s: float = 5.0) -> PolicyModel:
    spec = ModelSpec(
        model="tiny", base_url=url, policy="solver", max_tokens=64, timeout_s=timeout_s
    )
    return PolicyModel(spec, tokenizer=Letters(), patience_s=patience_s)


def sampled(text: str, *, finish: str = "stop", version: int = 3, **changes: Any) -> Answer:
    """What an engine answers that sampled `text` and, unless it was cut, the end of the turn."""
    ids = [ord(letter) for letter in text] + ([EOS] if finish == "stop" else [])
    choice: dict[str, Any] = {
        "token_ids": ids,
        "logprobs": {"token_logprobs": [-0.5] * len(ids)},
        "finish_reason": finish,
    }
    headers = {"x-policy": "solver", "x-policy-version": str(version)}
    return Answer({"choices": [choice | changes]}, headers=headers)


def ask(*texts: str, **changes: Any) -> ModelRequest:
    roles = ("user", "assistant")
    messages = [
        Message.model_validate({"role": roles[i % 2], "content": text})
        for i, text in enumerate(texts)
    ]
    return ModelRequest(messages=tuple(messages), **changes)


async def test_ids_logprobs_and_version_come_from_the_engine() -> None:
    async with engine(lambda _: sampled("hey")) as server:
        solver = model(server.url)
        completion = await solver.complete(ask("hi", seed=7))
        await solver.aclose()
    assert completion.text == "hey"
    assert completion.prompt_token_ids == (104, 105)
    assert completion.token_ids == (104, 101, 121, EOS)
    assert completion.behavior_logprobs == (-0.5,) * 4
    assert completion.policy == "solver"
    assert completion.version_spans == (VersionSpan(version=3, start=0, end=4),)
    assert completion.usage.completion_tokens == 4
    body = server.requests[0].body
    assert server.requests[0].path == "/v1/completions"
    assert body["prompt"] == [104, 105]
    assert body["max_tokens"] == 64
    assert body["seed"] == 7
    assert body["stop_token_ids"] == [EOS]
    assert (body["temperature"], body["top_p"], body["top_k"]) == (1.0, 1.0, -1)


async def test_next_prompt_extends_the_previous_ids() -> None:
    async with engine(lambda _: sampled("ok")) as server:
        solver = model(server.url)
        previous = (1, 2, 3)  # not what rendering would give
        await solver.complete(ask("a", "b", "c", previous_ids=previous, new_from=2))
        await solver.complete(ask("unextendable", "b", "c", previous_ids=previous, new_from=2))
        await solver.aclose()
    assert server.requests[0].body["prompt"] == [1, 2, 3, ord("c")]
    assert server.requests[1].body["prompt"] == [ord(letter) for letter in "unextendablebc"]


async def test_hermes_calls_are_read_from_the_text() -> None:
    text = '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    async with engine(lambda _: sampled(text, version=1)) as server:
        solver = model(server.url)
        completion = await solver.complete(ask("hi", max_tokens=500))
        await solver.aclose()
    assert completion.text == ""
    assert completion.finish_reason == "tool_calls"
    assert completion.tool_calls[0].arguments == {"expression": "1"}
    assert Letters().decode(completion.token_ids) == text


async def test_completion_cut_by_new_weights_goes_on_under_the_next_version() -> None:
    answers = iter(
        [
            sampled("one", finish="abort", version=3),
            sampled("", finish="abort", version=3),
            sampled("two", finish="abort", version=4),
            sampled("!", version=4),
        ]
    )
    async with engine(lambda _: next(answers)) as server:
        solver = model(server.url)
        completion = await solver.complete(ask("hi", seed=1))
        await solver.aclose()
    assert completion.text == "onetwo!"
    assert len(completion.behavior_logprobs) == len(completion.token_ids) == 8
    assert completion.version_spans == (
        VersionSpan(version=3, start=0, end=3),
        VersionSpan(version=4, start=3, end=8),
    )
    assert completion.policy_version == 3
    assert completion.prompt_token_ids == (104, 105)
    assert [bytes(r.body["prompt"]) for r in server.requests] == [
        b"hi",
        b"hione",
        b"hione",
        b"hionetwo",
    ]
    assert [r.body["max_tokens"] for r in server.requests] == [64, 61, 61, 58]


async def test_cut_at_its_very_end_it_is_complete() -> None:
    async with engine(lambda _: sampled("four", finish="abort")) as server:
        solver = model(server.url)
        completion = await solver.complete(ask("hi", max_tokens=4))
        await solver.aclose()
    assert completion.finish_reason == "length"
    assert len(server.requests) == 1


async def test_endless_cutting_is_an_error() -> None:
    async with engine(lambda _: sampled("", finish="abort")) as server:
        solver = model(server.url)
        with pytest.raises(ModelUnavailableError, match="cut 65 times"):
            await solver.complete(ask("hi"))
        await solver.aclose()


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"token_ids": None}, "no token_ids"),
        ({"logprobs": None}, r"no logprobs\.token_logprobs"),
        ({"logprobs": {"token_logprobs": [-1.0]}}, "3 token_ids but 1 logprobs"),
        ({"logprobs": {"token_logprobs": [-1.0, None, -1.0]}}, "the logprob None"),
        ({"logprobs": {"token_logprobs": [-1.0, -9999.0, -1.0]}}, r"the logprob -9999\.0"),
        ({"prompt_token_ids": [5]}, "other prompt_token_ids"),
    ],
)
async def test_inexact_answer_is_refused(changes: dict[str, Any], why: str) -> None:
    async with engine(lambda _: sampled("ab", **changes)) as server:
        solver = model(server.url)
        with pytest.raises(ModelRejectedError, match=why):
            await solver.complete(ask("hi"))
        await solver.aclose()


async def test_answer_of_another_policy_is_refused() -> None:
    def answer(_: Request) -> Answer:
        return Answer(sampled("x").body, headers={"x-policy": "verifier", "x-policy-version": "1"})

    async with engine(answer) as server:
        solver = model(server.url)
        with pytest.raises(ModelRejectedError, match="'verifier', but 'solver' was asked for"):
            await solver.complete(ask("hi"))
        await solver.aclose()


async def test_connection_that_the_server_closed_is_replaced_at_once() -> None:
    """A learner trains for half a minute; meanwhile the server closes idle connections."""
    answers = iter([sampled("a"), Answer(drop=True), sampled("b")])
    async with engine(lambda _: next(answers)) as server:
        solver = model(server.url, patience_s=0.0)
        assert (await solver.complete(ask("hi"))).text == "a"
        assert (await solver.complete(ask("hi"))).text == "b"
        await solver.aclose()
    assert server.connections == 2


async def test_paused_engine_is_waited_for() -> None:
    answers = iter([Answer(status=503, headers={"Retry-After": "0.01"}), sampled("up")])
    async with engine(lambda _: next(answers)) as server:
        solver = model(server.url)
        assert (await solver.complete(ask("hi"))).text == "up"
        await solver.aclose()


async def test_engine_that_stays_away_is_unavailable() -> None:
    async with engine(lambda _: sampled("x")) as server:
        pass  # gone again
    solver = model(server.url, patience_s=0.05)
    with pytest.raises(ModelUnavailableError, match=r"127\.0\.0\.1.*ConnectError"):
        await solver.complete(ask("hi"))
    await solver.aclose()


async def test_silent_engine_times_out() -> None:
    async with engine(lambda _: Answer(delay_s=5)) as server:
        solver = model(server.url, timeout_s=0.05)
        with pytest.raises(ModelTimeoutError, match=r"no answer within 0\.0"):
            await solver.complete(ask("hi"))
        await solver.aclose()


async def test_refused_request_is_not_tried_again() -> None:
    refusal = Answer({"error": {"message": "maximum context length is 2048"}}, status=400)
    async with engine(lambda _: refusal) as server:
        solver = model(server.url)
        with pytest.raises(ModelRejectedError, match=r"HTTP 400 .*maximum context length"):
            await solver.complete(ask("hi"))
        await solver.aclose()
    assert len(server.requests) == 1


async def test_models_of_one_engine_share_its_connections() -> None:
    async with engine(lambda _: sampled("x")) as server:
        first, second = model(server.url), model(server.url)
        await first.complete(ask("hi"))
        await second.complete(ask("hi"))
        await first.aclose()
        await second.complete(ask("hi"))
        await second.aclose()
    assert server.connections == 1


def test_spec_needs_address_and_tokenizer() -> None:
    with pytest.raises(ConfigError, match="no base_url"):
        PolicyModel(ModelSpec(model="tiny", policy="solver"))
    with pytest.raises(ConfigError, match="no tokenizer folder"):
        PolicyModel(ModelSpec(model="tiny", policy="solver", base_url="http://localhost:1/v1"))
