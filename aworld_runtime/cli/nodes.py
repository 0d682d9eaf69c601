"""`aworld nodes --bus URL`: who is on the bus now."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from aworld_runtime.cli.shared import add_bus, add_json, joined_bus, run_async, table

if TYPE_CHECKING:
    from aworld_runtime.bus.base import NodeInfo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List workers, tools, environments, samplers and trainers on a bus."
    add_bus(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    nodes = run_async(_nodes, arguments.bus)
    if arguments.json:
        for node in nodes:
            print(node.model_dump_json())
        return 0
    head = ("NODE", "KIND", "LOAD", "HOST", "PID", "SINCE (UTC)", "VERSION", "DETAIL")
    print(table(head, [_row(node) for node in nodes]) if nodes else "nobody is on the bus")
    return 0


async def _nodes(url: str | None) -> list[NodeInfo]:
    async with joined_bus(url) as bus:
        return sorted(await bus.nodes(), key=lambda node: (node.kind, node.name))


def _row(node: NodeInfo) -> tuple[object, ...]:
    detail = [f"{name}={json.dumps(value)}" for name, value in node.detail.items()]
    return (
        node.name,
        node.kind,
        f"{node.load:.0%}",
        node.host or "-",
        node.pid or "-",
        f"{node.since:%Y-%m-%d %H:%M:%S}" if node.since else "-",
        node.version or "-",
        " ".join([node.url, *detail] if node.url else detail),
    )
