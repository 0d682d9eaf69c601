"""Chat completions from an ordinary engine, through `LLMClient`."""

import logging
from typing import Any

import pytest

from aworld_runtime.config import LogSettings, RankSettings, Settings
from aworld_runtime.errors import (
    ConfigError,
    ModelRejectedError,
    ModelTimeoutError,
    ModelUnavailableError,
)
from aworld_runtime.messages import Completion, Message, ModelSpec, ToolCall, ToolSpec
from aworld_runtime.models.base import ChatModel, ModelRequest
from aworld_runtime.models.client import LLMClient, ModelDefaults, from_spec
from aworld_runtime.models.openai import OpenAIModel
from aworld_runtime.models.policy import PolicyModel
from aworld_runtime.runtime import run_sync
from tests.engine import Answer, Engine, engine

KEY = "sk-very-secret-0123456789"


def ask(text: str = "hello", **changes: Any) -> ModelRequest:
    return ModelRequest(messages=(Message(role="user", content=text),), **changes)


def said(message: dict[str, Any], finish: str = "stop", **choice: Any) -> Answer:
    choices = [{"index": 0, "message": message, "finish_reason": finish} | choice]
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    body: dict[str, Any] = {"id": "r1", "object": "chat.completion", "created": 0, "model": "m"}
    return Answer(body | {"choices": choices, "usage": usage})


HELLO = said({"role": "assistant", "content": "hi there"})


def client(server: Engine, **changes: Any) -> LLMClient:
    settings: dict[str, Any] = {"api_key": KEY, "base_url": server.url, "timeout_s": 5.0} | changes
    return LLMClient("test-model", **settings)


async def complete(model: ChatModel, request: ModelRequest) -> Completion:
    try:
        return await model.complete(request)
    finally:
        await model.aclose()


async def test_text_usage_and_settings() -> None:
    async with engine(lambda _: HELLO) as server:
        request = ask(seed=3, key="k1", temperature=0.5)
        completion = await complete(client(server, max_tokens=9), request)
    assert completion.text == "hi there"
    assert completion.finish_reason == "stop"
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (5, 2)
    sent = server.requests[0]
    assert sent.path == "/v1/chat/completions"
    assert sent.headers["authorization"] == f"Bearer {KEY}"
    assert sent.headers["idempotency-key"] == "k1"
    assert sent.body == {
        "model": "test-model",
        "messages": [{"role": "user", "content": "hello"}],
        "temperature": 0.5,
        "max_tokens": 9,
        "seed": 3,
    }


