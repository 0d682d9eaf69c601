"""Chat completions of OpenAI and the many engines that speak the same.

The only module that imports the openai package. Answers come whole; the retries are ours, because
the package's own don't know our deadlines.
"""

from __future__ import annotations

import json
import re
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from aworld_runtime.errors import ConfigError, ModelRejectedError, ModelUnavailableError
from aworld_runtime.messages import (
    Completion,
    FinishReason,
    Message,
    ModelSpec,
    ToolCall,
    ToolSpec,
    Usage,
    VersionSpan,
)
from aworld_runtime.models.arguments import read_arguments, readable
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

NO_KEY = "none"
"""What engines that want no key are sent: the package insists on one."""
OPENAI = "https://api.openai.com/"
KEY_LIKE = re.compile(r"\bsk-[\w*.-]{4,}")
TRY_AGAIN = frozenset({408, 409, 429})
FINISH_REASONS: dict[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
    "abort": "abort",
}


class OpenAIModel:
    """A `ChatModel` over `/chat/completions`.

    `exact_tokens` asks for token ids and logprobs, which vLLM knows and others refuse.

    Raises:
        ConfigError: the spec lacks the engine's address.
    """

    def __init__(
        self, spec: ModelSpec, api_key: str | None = None, *, exact_tokens: bool = False
    ) -> None:
        if spec.base_url is None:
            raise ConfigError(f"model {spec.model!r}: no base_url")
        self._spec = spec
        self._api_key = api_key or NO_KEY
        self._exact_tokens = exact_tokens
        self._base_url = spec.base_url
        self._connections = Connections(spec.base_url)

    @property
    def name(self) -> str:
        """Model name, as logged."""
        return self._spec.model

    @property
    def policy(self) -> str | None:
        """None: a policy in training is sampled by `PolicyModel`."""
        return None

    async def complete(self, request: ModelRequest) -> Completion:
        """Ask for one completion.

        Raises:
            ModelRejectedError: the engine refuses the request.
            ModelUnavailableError: it can't be reached, or is overloaded for too long.
            ModelTimeoutError: no answer within the spec's `timeout_s`.
        """
        expect_online(f"model {self.name}")
        body = self._body(request)
        headers = {"Idempotency-Key": request.key} if request.key else {}
        return await until_answered(
            lambda fresh: self._attempt(body, headers, fresh=fresh),
            where=shown(self._base_url),
            timeout_s=self._spec.timeout_s,
            patience_s=self._spec.timeout_s,
        )

    async def aclose(self) -> None:
        """Release connections."""
        await self._connections.aclose()

    def _body(self, request: ModelRequest) -> dict[str, Any]:
        max_tokens = request.max_tokens or self._spec.max_tokens
        temperature = request.temperature
        # OpenAI's newer models refuse the old name; few others know the new one.
        limit = "max_completion_tokens" if self._base_url.startswith(OPENAI) else "max_tokens"
        body: dict[str, Any] = {
            "model": self._spec.model,
            "messages": [_message(message) for message in request.messages],
            "temperature": self._spec.temperature if temperature is None else temperature,
            limit: max_tokens,
        }
        if request.tools:
            body["tools"] = [_function(spec) for spec in request.tools]
        if request.seed is not None:
            body["seed"] = request.seed
        if self._exact_tokens:
            body["logprobs"] = True
            body["extra_body"] = {"return_token_ids": True}
        return body

    async def _attempt(
        self, body: dict[str, Any], headers: dict[str, str], *, fresh: bool
    ) -> Completion:
        if not fresh:
            client = self._connections.client()
            return await self._ask(client, body, headers, broken_again=False)
        async with new_client(self._base_url) as client:
            return await self._ask(client, body, headers, broken_again=True)

    async def _ask(
        self, http_client: Any, body: dict[str, Any], headers: dict[str, str], *, broken_again: bool
    ) -> Completion:
        client = openai.AsyncOpenAI(
            api_key=self._api_key,
            base_url=self._base_url,
            max_retries=0,
            timeout=None,
            http_client=http_client,
        )
        try:
            create: Any = client.chat.completions.with_raw_response.create
            raw: Any = await create(**body, extra_headers=headers)
            answer: object = raw.parse()
        except openai.APIStatusError as error:
            raise self._failure(error) from None  # its request holds the key
        except openai.APIConnectionError as error:
            reason = f"{type(error).__name__} {error.__cause__ or error}"
            if broken_again:
                raise ModelUnavailableError(f"{shown(self._base_url)}: {reason}") from None
            raise TryAgain(reason, broken=True) from None
        except (openai.APIError, ValueError) as error:
            raise self._refuse(f"an answer that can't be read: {error}") from None
        return self._completion(answer, raw.headers)

    def _failure(self, error: openai.APIStatusError) -> Exception:
        reason = f"HTTP {error.status_code} {self._without_key(error.message):.500}"
        if error.status_code in TRY_AGAIN or error.status_code >= 500:
            return TryAgain(reason, after=retry_after(error.response.headers))
        if error.status_code == 401 and self._api_key == NO_KEY:
            reason += " (no key was sent: set AWORLD_LLM_API_KEY, or give api_key)"
        return ModelRejectedError(f"{shown(self._base_url)}: {reason}")

    def _without_key(self, text: str) -> str:
        """Some engines repeat the key in their errors, whole or with stars in it."""
        if self._api_key != NO_KEY:
            text = text.replace(self._api_key, "***")
        return KEY_LIKE.sub("***", text)

    def _refuse(self, what: str) -> ModelRejectedError:
        return ModelRejectedError(
            f"{shown(self._base_url)} answered with {self._without_key(what)}"
        )

    def _completion(self, answer: object, headers: Any) -> Completion:
        """Read what came; the package doesn't check it."""
        if not isinstance(answer, ChatCompletion) or not getattr(answer, "choices", None):
            raise self._refuse(f"no completion but {answer!r:.200}")
        choice = answer.choices[0]
        message = choice.message
        calls = tuple(
            _tool_call(call, f"{answer.id}_{number}")
            for number, call in enumerate(message.tool_calls or ())
        )
        finish_reason = FINISH_REASONS.get(choice.finish_reason, "stop")
        if calls and finish_reason == "stop":
            finish_reason = "tool_calls"
        ids, logprobs = self._tokens(choice)
        usage = answer.usage
        return Completion(
            text=readable(message.content or ""),
            tool_calls=_with_own_ids(calls, answer.id),
            finish_reason=finish_reason,
            usage=Usage(
                prompt_tokens=usage.prompt_tokens if usage else 0,
                completion_tokens=usage.completion_tokens if usage else 0,
            ),
            prompt_token_ids=_extra(answer, "prompt_token_ids") or () if ids else (),
            token_ids=ids,
            behavior_logprobs=logprobs,
            policy=headers.get("x-policy"),
            version_spans=_spans(headers.get("x-policy-version", ""), len(ids)),
        )

    def _tokens(self, choice: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Ids and logprobs, where the engine gave both; they must be one for one."""
        ids: list[int] | None = _extra(choice, "token_ids")
        content = choice.logprobs.content if choice.logprobs else None
        if not self._exact_tokens or ids is None or content is None:
            return (), ()
        if len(ids) != len(content):
            raise self._refuse(f"{len(ids)} token_ids but {len(content)} logprobs")
        return tuple(ids), tuple(token.logprob for token in content)


def _message(message: Message) -> dict[str, Any]:
    match message.role:
        case "assistant" if message.tool_calls:
            calls = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name or "unknown",
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for call in message.tool_calls
            ]
            return {"role": "assistant", "content": message.content or None, "tool_calls": calls}
        case "tool":
            return {
                "role": "tool",
                "content": message.content,
                "tool_call_id": message.tool_call_id or "",
            }
        case role:
            return {"role": role, "content": message.content}


def _function(spec: ToolSpec) -> dict[str, Any]:
    return {"type": "function", "function": spec.model_dump(mode="json")}


def _tool_call(call: Any, fallback_id: str) -> ToolCall:
    """A call as the engine gave it; what can't be read is `malformed`."""
    function = getattr(call, "function", None)
    name = readable(getattr(function, "name", None) or "")
    raw = getattr(function, "arguments", None) or ""
    call_id = readable(getattr(call, "id", None) or fallback_id)
    if not isinstance(raw, str):  # some engines send the object itself
        raw = json.dumps(raw)
    try:
        if not name:
            raise ValueError("a call needs a name")
        return ToolCall(id=call_id, name=name, arguments=read_arguments(raw))
    except ValueError:
        return ToolCall(id=call_id, name=name, malformed=readable(raw))


def _with_own_ids(calls: tuple[ToolCall, ...], answer_id: str) -> tuple[ToolCall, ...]:
    """Some engines give every parallel call the same id."""
    if len({call.id for call in calls}) == len(calls):
        return calls
    return tuple(
        call.model_copy(update={"id": f"{answer_id}_{number}"}) for number, call in enumerate(calls)
    )


def _extra(value: Any, name: str) -> Any:
    """A field that OpenAI doesn't have."""
    extra: dict[str, Any] = value.model_extra or {}
    return extra.get(name)


def _spans(version: str, tokens: int) -> tuple[VersionSpan, ...]:
    if not version.isdecimal() or not tokens:
        return ()
    return (VersionSpan(version=int(version), start=0, end=tokens),)
