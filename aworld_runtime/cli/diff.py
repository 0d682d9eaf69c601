"""`aworld diff A B`: what two episodes, or two runs, did otherwise."""

from __future__ import annotations

import argparse
import shutil
from typing import TYPE_CHECKING

from aworld_runtime.cli.own_types import add_program, own_types
from aworld_runtime.cli.shared import (
    add_json,
    add_limit,
    add_store,
    check_limit,
    find_log,
    one_line,
    run_async,
    stored,
    table,
)
from aworld_runtime.cli.side_by_side import side_by_side
from aworld_runtime.errors import AWorldError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aworld_runtime.replay.diff import (
        Call,
        CallDiff,
        EpisodeDiff,
        Outcome,
        RoleDiff,
    )
    from aworld_runtime.replay.diff_runs import RunDiff
    from aworld_runtime.store.base import EpisodeRecord, Store

LISTED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compare two episodes: what they share, where they part, and what each agent did otherwise; or two runs:"
        " which tasks have another outcome. Exit code 0 if they are the same, 1 if not, 2 where one can't be read."
    )
    for name in ("a", "b"):
        parser.add_argument(
            name,
            metavar=name.upper(),
            help="an episode (the beginning of its id will do; last is the newest), or a run",
        )
    add_limit(parser, LISTED, f"list at most N changed outcomes or calls (default {LISTED})")
    add_program(parser)
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    check_limit(arguments)
    try:
        found = run_async(_compare, arguments)
    except AWorldError as error:
        raise UsageError(str(error)) from error  # 1 would say that they differ
    if arguments.json:
        print(found.model_dump_json())
    else:
        print("\n".join(_lines(found, arguments.limit)))
    return 0 if found.same else 1


async def _compare(arguments: argparse.Namespace) -> EpisodeDiff | RunDiff:
    from aworld_runtime.bus.base import read_all
    from aworld_runtime.names import run_of_log
    from aworld_runtime.replay.diff import compare_episodes
    from aworld_runtime.replay.diff_runs import compare_runs

    with own_types(arguments.program) as types:
        async with stored(arguments.store) as store:
            a, b = [await find_log(store, name) for name in (arguments.a, arguments.b)]
            runs = run_of_log(a), run_of_log(b)
            match runs:
                case (None, None):
                    for log in (a, b):
                        await types.of(store, log)
                    return compare_episodes(await read_all(store, a), await read_all(store, b))
                case (str(one), str(two)):
                    return compare_runs(one, two, *[await _episodes(store, r) for r in (one, two)])
                case _:
                    raise UsageError(f"{a} and {b}: compare two episodes, or two runs")


async def _episodes(store: Store, run_id: str) -> list[EpisodeRecord]:
    return [episode async for episode in store.run_episodes(run_id)]


def _lines(found: EpisodeDiff | RunDiff, limit: int) -> Iterator[str]:
    from aworld_runtime.replay.diff import EpisodeDiff

    yield from (
        _of_episodes(found, limit) if isinstance(found, EpisodeDiff) else _of_runs(found, limit)
    )


def _of_episodes(found: EpisodeDiff, limit: int) -> Iterator[str]:
    yield f"A {found.a.episode}, B {found.b.episode}"
    begin = [f"they share their first {found.shared} events"] if found.shared else []
    if found.alike or not begin:
        begin.append(f"{'the next' if begin else 'their first'} {found.alike} are alike")
    yield "; ".join(begin)
    if found.same:
        yield "no difference"
        return
    for change in found.request:
        yield f"asked otherwise: {change}"
    if (first := found.first) is not None:
        yield f"first difference, of {first.role}: {first.what}"
        heads = (f"A, EVENT {first.a or '-'}", f"B, EVENT {first.b or '-'}")
        columns = shutil.get_terminal_size((120, 24)).columns
        yield side_by_side(*first.recorded, columns, heads)
    yield ""
    head = ("", "TURNS", "CALLS", "TOKENS", "SECONDS", "REWARD", "STATUS", "ANSWER")
    rows = [_role_row(role) for role in found.roles]
    a, b = found.a, found.b
    yield table(head, [*rows, ("episode", "", "", "", "", *_outcome_cells(a, b))])
    changes = [(role.role, call) for role in found.roles for call in role.calls]
    if changes:
        yield ""
    for role, call in changes[:limit]:
        yield f"{role}: {_call_change(call)}"
    if len(changes) > limit:
        yield f"… {len(changes) - limit} more calls; --limit shows more"


def _role_row(role: RoleDiff) -> tuple[str, ...]:
    a, b = role.a, role.b
    return (
        role.role,
        _pair(a.turns, b.turns),
        _pair(a.calls, b.calls),
        _pair(a.tokens, b.tokens),
        _pair(f"{a.seconds:.2f}", f"{b.seconds:.2f}"),
        _pair(_reward(a.reward), _reward(b.reward)),
        "",
        _pair(_text(a.answer), _text(b.answer)),
    )


def _outcome_cells(a: Outcome, b: Outcome) -> tuple[str, str, str]:
    return (
        _pair(_reward(a.reward), _reward(b.reward)),
        _pair(a.status or "unfinished", b.status or "unfinished"),
        _pair(_text(a.answer), _text(b.answer)),
    )


def _pair(a: object, b: object) -> str:
    return str(a) if a == b else f"{a} → {b}"


def _reward(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"


def _text(answer: str | None) -> str:
    return repr(one_line(answer, 40)) if answer else "-"


def _call_change(change: CallDiff) -> str:
    a, b = change.a, change.b
    if a and b and change.change == "arguments":
        return f"{a.name}: {one_line(a.arguments, 60)} in A, {one_line(b.arguments, 60)} in B"
    if a and b:
        return f"{_called(a)} in A, {_given(b)} in B"
    return f"only in A: {_called(a)}" if a else f"only in B: {_called(b)}" if b else ""


def _called(call: Call) -> str:
    return f"{call.name}({one_line(call.arguments, 60)}) {_given(call)}"


def _given(call: Call) -> str:
    if call.answer is None:
        return "without an answer"
    return f"{'failed: ' if call.failed else '= '}{one_line(call.answer, 60)}"


def _of_runs(found: RunDiff, limit: int) -> Iterator[str]:
    yield f"A {found.a}, B {found.b}: {found.pairs} episodes of the same task and index"
    if found.pairs and found.rewards[0] is not None:
        yield f"mean reward {_pair(*map(_reward, found.rewards))}"
    if found.same:
        yield "no difference"
    if found.changed:
        head = ("TASK", "INDEX", "A", "B", "REWARD", "STATUS", "ANSWER")
        rows = [
            (
                change.task or "",
                change.index,
                change.a.episode,
                change.b.episode,
                *_outcome_cells(change.a, change.b),
            )
            for change in found.changed[:limit]
        ]
        yield f"another outcome: {len(found.changed)}"
        yield table(head, rows)
        if len(found.changed) > limit:
            yield f"… {len(found.changed) - limit} more; --limit shows more"
    for name, alone in (("A", found.only_a), ("B", found.only_b)):
        if alone:
            yield f"only in {name}: {len(alone)} episodes: {one_line(', '.join(alone), 100)}"
