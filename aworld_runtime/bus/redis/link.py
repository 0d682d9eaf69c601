"""`Link`: what a bus's calls go out on, each to where its key is; and `ServerLink`, the connection to one
server: one exchange at a time, and what is called meanwhile goes out together with the next one.

    call ─▶ waiting ─▶ run: [connect] ─▶ a batch ─▶ exchange ─▶ replies to the callers
                ▲                                      │
                └────────── connection broke ◀─────────┘   until a call's deadline has passed
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import anyio

from aworld_runtime import telemetry
from aworld_runtime.bus.redis.awake import Awake
from aworld_runtime.bus.redis.suitable import check_server
from aworld_runtime.bus.redis.wire import (
    ASKING,
    CONNECT_S,
    MB,
    Address,
    Argument,
    Command,
    Reply,
    ReplyError,
    Unreachable,
    Wire,
    denial,
    dial,
    pack,
)
from aworld_runtime.errors import (
    AccessDeniedError,
    BusError,
    BusFullError,
    BusUnavailableError,
    ConfigError,
)

logger = logging.getLogger(__name__)

BATCH_CALLS = 100
BATCH_BYTES = 1024 * 1024
"""At most so much in one exchange, so that no script keeps the server for long."""
CALL_BYTES = 512
"""What a call holds beside its arguments."""
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
SILENT_S = 1.0
"""Seconds without an answer after which what may be lost is lost."""
NOT_READY = frozenset({"LOADING", "NOSCRIPT", "MASTERDOWN", "READONLY", "CLUSTERDOWN", "TRYAGAIN"})
"""Error codes that say: nothing was done, ask again."""
FULL = frozenset({"OOM", "MISCONF", "NOREPLICAS"})
"""Error codes that say: nothing may be added now. MISCONF: the disk is full or failed."""


@dataclass(frozen=True, eq=False)
class Script:
    """A change that happens as a whole."""

    text: str
    merges: bool = False
    """Called several times in one batch, it runs once over the keys and arguments of all; its reply is
    one for all, or a list with one for each."""
    adds: bool = False
    """It adds something, so it is refused where too much waits to be sent. What reads and settles never is."""
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()
        object.__setattr__(self, "sha", digest)

    def command(self, keys: Sequence[bytes], arguments: Sequence[Argument]) -> Command:
        return (b"EVALSHA", self.sha, str(len(keys)), *keys, *arguments)


class Link(Protocol):
    """Sends commands and scripts to the server that has their keys.

    The replies raise:
        BusUnavailableError: the server stayed away; the outcome is unknown.
        BusFullError: it refuses to add anything. Raised at once where too much waits to be sent.
        BusError: another error reply.
    """

    def waiting_bytes(self) -> int:
        """What the calls hold that are not answered yet."""
        ...

    def slot(self, key: bytes, /) -> int:
        """What moves as one: only keys of the same slot may be in one command."""
        ...

    def call(self, *command: Argument, key: bytes | None = None) -> asyncio.Future[Reply]:
        """Send a command; await its reply. `key` where it isn't the command's second word."""
        ...

    def say(self, *command: Argument, key: bytes | None = None) -> asyncio.Future[Reply]:
        """The same for a command that may be lost: it fails as soon as its server is found away."""
        ...

    def run_script(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[Argument],
        *,
        urgent: bool = False,
    ) -> asyncio.Future[Reply]:
        """Run a script over keys of one slot, an urgent one before the calls that wait; await its reply."""
        ...

    def ask_all(self, *command: Argument) -> list[asyncio.Future[Reply]]:
        """Send a command to every server. One that is one of several and is away fails at once."""
        ...

    def place(self, key: bytes, /) -> Address:
        """Where the key is now. From any thread."""
        ...

    def doubt(self) -> None:
        """A key was not in its place: look where they are. From any thread."""
        ...

    async def dial(self, key: bytes | None = None, /) -> Wire:
        """A connection of the caller's own to where `key` is (None: to any server), with the scripts loaded.

        Raises:
            Unreachable: there is none now.
            ConfigError: the server doesn't know user or password.
        """
        ...

    async def connect(self) -> dict[str, str]:
        """The first connection; what the server, or one of them, says about itself.

        Raises:
            Unreachable: there is none.
            ConfigError: the server won't do.
        """
        ...

    async def run(self) -> None:
        """Serve the callers until cancelled."""
        ...

    async def close(self) -> None:
        """Close the connection; whoever still waits gets an error."""
        ...


@dataclass(slots=True, eq=False)
class Call:
    """What waits for its reply."""

    script: Script | None
    """None: `arguments` are a command."""
    keys: Sequence[bytes]
    arguments: Sequence[Argument]
    size: int
    deadline: float
    """By the `Awake` that all links of a bus share."""
    reply: asyncio.Future[Reply]
    urgent: bool = False
    slot: int = 0
    asking: bool = False
    """It was sent on to where its keys are being moved."""
    moves: int = 0
    """How often it was sent on."""
    alone: bool = False
    """It is not merged with others: one of those was forbidden."""


class ServerLink:
    """Implements `Link` for one server; reconnects through an outage."""

    def __init__(
        self,
        address: Address,
        scripts: Sequence[Script],
        *,
        clustered: bool = False,
        awake: Awake | None = None,
    ) -> None:
        self._address = address
        self._clustered = clustered
        self._prologue = [(b"SCRIPT", b"LOAD", script.text) for script in scripts]
        self._waiting: deque[Call] = deque()
        self._waiting_bytes = 0
        self._called = asyncio.Event()
        self._wire: Wire | None = None
        self._sent_at: float | None = None
        """When the exchange began that is going on."""
        self._failed_at = -LONGEST_PAUSE_S
        self._away_since: float | None = None
        """When it could first not be reached, if it can't be now."""
        self._awake = awake or Awake()
        self._open = False
        telemetry.LINK_CALLS.watch(self, ServerLink.waiting_calls)
        telemetry.LINK_BYTES.watch(self, ServerLink.waiting_bytes)

    async def connect(self) -> dict[str, str]:
        self._wire, facts = await self._dial_checked(CONNECT_S)
        self._open = True
        return facts

    async def dial(self, _key: bytes | None = None, /) -> Wire:
        return (await dial(self._address, self._prologue))[0]

    def slot(self, _key: bytes, /) -> int:
        return 0

    def place(self, _key: bytes, /) -> Address:
        return self._address

    def doubt(self) -> None:
        """One server has all keys."""

    def call(
        self,
        *command: Argument,
        key: bytes | None = None,  # noqa: ARG002 - one server has all keys
    ) -> asyncio.Future[Reply]:
        return self.post(None, (), command)

    def say(
        self,
        *command: Argument,
        key: bytes | None = None,  # noqa: ARG002 - one server has all keys
    ) -> asyncio.Future[Reply]:
        if not self._is_silent():
            return self.post(None, (), command, patience_s=0.0)
        lost = asyncio.get_running_loop().create_future()
        lost.set_exception(BusUnavailableError(f"bus {self._address.url} does not answer"))
        return lost

    def run_script(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[Argument],
        *,
        urgent: bool = False,
    ) -> asyncio.Future[Reply]:
        return self.post(script, keys, arguments, urgent=urgent)

    def ask_all(self, *command: Argument) -> list[asyncio.Future[Reply]]:
        return [self.call(*command)]

    def waiting_calls(self) -> int:
        return len(self._waiting)

    def waiting_bytes(self) -> int:
        return self._waiting_bytes

    async def run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            if not self._waiting:
                self._called.clear()
                await self._called.wait()
            try:
                if self._wire is None:
                    self._wire, _ = await self._dial_checked(self._patience())
                    telemetry.RECONNECTS.add()
                    self._tell_back()
                again = await self._serve(self._wire, self._take_batch())
            except (Unreachable, ConfigError) as error:
                if self._wire is None:
                    self._tell_away(error)
                self._wire = None
                self._failed_at = asyncio.get_running_loop().time()
                again = str(error)
            if again is None:
                pause_s = FIRST_PAUSE_S
                continue
            self.expire(again)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def close(self) -> None:
        self._open = False
        while self._waiting:
            self.fail(self._waiting.popleft(), "it was closed")
        if self._wire is not None:
            await self._wire.close()
            self._wire = None

    def post(
        self,
        script: Script | None,
        keys: Sequence[bytes],
        arguments: Sequence[Argument],
        *,
        slot: int = 0,
        urgent: bool = False,
        patience_s: float | None = None,
    ) -> asyncio.Future[Reply]:
        """Run a script, or the command that `arguments` are; await the reply.

        A call of no patience is not sent again.
        """
        if not self._open:
            raise BusUnavailableError(f"bus {self._address.url} is not open: use `async with`")
        size = CALL_BYTES + sum(map(len, arguments))
        room = self._address.outbox_bytes - self._waiting_bytes
        adds = script is not None and script.adds and not urgent
        if size > room and self._waiting_bytes and adds:
            raise BusFullError(
                f"bus {self._address.url}: {self._waiting_bytes} bytes wait for an answer, {size} more are above"
                f" outbox_mb={self._address.outbox_bytes / MB:g}: the server is away, or slower than its callers."
                " Send it again later"
            )
        patience_s = self._address.outage_s if patience_s is None else patience_s
        deadline = self._awake.now() + patience_s
        reply = asyncio.get_running_loop().create_future()
        call = Call(script, keys, arguments, size, deadline, reply, urgent, slot)
        self.send(call)
        return call.reply

    def send(self, call: Call) -> None:
        """Let it wait its turn."""
        self._waiting_bytes += call.size
        if call.urgent:
            ahead = sum(1 for _ in takewhile(lambda waiting: waiting.urgent, self._waiting))
            self._waiting.insert(ahead, call)
        else:
            self._waiting.append(call)
        self._called.set()

    def fail(self, call: Call, cause: str) -> None:
        """Tell its caller that the server stayed away."""
        self._waiting_bytes -= call.size
        if not call.reply.done():
            call.reply.set_exception(
                BusUnavailableError(f"bus {self._address.url} is unavailable: {cause}")
            )

    def _tell_away(self, error: Exception) -> None:
        """Once for each outage; a connection that is made anew at once is none."""
        if self._away_since is None:
            self._away_since = asyncio.get_running_loop().time()
            logger.warning(
                "bus %s can't be reached: %s; calls wait up to %g s for it",
                self._address.url,
                error,
                self._address.outage_s,
            )

    def _tell_back(self) -> None:
        if self._away_since is not None:
            away_s = asyncio.get_running_loop().time() - self._away_since
            logger.warning("bus %s is back after %.1f s", self._address.url, away_s)
            self._away_since = None

    async def _dial_checked(self, patience_s: float) -> tuple[Wire, dict[str, str]]:
        """A connection to a server that will do, and what it says about itself."""
        prologue = [*self._prologue, (b"INFO",)]
        wire, replies = await dial(self._address, prologue, patience_s=patience_s)
        try:
            facts = check_server(self._address.url, replies[-1], clustered=self._clustered)
        except ConfigError:
            wire.drop()
            raise
        return wire, facts

    def _is_silent(self) -> bool:
        """Whether the server has just been found away, or hasn't answered for a while what was sent."""
        now = asyncio.get_running_loop().time()
        if self._wire is None:
            return now - self._failed_at < LONGEST_PAUSE_S
        return self._sent_at is not None and now - self._sent_at > SILENT_S

    def _take_batch(self) -> list[Call]:
        batch: list[Call] = []
        size = 0
        while self._waiting and len(batch) < BATCH_CALLS and size < BATCH_BYTES:
            call = self._waiting.popleft()
            if call.reply.done():  # nobody waits for it any more, and it was never sent
                self._waiting_bytes -= call.size
            else:
                batch.append(call)
                size += call.size
        return batch

    async def _serve(self, wire: Wire, batch: Sequence[Call]) -> str | None:
        """Exchange one batch; None if all is answered, else why some of it must be sent again."""
        groups = _merge(batch)
        commands: list[Command] = []
        for group in groups:
            if group[0].asking:
                commands.append(ASKING)
            commands.append(_command(group))
        self._sent_at = asyncio.get_running_loop().time()
        try:
            replies = iter(await wire.exchange(pack(commands), len(commands)))
        except BaseException:
            self._waiting.extendleft(reversed(batch))
            raise
        finally:
            self._sent_at = None
        again: str | None = None
        refused: set[Call] = set()
        for group in groups:
            if group[0].asking:
                next(replies)
            reply = next(replies)
            if isinstance(reply, ReplyError) and self._sent_on(group, reply):
                continue
            if isinstance(reply, ReplyError) and reply.code in NOT_READY:
                refused.update(group)
                again = str(reply)
            elif isinstance(reply, ReplyError) and reply.denied and len(group) > 1:
                refused.update(group)  # nothing was done: it may be forbidden to one of them alone
                for call in group:
                    call.alone = True
            else:
                self._answer(group, reply)
        self._waiting.extendleft(call for call in reversed(batch) if call in refused)
        if again is not None:
            wire.drop()
            self._wire = None
        return again

    def _sent_on(self, _group: Sequence[Call], _error: ReplyError, /) -> bool:
        """Whether the calls are now somebody else's."""
        return False

    def _answer(self, group: Sequence[Call], reply: Reply) -> None:
        single = len(group) == 1 and not (group[0].script and group[0].script.merges)
        for index, call in enumerate(group):
            self._waiting_bytes -= call.size
            if call.reply.done():
                continue
            if isinstance(reply, ReplyError):
                call.reply.set_exception(self._error(reply, call))
            elif single or not isinstance(reply, list):
                call.reply.set_result(reply)
            else:
                call.reply.set_result(reply[index])

    def _error(self, reply: ReplyError, call: Call) -> BusError:
        if reply.denied:
            return AccessDeniedError(denial(self._address, reply, _denied_command(reply, call)))
        if reply.code in FULL:
            return BusFullError(
                f"bus {self._address.url} accepts no new events: {reply}. Raise its maxmemory or free its"
                " disk; reads and acknowledgements go on"
            )
        return CommandRefused(f"bus {self._address.url} refused a command: {reply}", reply.code)

    def _patience(self) -> float:
        """How long to try to connect: not past the first deadline, if that is near."""
        now = self._awake.now()
        first = min((call.deadline for call in self._waiting), default=now + CONNECT_S)
        return min(max(first - now, 0.1), CONNECT_S)

    def expire(self, cause: str) -> None:
        """Fail the calls that have waited too long for a server that is away."""
        now = self._awake.now()
        for _ in range(len(self._waiting)):
            call = self._waiting.popleft()
            if call.deadline <= now or call.reply.done():
                self.fail(call, f"it has not answered for {self._address.outage_s:g} s: {cause}")
            else:
                self._waiting.append(call)


