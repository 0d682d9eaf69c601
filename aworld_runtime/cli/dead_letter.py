"""`aworld dead-letter list, show, requeue, drop`: what queues gave up on, and mail that nobody could read."""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from aworld_runtime.cli.log_lines import add_logging
from aworld_runtime.cli.shared import (
    add_bus,
    add_json,
    add_limit,
    ago,
    check_limit,
    joined_bus,
    one_line,
    run_async,
    table,
    tell_outcomes,
)
from aworld_runtime.cli.streams import printable
from aworld_runtime.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from aworld_runtime.bus.base import Bus, DeadLetter

SHOWN = 4000
"""Characters of a dead letter that are shown; --json has all."""
REASON = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Events that failed too often, came too late or could not be read. Those of queue 'mail' were"
        " mail to a log, and go back there."
    )
    parser.epilog = (
        "example: aworld dead-letter list --bus redis://host:6379, then: aworld dead-letter requeue episodes"
        " ID --bus redis://host:6379"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|requeue|drop")
    listing = actions.add_parser(
        "list",
        help="list them, of one queue or of all",
        description="List dead letters: queue, id, age, type, how often it was tried, and why it died.",
    )
    listing.add_argument("queue", nargs="?", metavar="QUEUE", help="this one alone (default: all)")
    add_limit(listing, 100, "of each queue, the oldest (default 100)")
    for name, help_text, more in (
        (
            "show",
            "show them whole",
            "Show dead letters whole: the reason, and the event or its bytes.",
        ),
        (
            "requeue",
            "try them again, with all their tries",
            "Put dead letters back on their queue, with all their tries. What is past its deadline is left: exit code 1.",
        ),
        ("drop", "forget them", "Remove dead letters for good."),
    ):
        action = actions.add_parser(name, help=help_text, description=more)
        action.add_argument("queue", metavar="QUEUE", help="as dead-letter list shows it")
        action.add_argument("ids", nargs="*", metavar="ID", help="as dead-letter list shows them")
        action.add_argument("--all", action="store_true", help="all of the queue")
    for action in actions.choices.values():
        add_bus(action)
        add_json(action)
        add_logging(action)


def run(arguments: argparse.Namespace) -> int:
    match arguments.action:
        case "list":
            check_limit(arguments)
            return run_async(_list, arguments)
        case "show":
            return run_async(_show, arguments)
        case _:
            return run_async(_change, arguments)


async def _list(arguments: argparse.Namespace) -> int:
    async with joined_bus(arguments.bus) as bus:
        queues = [arguments.queue] if arguments.queue else await bus.dead_letter_queues()
        letters = [
            letter
            for queue in queues
            for letter in await bus.dead_letters(queue, limit=arguments.limit)
        ]
    if arguments.json:
        for letter in letters:
            print(json.dumps(_fields(letter)))
        return 0
    rows = [
        (
            printable(letter.queue),
            letter.id,
            ago(letter.time),
            letter.event.type if letter.event else f"? ({len(letter.raw)} bytes)",
            letter.deliveries,
            one_line(letter.reason, REASON),
        )
        for letter in letters
    ]
    head = ("QUEUE", "ID", "AGE", "TYPE", "DELIVERIES", "REASON")
    print(table(head, rows) if rows else "no dead letters")
    return 0


async def _show(arguments: argparse.Namespace) -> int:
    async with joined_bus(arguments.bus) as bus:
        letters = await _chosen(bus, arguments)
    if not letters and not arguments.json:
        print(f"no dead letters on queue {printable(arguments.queue)!r}")
    for number, letter in enumerate(letters):
        if arguments.json:
            print(json.dumps(_fields(letter)))
        else:
            print("\n" * bool(number) + _whole(letter))
    return 0


async def _change(arguments: argparse.Namespace) -> int:
    """Requeue or drop; what would only die again is left where it is."""
    from aworld_runtime.bus.base import too_late

    requeuing = arguments.action == "requeue"
    done = "requeued" if requeuing else "dropped"
    outcomes: dict[str, str] = {}
    async with joined_bus(arguments.bus) as bus:
        change: Callable[[str, str], Awaitable[None]] = bus.requeue if requeuing else bus.drop
        for letter in await _chosen(bus, arguments):
            late = requeuing and letter.event and too_late(letter.event, bus.now)
            if late:
                outcomes[letter.id] = f"left: its {late}"
                continue
            try:
                await change(letter.queue, letter.id)
                outcomes[letter.id] = done
            except NotFoundError:
                outcomes[letter.id] = "gone: somebody else was faster"
    if not outcomes and not arguments.json:
        print(f"no dead letters on queue {printable(arguments.queue)!r}")
    return tell_outcomes(
        outcomes, of="id", done=done, as_json=arguments.json, queue=arguments.queue
    )


async def _chosen(bus: Bus, arguments: argparse.Namespace) -> Sequence[DeadLetter]:
    """The dead letters that the arguments name.

    Raises:
        UsageError: neither ids nor `--all`, or both.
        NotFoundError: an id that the queue doesn't have.
    """
    queue, ids = arguments.queue, arguments.ids
    if bool(ids) == arguments.all:
        raise UsageError(f"dead-letter {arguments.action} {queue}: give IDs, or --all; one of them")
    letters = {letter.id: letter for letter in await bus.dead_letters(queue, limit=1_000_000)}
    if arguments.all:
        return list(letters.values())
    if unknown := [name for name in ids if name not in letters]:
        raise NotFoundError(
            f"queue {queue!r} has no dead letter {unknown[0]!r}; see: aworld dead-letter list {queue}"
        )
    return [letters[name] for name in ids]


def _whole(letter: DeadLetter) -> str:
    facts = {
        "queue": letter.queue,
        "id": letter.id,
        "since": f"{letter.time:%Y-%m-%d %H:%M:%S} UTC, {ago(letter.time)}",
        "deliveries": letter.deliveries,
        "reason": letter.reason,
        "mail to": letter.log,
    }
    lines = [f"{name:<10}  {printable(str(f))}" for name, f in facts.items() if f is not None]
    if letter.event is not None:
        body = printable(letter.event.model_dump_json(indent=2, exclude_defaults=True), keep="\n")
        size = len(body)
    else:
        body, size = repr(letter.raw[:SHOWN]), len(letter.raw)
    cut = f"\n… of {size} in all; --json has it whole" if size > SHOWN else ""
    return "\n".join(lines) + f"\n{body[:SHOWN]}{cut}"


def _fields(letter: DeadLetter) -> dict[str, object]:
    return {
        "queue": letter.queue,
        "id": letter.id,
        "time": letter.time.isoformat(),
        "deliveries": letter.deliveries,
        "reason": letter.reason,
        "log": letter.log,
        "event": letter.event.model_dump(mode="json", exclude_defaults=True)
        if letter.event
        else None,
        "raw_base64": base64.b64encode(letter.raw).decode() if letter.event is None else None,
    }
