"""`ClusterLink`: the calls of a bus on a cluster, each over the connection to the node that has its keys.

    call ─▶ owner of its slot: a NodeLink for each node ─▶ … ─▶ its reply
                │ MOVED, ASK: nothing was done, another node is named ─▶ that one's NodeLink
                │ CLUSTERDOWN, TRYAGAIN, no owner ─▶ adrift ───────┐
                │ no connection, for one ─▶ doubt ─▶ run: ask some node who owns what ─▶ owners
                                                                   └─▶ sent again ─┘

A node that is away holds up its own calls alone, as far as the servers allow it
(`cluster-require-full-coverage no`).
"""

from __future__ import annotations

import asyncio
import logging
from binascii import crc_hqx
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain

import anyio
from anyio.abc import TaskGroup

from aworld_runtime.bus.redis.awake import Awake
from aworld_runtime.bus.redis.link import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Call,
    Script,
    ServerLink,
)
from aworld_runtime.bus.redis.wire import (
    Address,
    Argument,
    Reply,
    ReplyError,
    Unreachable,
    Wire,
    dial,
    pack,
)
from aworld_runtime.errors import BusUnavailableError, ConfigError

logger = logging.getLogger(__name__)

SLOTS = 16384
SHARDS = 64
"""Hash tags that logs are spread over. They fall into 64 slots, evenly over the nodes."""
ANSWER_S = 1.0
"""How long one node may take to say who owns what, before another is asked."""
ELSEWHERE = frozenset({"MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN"})
"""Error codes that say: nothing was done, nor would it be if this node were asked again at once."""
MANY_MOVES = 5
"""So often a call is sent on at once; then it waits until the nodes have been asked."""


def slot_of(key: bytes) -> int:
    """The slot of a key: of its hash tag, if it has one."""
    begin = key.find(b"{")
    if begin >= 0:
        end = key.find(b"}", begin)
        if end > begin + 1:
            key = key[begin + 1 : end]
    return crc_hqx(key, 0) % SLOTS


class NodeLink(ServerLink):
    """The connection to one node."""

    def __init__(
        self, place: str, address: Address, scripts: Sequence[Script], cluster: ClusterLink
    ) -> None:
        super().__init__(address, scripts, clustered=True, awake=cluster.awake)
        self.place_name = place
        """`host:port`."""
        self.address = address
        self._cluster = cluster
        self._open = True  # the cluster's is asked: this may connect later

    def give_up(self, owners: Sequence[NodeLink | None]) -> list[Call]:
        """The waiting calls that belong to another node now."""
        waiting = tuple(self._waiting)
        self._waiting.clear()
        others: list[Call] = []
        for call in waiting:
            if call.asking or owners[call.slot] in (self, None):
                self._waiting.append(call)
            else:
                others.append(call)
                self._waiting_bytes -= call.size
        return others

    def expire(self, cause: str) -> None:
        super().expire(cause)
        self._cluster.doubt()

    def _sent_on(self, group: Sequence[Call], error: ReplyError, /) -> bool:
        if error.code not in ELSEWHERE:
            return False
        self._waiting_bytes -= sum(call.size for call in group)
        self._cluster.send_on(self, group, error)
        return True


