"""An agent that uses a tool, without a model or a server: `python examples/calculator.py`."""

from aworld_runtime import Agent, ScriptedModel
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.base import ModelRequest


def reply(request: ModelRequest) -> ToolCall | str:
    """What a model would say: call the calculator, then answer with what it returned."""
    last = request.messages[-1]
    if last.role == "tool":
        return f"It is {last.content}."
    return ToolCall(id="call-1", name="calculator", arguments={"expression": "17 * 23"})


agent = Agent("solver", llm=ScriptedModel(reply), tools=["calculator"])
if __name__ == "__main__":
    episode = agent.run("What is 17 * 23?")
    print(episode.answer)
    print(f"what happened:   aworld log {episode.episode_id}")
    print("the same again:  aworld replay last --program examples.calculator:agent")