def _denied_command(reply: ReplyError, call: Call) -> str:
    """A server tells of a script where it was stopped, and perhaps no more."""
    if call.script is None:
        return str(call.arguments[0], "ascii") if isinstance(call.arguments[0], bytes) else ""
    line = re.search(r"user_script:(\d+)", str(reply))
    lines = call.script.text.splitlines()
    named = re.findall(r"call\('(\w+)'", lines[int(line[1]) - 1]) if line else []
    return " or ".join(named) or "EVALSHA"


class CommandRefused(BusError):
    """The server answered with an error that no retry mends."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def _merge(batch: Sequence[Call]) -> list[list[Call]]:
    """Calls that are sent as one, together: of one script and one slot."""
    groups: list[list[Call]] = []
    merged: dict[tuple[Script, int], list[Call]] = {}
    for call in batch:
        if call.script is None or not call.script.merges or call.asking or call.alone:
            groups.append([call])
            continue
        group = merged.get((call.script, call.slot))
        if group is None:
            merged[call.script, call.slot] = group = [call]
            groups.append(group)
        else:
            group.append(call)
    for group in merged.values():
        group.sort(key=_keys)  # scripts handle neighbors of one key together
    return groups


def _keys(call: Call) -> tuple[bytes, ...]:
    return tuple(call.keys)


def _command(group: Sequence[Call]) -> Command:
    first = group[0]
    if first.script is None:
        return first.arguments
    if len(group) == 1:
        return first.script.command(first.keys, first.arguments)
    keys = [key for call in group for key in call.keys]
    return first.script.command(keys, [argument for call in group for argument in call.arguments])