class ClusterLink:
    """Implements `Link` for a cluster."""

    def __init__(self, address: Address, scripts: Sequence[Script]) -> None:
        self.awake = Awake()
        """Of all its links: a call may wait for one node, then for another."""
        self._address = address
        self._scripts = scripts
        self._links: dict[str, NodeLink] = {}
        self._owners: list[NodeLink | None] = [None] * SLOTS
        self._known = list(address.seeds)
        """Nodes to ask, the next one first."""
        self._adrift = NodeLink("", address, (), self)
        """Never connected: holds the calls that no node takes now."""
        self._cause = ""
        """Why not."""
        self._doubted = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: TaskGroup | None = None
        self._open = False

    async def connect(self) -> dict[str, str]:
        self._loop = asyncio.get_running_loop()
        await self._find_owners()
        found: list[dict[str, str]] = []
        refusals: list[ConfigError] = []
        absent: list[Unreachable] = []

        async def connect(link: NodeLink) -> None:
            try:
                found.append(await link.connect())
            except ConfigError as error:
                refusals.append(error)
            except Unreachable as error:
                logger.warning("bus %s: %s", link.address.url, error)
                absent.append(error)

        async with anyio.create_task_group() as tasks:
            for link in self._links.values():
                tasks.start_soon(connect, link)
        self._open = True
        if refusals or not found:
            await self.close()
            raise (refusals or absent)[0]
        return found[0]

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for link in self._links.values():
                tasks.start_soon(link.run)
            self._tasks = tasks
            pause_s = FIRST_PAUSE_S
            while True:
                await self._doubted.wait()
                self._doubted.clear()
                try:
                    await self._find_owners()
                except (Unreachable, ConfigError) as error:
                    logger.debug("bus %s: %s", self._address.url, error)
                    self._doubted.set()
                self._send_adrift()
                await anyio.sleep(pause_s)
                longer_s = min(2 * pause_s, LONGEST_PAUSE_S)
                pause_s = longer_s if self._doubted.is_set() else FIRST_PAUSE_S

    async def close(self) -> None:
        self._open = False
        for link in (self._adrift, *self._links.values()):
            await link.close()

    def slot(self, key: bytes, /) -> int:
        return slot_of(key)

    def call(self, *command: Argument, key: bytes | None = None) -> asyncio.Future[Reply]:
        slot = _slot_of_command(command, key)
        return self._taker(slot).post(None, (), command, slot=slot)

    def say(self, *command: Argument, key: bytes | None = None) -> asyncio.Future[Reply]:
        return self._taker(_slot_of_command(command, key)).say(*command)

    def run_script(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[Argument],
        *,
        urgent: bool = False,
    ) -> asyncio.Future[Reply]:
        slot = slot_of(keys[0])
        return self._taker(slot).post(script, keys, arguments, slot=slot, urgent=urgent)

    def ask_all(self, *command: Argument) -> list[asyncio.Future[Reply]]:
        return [link.say(*command) for link in dict.fromkeys(self._owners) if link is not None]

    def waiting_bytes(self) -> int:
        return sum(link.waiting_bytes() for link in (self._adrift, *self._links.values()))

    def place(self, key: bytes, /) -> Address:
        link = self._owners[slot_of(key)]
        return link.address if link is not None else self._address.node(self._address.seeds[0])

    def doubt(self) -> None:
        if self._loop is not None:
            with suppress(
                RuntimeError
            ):  # it is closed: a program was interrupted with its bus open
                self._loop.call_soon_threadsafe(self._doubted.set)

    async def dial(self, key: bytes | None = None, /) -> Wire:
        if key is None:
            self._known.append(self._known.pop(0))
            return (await dial(self._address.node(self._known[0])))[0]
        link = self._owners[slot_of(key)]
        if link is None:
            self.doubt()
            raise Unreachable(f"no node has slot {slot_of(key)}")
        try:
            wire = await link.dial()
            # Asks for nothing but whether it is here.
            (reply,) = await wire.exchange(pack([(b"EXISTS", key)]), 1)
        except Unreachable:
            self.doubt()
            raise
        if not isinstance(reply, ReplyError):
            return wire
        wire.drop()
        if reply.code != "ASK":
            self.doubt()
            raise Unreachable(str(reply))
        wire = await self._named_in(reply, link).dial()
        wire.asking = True
        return wire

    def send_on(self, link: NodeLink, group: Sequence[Call], error: ReplyError) -> None:
        """Bring calls that `link` has not carried out to where they can be."""
        if error.code in {"MOVED", "ASK"}:
            named = self._named_in(error, link)
            if error.code == "MOVED":
                self._owners[group[0].slot] = named
                self.doubt()
        else:
            named = None
        for call in group:
            call.moves += 1
            call.asking = named is not None and error.code == "ASK"
            if named is None or call.moves % MANY_MOVES == 0:
                call.asking = False
                self._cause = str(error)
                self._adrift.send(call)
                self.doubt()
            else:
                named.send(call)

    def _taker(self, slot: int) -> NodeLink:
        """Who takes a new call."""
        if not self._open:
            raise BusUnavailableError(f"bus {self._address.url} is not open: use `async with`")
        link = self._owners[slot]
        if link is None or self._adrift.waiting_bytes() > self._address.outbox_bytes:
            self._cause = self._cause or f"no node has slot {slot}"
            self.doubt()
            return self._adrift
        return link

    def _send_adrift(self) -> None:
        if not self._adrift.waiting_calls():
            return
        self._adrift.expire(self._cause)
        for call in self._adrift.give_up(self._owners):
            self._route(call)
        if not self._adrift.waiting_calls():
            self._cause = ""

    def _route(self, call: Call) -> None:
        (self._owners[call.slot] or self._adrift).send(call)

    async def _find_owners(self) -> None:
        """Ask one node after the other who owns what, until one answers.

        Raises:
            Unreachable: none does.
            ConfigError: it is no cluster, or doesn't know user or password.
        """
        for last in [False] * (len(self._known) - 1) + [True]:
            place = self._known[0]
            self._known.append(self._known.pop(0))
            try:
                self._learn(await self._ask(place), place.rpartition(":")[0])
            except Unreachable as error:
                if last:
                    raise Unreachable(f"{place}: {error}") from error
            else:
                return

    async def _ask(self, place: str) -> Reply:
        wire, _ = await dial(self._address.node(place), patience_s=ANSWER_S)
        try:
            command = (b"CLUSTER", b"SLOTS")
            (reply,) = await wire.exchange(pack([command]), 1, patience_s=ANSWER_S)
        finally:
            await wire.close()
        if isinstance(reply, ReplyError):
            if "cluster support disabled" in str(reply):
                raise ConfigError(
                    f"bus {self._address.url}: {place} belongs to no cluster: use redis://{place}"
                )
            raise Unreachable(str(reply))
        if not reply:
            raise Unreachable("the cluster's slots have no owners yet")
        return reply

    def _learn(self, ranges: Reply, asked: str) -> None:
        owners: list[NodeLink | None] = [None] * SLOTS
        nodes: dict[str, None] = {}
        for first, last, *servers in ranges:
            places = [_place(host, port, asked) for host, port, *_ in servers]
            nodes.update(dict.fromkeys(places))
            owners[first : last + 1] = [self._link_to(places[0])] * (last + 1 - first)
        self._owners = owners
        self._known = list(dict.fromkeys(chain(self._known, nodes)))
        for link in tuple(self._links.values()):
            for call in link.give_up(owners):
                self._route(call)

    def _link_to(self, place: str) -> NodeLink:
        link = self._links.get(place)
        if link is None:
            link = NodeLink(place, self._address.node(place), self._scripts, self)
            self._links[place] = link
            if self._tasks is not None:
                self._tasks.start_soon(link.run)
        return link

    def _named_in(self, error: ReplyError, asked: NodeLink) -> NodeLink:
        host, _, port = str(error).split(" ")[2].rpartition(":")
        return self._link_to(_place(host, port, asked.place_name.rpartition(":")[0]))


def _slot_of_command(command: Sequence[Argument], key: bytes | None) -> int:
    name = command[1] if key is None else key
    return slot_of(name if isinstance(name, bytes) else name.encode())


def _place(host: bytes | str | None, port: int | str, asked: str) -> str:
    """`host:port` of a node; one that doesn't know its own name is where it was asked."""
    name = host.decode() if isinstance(host, bytes) else host
    if not name or name == "?":
        name = asked
    elif ":" in name and not name.startswith("["):
        name = f"[{name}]"
    return f"{name}:{port}"
