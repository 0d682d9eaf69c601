"""Chooses a command, and turns what goes wrong into one line and an exit code.

    0    done
    1    it ran, and the answer is no: an episode failed, a replay differs; or it could not go on: its bus stayed away
    2    the caller can mend it: arguments, names, a server that can't be reached, an event that can't be read
    130  Ctrl-C, SIGTERM, SIGHUP

A command is a module with `add_arguments(parser)` and a function of the parsed arguments; it is imported when it is
chosen. `--help` imports none of them. `LOG_LEVEL` of the module, if there is one, is the level of its logs where nobody
says another.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from aworld_runtime.cli.log_lines import add_logging, set_up_logging
from aworld_runtime.cli.streams import open_streams, printable
from aworld_runtime.errors import (
    AWorldError,
    EventError,
    ExportError,
    NoBusError,
    StoreUnavailableError,
    UsageError,
    WorkerRefusedError,
    leaves,
)

GROUP = "aworld.commands"
"""Entry points by which other packages add commands: name = "module:function", as in `COMMANDS`."""
YOUNG_OBJECTS = 10_000
"""Objects made, less those freed, after which Python looks for cycles. Its own 700 costs a bus a tenth of its time."""
MENDABLE = (
    UsageError,
    EventError,
    NoBusError,
    StoreUnavailableError,
    ExportError,
    WorkerRefusedError,
)


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command is, and what the overview says about it."""

    reference: str
    """`module:function`; the module's `add_arguments` defines the arguments."""
    help: str


