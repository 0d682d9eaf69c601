"""What the workers do: small agents in real episodes, and programs that misbehave on purpose.

walker ─▶ values, tool calls, a question ─▶ tool workers (over their queue), thinker (a model's turn)
   ▲                                              │
   └────────── answers: the next turn ◀───────────┘     after the last turn: episode.finished
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import anyio
from pydantic import JsonValue

from aworld_runtime.events import (
    AnswerProposed,
    EpisodeFinished,
    EpisodeRequested,
    Event,
    MessagePosted,
    ToolCalled,
    ToolFailed,
    ToolReturned,
    ValueRecorded,
)
from aworld_runtime.messages import Task, ToolCall, ToolSpec
from aworld_runtime.models.scripted import ScriptedModel
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.node import Node, Program
from aworld_runtime.tools.base import BaseTool, RemoteTool

MODULE = "aworld_runtime.chaos.workload"
WALK = f"{MODULE}:walk"
MISBEHAVE = f"{MODULE}:misbehave"
TURNS = 8
VALUES = 40
"""Recorded in each turn."""
CALLS = 2
"""Of the remote tool in each turn; to think is one more."""
LARGE_EVERY = 37
"""One value in so many is large, up to `LARGE_BYTES`."""
LARGE_BYTES = 90_000
TOOL = "measure"
CALL_S = 30.0
MEASURE_S = 0.1
"""An episode lasts a few seconds, so that faults strike in its middle."""
ANSWERS = (ToolReturned, ToolFailed, AnswerProposed)
MISDEEDS = ("raises", "exits", "hangs", "blocks", "chatters", "unwritable", "too_large")


def answer_of(name: str) -> str:
    """What the healthy episode of this name answers."""
    return f"{name} walked {TURNS} turns"


class Walker:
    """Takes `TURNS` turns; each ends with calls whose answers begin the next one."""

    role = "walker"
    subscriptions = ("episode.requested",)

    async def handle(self, ctx: Context, event: Event) -> None:  # noqa: ARG002 - Node's signature
        answers = sum(isinstance(e.data, ANSWERS) for e in ctx.history)
        turn, waiting = divmod(answers, CALLS + 1)
        if waiting:
            return
        if turn == TURNS:
            ctx.emit(EpisodeFinished(answer=answer_of(ctx.task.id)))
            return
        for number in range(VALUES):
            await ctx.record("sample", _Sample(ctx, turn, number))
        for number in range(CALLS):
            call = ToolCall(
                id=f"{turn}-{number}", name=TOOL, arguments={"turn": turn, "number": number}
            )
            ctx.emit(ToolCalled(call=call))
        ctx.emit(MessagePosted(content=f"What about turn {turn}?"), to=Thinker.role)


@dataclass(frozen=True, slots=True)
class _Sample:
    ctx: Context
    turn: int
    number: int

    async def __call__(self) -> JsonValue:
        place = self.turn * VALUES + self.number
        if place % LARGE_EVERY == LARGE_EVERY - 1:
            size = int(self.ctx.random.random() ** 3 * LARGE_BYTES)
            return os.urandom(size // 2).hex()
        return [self.turn, self.number, self.ctx.random.random()]


class Thinker:
    """Asks a model, which commits the request before the answer."""

    role = "thinker"
    subscriptions = ()

    def __init__(self) -> None:
        self._model = ScriptedModel(lambda request: f"{len(request.messages)} messages so far")

    async def handle(self, ctx: Context, event: Event) -> None:  # noqa: ARG002 - Node's signature
        completion = await ctx.complete(self._model)
        ctx.emit(AnswerProposed(text=completion.text), to=Walker.role)


class Measure(BaseTool):
    """The tool that tool workers serve."""

    def get_schema(self) -> ToolSpec:
        return ToolSpec(name=TOOL, description="Measures a place of the walk.")

    async def run(self, **arguments: JsonValue) -> JsonValue:
        await anyio.sleep(MEASURE_S)
        return {"measured": arguments}


@dataclass(frozen=True)
class Nodes:
    """A program as it is."""

    nodes: tuple[Node, ...]
    tools: tuple[BaseTool, ...] = ()

    def program(self) -> Program:
        named = {tool.get_schema().name: tool for tool in self.tools}
        return Program(nodes=self.nodes, tools={node.role: named for node in self.nodes})


def walk() -> Nodes:
    """The healthy program."""
    remote = RemoteTool(Measure().get_schema(), timeout_s=CALL_S)
    return Nodes((Walker(), Thinker()), (remote,))


@dataclass(frozen=True)
class Villain:
    """Does something that no handler should."""

    deed: str
    role: str = "villain"
    subscriptions: tuple[str, ...] = ("episode.requested",)

    async def handle(self, ctx: Context, event: Event) -> None:  # noqa: ARG002 - Node's signature
        match self.deed:
            case "raises":
                raise RuntimeError("on purpose")
            case "exits":
                os._exit(EXIT_CODE)
            case "hangs":
                await anyio.sleep_forever()
            case "blocks":
                time.sleep(1.0)  # noqa: ASYNC251 - the deed: the leases must outlive it
                ctx.emit(EpisodeFinished(answer="blocked for a while"))
            case "chatters":
                other = "accomplice" if self.role == "villain" else "villain"
                ctx.emit(MessagePosted(content="and you?"), to=other)
            case "unwritable":
                ctx.emit(ValueRecorded(kind="surrogate", value="\ud800"))
            case "too_large":
                ctx.emit(ValueRecorded(kind="large", value="x" * (9 * 1024 * 1024)))
            case _:
                raise ValueError(f"deed={self.deed!r}; expected one of {', '.join(MISDEEDS)}")


EXIT_CODE = 17
"""Of a worker that one of its handlers ended."""


def misbehave(deed: str) -> Nodes:
    """A program that does harm."""
    return Nodes((Villain(deed), Villain(deed, "accomplice", ())))


def request(run_id: str, name: str, deed: str | None = None) -> Event:
    """An episode to be run; with a `deed`, one that misbehaves and is given up some time."""
    task = Task(id=name, prompt="Walk.")
    data = EpisodeRequested(
        task=task,
        program=WALK if deed is None else MISBEHAVE,
        arguments={} if deed is None else {"deed": deed},
        timeout_s=None if deed is None else 4.0,
    )
    return Event.of(
        data,
        source="submitter/chaos",
        run_id=run_id,
        task_id=name,
        episode_id=f"{run_id}-{name}",
        # Only of a group's is given up that its workers do not survive.
        group_id=None if deed is None else f"{run_id}-{name}",
    )
