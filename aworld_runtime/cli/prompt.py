"""The debugger's prompt: a line is a command, an empty one the last again.

    main thread: readline, commands ──▶ portal ──▶ the event loop's thread: debugger, bus, runtime
                 Ctrl-C cancels what a command waits for

So the loop never waits for a person, and leases stay alive.
"""

from __future__ import annotations

import cmd
import json
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal
from pydantic import JsonValue

from aworld_runtime.cli.log import Layout
from aworld_runtime.cli.screen import PIPE_WIDTH, Look
from aworld_runtime.cli.shared import counted
from aworld_runtime.cli.side_by_side import explained
from aworld_runtime.errors import AWorldError, UsageError, first_error
from aworld_runtime.events import Event
from aworld_runtime.messages import Message
from aworld_runtime.predicate import values
from aworld_runtime.replay.debugger import Debugger, Forks, Stop, Why
from aworld_runtime.replay.state import EpisodeState

T = TypeVar("T")

ALIASES = {
    "s": "step",
    "n": "next",
    "c": "continue",
    "u": "until",
    "r": "run",
    "g": "goto",
    "b": "break",
    "l": "list",
    "p": "print",
    "w": "where",
    "e": "edit",
    "m": "model",
    "h": "help",
    "q": "quit",
}
COMMANDS = {
    "step": "to the next event; at a live log's end, a handler or tool call may start",
    "next [ROLE]": "to where the next handler, of this role, ends",
    "continue": "to the next breakpoint, or the end",
    "until SEQ|PREDICATE": "to the next such event",
    "back": "to the event before",
    "goto SEQ": "to any event that has happened; runs nothing again",
    "break PREDICATE": "stop at such events: type=tool.called and data.name=calculator",
    "breaks": "the breakpoints",
    "clear [NUMBER]": "forget a breakpoint, or all",
    "list [SEQ]": "the events around the position, or around this one",
    "print [PATH]": "the event, or a field of it: data.content",
    "state [ROLE]": "what an agent knows here: its conversation, and what it has yet to do; else as where",
    "where": "who has to do what, and who waits for whom",
    "edit PATH=VALUE": "go on, live, with a fork in which this event has another value: data.content=42",
    "model ROLE=MODEL": "go on, live, with a fork in which a role (* for all) has another model",
    "fork [MODULE:ATTRIBUTE]": "go on, live, with a fork from here, perhaps of another program",
    "run [MODULE:ATTRIBUTE]": "fork, then continue",
    "pause": "a live episode starts nothing new",
    "resume": "a live episode goes on, and is not followed",
    "help [COMMAND]": "this list, or more of a command",
    "quit": "leave: breakpoints are cleared; an episode on a bus stays paused, one in this process or a fork is cancelled",
}
SAID: Mapping[Why, str] = {
    "breakpoint": "breakpoint {}",
    "diverged": "DIFFERENT: {}",
    "paused": "paused by somebody: {}",
    "waiting": "it waits: {}",
    "end": "nothing follows",
}
"""Of why it has stopped."""
AROUND = 5
"""Events that `list` shows on either side."""