GROUPS = {
    "run": {
        "run": Command("aworld_runtime.cli.run:run", "run an agent or a swarm on one task"),
        "train": Command(
            "aworld_runtime.training.cli:train_command",
            "train the model behind the agents of a task",
        ),
        "doctor": Command(
            "aworld_runtime.cli.doctor:run", "show what is installed, and what to add"
        ),
    },
    "look": {
        "log": Command("aworld_runtime.cli.log:run", "show what happened in an episode"),
        "runs": Command("aworld_runtime.cli.runs:run", "list runs and their episodes"),
        "status": Command("aworld_runtime.cli.status:run", "show how a run is doing"),
        "diff": Command("aworld_runtime.cli.diff:run", "compare two episodes, or two runs"),
    },
    "replay, and change": {
        "replay": Command("aworld_runtime.cli.replay:run", "run episodes again from their logs"),
        "debug": Command(
            "aworld_runtime.cli.debug:run", "stop anywhere in an episode, and change it"
        ),
        "fork": Command("aworld_runtime.cli.fork:run", "go on live from any event of an episode"),
        "lint": Command("aworld_runtime.cli.lint:run", "find what a replay can't repeat in agents"),
        "replay-step": Command(
            "aworld_runtime.training.replay_step_cli:run", "take a training run's steps again"
        ),
        "export": Command(
            "aworld_runtime.cli.export:run", "write an episode or a run into one file"
        ),
        "import": Command(
            "aworld_runtime.cli.import_file:run", "take an exported file into a store"
        ),
    },
    "steer what runs": {
        "answer": Command("aworld_runtime.cli.answer:run", "answer what an agent asks a person"),
        "pause": Command("aworld_runtime.cli.control:pause", "let episodes start nothing new"),
        "resume": Command("aworld_runtime.cli.control:resume", "let paused episodes go on"),
        "cancel": Command("aworld_runtime.cli.control:cancel", "end episodes that run"),
    },
    "share a bus": {
        "worker": Command("aworld_runtime.cli.worker:run", "run episodes and tools for a bus"),
        "nodes": Command("aworld_runtime.cli.nodes:run", "list who is on the bus"),
        "archive": Command(
            "aworld_runtime.cli.archive:run", "store what happens on a bus, and tidy it"
        ),
        "dead-letter": Command("aworld_runtime.cli.dead_letter:run", "see to events that failed"),
        "verify": Command(
            "aworld_runtime.cli.verify:run", "compare what the bus and the store hold"
        ),
        "acl": Command("aworld_runtime.cli.acl:run", "make users for the bus's server, one a role"),
        "otel": Command("aworld_runtime.cli.otel:run", "send episodes to a collector as spans"),
    },
    "measure": {
        "bench": Command(
            "aworld_runtime.bench.cli:bench_command", "measure the bus on this machine"
        ),
        "chaos": Command(
            "aworld_runtime.chaos.cli:chaos_command",
            "let faults strike, and check what was promised",
        ),
    },
}
"""Ours, the upper layers' too, as the overview shows them: names alone, which import nothing. Other packages add theirs
as entry points."""
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see: {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _end_as_ctrl_c_does()
    open_streams()
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except (AWorldError, OSError, KeyboardInterrupt, BaseExceptionGroup) as error:
        return explain(error)
    return code


def _end_as_ctrl_c_does() -> None:
    """Let what ends a job on a cluster (SIGTERM), or a terminal that closes, stop the work as orderly as Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # In the background of a script: the terminal's Ctrl-C stays unheard, but an event loop must see a handler.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def end(_: int, frame: FrameType | None) -> None:
        interrupt = signal.getsignal(signal.SIGINT)
        if callable(interrupt):
            interrupt(signal.SIGINT, frame)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # else somebody has decided, as nohup does
            signal.signal(number, end)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        print(_overview())
        return 0
    if arguments[0] == "--version":
        from aworld_runtime.version import code_version

        print(code_version())
        return 0
    name = arguments[0]
    module_name, _, function = _find(name).reference.partition(":")
    module = importlib.import_module(module_name)
    parser = Parser(prog=f"aworld {name}")
    module.add_arguments(parser)
    add_logging(parser)
    parsed = parser.parse_args(arguments[1:])
    usual_level: str | None = getattr(module, "LOG_LEVEL", None)
    log_format, log_level = (getattr(parsed, name, None) for name in ("log_format", "log_level"))
    set_up_logging(log_format, log_level, usual_level=usual_level)
    gc.freeze()  # what is loaded by now stays: no collection need look at it again
    gc.set_threshold(YOUNG_OBJECTS)
    return getattr(module, function)(parsed)


def _find(name: str) -> Command:
    if name in COMMANDS:
        return COMMANDS[name]
    others = dict(_of_other_packages())
    if name in others:
        return others[name]
    known = [*COMMANDS, *others]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
    raise UsageError(f"unknown command {name!r}; {hint}")


def _of_other_packages() -> Iterator[tuple[str, Command]]:
    from importlib.metadata import entry_points

    for entry in entry_points(group=GROUP):
        if entry.name not in COMMANDS:
            package = entry.dist.name if entry.dist else "another package"
            yield entry.name, Command(entry.value, f"from {package}")


def _overview() -> str:
    others = dict(_of_other_packages())
    groups = {**GROUPS, "from other packages": others} if others else GROUPS
    width = max(len(name) for group in groups.values() for name in group)
    lines: list[str] = []
    for title, group in groups.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<{width}}  {command.help}" for name, command in group.items()]
    return "\n".join(
        [
            "usage: aworld COMMAND [ARGUMENTS]",
            "",
            "Runs agents and swarms whose every run is a log, and learns from it.",
            *lines,
            "",
            "aworld COMMAND --help says more. aworld --version names the code.",
        ]
    )


def explain(error: BaseException) -> int:
    """Say what went wrong in one line, where it is ours to say; returns the exit code."""
    found = list(leaves(error))
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in found):
        return 130
    if any(
        isinstance(leaf, BrokenPipeError) for leaf in found
    ):  # the reader left, as `| head` does
        _leave_output()
        return 141
    if any(isinstance(leaf, OSError) and leaf.errno == errno.ENOSPC for leaf in found):
        _leave_output()
        print("aworld: error: no space left on the disk that is written to", file=sys.stderr)
        return 1
    for kind, code in ((MENDABLE, 2), (AWorldError, 1)):
        for leaf in found:
            if isinstance(leaf, kind):
                print("aworld: error:", printable(str(leaf), keep="\n"), file=sys.stderr)
                return code
    raise error


def _leave_output() -> None:
    """What is still to be written to it would fail again as Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
