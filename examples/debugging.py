"""A run, the same again without a live call, and what would have been if: `python examples/debugging.py`.

No model and no server are needed.
"""

import asyncio

from aworld_runtime import Agent, Runtime, ScriptedModel
from aworld_runtime.events import ToolReturned
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.replay.diff import compare_episodes
from aworld_runtime.replay.replay import replay


def forecast(city: str) -> str:
    """Tomorrow's weather."""
    return f"sun in {city}, all day"


def reply(request: ModelRequest) -> ToolCall | str:
    """What a model would say: ask for the weather, then advise."""
    last = request.messages[-1]
    if last.role == "tool":
        return "Take an umbrella." if "rain" in last.content else "Take a hat."
    return ToolCall(id="call-1", name="forecast", arguments={"city": "Lyon"})


agent = Agent("packer", llm=ScriptedModel(reply), tools=[forecast])


async def main() -> None:
    """Run, replay, fork, compare."""
    async with Runtime() as runtime:
        episode = await runtime.run(agent, "What shall I take to Lyon?")
        events = await runtime.events(episode.id)
        report = await replay(events, agent.program())
        print(f"{episode.answer} Replayed: identical={report.identical}, and no live call.")

        weather = next(event for event in events if isinstance(event.data, ToolReturned))
        rain = {"data.content": "rain"}
        fork = await runtime.fork(episode.id, at=weather.seq - 1, edit=rain, program=agent)
        print(f"If it rained: {(await runtime.result(fork)).answer}")

        diff = compare_episodes(events, await runtime.events(fork))
        print(f"They share {diff.shared} events; then {diff.first and diff.first.what}.")


if __name__ == "__main__":
    asyncio.run(main())
