"""`aworld fork EPISODE --at SEQ`: go on live from an event of an episode, with something changed."""

from __future__ import annotations

import argparse
import json
import logging
from typing import TYPE_CHECKING, cast

from aworld_runtime.cli.own_types import own_types, same_options
from aworld_runtime.cli.run import UNSAID, add_slots, expect_workers, leaving_to_workers
from aworld_runtime.cli.shared import (
    LAST,
    add_bus,
    add_json,
    add_store,
    find_episode,
    one_line,
    run_async,
    stored,
    table,
)
from aworld_runtime.cli.streams import own_prints
from aworld_runtime.errors import UsageError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from aworld_runtime.cli.own_types import OwnTypes
    from aworld_runtime.messages import ModelSpec
    from aworld_runtime.replay.fork import Changes
    from aworld_runtime.store.base import EpisodeRecord, Store
    from aworld_runtime.trajectory import Episode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run an episode again from one of its events on, live: a new episode that shares the events before that. Its next"
        " event can be edited, and program, arguments and models can be others. The episode itself stays as it is."
        " Exit code 1 if the new one isn't answered."
    )
    parser.epilog = "example: aworld fork last --at 11 --set data.content=42"
    parser.add_argument(
        "episode",
        nargs="?",
        default=LAST,
        metavar="EPISODE",
        help="an id, or how it begins, or last (the newest; the default)",
    )
    parser.add_argument(
        "--at",
        type=int,
        required=True,
        metavar="SEQ",
        help="the last event that both share, by its number in aworld log",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="PATH=VALUE",
        help="edit the event after that: data.content=42, data.call.arguments.a=1; VALUE is JSON, else text",
    )
    parser.add_argument(
        "--program",
        metavar="MODULE:ATTRIBUTE",
        help="another agent or swarm to go on with; needed where the episode's was an object in a script",
    )
    parser.add_argument(
        "--arguments", metavar="JSON", help="other arguments of the function that makes the program"
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="ROLE=SPEC",
        help="another model for a role, or for * (all): a name such as openai/gpt-5, or JSON:"
        ' {"model": "NAME", "base_url": "http://…/v1"}',
    )
    add_slots(parser)
    add_bus(parser)
    add_store(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    expect_workers(arguments)
    logging.getLogger("aworld_runtime.nodes.owner").addHandler(UNSAID)
    edit = dict(_pair(text, "--set", "data.content=42") for text in arguments.set)
    models = dict(_pair(text, "--model", "solver=openai/gpt-5") for text in arguments.model)
    here = arguments.program if arguments.slots else None  # a worker's may be nowhere else
    with own_prints(apart=arguments.json), own_types(here) as types:
        parent, fork = run_async(_fork, arguments, edit, models, types)
    before, after = _outcome(parent, parent.status), _outcome(fork, fork.reason)
    differing = [name for name, value in before.items() if after[name] != value]
    if arguments.json:
        ids = {"episode": fork.id, "parent": parent.id, "at": arguments.at, "run": fork.run_id}
        compared = {"before": before, "after": after, "differing": differing}
        print(json.dumps(ids | compared, ensure_ascii=False))
    else:
        print(f"{fork.id}, forked from {parent.id} after event {arguments.at}")
        rows = [_row("before", before), _row("after", after)]
        print(table(("", "REASON", "REWARD", "ANSWER"), rows))
        print(f"differing: {', '.join(differing) or 'nothing'}")
        options = same_options(arguments)
        print(f"what happened:  aworld log {fork.id}{options}")
        print(f"what differs:   aworld diff {parent.id} {fork.id}{options}")
    return 0 if fork.reason == "answered" else 1


def _pair(text: str, option: str, example: str) -> tuple[str, JsonValue]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"{option} {text!r}: expected {option} {example}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


async def _fork(
    arguments: argparse.Namespace,
    edit: dict[str, JsonValue],
    models: dict[str, JsonValue],
    types: OwnTypes,
) -> tuple[EpisodeRecord, Episode]:
    """The episode that was forked, and the fork, once it has ended."""
    from aworld_runtime.names import episode_log
    from aworld_runtime.nodes.node import load
    from aworld_runtime.replay.fork import Changes
    from aworld_runtime.runtime import Runtime

    async with stored(arguments.store) as store:
        parent = await find_episode(store, arguments.episode)
        await types.of(store, episode_log(parent.id))
        changes = Changes(
            edit,
            arguments.program,
            _arguments(arguments.arguments),
            {role: _spec(role, spec) for role, spec in models.items()},
        )
        await _check(arguments, store, parent.id, changes)
    program: str = arguments.program or parent.program
    if arguments.slots and not program.startswith("local:"):
        load(program)  # a wrong name is the caller's to mend, not an episode that failed
    async with Runtime(bus=arguments.bus, store=arguments.store, slots=arguments.slots) as runtime:
        fork = await runtime.fork(
            parent.id,
            at=arguments.at,
            edit=changes.edit,
            program=changes.program,
            arguments=changes.arguments,
            models=changes.models,
        )
        with leaving_to_workers(runtime.bus.url):
            return parent, await runtime.result(fork)


async def _check(
    arguments: argparse.Namespace, store: Store, parent: str, changes: Changes
) -> None:
    """See that the fork can be made, before a run begins for it."""
    from aworld_runtime.archive.logs import Logs
    from aworld_runtime.bus.open import open_bus
    from aworld_runtime.config import Settings
    from aworld_runtime.replay.fork import begin_fork, expect_roles

    settings = Settings.from_env()
    async with open_bus(arguments.bus or settings.bus, keys=settings.bus_keys) as bus:
        opening = await begin_fork(
            Logs(bus, store), parent, arguments.at, changes, source="cli/fork", run_id=None
        )
    if arguments.slots:
        expect_roles(opening[1], changes.models, {})


def _arguments(text: str | None) -> dict[str, JsonValue] | None:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--arguments {text!r}: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f'--arguments {text!r}: expected an object, such as {{"rounds": 2}}')
    return cast("dict[str, JsonValue]", found)


def _spec(role: str, spec: JsonValue) -> ModelSpec:
    from pydantic import ValidationError

    from aworld_runtime.config import Settings
    from aworld_runtime.messages import ModelSpec
    from aworld_runtime.models.client import LLMClient

    if not isinstance(spec, dict):
        return LLMClient(str(spec)).spec(Settings.from_env().llm)
    try:
        return ModelSpec.model_validate(spec)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UsageError(f"--model {role}=…: {wrong}") from error


def _outcome(episode: Episode | EpisodeRecord, reason: str | None) -> dict[str, JsonValue]:
    return {
        "reason": reason or "running",
        "answer": episode.answer,
        "reward": episode.reward,
        "error": episode.error,
    }


def _row(name: str, outcome: dict[str, JsonValue]) -> tuple[str, ...]:
    reward = outcome["reward"]
    said = str(outcome["answer"] or outcome["error"] or "")
    shown = f"{reward:.3f}" if isinstance(reward, float) else "-"
    return (name, str(outcome["reason"]), shown, one_line(said, 100))
