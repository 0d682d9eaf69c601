"""Bytes that no client of ours would send, written past them onto queues and mail, and onto the server's port."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from functools import cache

import anyio
from anyio.abc import SocketStream

from aworld_runtime.bus.redis.keys import Keys
from aworld_runtime.events import REFUSE_ABOVE, Event, Registry, ToolReturned
from aworld_runtime.names import EPISODES_QUEUE, episode_log, tool_queue
from aworld_runtime.processes import HOST

LINE_MB = 48
"""Of the line that never ends; as much as a server takes at once is its own limit."""
CHUNK = b"x" * (1 << 20)
ANSWER_S = 10.0


def poison(registry: Registry, whole: Event) -> list[bytes]:
    """Events that can't be decoded: broken, from the future, of a type nobody knows."""
    body = json.loads(registry.encode(whole))
    return [
        b"{not json",
        b"",
        b"\xff\xfe\x00",
        json.dumps({**body, "schema_version": 999}).encode(),
        json.dumps({**body, "type": "nobody.knows"}).encode(),
        json.dumps({**body, "data": {"type": "wrong"}}).encode(),
        json.dumps({**body, "surprise": 1}).encode(),
    ]


@cache
def hostile() -> list[bytes]:
    """Content made to exhaust who reads it."""
    return [
        b"z" + zlib.compress(b"[" + b"0," * (16 << 20) + b"0]", 9),  # 32 MB in 32 KB
        b"z" + zlib.compress(b"a" * 1000)[:-4],
        b"[" * 200_000 + b"]" * 200_000,
        b'{"data":' * 100_000 + b"0" + b"}" * 100_000,
        json.dumps({f"k{i}": i for i in range(500_000)}).encode(),
        b"x" * (REFUSE_ABOVE + 1),
        b'{"type":"value.recorded","data":{"value":' + b"9" * 100_000 + b"}}",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R.",  # a pickle that runs a program
    ]


def forged(episode: Event) -> list[Event]:
    """Well-formed events for an episode's mail from somebody who has no business there."""
    return [
        episode.caused(
            ToolReturned(name="measure", content="forged"),
            source="worker/mallory",
            correlation_id="a-call-that-nobody-made",
            to="walker",
        )
    ]


async def throw(port: int, bodies: Sequence[bytes], episode: Event, keys: Keys) -> None:
    """Write each onto the queues and into the episode's mail."""
    mail = keys.log(episode_log(episode.episode_id or "")).mail
    targets = [keys.queue(EPISODES_QUEUE).work, keys.queue(tool_queue("measure")).work, mail]
    async with await anyio.connect_tcp(HOST, port) as stream:
        for target in targets:
            for body in bodies:
                await _ask(stream, [b"XADD", target, b"*", b"e", body])


async def mail_forged(port: int, episode: Event, keys: Keys, registry: Registry) -> None:
    """Send what is forged."""
    mail = keys.log(episode_log(episode.episode_id or "")).mail
    async with await anyio.connect_tcp(HOST, port) as stream:
        for event in forged(episode):
            await _ask(stream, [b"XADD", mail, b"*", b"e", registry.encode(event)])


async def endless_line(port: int) -> None:
    """A command that doesn't end, in chunks; then hang up."""
    async with await anyio.connect_tcp(HOST, port) as stream:
        await stream.send(b"*2\r\n$4\r\nECHO\r\n$500000000\r\n")
        for _ in range(LINE_MB):
            await stream.send(CHUNK)


async def _ask(stream: SocketStream, command: Sequence[bytes]) -> bytes:
    parts = [b"*%d\r\n" % len(command)]
    parts += [b"$%d\r\n%s\r\n" % (len(part), part) for part in command]
    with anyio.fail_after(ANSWER_S):
        await stream.send(b"".join(parts))
        return await stream.receive()
