"""The scripted model."""

from typing import Any

import anyio
import pytest

from aworld_runtime.errors import ModelRejectedError, ModelUnavailableError
from aworld_runtime.messages import Completion, Message, ToolCall
from aworld_runtime.models.base import ChatModel, ModelRequest
from aworld_runtime.models.scripted import ScriptedModel

CALL = ToolCall(id="1", name="calculator", arguments={"expression": "1 + 1"})


def ask(text: str = "hello") -> ModelRequest:
    return ModelRequest(messages=(Message(role="user", content=text),))


async def test_replies_come_in_order_and_requests_are_kept() -> None:
    model: ChatModel = ScriptedModel([CALL, [CALL, CALL], Completion(text="two"), "done"])
    assert await model.complete(ask()) == Completion(tool_calls=(CALL,), finish_reason="tool_calls")
    assert (await model.complete(ask())).tool_calls == (CALL, CALL)
    assert (await model.complete(ask())).text == "two"
    assert (await model.complete(ask("last"))).text == "done"
    assert isinstance(model, ScriptedModel)
    assert model.requests[-1] == ask("last")


async def test_used_up_script_says_so() -> None:
    model = ScriptedModel(["only"], name="tiny")
    await model.complete(ask())
    with pytest.raises(ModelRejectedError, match="'tiny' has used up its 1 replies"):
        await model.complete(ask())


async def test_last_reply_can_repeat() -> None:
    model = ScriptedModel(["first", "again"], repeat_last=True)
    assert [(await model.complete(ask())).text for _ in range(3)] == ["first", "again", "again"]


async def test_exception_is_raised_and_the_script_goes_on() -> None:
    model = ScriptedModel([ModelUnavailableError("down"), "up"])
    with pytest.raises(ModelUnavailableError, match="down"):
        await model.complete(ask())
    assert (await model.complete(ask())).text == "up"


async def test_a_function_that_returns_nothing_is_told_so() -> None:
    def forgot(_: ModelRequest) -> Any:
        """No return."""

    with pytest.raises(ModelRejectedError, match="'scripted' replied with None; expected text"):
        await ScriptedModel(forgot).complete(ask())


async def test_callable_serves_many_at_once() -> None:
    model = ScriptedModel(lambda request: request.messages[-1].content.upper(), delay_s=0.01)
    answers: dict[str, str] = {}

    async def run(text: str) -> None:
        answers[text] = (await model.complete(ask(text))).text

    async with anyio.create_task_group() as group:
        for text in "abc":
            group.start_soon(run, text)
    assert answers == {"a": "A", "b": "B", "c": "C"}
