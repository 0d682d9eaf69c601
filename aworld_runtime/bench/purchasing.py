"""The episodes whose replay is measured: a purchase by three agents and a person, whose calls take time and often fail.

    scout ── a price of each supplier, at once ──▶ auditor ── two checks, at once ──▶ person, if it is dear ──▶ clerk ──▶ score
      ▲                                               │ unsound                          │ no
      └────────── handed back, without that supplier ◀┴──────────────────────────────────┘

Models, tools and the environment are stand-ins that wait as long as real ones would. What they say depends on their
request alone, so that any number of episodes share them, on any worker.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import cast

import anyio
from pydantic import BaseModel, JsonValue

from aworld_runtime.agents.agent import Agent
from aworld_runtime.environments.base import Reward, Split
from aworld_runtime.errors import ModelUnavailableError, ToolError
from aworld_runtime.events import (
    AnswerProposed,
    EpisodeAnswered,
    EpisodeRequested,
    Event,
    HandoffMade,
    HumanAnswered,
    MessagePosted,
)
from aworld_runtime.messages import Data, Task, ToolCall
from aworld_runtime.models.base import ModelRequest
from aworld_runtime.models.scripted import Reply, ScriptedModel
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.environment import EnvironmentNode
from aworld_runtime.nodes.node import Program
from aworld_runtime.tools.base import BaseTool
from aworld_runtime.tools.call import call_id
from aworld_runtime.tools.function import tool
from aworld_runtime.trajectory import Episode

MODULE = "aworld_runtime.bench.purchasing"
PURCHASING = f"{MODULE}:Purchasing"
ENVIRONMENT = f"{MODULE}:Purchases"
CALL_S = 0.21
"""Seconds that each call of a model, a tool and the environment takes."""
FAILING = 0.2
"""Share of the calls of models and tools that fail."""
TRIES = 10
"""Of one model call; all of them fail in one of ten million."""
MOMENT_S = 0.05
"""Seconds before another."""
SUPPLIERS = ("north", "east", "south", "west")
YES, SOUND, ORDERED = "yes", "sound", "ordered"


def chance(key: str) -> float:
    """0 ≤ chance < 1, the same for the same key."""
    return zlib.crc32(key.encode()) / 2**32


# --- tools and models ----------------------------------------------------------------------------------------------


class Finding(BaseModel):
    """What a tool found out about a supplier."""

    tool: str
    supplier: str
    value: int


@tool
async def quote(supplier: str) -> Finding:
    """Ask a supplier for the price."""
    return await _find("quote", supplier, range(100, 1000))


@tool
async def rating(supplier: str) -> Finding:
    """What others say of a supplier: 0 to 9."""
    return await _find("rating", supplier, range(10))


@tool
async def stock(supplier: str) -> Finding:
    """How many a supplier has."""
    return await _find("stock", supplier, range(10, 100))


@tool
async def order(supplier: str) -> Finding:
    """Order; the value is the number of the order."""
    return await _find("order", supplier, range(10_000))


async def _find(name: str, supplier: str, values: Sequence[int]) -> Finding:
    await anyio.sleep(CALL_S)  # aworld: allow the tools' own
    key = call_id()
    if chance(f"{key} fails") < FAILING:
        raise ToolError(f"{supplier} does not answer")
    return Finding(tool=name, supplier=supplier, value=values[int(chance(key) * len(values))])


def model(*tools: BaseTool, conclude: Callable[[Sequence[Finding]], str]) -> ScriptedModel:
    """Calls each tool for each supplier at once, again those that failed, and concludes from what they found."""
    names = [tool.get_schema().name for tool in tools]

    def reply(request: ModelRequest) -> Reply:
        if chance(request.key) < FAILING:
            return ModelUnavailableError("the engine is overloaded")
        findings: list[Finding] = []
        suppliers: list[str] = []
        for message in request.messages:
            if message.role == "user":
                suppliers, findings = message.content.rpartition(": ")[2].split(", "), []
            elif message.role == "tool" and message.content.startswith("{"):
                findings.append(Finding.model_validate_json(message.content))
        found = {(finding.tool, finding.supplier) for finding in findings}
        calls = [
            ToolCall(
                id=f"{len(request.messages)}-{name}-{supplier}",
                name=name,
                arguments={"supplier": supplier},
            )
            for name in names
            for supplier in suppliers
            if (name, supplier) not in found
        ]
        return calls or conclude(findings)

    return ScriptedModel(reply, delay_s=CALL_S)


class Offer(Data):
    """What the scout proposes."""

    supplier: str
    price: int


def cheapest(findings: Sequence[Finding]) -> str:
    best = min(findings, key=lambda finding: finding.value)
    return Offer(supplier=best.supplier, price=best.value).model_dump_json()


def verdict(findings: Sequence[Finding]) -> str:
    values = {finding.tool: finding.value for finding in findings}
    return SOUND if values["rating"] >= 1 and values["stock"] >= 15 else "unsound"


def receipt(findings: Sequence[Finding]) -> str:
    return f"{ORDERED} from {findings[0].supplier}, number {findings[0].value}"


# --- agents and rules ----------------------------------------------------------------------------------------------


class PatientAgent(Agent):
    """Asks its model again after a moment where the engine failed."""

    async def handle(self, ctx: Context, event: Event) -> None:
        for _ in range(TRIES - 1):
            try:
                return await super().handle(ctx, event)
            except ModelUnavailableError:
                await ctx.sleep(MOMENT_S)
        return await super().handle(ctx, event)


class Rules:
    """Who is next, and when a person is asked."""

    role = "swarm"
    subscriptions = ("episode.requested", "answer.proposed")

    async def handle(self, ctx: Context, event: Event) -> None:
        match event.role, event.data:
            case _, EpisodeRequested():
                self._post(ctx, "scout", "Get a price from", *_suppliers(ctx))
            case "scout", AnswerProposed():
                self._hand_over(ctx, "auditor", "Check", _offers(ctx)[-1].supplier)
            case "auditor", AnswerProposed(text=text) if text == SOUND:
                offer = _offers(ctx)[-1]
                if offer.price > cast("int", ctx.task.data["free_up_to"]):
                    ctx.ask(f"May {offer.price} be spent at {offer.supplier}?")
                else:
                    await self._order(ctx, offer)
            case _, HumanAnswered(answer=answer) if answer == YES:
                await self._order(ctx, _offers(ctx)[-1])
            case "clerk", AnswerProposed(text=text):
                ctx.emit(EpisodeAnswered(answer=text))
            case _:
                self._look_on(ctx)

    def _look_on(self, ctx: Context) -> None:
        """Without those suppliers that nobody wanted."""
        tried = {offer.supplier for offer in _offers(ctx)}
        left = [supplier for supplier in _suppliers(ctx) if supplier not in tried]
        ctx.random.shuffle(left)
        if left:
            self._hand_over(ctx, "scout", "Get a price from", *left)
        else:
            ctx.emit(EpisodeAnswered(answer="nothing could be ordered"))

    async def _order(self, ctx: Context, offer: Offer) -> None:
        day = (await ctx.now()).date()
        text = f"On {day.isoformat()}, as {ctx.uuid()} and for {offer.price}, order from"
        self._hand_over(ctx, "clerk", text, offer.supplier)

    def _hand_over(self, ctx: Context, role: str, text: str, *suppliers: str) -> None:
        ctx.emit(HandoffMade(target=role))
        self._post(ctx, role, text, *suppliers)

    def _post(self, ctx: Context, role: str, text: str, *suppliers: str) -> None:
        ctx.emit(
            MessagePosted(content=f"{ctx.task.prompt} {text}: {', '.join(suppliers)}"), to=role
        )


def _suppliers(ctx: Context) -> list[str]:
    return cast("list[str]", ctx.task.data["suppliers"])


def _offers(ctx: Context) -> list[Offer]:
    """The scout's, the newest last."""
    return [
        Offer.model_validate_json(event.data.text)
        for event in ctx.history
        if event.role == "scout" and isinstance(event.data, AnswerProposed)
    ]