class Prompt(cmd.Cmd):
    """Commands of one debugger, until it is quit."""

    def __init__(
        self, debugger: Debugger, portal: BlockingPortal, *, runtime: Callable[[], Forks]
    ) -> None:
        super().__init__()
        self.code = 0
        self._debugger = debugger
        self._portal = portal
        self._runtime = runtime
        """Where forks are made, opened when it is called."""
        self._look = Look.of(sys.stdout)
        self._interactive = sys.stdin.isatty()
        self.prompt = "(aworld) " if self._interactive else ""

    # --- the loop --------------------------------------------------------------------------------------------------------

    def go(self, about: str, first: str | None = None) -> int:
        """From a `first` command until it is quit, or its input ends.

        Returns the exit code: 1 where a handler did something else than its record; 2 where a script's command failed, which
        ends it.
        """
        print(about)
        if first is None:
            self._show()
        else:
            self.cmdqueue.append(first)
        while True:
            try:
                self.cmdloop()
                break
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print("\ninterrupted; quit leaves")
                self._show()
        return self.code

    def onecmd(self, line: str) -> bool:
        try:
            if self._debugger.live is not None:
                self._call(self._debugger.live.look)
            return bool(super().onecmd(line))
        except BaseExceptionGroup as group:
            error = first_error(group)
            if not isinstance(error, AWorldError):
                raise
        except AWorldError as caught:
            error = caught
        print(f"aworld: error: {error}", file=sys.stderr)
        if self._interactive:
            return False
        self.code = 2
        return True

    def parseline(self, line: str) -> tuple[str | None, str | None, str]:
        name, rest, line = super().parseline(line)
        if name and not hasattr(self, f"do_{name}"):
            begun = self.completenames(name)
            name = ALIASES.get(name) or (begun[0] if len(begun) == 1 else name)
        return name, rest, line

    def default(self, line: str) -> None:
        name = line.split(maxsplit=1)[0]
        begun = self.completenames(name)
        what = "several commands begin with" if begun else "no command is called"
        raise UsageError(f"{what} {name!r}: {', '.join(begun or self.names)}")

    def _call(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do it in the event loop. Ctrl-C cancels it, and is raised once it has ended."""
        scopes: list[anyio.CancelScope] = []

        async def call() -> list[T]:
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                return [await work()]
            return []

        future: Future[list[T]] = self._portal.start_task_soon(call)
        try:
            done = future.result()
        except KeyboardInterrupt:
            for scope in scopes:
                self._portal.call(scope.cancel)
            future.result()
            raise
        return done[0]

    # --- completion and help ---------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return [usage.partition(" ")[0] for usage in COMMANDS]

    def completenames(self, text: str, *_: object) -> list[str]:
        return [name for name in self.names if name.startswith(text)]

    def completedefault(self, *ignored: object) -> list[str]:
        """A role."""
        text = str(ignored[0])
        return [role for role in self._debugger.state().to_handle if role.startswith(text)]

    def do_help(self, arg: str) -> None:
        short = {name: alias for alias, name in ALIASES.items()}
        for name, (usage, does) in zip(self.names, COMMANDS.items(), strict=True):
            if name.startswith(ALIASES.get(arg, arg)):
                print(f"  {short.get(name, ''):<1}  {usage:<23}  {does}")
        print("An empty line is the last command again. Ctrl-C interrupts a command; Ctrl-D quits.")

    # --- movement --------------------------------------------------------------------------------------------------------

    def do_step(self, _: str) -> None:
        self._stopped(self._call(self._debugger.step))

    def do_next(self, arg: str) -> None:
        self._stopped(self._call(lambda: self._debugger.next(arg or None)))

    def do_continue(self, _: str) -> None:
        self._stopped(self._call(self._debugger.continue_))

    def do_until(self, arg: str) -> None:
        where = int(arg) if arg.isdecimal() else _given(arg, "SEQ or PREDICATE")
        self._stopped(self._call(lambda: self._debugger.until(where)))

    def do_back(self, _: str) -> None:
        self._stopped(self._debugger.back())

    def do_goto(self, arg: str) -> None:
        self._stopped(self._debugger.goto(_number(arg, "SEQ")))

    def do_pause(self, _: str) -> None:
        self._call(self._debugger.pause)

    def do_resume(self, _: str) -> None:
        self._call(self._debugger.resume)

    def do_quit(self, _: str) -> bool:
        return True

    def do_EOF(self, _: str) -> bool:  # noqa: N802 - the name that cmd gives it
        if self._interactive:
            print()
        return True

    # --- breakpoints -----------------------------------------------------------------------------------------------------

    def do_break(self, arg: str) -> None:
        number = self._call(lambda: self._debugger.break_at(_given(arg, "PREDICATE")))
        print(f"breakpoint {number}: {self._debugger.breakpoints[number]}")

    def do_breaks(self, _: str) -> None:
        for number, predicate in self._debugger.breakpoints.items():
            print(f"{number:>3}  {predicate}")

    def do_clear(self, arg: str) -> None:
        number = _number(arg, "NUMBER") if arg else None
        self._call(lambda: self._debugger.clear(number))

    # --- looking ---------------------------------------------------------------------------------------------------------

    def do_list(self, arg: str) -> None:
        at = _number(arg, "SEQ") if arg else self._debugger.seq
        for event in self._debugger.events[max(at - 1 - AROUND, 0) : at + AROUND]:
            self._show(event)

    def do_print(self, arg: str) -> None:
        event = self._debugger.event
        if not arg:
            print(f"seq {event.seq}")
            self._say(event.model_dump_json(indent=2, exclude_defaults=True))
            return
        found = values(event, arg)
        if not found:
            raise UsageError(f"{event.type} has no {arg}; print shows the whole event")
        for value in found:
            self._say(_text(value))

    def do_state(self, arg: str) -> None:
        roles = self._debugger.state().to_handle
        event = self._debugger.event
        here = [role for role in (event.role, event.to) if role in roles]
        if not arg and not here:  # of nobody who acts: the request, or what an owner notes down
            self.do_where("")
            return
        state = self._debugger.role(arg or here[0])
        print(f"{state.role} at event {state.seq}: {counted(len(state.turns), 'turn')} so far")
        for place, message in enumerate(state.messages):
            new = place >= len(state.messages) - len(state.pending)
            self._say(("+ " if new else "  ") + _said(message))
        for call in state.open_calls:
            self._say(f"  waits for {call.call.name} (event {call.seq})")
        if state.to_handle:
            print(f"  has to handle {_events(state.to_handle)}")

    def do_where(self, _: str) -> None:
        state = self._debugger.state()
        print(_standing(self._debugger.now() if self._debugger.live else state))
        width = max(map(len, state.to_handle), default=0)
        for role, waiting in state.to_handle.items() if state.reason is None else ():
            print(
                f"  {role:<{width}}  {'has to handle ' + _events(waiting) if waiting else 'waits'}"
            )
        for call in state.open_calls:
            self._say(f"  {call.call.name} is to answer {call.role} (event {call.seq})")
        for seq in state.questions:
            print(f"  a person is to answer event {seq}")

    # --- changing --------------------------------------------------------------------------------------------------------

    def do_edit(self, arg: str) -> None:
        path, _, value = _given(arg, "PATH=VALUE").partition("=")
        changes = {path.strip(): _json(_given(value.strip(), "PATH=VALUE"))}
        self._debugger.forks = self._runtime()
        self._forked(self._call(lambda: self._debugger.edit(changes)))

    def do_model(self, arg: str) -> None:
        role, _, model = _given(arg, "ROLE=MODEL").partition("=")
        models = {role.strip(): _given(model.strip(), "ROLE=MODEL")}
        self._debugger.forks = self._runtime()
        self._forked(self._call(lambda: self._debugger.fork(models=models)))

    def do_fork(self, arg: str) -> None:
        self._debugger.forks = self._runtime()
        self._forked(self._call(lambda: self._debugger.fork(program=arg or None)))

    def do_run(self, arg: str) -> None:
        self.do_fork(arg)
        self.do_continue("")

    def _forked(self, stop: Stop) -> None:
        print(f"episode {stop.event.episode_id}: live, paused")
        self._show(stop.event)

    # --- what is shown ---------------------------------------------------------------------------------------------------

    def _stopped(self, stop: Stop) -> None:
        if said := SAID.get(stop.why):
            print(said.format(stop.detail))
        if stop.difference is not None:
            self.code = self.code or 1
            columns = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns
            self._say(explained(stop.difference, columns))
        self._show(stop.event)

    def _show(self, event: Event | None = None) -> None:
        """An event as `aworld log` has it, with an arrow at the position."""
        here = self._debugger.event
        event = event or here
        layout = Layout(shutil.get_terminal_size((PIPE_WIDTH, 24)).columns - 1, self._look)
        layout.note(self._debugger.events[0])
        layout.note(event)
        print(self._look.safe("→" if event.seq == here.seq else " ") + layout.line(event))

    def _say(self, text: str) -> None:
        """What a model or a tool may have written: on as many lines as it has."""
        for line in text.split("\n"):
            print(self._look.safe(line))


def _said(message: Message) -> str:
    calls = [f"{call.name}({json.dumps(call.arguments)})" for call in message.tool_calls]
    return f"{message.role}: {' '.join([*filter(None, [message.content]), *calls])}"


def _standing(state: EpisodeState) -> str:
    if state.reason is not None:
        return f"it has ended: {state.reason}"
    return f"paused, {state.steps_left} steps left" if state.paused else "running"


def _events(seqs: Sequence[int]) -> str:
    return f"event {', then '.join(map(str, seqs))}"


def _given(arg: str, what: str) -> str:
    if not arg:
        raise UsageError(f"{what} is missing")
    return arg


def _number(arg: str, what: str) -> int:
    if not arg.isdecimal():
        raise UsageError(f"{what} is a number, not {arg!r}")
    return int(arg)


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)


def _json(text: str) -> JsonValue:
    """As JSON where it is some; else as it stands."""
    try:
        value: JsonValue = json.loads(text)
    except ValueError:
        return text
    return value
