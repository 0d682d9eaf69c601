"""`aworld answer EPISODE [TEXT]`: the questions that an episode has for a person, and an answer to one."""

from __future__ import annotations

import argparse
import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from aworld_runtime.cli.control import WAIT_S, outcome, unfinished
from aworld_runtime.cli.own_types import add_program, own_types
from aworld_runtime.cli.shared import (
    add_bus,
    add_json,
    add_store,
    joined_bus,
    run_async,
    table,
    tell_outcomes,
)
from aworld_runtime.errors import UsageError

if TYPE_CHECKING:
    from aworld_runtime.bus.base import Bus
    from aworld_runtime.events import Event


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Answer what an agent asks a person, and wait until the episode's log has the answer; it goes on then."
        " Without TEXT, list the open questions."
    )
    parser.add_argument(
        "name",
        metavar="EPISODE",
        help="the beginning of its id will do; last is the newest",
    )
    parser.add_argument("text", metavar="TEXT", nargs="?", help="the answer")
    parser.add_argument(
        "--question", type=int, metavar="SEQ", help="which one, where several are open"
    )
    add_program(parser)
    add_bus(parser)
    add_store(parser)
    add_json(parser)
    parser.epilog = f"example: {parser.prog} last 'Yes, go on.' --bus redis://host:6379"


def run(arguments: argparse.Namespace) -> int:
    return run_async(_answer, arguments)


async def _answer(arguments: argparse.Namespace) -> int:
    from aworld_runtime.bus.base import read_all
    from aworld_runtime.names import episode_log
    from aworld_runtime.nodes.questions import answer_to, open_questions, the_question

    async with AsyncExitStack() as opened:
        types = opened.enter_context(own_types(arguments.program))
        bus = await opened.enter_async_context(joined_bus(arguments.bus))
        last, *others = await unfinished(bus, arguments, types)
        if others:
            raise UsageError(f"{arguments.name!r} is a run: name one of its episodes")
        events = await read_all(bus, episode_log(last.episode_id or ""))
        if arguments.text is None:
            _list(open_questions(events), as_json=arguments.json)
            return 0
        asked = the_question(events, arguments.question)
        said = await _send(bus, answer_to(asked, arguments.text, source="human/cli"), events[-1])
    return tell_outcomes(said, of="episode", done="answered", as_json=arguments.json)


async def _send(bus: Bus, answer: Event, last: Event) -> dict[str, str]:
    import anyio

    from aworld_runtime.names import episode_log

    episode = answer.episode_id or ""
    await bus.send_mail(episode_log(episode), answer)
    said = "not answered yet"
    with anyio.move_on_after(WAIT_S):
        said = await outcome(bus, answer, last.seq + 1, "answered")
    return {episode: said}


def _list(asked: list[Event], *, as_json: bool) -> None:
    from aworld_runtime.events import HumanAsked

    rows = [(e.seq, e.role, e.data.question) for e in asked if isinstance(e.data, HumanAsked)]
    if as_json:
        print(json.dumps([{"seq": s, "role": role, "question": text} for s, role, text in rows]))
    elif rows:
        print(table(("SEQ", "ROLE", "QUESTION"), rows))
    else:
        print("no open questions")
