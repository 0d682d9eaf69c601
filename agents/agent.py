"""An agent: a function from an episode's history to its next turn.

    message, tool results ──▶ model ──▶ tool calls ──▶ ... ──▶ answer

It keeps no state of its own; what it knows is the fold of the log. One handler is one turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import Field, SecretStr

from aworld_runtime.errors import ConfigError
from aworld_runtime.events import (
    AnswerProposed,
    Event,
    HumanAnswered,
    MessagePosted,
    StopReason,
    ToolCalled,
    ToolFailed,
    ToolReturned,
)
from aworld_runtime.messages import Completion, Data, Message, Task
from aworld_runtime.models.base import ChatModel
from aworld_runtime.models.client import LLMClient
from aworld_runtime.nodes.context import Context
from aworld_runtime.nodes.environment import EnvironmentNode
from aworld_runtime.nodes.node import Program
from aworld_runtime.nodes.serial import Serial
from aworld_runtime.runtime import run_program, run_sync
from aworld_runtime.tools.base import BaseTool
from aworld_runtime.tools.registry import resolve
from aworld_runtime.trajectory import Episode

MAX_MALFORMED = 2
"""Malformed tool calls that are told to the model; the next one ends its work."""
RESERVED = frozenset({"swarm", "environment", "worker"})


class AgentConfig(Data):
    """Where an agent's model is, by fields."""

    llm_model_name: str
    llm_base_url: str | None = None
    llm_api_key: SecretStr | None = Field(default=None, repr=False)


class Agent:
    """One role: a model, instructions, and the tools it may use.

        Agent(name="solver", llm=LLMClient("openai/gpt-4o"), tools=["calculator"]).run("What is 17 * 23?")

    Args:
        name: its role, unique in a swarm.
        llm: its model, or the name of one, as `LLMClient` takes it; a run may give the role another.
        system_prompt: its instructions.
        tools: names of built-in tools, `BaseTool`s or functions. It can call no others.
        examples: worked turns shown before the task.
        max_turns: completions after which it stops with `turn_limit`.

    Raises:
        ConfigError: a reserved or empty name, `max_turns` below 1, an `llm` that is no model.
        UnknownToolError: a tool name that isn't built in.
    """

    subscriptions: tuple[str, ...] = ()

    def __init__(
        self,
        name: str = "agent",
        *,
        llm: ChatModel | str | None = None,
        conf: AgentConfig | None = None,
        system_prompt: str = "",
        tools: Sequence[str | BaseTool | Callable[..., object]] = (),
        examples: Sequence[Message] = (),
        max_turns: int = 32,
    ) -> None:
        if not name or name in RESERVED or "/" in name:
            raise ConfigError(
                f"agent name={name!r}: expected a name without '/', other than {', '.join(sorted(RESERVED))}"
            )
        if max_turns < 1:
            raise ConfigError(f"agent {name!r}: max_turns={max_turns}; expected 1 or more")
        if conf is not None:
            llm = LLMClient(
                model_name=conf.llm_model_name,
                base_url=conf.llm_base_url,
                api_key=conf.llm_api_key.get_secret_value() if conf.llm_api_key else None,
            )
        elif isinstance(llm, str):
            llm = LLMClient(llm)
        elif llm is not None and not hasattr(llm, "complete"):
            raise ConfigError(
                f"agent {name!r}: llm={llm!r:.80} is no model; expected LLMClient('openai/MODEL') or the like"
            )
        self.role = name
        self.llm = llm
        self.tools = resolve(tools)
        self.max_turns = max_turns
        system = (Message(role="system", content=system_prompt),) if system_prompt else ()
        self.preamble: tuple[Message, ...] = (*system, *examples)

    def __repr__(self) -> str:
        model = getattr(self.llm, "name", None)
        return f"{type(self).__name__}({self.role!r}, llm={model!r}, tools={list(self.tools)!r})"

    async def handle(self, ctx: Context, event: Event) -> None:
        """Take a turn on a message, on a person's answer, or once the last open tool call is answered."""
        refused_by_itself = isinstance(event.data, ToolFailed) and event.role == self.role
        if (
            isinstance(event.data, MessagePosted | HumanAnswered | ToolReturned | ToolFailed)
            and not refused_by_itself
            and not ctx.trajectory.open_calls
        ):
            await self._turn(ctx)

    async def _turn(self, ctx: Context) -> None:
        earlier = ctx.trajectory.turns
        completion = await ctx.complete(
            self.llm,
            preamble=self.preamble,
            tools=[tool.get_schema() for tool in self.tools.values()],
        )
        if not completion.tool_calls:
            ctx.emit(AnswerProposed(text=completion.text), trust="model")
            return
        malformed = sum(
            call.malformed is not None for turn in earlier for call in turn.completion.tool_calls
        )
        if len(earlier) + 1 >= self.max_turns:
            why = f"the turn limit ({self.max_turns}) is reached"
            self._stop(ctx, completion, "turn_limit", why)
        elif malformed >= MAX_MALFORMED and any(
            call.malformed is not None for call in completion.tool_calls
        ):
            self._stop(ctx, completion, "malformed", "too many calls were malformed")
        else:
            for call in completion.tool_calls:
                ctx.emit(ToolCalled(call=call), trust="model")

    def _stop(self, ctx: Context, completion: Completion, reason: StopReason, why: str) -> None:
        """End its work. Its last calls are not made, but answered: the conversation stays whole."""
        for call in completion.tool_calls:
            called = ctx.emit(ToolCalled(call=call), trust="model")
            refusal = ToolFailed(name=call.name, error="Cancelled", message=why)
            ctx.emit(refusal, to=self.role, correlation_id=called.id)
        ctx.emit(AnswerProposed(text=completion.text, reason=reason), trust="model")

    def program(self) -> Program:
        """This agent alone, with its task's environment."""
        return Program(
            nodes=(self, Serial([self.role]), EnvironmentNode()), tools={self.role: self.tools}
        )

    async def arun(self, task: str | Task) -> Episode:
        """Do one task on an embedded runtime (memory bus, SQLite store).

        Raises:
            AWorldError: the episode failed; its log says how.
        """
        return await run_program(self, task)

    def run(self, task: str | Task) -> Episode:
        """`arun`, for scripts; works in a notebook's running event loop too."""
        return run_sync(run_program, self, task)

    def chat(self, message: str) -> str:
        """The answer alone."""
        return self.run(message).answer

    async def achat(self, message: str) -> str:
        return (await self.arun(message)).answer
