"""Two agents, a slow tool and one that fails, without a model or a server.

aworld run examples.team:swarm "How many people live in Lyon and Nice together?"
"""

import asyncio

from pydantic import JsonValue

from aworld_runtime import Agent, ScriptedModel, Swarm, tool
from aworld_runtime.messages import ToolCall
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import Reply

PEOPLE = {"Lyon": 522_250, "Nice": 348_085}


@tool
async def population(city: str) -> int:
    """How many people live in a city."""
    if city not in PEOPLE:
        raise ValueError(f"no city {city}")
    return PEOPLE[city]


@tool
async def search(query: str) -> str:
    """Search the news. It takes a while."""
    await asyncio.sleep(1)
    return f"nothing new in {query}"


def solve(request: ModelRequest) -> Reply:
    """What a model would say: look everything up at once, mend a slip, add up, answer."""
    found = {m.tool_call_id: m.content for m in request.messages if m.role == "tool"}
    if "sum" in found:
        return f"{found['sum']} people."
    if "nice" in found:
        return call("sum", "calculator", expression=f"{found['lyon']} + {found['nice']}")
    if found:
        return call("nice", "population", city="Nice")
    return [
        call("lyon", "population", city="Lyon"),
        call("nize", "population", city="Nize"),
        call("news", "search", query="Lyon"),
    ]


def check(request: ModelRequest) -> Reply:
    """Agree with the answer, which is the last line."""
    return request.messages[-1].content.splitlines()[-1]


def call(call_id: str, name: str, **arguments: JsonValue) -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def team(prompt: str) -> Swarm:
    """A solver with this prompt, and who verifies its answer."""
    tools = [population, search, "calculator"]
    solver = Agent("solver", llm=ScriptedModel(solve), system_prompt=prompt, tools=tools)
    return Swarm(solver, Agent("verifier", llm=ScriptedModel(check), system_prompt="Check it."))


swarm = team("Add up what the tools say.")
reworded = team("Add up what your tools say.")

if __name__ == "__main__":
    print(swarm.run("How many people live in Lyon and Nice together?").answer)
