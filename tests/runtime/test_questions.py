"""Questions to people: an agent asks, a person answers by mail, and the agent goes on."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aworld_runtime import Agent, Runtime
from aworld_runtime.bus.base import read_all
from aworld_runtime.errors import NotFoundError, UsageError
from aworld_runtime.events import AnswerProposed, Event, HumanAnswered, HumanAsked
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.names import episode_log
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.questions import open_questions
from aworld_runtime.replay.replay import replay
from tests.waiting import wait_until


def last_words(request: ModelRequest) -> str:
    return f"heard: {request.messages[-1].content}"


class Careful(Agent):
    """Asks a person before it says anything, as often as it is told to."""

    def __init__(self, *questions: str) -> None:
        super().__init__("careful", llm=ScriptedModel(last_words))
        self.questions = questions

    async def handle(self, ctx: Context, event: Event) -> None:
        if isinstance(event.data, HumanAnswered):
            await super().handle(ctx, event)
            return
        for question in self.questions:
            ctx.ask(question)


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with Runtime(bus="memory://", store=f"sqlite:///{tmp_path}/s.db") as opened:
        yield opened


async def asked(runtime: Runtime, episode_id: str, count: int) -> list[Event]:
    """The open questions, once there are so many."""
    found: list[Event] = []

    async def there_are() -> bool:
        found[:] = open_questions(await read_all(runtime.bus, episode_log(episode_id)))
        return len(found) == count

    await wait_until(there_are, 10, f"{count} open questions")
    return found


async def test_a_persons_answer_is_the_agents_next_message(runtime: Runtime) -> None:
    agent = Careful("May I?")
    episode_id = await runtime.submit(agent, "Do it.")
    (question,) = await asked(runtime, episode_id, 1)
    assert question.data == HumanAsked(question="May I?")
    await runtime.answer(episode_id, "You may.")
    episode = await runtime.result(episode_id)
    assert episode.answer == "heard: You may."
    events = await read_all(runtime.bus, episode_log(episode_id))
    answered = next(e for e in events if isinstance(e.data, HumanAnswered))
    assert (answered.to, answered.trust, answered.role) == ("careful", "user", "human")
    assert (answered.causation_id, answered.correlation_id) == (question.id, question.id)
    assert open_questions(events) == []
    report = await replay(events, agent.program())
    assert report.identical, report.divergence


async def test_of_several_questions_one_is_named(runtime: Runtime) -> None:
    episode_id = await runtime.submit(Careful("One?", "Two?"), "Do it.")
    _, second = await asked(runtime, episode_id, 2)
    with pytest.raises(UsageError, match="has 2 open questions, events "):
        await runtime.answer(episode_id, "yes")
    with pytest.raises(NotFoundError, match="no open question at event 1"):
        await runtime.answer(episode_id, "yes", question=1)
    await runtime.answer(episode_id, "the second", question=second.seq)
    assert (await runtime.result(episode_id)).answer == "heard: the second"


async def test_what_asks_nothing_cannot_be_answered(runtime: Runtime) -> None:
    episode = await runtime.run(Agent(llm=ScriptedModel("Hello!")), "Hi")
    with pytest.raises(NotFoundError, match="the episode has no open question"):
        await runtime.answer(episode.id, "yes")
    events = await read_all(runtime.bus, episode_log(episode.id))
    assert [e for e in events if isinstance(e.data, AnswerProposed)]
