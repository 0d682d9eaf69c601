"""What an agent asks of a model: messages and tools in, a `Completion` out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from aworld_runtime.messages import Completion, Message, ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One prompt."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    previous_ids: tuple[int, ...] = ()
    """The role's previous prompt and sampled ids. A token-exact model extends them instead of rendering anew."""
    new_from: int = 0
    """Index of the first message that is not in `previous_ids`."""
    temperature: float | None = None
    """None: the client's own setting, as for `max_tokens`."""
    max_tokens: int | None = None
    seed: int | None = None
    key: str = ""
    """Idempotency key: the same for every try of one logged request."""


class ChatModel(Protocol):
    """Anything that completes a conversation.

    `complete` raises `ModelUnavailableError`, `ModelRejectedError` or `ModelTimeoutError`, nothing else of its own. Tool
    calls that the model wrote wrongly come back with `ToolCall.malformed` set.
    """

    @property
    def name(self) -> str:
        """Model name, as logged."""
        ...

    @property
    def policy(self) -> str | None:
        """Name of the policy being trained, if this is one."""
        ...

    async def complete(self, request: ModelRequest) -> Completion: ...

    async def aclose(self) -> None:
        """Release connections."""
        ...
