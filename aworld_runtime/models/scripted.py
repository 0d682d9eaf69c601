"""A model that says what it was told to say: for examples, docs and tests.

A list of replies is used up one by one, in the order in which requests arrive. A callable decides
by the request alone, so any number of concurrent episodes can share it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import anyio

from aworld_runtime.errors import ModelRejectedError
from aworld_runtime.messages import Completion, ToolCall
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.offline import expect_online

Reply = str | Completion | ToolCall | Sequence[ToolCall] | Exception
"""What to answer; an exception is raised."""

KEEP_REQUESTS = 1_000
"""How many of the latest requests are remembered, so that long runs don't grow."""


class ScriptedModel:
    """Answers with `replies`; a `ChatModel`.

    `repeat_last` goes on with the last reply instead of failing once all are used; `delay_s` is how
    long each answer takes.
    """

    def __init__(
        self,
        replies: Sequence[Reply] | Callable[[ModelRequest], Reply],
        name: str = "scripted",
        *,
        policy: str | None = None,
        repeat_last: bool = False,
        delay_s: float = 0.0,
    ) -> None:
        self.requests: deque[ModelRequest] = deque(maxlen=KEEP_REQUESTS)
        """The latest requests, oldest first."""
        self._name = name
        self._policy = policy
        self._delay_s = delay_s
        if callable(replies):
            self._next = replies
        else:
            script: list[Reply] = [replies] if isinstance(replies, str) else list(replies)
            self._next = _one_by_one(script, name, repeat_last=repeat_last)

    @property
    def name(self) -> str:
        """Model name, as logged."""
        return self._name

    @property
    def policy(self) -> str | None:
        """Name of the policy it plays, if any."""
        return self._policy

    async def complete(self, request: ModelRequest) -> Completion:
        """The next reply.

        Raises:
            ModelRejectedError: the replies are used up, or this one is none.
        """
        expect_online(f"model {self.name}")
        self.requests.append(request)
        reply = self._next(request)
        if self._delay_s:
            await anyio.sleep(self._delay_s)
        return _completion(reply, self._name)

    async def aclose(self) -> None:
        """Nothing to release."""


def _one_by_one(
    script: list[Reply], name: str, *, repeat_last: bool
) -> Callable[[ModelRequest], Reply]:
    left = iter(script)

    def following(_: ModelRequest) -> Reply:
        reply = next(left, None)
        if reply is not None:
            return reply
        if repeat_last and script:
            return script[-1]
        raise ModelRejectedError(
            f"scripted model {name!r} has used up its {len(script)} replies: give it more, or"
            " repeat_last=True"
        )

    return following


def _completion(reply: Reply, name: str) -> Completion:
    match reply:
        case Exception():
            raise reply
        case Completion():
            return reply
        case str():
            return Completion(text=reply)
        case ToolCall():
            return Completion(tool_calls=(reply,), finish_reason="tool_calls")
        case Sequence():
            return Completion(tool_calls=tuple(reply), finish_reason="tool_calls")
        case _:
            raise ModelRejectedError(
                f"scripted model {name!r} replied with {reply!r:.80}; expected text, tool calls or a Completion"
            )
