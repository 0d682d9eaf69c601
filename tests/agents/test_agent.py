"""An agent: turns, tools, limits, and the short forms that users write."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from pydantic import JsonValue, SecretStr

from aworld_runtime import Agent, AgentConfig, BaseTool, LLMClient, Runners
from aworld_runtime.bus.open import open_bus
from aworld_runtime.errors import ConfigError, ToolError, UnknownToolError
from aworld_runtime.messages import Completion, Message, ToolCall, ToolSpec, VersionSpan
from aworld_runtime.models.base import ChatModel, ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.training.projection import rows_of
from aworld_runtime.trajectory import Episode, episode_of
from tests.episodes import EXACT_MATCH, Adder, request_episode, run_episode


async def run(agent: Agent, prompt: str = "Add it all.") -> Episode:
    async with open_bus("memory://") as bus:
        return episode_of(await run_episode(bus, request_episode(prompt), agent.program()))


def add(number: int = 1, **arguments: JsonValue) -> ToolCall:
    return ToolCall(id=f"c{number}", name="add", arguments=arguments or {"a": 1, "b": 2})


async def test_the_model_sees_instructions_examples_and_the_task_in_this_order() -> None:
    model = ScriptedModel("four")
    examples = [
        Message(role="user", content="1+1?"),
        Message(role="assistant", content="two"),
    ]
    await run(Agent(llm=model, system_prompt="Add.", examples=examples), "2+2?")
    (request,) = model.requests
    assert [(m.role, m.content) for m in request.messages] == [
        ("system", "Add."),
        ("user", "1+1?"),
        ("assistant", "two"),
        ("user", "2+2?"),
    ]


async def test_a_tools_result_is_the_next_prompts_last_message() -> None:
    model = ScriptedModel([add(a=1, b=2), "three"])
    episode = await run(Agent(llm=model, tools=[Adder()]))
    assert episode.answer == "three"
    assert [t.name for t in model.requests[0].tools] == ["add"]
    last = model.requests[1].messages[-1]
    assert (last.role, last.content, last.name, last.tool_call_id) == ("tool", "3", "add", "c1")


async def test_a_tool_that_fails_is_told_and_the_agent_goes_on() -> None:
    def fail() -> str:
        """Never works."""
        raise OSError("disk full")

    model = ScriptedModel([ToolCall(id="c1", name="fail"), "I could not"])
    episode = await run(Agent(llm=model, tools=[fail]))
    assert episode.answer == "I could not"
    assert "OSError: disk full" in model.requests[1].messages[-1].content


async def test_only_its_own_tools_may_be_called() -> None:
    model = ScriptedModel([ToolCall(id="c1", name="calculator", arguments={}), "no"])
    episode = await run(Agent(llm=model, tools=[Adder()]))
    assert "UnknownToolError: no tool 'calculator'" in model.requests[1].messages[-1].content
    assert episode.reason == "answered"


def unanswered(episode: Episode) -> set[str]:
    """Ids of the calls that the conversation answers nowhere."""
    (trajectory,) = episode.trajectories
    called = {call.id for m in trajectory.messages for call in m.tool_calls}
    return called - {str(m.tool_call_id) for m in trajectory.messages if m.role == "tool"}


async def test_the_turn_limit_ends_its_work() -> None:
    model, tool = ScriptedModel(lambda r: add(len(r.messages))), Adder()
    episode = await run(Agent(llm=model, tools=[tool], max_turns=3))
    assert (episode.reason, len(model.requests), len(tool.ran)) == ("turn_limit", 3, 2)


async def test_calls_beyond_the_turn_limit_are_answered_and_not_made() -> None:
    model, tool = ScriptedModel(lambda _: [add(1), add(2)]), Adder()
    episode = await run(Agent(llm=model, tools=[tool], max_turns=1))
    assert tool.ran == []
    (trajectory,) = episode.trajectories
    assert [(m.role, m.tool_call_id, m.content) for m in trajectory.replies] == [
        ("tool", "c1", "Cancelled: the turn limit (1) is reached"),
        ("tool", "c2", "Cancelled: the turn limit (1) is reached"),
    ]
    assert unanswered(episode) == set()
    assert len(trajectory.turns) == 1


async def test_what_answers_calls_beyond_the_turn_limit_is_not_trained_on() -> None:
    def sampled(prompt: tuple[int, ...], ids: tuple[int, ...]) -> Completion:
        return Completion(
            tool_calls=(add(len(prompt)),),
            finish_reason="tool_calls",
            prompt_token_ids=prompt,
            token_ids=ids,
            behavior_logprobs=(-0.5,) * len(ids),
            policy="policy",
            version_spans=(VersionSpan(version=0, start=0, end=len(ids)),),
        )

    model = ScriptedModel([sampled((1, 2), (3,)), sampled((1, 2, 3, 4), (5, 6))])
    agent = Agent(llm=model, tools=[Adder()], max_turns=2)
    async with open_bus("memory://") as bus:
        requested = request_episode(environment=EXACT_MATCH)
        episode = episode_of(await run_episode(bus, requested, agent.program()))
    assert unanswered(episode) == set()
    (row,) = rows_of(episode, ["agent"])
    assert row.token_ids == (1, 2, 3, 4, 5, 6)
    assert row.trained_positions == (2, 4, 5)


async def test_two_malformed_calls_are_forgiven_the_third_ends_its_work() -> None:
    bad = ToolCall(id="c1", name="add", malformed="{")
    model = ScriptedModel([bad, bad, "done"])
    assert (await run(Agent(llm=model, tools=[Adder()]))).answer == "done"
    model = ScriptedModel(lambda r: ToolCall(id=f"c{len(r.messages)}", name="add", malformed="{"))
    episode = await run(Agent(llm=model, tools=[Adder()]))
    assert (episode.reason, len(model.requests)) == ("malformed", 3)
    assert unanswered(episode) == set()


async def test_one_agent_serves_many_episodes_and_keeps_nothing() -> None:
    def reply(request: ModelRequest) -> Reply:
        return f"{len(request.messages)} messages"

    agent = Agent(llm=ScriptedModel(reply))
    before = dict(vars(agent))
    assert {(await run(agent, f"task {n}")).answer for n in range(5)} == {"1 messages"}
    assert vars(agent) == before


def test_an_agent_shows_its_role_model_and_tools() -> None:
    agent = Agent("solver", llm="openai/gpt-4o", tools=[Adder()])
    assert repr(agent) == "Agent('solver', llm='openai/gpt-4o', tools=['add'])"
    assert repr(Agent()) == "Agent('agent', llm=None, tools=[])"


@pytest.mark.parametrize("name", ["", "swarm", "environment", "worker", "a/b"])
def test_a_name_that_cannot_be_a_role_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="expected a name"):
        Agent(name)


def test_a_model_by_its_name() -> None:
    assert Agent(llm="openai/gpt-4o").llm == LLMClient("openai/gpt-4o")


def test_wrong_settings_are_refused_with_their_value() -> None:
    with pytest.raises(ConfigError, match=r"agent 'a': llm=7 is no model; expected LLMClient"):
        Agent("a", llm=cast("ChatModel", 7))
    with pytest.raises(ConfigError, match="max_turns=0; expected 1 or more"):
        Agent(max_turns=0)
    with pytest.raises(UnknownToolError, match="unknown tool 'calcluator'; known: calculator"):
        Agent(tools=["calcluator"])
    with pytest.raises(ToolError, match="two tools are called 'add'"):
        Agent(tools=[Adder(), Adder()])


def test_an_agent_and_its_tool_may_not_share_a_name() -> None:
    with pytest.raises(ConfigError, match="name add stands for two"):
        Agent("add", tools=[Adder()]).program()


def test_a_model_by_fields() -> None:
    conf = AgentConfig(
        llm_model_name="tiny", llm_base_url="http://localhost/v1", llm_api_key=SecretStr("k")
    )
    assert Agent(conf=conf).llm == LLMClient(
        model_name="tiny", base_url="http://localhost/v1", api_key="k"
    )
    assert "SecretStr" not in repr(conf)


class Doubler(BaseTool):
    """As a user writes one."""

    def get_schema(self) -> ToolSpec:
        return ToolSpec(name="double", parameters={"type": "object", "properties": {"x": {}}})

    async def run(self, **arguments: JsonValue) -> JsonValue:
        x = arguments["x"]
        assert isinstance(x, int)
        return 2 * x


@pytest.mark.parametrize("tools", [[Doubler()], [Doubler]])
async def test_a_tool_class_or_object(tools: Sequence[BaseTool]) -> None:
    model = ScriptedModel([ToolCall(id="c1", name="double", arguments={"x": 21}), "done"])
    await run(Agent(llm=model, tools=tools))
    assert model.requests[1].messages[-1].content == "42"


async def test_short_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    agent = Agent(llm=ScriptedModel("hi", repeat_last=True))
    assert agent.run("q").answer == "hi"
    assert (await agent.arun("q")).answer == "hi"
    assert agent.chat("q") == "hi"
    assert await agent.achat("q") == "hi"
    assert Runners.sync_run(input="q", agent=agent).answer == "hi"
    assert (await Runners.run(input="q", agent=agent)).answer == "hi"
