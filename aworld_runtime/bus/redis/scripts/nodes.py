"""Scripts for replies to requests, and over who is on the bus."""

from __future__ import annotations

from typing import cast

from aworld_runtime.bus.redis.clock import NOW
from aworld_runtime.bus.redis.link import Link, Script

REPLY_TTL_S = 60
"""Life of a reply; who waits for it looks every second."""

_REPLY = Script(
    """
redis.call('SET', KEYS[1], ARGV[1], 'NX', 'EX', ARGV[2])
redis.call('PUBLISH', KEYS[1], ARGV[1])
""",
    adds=True,
)


async def reply(link: Link, key: bytes, body: bytes) -> None:
    """Leave a reply and hint with it. The first one counts."""
    await link.run_script(_REPLY, (key,), (body, str(REPLY_TTL_S)))


_ANNOUNCE = Script(
    NOW
    + """
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f ', now() + ARGV[2]) .. ARGV[3])
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
""",
    adds=True,
)


async def announce(link: Link, key: bytes, name: str, body: bytes, ttl_ms: int) -> None:
    """Write a node down until its time runs out."""
    await link.run_script(_ANNOUNCE, (key,), (name, str(ttl_ms), body))


_NODES = Script(
    NOW
    + """
local all, present, time = redis.call('HGETALL', KEYS[1]), {}, now()
for i = 1, #all, 2 do
  local expiry, body = string.match(all[i + 1], '^(%d+) (.*)$')
  if tonumber(expiry) > time then
    present[#present + 1] = body
  else
    redis.pcall('HDEL', KEYS[1], all[i])  -- who may only look leaves it to others
  end
end
return present
"""
)


async def nodes(link: Link, key: bytes) -> list[bytes]:
    """The nodes whose time has not run out."""
    return cast("list[bytes]", await link.run_script(_NODES, (key,), ()))


SCRIPTS = (
    _REPLY,
    _ANNOUNCE,
    _NODES,
)
