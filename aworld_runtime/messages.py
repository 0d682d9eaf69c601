"""What models and tools exchange: messages, tool calls, completions, and the task they work on.

Shapes follow the OpenAI chat format. No I/O here, and nothing that can't be written as JSON.
"""

from __future__ import annotations

import base64
from array import array
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PlainSerializer

Trust = Literal["system", "user", "model", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "content_filter"]


class Data(BaseModel):
    """Base of every value here: immutable, and a misspelled field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


def _ints(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    packed = array("i")
    packed.frombytes(base64.b64decode(value, validate=True))
    return tuple(packed)


def _floats(value: Any) -> Any:
    packed = array("f")
    if isinstance(value, str):
        packed.frombytes(base64.b64decode(value, validate=True))
    else:  # round now what storing would round, so a run and its record compare equal
        packed.extend(value)
    return tuple(packed)


def _pack(code: Literal["i", "f"]) -> PlainSerializer:
    def pack(values: tuple[int, ...] | tuple[float, ...]) -> str:
        return base64.b64encode(array(code, values).tobytes()).decode("ascii")

    return PlainSerializer(pack, return_type=str, when_used="json")


PackedInts = Annotated[tuple[int, ...], BeforeValidator(_ints), _pack("i")]
"""Token ids; in JSON, base64 of little-endian int32."""

PackedFloats = Annotated[tuple[float, ...], BeforeValidator(_floats), _pack("f")]
"""Logprobs, rounded to float32; in JSON, base64 of little-endian float32."""


class ToolCall(Data):
    """One call a model asks for."""

    id: str
    name: str
    arguments: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    malformed: str | None = None
    """What the model wrote, when it isn't a valid call; `arguments` is then empty."""


class Message(Data):
    """One chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


class ToolSpec(Data):
    """What a model is told about a tool."""

    name: str
    description: str = ""
    parameters: dict[str, JsonValue] = Field(default_factory=lambda: {"type": "object"})
    """JSON schema of the arguments."""


class Usage(Data):
    """Tokens of one completion, and its price where a price is known."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cost_usd=self.cost_usd + other.cost_usd,
        )


class VersionSpan(Data):
    """Tokens [start, end) of a completion were sampled by this policy version."""

    version: int
    start: int
    end: int


class Completion(Data):
    """One model output. The token fields are there when the engine gives them."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "stop"
    usage: Usage = Usage()
    prompt_token_ids: PackedInts = ()
    """[P] the engine's own ids of the whole prompt."""
    token_ids: PackedInts = ()
    """[T] the sampled ids, the end-of-turn token included when it was sampled."""
    behavior_logprobs: PackedFloats = ()
    """[T] log-probability of each sampled id under the policy that sampled it, from the engine."""
    policy: str | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    """Which version sampled which tokens; covers [0, T) without gaps."""

    @property
    def policy_version(self) -> int | None:
        """The oldest version that sampled a token of it."""
        return min((span.version for span in self.version_spans), default=None)


class ModelSpec(Data):
    """Where a role's completions come from, as JSON that may cross processes. Holds no secret."""

    model: str
    base_url: str | None = None
    policy: str | None = None
    """Name of the policy being trained; set, the engine is asked for exact tokens."""
    tokenizer: str | None = None
    """Folder of the policy's tokenizer and chat template."""
    temperature: float = 1.0
    max_tokens: int = 512
    timeout_s: float = 120.0


class Task(Data):
    """One problem: a prompt, and what its environment needs to judge an answer."""

    id: str
    prompt: str
    data: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """What the environment scores with; agents never see it."""
    environment: str | None = None
    """`module:attribute` of the environment that scores the episode."""
