"""`aworld nodes --bus URL`: who is on the bus now, and how far behind."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aworld_runtime.cli.shared import add_bus, add_json, joined_bus, run_async, span, table

if TYPE_CHECKING:
    from aworld_runtime.bus.base import NodeInfo


@dataclass(frozen=True, slots=True)
class Listed:
    """A node, and what the bus knows of it."""

    node: NodeInfo
    lag: int | None
    """Events in its queues that nobody has settled; none where it serves no queue."""
    age_s: float | None
    seen_s: float
    """Since its last word."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "List workers, tools, environments, samplers, trainers and archivers on a bus. LAG is what its"
        " queues hold (work in hand included), or how old what an archiver has yet to store is."
    )
    add_bus(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    listed = run_async(_nodes, arguments.bus)
    if arguments.json:
        for entry in listed:
            fields = entry.node.model_dump(mode="json")
            fields |= {"role": entry.node.role, "lag": entry.lag, "age_s": entry.age_s}
            print(json.dumps(fields))
        return 0
    head = ("NODE", "KIND", "LOAD", "LAG", "AGE", "SEEN", "HOST", "PID", "VERSION", "DETAIL")
    print(table(head, [_row(entry) for entry in listed]) if listed else "nobody is on the bus")
    return 0


async def _nodes(url: str | None) -> list[Listed]:
    async with joined_bus(url) as bus:
        nodes = sorted(await bus.nodes(), key=lambda node: (node.kind, node.name))
        backlogs = {q: await bus.backlog(q) for q in {q for node in nodes for q in node.queues}}
        now = bus.now()
    return [
        Listed(
            node,
            lag=sum(backlogs[queue] for queue in node.queues) if node.queues else None,
            age_s=max((now - node.since).total_seconds(), 0.0) if node.since else None,
            seen_s=max((now - node.seen).total_seconds(), 0.0) if node.seen else 0.0,
        )
        for node in nodes
    ]


def _row(entry: Listed) -> tuple[object, ...]:
    node = entry.node
    detail = [f"{name}={json.dumps(value)}" for name, value in node.detail.items()]
    lag = f"{node.behind_s:.1f} s" if node.behind_s is not None else entry.lag
    return (
        node.name,
        node.kind,
        f"{node.load:.0%}",
        "-" if lag is None else lag,
        "-" if entry.age_s is None else span(entry.age_s),
        f"{entry.seen_s:.1f} s ago",
        node.host or "-",
        node.pid or "-",
        node.version or "-",
        " ".join([node.url, *detail] if node.url else detail),
    )