def call(name: str, arguments: Any, call_id: str | None = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


async def test_tool_calls_come_back_whole_or_malformed() -> None:
    calls = [
        call("add", '{"a": 1}', "c1"),
        call("add", '{"a": ', "c2"),
        call("add", "", None),
        call("add", {"a": 2}, "c4"),
        call("", "{}", "c5"),
    ]
    answer = said({"role": "assistant", "content": None, "tool_calls": calls}, "stop")
    async with engine(lambda _: answer) as server:
        completion = await complete(client(server), ask(tools=(ToolSpec(name="add"),)))
    assert completion.finish_reason == "tool_calls"
    assert completion.tool_calls == (
        ToolCall(id="c1", name="add", arguments={"a": 1}),
        ToolCall(id="c2", name="add", malformed='{"a": '),
        ToolCall(id="r1_2", name="add"),
        ToolCall(id="c4", name="add", arguments={"a": 2}),
        ToolCall(id="c5", name="", malformed="{}"),
    )
    assert server.requests[0].body["tools"][0]["function"]["name"] == "add"


async def test_half_a_character_in_an_answer_is_replaced() -> None:
    message = {
        "role": "assistant",
        "content": "a\ud83d",
        "tool_calls": [call("add\ud83d", "{}", "c\ud83d"), call("add", '{"a": "\ud83d"}', "c2")],
    }
    async with engine(lambda _: said(message)) as server:
        completion = await complete(client(server), ask())
    assert completion.text == "a?"
    assert completion.tool_calls == (
        ToolCall(id="c?", name="add?"),
        ToolCall(id="c2", name="add", malformed='{"a": "?"}'),
    )


async def test_parallel_calls_with_one_id_get_their_own() -> None:
    calls = [call("a", "{}"), call("b", "{}")]
    async with engine(lambda _: said({"role": "assistant", "tool_calls": calls})) as server:
        completion = await complete(client(server), ask())
    assert [c.id for c in completion.tool_calls] == ["r1_0", "r1_1"]


async def test_history_of_calls_and_results_is_sent_in_openai_shape() -> None:
    history = (
        Message(role="user", content="1 + 1?"),
        Message(role="assistant", tool_calls=(ToolCall(id="c1", name="add", arguments={"a": 1}),)),
        Message(role="tool", content="2", name="add", tool_call_id="c1"),
    )
    async with engine(lambda _: HELLO) as server:
        await complete(client(server), ModelRequest(messages=history))
    assert server.requests[0].body["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call("add", '{"a": 1}')]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


async def test_vllm_gives_exact_tokens() -> None:
    token = {"token": "h", "bytes": [104], "top_logprobs": []}
    logprobs = {"content": [token | {"logprob": -0.25}, token | {"logprob": -0.5}]}
    answer = said({"role": "assistant", "content": "hi"}, logprobs=logprobs, token_ids=[7, 8])
    answer.body["prompt_token_ids"] = [1, 2, 3]
    answer.headers.update({"x-policy-version": "4"})
    async with engine(lambda _: answer) as server:
        model = LLMClient("vllm/tiny", base_url=server.url)
        completion = await complete(model, ask())
    assert completion.prompt_token_ids == (1, 2, 3)
    assert completion.token_ids == (7, 8)
    assert completion.behavior_logprobs == (-0.25, -0.5)
    assert completion.policy_version == 4
    body = server.requests[0].body
    assert (body["model"], body["logprobs"], body["return_token_ids"]) == ("tiny", True, True)


async def test_overloaded_engine_is_asked_again_after_as_long_as_it_says() -> None:
    answers = iter([Answer({}, status=429, headers={"Retry-After": "0.01"}), HELLO])
    async with engine(lambda _: next(answers)) as server:
        assert (await complete(client(server), ask())).text == "hi there"


async def test_an_engine_that_goes_on_failing_is_told_of_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    down = Answer({"error": {"message": "boom"}}, status=500, headers={"Retry-After": "0"})
    answers = iter([*[down] * 9, HELLO])
    async with engine(lambda _: next(answers)) as server:
        await complete(client(server), ask())
    told = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [t.partition("(")[2].partition(",")[0] for t in told] == [
        f"try {n}" for n in (2, 3, 5, 9)
    ]
    assert told[0].startswith(f"model at {server.url}: HTTP 500 ")
    assert told[0].endswith("retrying in 0.0 s (try 2, giving up in 5 s)")


async def test_longer_wait_than_the_deadline_fails_at_once() -> None:
    answer = Answer({}, status=429, headers={"Retry-After": "3600"})
    async with engine(lambda _: answer) as server:
        with pytest.raises(ModelUnavailableError, match="HTTP 429"):
            await complete(client(server), ask())
    assert len(server.requests) == 1


async def test_wrong_key_is_rejected_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    error = {"error": {"message": f"Incorrect API key provided: {KEY} or sk-ve*****789"}}
    async with engine(lambda _: Answer(error, status=401)) as server:
        model = client(server)
        with pytest.raises(ModelRejectedError, match=r"HTTP 401 .*Incorrect API key") as caught:
            await complete(model, ask())
    assert caught.value.__cause__ is None
    for text in (str(caught.value), repr(model), repr(model.connect()), caplog.text):
        assert "secret" not in text
        assert "sk-ve" not in text


async def test_an_engine_that_wanted_a_key_says_how_to_give_one() -> None:
    async with engine(lambda _: Answer({}, status=401)) as server:
        with pytest.raises(ModelRejectedError, match="no key was sent: set AWORLD_LLM_API_KEY"):
            await complete(client(server, api_key=None), ask())


@pytest.mark.parametrize(
    "model, variables",
    [
        ("openai/gpt-5", "OPENAI_API_KEY or AWORLD_LLM_API_KEY"),
        ("deepseek/deepseek-chat", "AWORLD_LLM_API_KEY"),
    ],
)
def test_a_hosted_model_without_a_key_names_the_variable(model: str, variables: str) -> None:
    with pytest.raises(ConfigError, match=f"no API key for https://.*: set {variables}, or"):
        LLMClient(model).connect()


async def test_broken_connection_is_tried_once_more() -> None:
    answers = iter([HELLO, Answer(drop=True), HELLO, Answer(drop=True), Answer(drop=True)])
    async with engine(lambda _: next(answers)) as server:
        model = client(server)
        assert (await model.complete(ask())).text == "hi there"
        assert (await model.complete(ask())).text == "hi there"
        with pytest.raises(ModelUnavailableError, match=r"127\.0\.0\.1"):
            await model.complete(ask())
        await model.aclose()
    assert len(server.requests) == 5


async def test_silent_engine_times_out() -> None:
    async with engine(lambda _: Answer(delay_s=5)) as server:
        with pytest.raises(ModelTimeoutError, match=r"no answer within 0\.05 s"):
            await complete(client(server, timeout_s=0.05), ask())


@pytest.mark.parametrize("body", ["<html>login</html>", {"choices": []}, {"choices": None}, [1]])
async def test_answer_that_is_no_completion_is_rejected(body: Any) -> None:
    async with engine(lambda _: Answer(body)) as server:
        with pytest.raises(ModelRejectedError, match=r"127\.0\.0\.1"):
            await complete(client(server), ask())


def test_one_client_serves_one_event_loop_after_another() -> None:
    model = LLMClient("test-model", base_url="http://127.0.0.1:9/v1", timeout_s=0.5)

    async def run() -> None:
        with pytest.raises(ModelUnavailableError):
            await model.complete(ask())
        await model.aclose()

    run_sync(run)
    run_sync(run)


# --- names, defaults, specs ------------------------------------------------------------------------


def test_provider_prefix_gives_the_address_and_any_other_name_needs_one() -> None:
    known = from_spec(ModelSpec(model="deepseek/deepseek-chat"), api_key=KEY)
    assert known.name == "deepseek-chat"
    assert LLMClient("Qwen/Qwen3-4B", base_url="http://x/v1").connect().name == "Qwen/Qwen3-4B"
    with pytest.raises(
        ConfigError, match=r"give base_url, or a name such as .*anthropic, deepseek"
    ):
        LLMClient("Qwen/Qwen3-4B").connect()
    with pytest.raises(ConfigError, match="AWORLD_LLM_MODEL_NAME"):
        LLMClient().connect()


def test_spec_crosses_processes_without_the_key() -> None:
    spec = LLMClient("openai/gpt-5", KEY, temperature=0.2).spec()
    assert "secret" not in spec.model_dump_json()
    assert spec.temperature == 0.2


def test_spec_with_a_policy_is_sampled_token_exactly() -> None:
    spec = ModelSpec(model="m", base_url="http://x/v1", policy="solver", tokenizer="/somewhere")
    model = from_spec(spec)
    assert isinstance(model, PolicyModel)
    assert model.policy == "solver"


def test_environment_gives_defaults_but_no_key_to_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWORLD_LLM_MODEL_NAME", "openai/gpt-5")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    settings = Settings.from_env()
    assert settings.bus == "memory://"
    assert "secret" not in repr(settings)
    assert "secret" not in repr(settings.llm)
    model = LLMClient().connect(settings.llm)
    assert model.name == "gpt-5"
    assert key_of(model) == KEY
    with pytest.raises(ConfigError, match=r"no API key for https://api\.deepseek\.com"):
        LLMClient("deepseek/deepseek-chat").connect(settings.llm)
    assert key_of(LLMClient("m", base_url="http://x/v1").connect(settings.llm)) != KEY


@pytest.mark.parametrize(
    "variable, value, told",
    [
        ("AWORLD_RESTORE_AFTER_S", "-6", r"AWORLD_RESTORE_AFTER_S='-6': .*greater than or equal"),
        ("AWORLD_LOG_LEVEL", "loud", r"AWORLD_LOG_LEVEL='loud': .*'debug', 'info'"),
        ("RANK", "first", r"RANK='first': .*integer"),
    ],
)
def test_a_wrong_value_in_the_environment_is_named_with_what_was_expected(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, told: str
) -> None:
    monkeypatch.setenv(variable, value)
    owner = {"AWORLD_LOG_LEVEL": LogSettings, "RANK": RankSettings}.get(variable, Settings)
    with pytest.raises(ConfigError, match=told):
        owner.from_env()


def test_own_address_wins_over_the_default_one() -> None:
    defaults = ModelDefaults(model_name="tiny", base_url="http://default/v1")
    assert LLMClient().spec(defaults).base_url == "http://default/v1"
    assert LLMClient("other").spec(defaults).base_url == "http://default/v1"
    assert LLMClient("openai/gpt-5").spec(defaults).base_url is None
    assert LLMClient(base_url="http://mine/v1").spec(defaults).base_url == "http://mine/v1"


def key_of(model: ChatModel) -> str:
    """The key that requests would carry."""
    assert isinstance(model, OpenAIModel)
    return model._api_key  # pyright: ignore[reportPrivateUsage]