class Purchasing:
    """The swarm."""

    def program(self) -> Program:
        agents = (
            PatientAgent("scout", llm=model(quote, conclude=cheapest), tools=[quote]),
            PatientAgent(
                "auditor", llm=model(rating, stock, conclude=verdict), tools=[rating, stock]
            ),
            PatientAgent("clerk", llm=model(order, conclude=receipt), tools=[order]),
        )
        tools = {agent.role: agent.tools for agent in agents}
        return Program(nodes=(*agents, Rules(), EnvironmentNode()), tools=tools)


class Purchases:
    """The environment: something to buy, the better the less it costs."""

    def tasks(self, split: Split, *, count: int, seed: int = 0) -> Sequence[Task]:
        """Each with suppliers of its own, and a price up to which nobody is asked."""
        dice = random.Random(f"{split} {seed}")
        return [self._task(number, dice) for number in range(count)]

    def _task(self, number: int, dice: random.Random) -> Task:
        amount = dice.randrange(2, 500)
        data: dict[str, JsonValue] = {
            "suppliers": list(dice.sample(SUPPLIERS, dice.randrange(2, len(SUPPLIERS) + 1))),
            "free_up_to": dice.randrange(0, 400),
        }
        return Task(
            id=f"purchase-{number}",
            prompt=f"{amount} bearings are wanted.",
            data=data,
            environment=ENVIRONMENT,
        )

    async def score(self, task: Task, episode: Episode) -> Reward:  # noqa: ARG002 - Environment's signature
        """1 for an order."""
        await anyio.sleep(CALL_S)
        return Reward(total=float(episode.answer.startswith(ORDERED)))
