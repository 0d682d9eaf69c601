"""Nodes: they turn an event into events. A program is the set of nodes and tools that runs an episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol, cast

from pydantic import JsonValue

from aworld_runtime.errors import AWorldError, ConfigError, UnknownProgramError
from aworld_runtime.events import Event, SubscriptionChanged
from aworld_runtime.nodes.context import Context
from aworld_runtime.tools.base import BaseTool
from aworld_runtime.tools.call import told


class Node(Protocol):
    """Handles one delivery at a time, in seq order. Its state is the fold of `ctx.history`."""

    @property
    def role(self) -> str:
        """Unique in the episode; events with this `to` are delivered here."""
        ...

    @property
    def subscriptions(self) -> tuple[str, ...]:
        """Type prefixes of events without `to` that are delivered here too."""
        ...

    async def handle(self, ctx: Context, event: Event) -> None:
        """React by `ctx.emit`. What is emitted commits together with the fact that the event was handled."""
        ...


@dataclass(frozen=True, slots=True)
class Program:
    """Everything an episode runs.

    Raises:
        ConfigError: two nodes share a role, or a node and a tool a name: the log could not tell them apart.
    """

    nodes: tuple[Node, ...]
    tools: Mapping[str, Mapping[str, BaseTool]] = field(
        default_factory=dict[str, Mapping[str, BaseTool]]
    )
    """Role → the tools it may call, by name."""
    max_hops: int = 4000
    """Events that may follow from one another before the episode ends with `hop_limit`. A turn with a tool call takes two, so
    the longest honest episodes pass; roles that hand over to each other for ever, without a model between them, don't."""

    by_role: Mapping[str, Node] = field(init=False, repr=False, compare=False)
    subscribed: SubscriptionChanged = field(init=False, repr=False, compare=False)
    """Who gets what, at first. Made once: all its episodes share it."""

    def __post_init__(self) -> None:
        names = [*(node.role for node in self.nodes), *self.tool_names]
        if shared := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"name {', '.join(shared)} stands for two of this program's agents and tools: rename one"
            )
        subscriptions = {node.role: node.subscriptions for node in self.nodes}
        object.__setattr__(self, "by_role", {node.role: node for node in self.nodes})
        object.__setattr__(self, "subscribed", SubscriptionChanged(subscriptions=subscriptions))

    @property
    def tool_names(self) -> frozenset[str]:
        return frozenset(name for tools in self.tools.values() for name in tools)


class Runnable(Protocol):
    """Whatever can run an episode: an agent, a swarm."""

    def program(self) -> Program: ...


def load_program(
    reference: str, arguments: Mapping[str, JsonValue], known: Mapping[str, Runnable]
) -> Program:
    """The program that `reference` names: `local:NAME` in `known`, or `module:attribute`.

    The attribute is an agent or a swarm, or a function of `arguments` that returns one.

    Raises:
        UnknownProgramError: it can't be imported, the function or `program()` failed, or it is neither.
    """
    runnable = known[reference] if reference in known else _runnable(reference, arguments)
    try:
        return runnable.program()
    except AWorldError:
        raise
    except (Exception, SystemExit) as error:  # the boundary: user code
        raise UnknownProgramError(
            f"{reference!r}: its program() failed with {type(error).__name__}: {told(error)}"
        ) from error


def _runnable(reference: str, arguments: Mapping[str, JsonValue]) -> Runnable:
    if reference.startswith("local:"):
        raise UnknownProgramError(
            f"{reference!r} was an object of another process: name the program as module:attribute"
        )
    found = load(reference)
    if isinstance(found, type) or not hasattr(found, "program"):
        if not callable(found):
            raise UnknownProgramError(
                f"{reference!r} is a {type(found).__name__}; expected an agent, a swarm or a function"
            )
        found = made(repr(reference), cast("Callable[..., object]", found), arguments)
    if not hasattr(found, "program"):
        raise UnknownProgramError(
            f"{reference!r} gave a {type(found).__name__}; expected an agent or a swarm"
        )
    return cast("Runnable", found)


def made(
    what: str, make: Callable[..., object], arguments: Mapping[str, JsonValue] | None = None
) -> object:
    """What a user's function or class gives.

    Raises:
        UnknownProgramError: it failed; names `what`.
    """
    try:
        return make(**(arguments or {}))
    except (Exception, SystemExit) as error:  # the boundary: user code
        raise UnknownProgramError(
            f"{what} failed with {type(error).__name__}: {told(error)}"
        ) from error


def load(reference: str) -> object:
    """Import `module:attribute`.

    Raises:
        UnknownProgramError: no such module or attribute.
    """
    module, colon, attribute = reference.partition(":")
    if not colon or not module or not attribute:
        raise UnknownProgramError(
            f"{reference!r}: expected module:attribute, such as my_project.agents:solver"
        )
    try:
        found: object = import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except ImportError as error:
        raise UnknownProgramError(f"{reference!r}: can't import {module!r}: {error}") from error
    except (Exception, SystemExit) as error:  # the boundary: importing runs user code
        raise UnknownProgramError(
            f"{reference!r}: {type(error).__name__}: {told(error)}"
        ) from error
    return found
