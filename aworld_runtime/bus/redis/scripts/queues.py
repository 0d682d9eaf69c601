"""Scripts over a queue: its work, what is delayed, and its dead letters."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Sequence
from typing import NamedTuple, cast

from aworld_runtime.bus.base import Standing
from aworld_runtime.bus.redis.clock import NOW
from aworld_runtime.bus.redis.keys import GROUP, QueueKeys
from aworld_runtime.bus.redis.link import Link, Script
from aworld_runtime.bus.redis.wire import Command

PROMOTE = 100
"""Most delayed events moved at once."""

_PUT = Script(
    NOW
    + """
local refused, a = {}, 1
for k = 1, #KEYS, 2 do
  local work, delayed, limit, wait = KEYS[k], KEYS[k + 1], ARGV[a] + 0, ARGV[a + 1] + 0
  local length, last = redis.call('XLEN', work) + redis.call('ZCARD', delayed), a + 2 + ARGV[a + 2]
  for i = a + 3, length < limit and last or 0 do
    if wait == 0 then
      redis.call('XADD', work, '*', 'e', ARGV[i])
    else
      redis.call('ZADD', delayed, now() + 1 + wait, '0 0 ' .. ARGV[i])
    end
  end
  refused[#refused + 1], a = length < limit and 0 or length, last + 1
end
return refused
""",
    merges=True,
    adds=True,
)


def put(
    link: Link, keys: QueueKeys, bodies: Sequence[bytes], limit: int, delay_ms: int
) -> Awaitable[int]:
    """Add work, due now or after a while. Where there are `limit` already, add none and say how many."""
    arguments = (str(limit), str(delay_ms), str(len(bodies)), *bodies)
    return link.run_script(_PUT, (keys.work, keys.delayed), arguments)


_BACKLOG = "return redis.call('XLEN', KEYS[1]) + redis.call('ZCARD', KEYS[2])"


async def backlog(link: Link, keys: QueueKeys) -> int:
    """How much is unsettled. In one step, as work goes from one key to the other and back; one that writes nothing,
    for those who may only look.
    """
    reply = link.call(b"EVAL_RO", _BACKLOG, "2", keys.work, keys.delayed, key=keys.work)
    return cast("int", await reply)


_PROMOTE = Script(
    NOW
    + """
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now(), 'LIMIT', 0, ARGV[1])
for _, member in ipairs(due) do
  local f, d, body = string.match(member, '^(%d+) (%d+) (.*)$')
  redis.call('XADD', KEYS[1], '*', 'e', body, 'f', f, 'd', d)
  redis.call('ZREM', KEYS[2], member)
end
local next = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
return next[2] and math.max(0, next[2] - now()) or -1
"""
)


def promote_command(keys: QueueKeys) -> Command:
    """Move delayed work that is due. Replies with the milliseconds until more is, or -1."""
    return _PROMOTE.command((keys.work, keys.delayed), (str(PROMOTE),))


async def promote(link: Link, keys: QueueKeys) -> int:
    """The same over a link."""
    reply = await link.run_script(_PROMOTE, (keys.work, keys.delayed), (str(PROMOTE),))
    return cast("int", reply)


_CLAIM = Script(
    """
local lease, most, next = ARGV[2] + 0, ARGV[4] + 0, -1
local ids, deliveries, found = {}, {}, {}
for _, entry in ipairs(redis.call('XPENDING', KEYS[1], 'g', 'IDLE', ARGV[3], '-', '+', 100)) do
  local left = math.max(lease - entry[3], 0)
  if left == 0 and #ids < most then
    ids[#ids + 1], deliveries[entry[1]] = entry[1], entry[4] + 1
  elseif next < 0 or left < next then
    next = left
  end
end
if #ids > 0 then found = redis.call('XCLAIM', KEYS[1], 'g', ARGV[1], lease, unpack(ids)) end
for _, entry in ipairs(found) do entry[3] = deliveries[entry[1]] end
return {found, next}
"""
)


def claim_command(
    keys: QueueKeys, consumer: str, lease_ms: int, *, count: int, ahead_ms: int
) -> Command:
    """Take over work whose lease ran out, `count` at most. Replies with [id, fields, deliveries] of each, and with the
    milliseconds until the next lease runs out: 0 if one has; -1 if none does within `ahead_ms`.
    """
    idle_ms = max(lease_ms - ahead_ms, 0)
    return _CLAIM.command((keys.work,), (consumer, str(lease_ms), str(idle_ms), str(count)))


def read_command(keys: QueueKeys, consumer: str, count: int, block_ms: int | None) -> Command:
    """Take new work; waits for some unless `block_ms` is None."""
    block = (b"BLOCK", str(block_ms)) if block_ms is not None else ()
    head = (b"XREADGROUP", b"GROUP", GROUP, consumer, b"COUNT", str(count))
    return (*head, *block, b"STREAMS", keys.work, b">")


_JOIN = Script(
    """
if redis.call('EXISTS', KEYS[1]) == 0 or #redis.call('XINFO', 'GROUPS', KEYS[1]) == 0 then
  redis.call('XGROUP', 'CREATE', KEYS[1], 'g', '0', 'MKSTREAM')
end
for _, c in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], 'g')) do
  if c[4] == 0 and c[6] > 3600000 then redis.call('XGROUP', 'DELCONSUMER', KEYS[1], 'g', c[2]) end
end
"""
)


def join_command(keys: QueueKeys) -> Command:
    """Make sure of the group, and forget consumers that are long gone and hold nothing.

    From the beginning: what is settled is deleted, so what stands there is what is to be done.
    """
    return _JOIN.command((keys.work,), ())


_HOLDS = """
local function held(work, consumer, first, last)
  local deliveries = {}
  local found = redis.pcall('XPENDING', work, 'g', first, last, 1000000, consumer)
  for _, entry in ipairs(found.err and {} or found) do deliveries[entry[1]] = entry[4] end
  return deliveries
end
"""
"""What a consumer holds from an id to another: by id, how often it was delivered."""

_LEAVE = Script(
    """
local left = redis.pcall('XPENDING', KEYS[1], 'g', '-', '+', 1, ARGV[1])
if not left.err and #left == 0 then redis.call('XGROUP', 'DELCONSUMER', KEYS[1], 'g', ARGV[1]) end
"""
)


async def leave(link: Link, keys: QueueKeys, consumer: str) -> None:
    """Forget a consumer that holds nothing."""
    await link.run_script(_LEAVE, (keys.work,), (consumer,))


_RELEASE = Script(
    _HOLDS
    + """
local mine = held(KEYS[1], ARGV[1], '-', '+')
for i = 2, #ARGV, 2 do
  local deliveries = mine[ARGV[i]]
  if deliveries then
    redis.call('XCLAIM', KEYS[1], 'g', 'nobody', 0, ARGV[i], 'IDLE', 86400000,
      'RETRYCOUNT', deliveries - ARGV[i + 1], 'JUSTID')
  end
end
"""
)


async def release(
    link: Link, keys: QueueKeys, consumer: str, ids: Iterable[tuple[bytes, bool]]
) -> None:
    """Give work back at once. With each id, whether anybody has seen it: else that was no delivery."""
    flags = [part for entry_id, seen in ids for part in (entry_id, "0" if seen else "1")]
    if flags:
        await link.run_script(_RELEASE, (keys.work,), (consumer, *flags))


RENEW = (
    _HOLDS
    + """
local mine, lost = held(KEYS[1], ARGV[1], '-', '+'), {}
for i = 3, #ARGV do
  if not mine[ARGV[i]] then
    lost[#lost + 1] = ARGV[i]
  elseif ARGV[2] == '1' then
    redis.call('XCLAIM', KEYS[1], 'g', ARGV[1], 0, ARGV[i], 'JUSTID')
  end
end
return lost
"""
)
"""For the heartbeat: KEYS work; ARGV consumer, 1 to renew or 0 to look only, ids. Returns the lost ones.
JUSTID leaves delivery counts alone; only the holder renews, so a process that was stopped can't take
back what others took over."""

_ACK = Script(
    _HOLDS
    + """
local results, a = {}, 1
for k = 1, #KEYS do
  local work, first, last, done, lost = KEYS[k], a + 2, a + 1 + ARGV[a + 1], {}, {}
  -- Oldest first, so one look shows all that is held from the first to the last.
  local mine = held(work, ARGV[a], ARGV[first], ARGV[last])
  for i = first, last do
    local to = mine[ARGV[i]] and done or lost
    to[#to + 1] = ARGV[i]
  end
  if #done > 0 then
    redis.call('XACK', work, 'g', unpack(done))
    redis.call('XDEL', work, unpack(done))
  end
  results[k], a = lost, last + 1
end
return results
""",
    merges=True,
)


def ack(
    link: Link, keys: QueueKeys, consumer: str, ids: Sequence[bytes]
) -> Awaitable[Sequence[bytes]]:
    """Settle as done, ids oldest first; returns those that were no longer this consumer's."""
    return link.run_script(_ACK, (keys.work,), (consumer, str(len(ids)), *ids))


_STANDING = Script(
    _HOLDS
    + """
if held(KEYS[1], ARGV[1], ARGV[2], ARGV[2])[ARGV[2]] then return 'held' end
return #redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2]) > 0 and 'taken' or 'gone'
"""
)


async def standing(link: Link, keys: QueueKeys, consumer: str, entry_id: bytes) -> Standing:
    """Whose it is."""
    reply = cast("bytes", await link.run_script(_STANDING, (keys.work,), (consumer, entry_id)))
    return cast("Standing", reply.decode())


_FAIL = Script(
    NOW
    + _HOLDS
    + """
if not held(KEYS[1], ARGV[1], ARGV[2], ARGV[2])[ARGV[2]] then return 0 end
local body = redis.call('XRANGE', KEYS[1], ARGV[2], ARGV[2])[1][2][2]
local deliveries, failures, wait, reason = ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
if wait < 0 then
  redis.call('XADD', KEYS[3], '*', 'e', body, 'r', reason, 'd', deliveries)
elseif wait == 0 then
  redis.call('XADD', KEYS[1], '*', 'e', body, 'f', failures, 'd', deliveries)
else
  redis.call('ZADD', KEYS[2], now() + 1 + wait, failures .. ' ' .. deliveries .. ' ' .. body)
end
redis.call('XACK', KEYS[1], 'g', ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
return 1
"""
)


class Held(NamedTuple):
    """One piece of work as its holder knows it."""

    consumer: str
    id: bytes
    deliveries: int
    failures: int


async def again(link: Link, keys: QueueKeys, held: Held, delay_ms: int) -> bool:
    """Settle as failed once more, to be delivered after a while; False if it was no longer held."""
    failures = str(held.failures + 1)
    arguments = (held.consumer, held.id, str(held.deliveries), failures, str(delay_ms), "")
    return bool(await link.run_script(_FAIL, keys, arguments))


async def bury(link: Link, keys: QueueKeys, held: Held, reason: str) -> bool:
    """Settle as dead; False if it was no longer held."""
    arguments = (held.consumer, held.id, str(held.deliveries), str(held.failures), "-1", reason)
    return bool(await link.run_script(_FAIL, keys, arguments))


_BURY_LARGE = Script(
    """
for _, pending in ipairs(redis.call('XPENDING', KEYS[1], 'g', '-', '+', 1000, ARGV[1])) do
  local id, deliveries = pending[1], pending[4]
  local entry, size = redis.call('XRANGE', KEYS[1], id, id)[1], 0
  for _, part in ipairs(entry and entry[2] or {}) do size = size + #part end
  if size > tonumber(ARGV[2]) then
    local reason = size .. ' bytes; at most ' .. ARGV[2] .. ' are read'
    redis.call('XADD', KEYS[2], '*', 'e', string.sub(entry[2][2], 1, 1000), 'r', reason, 'd', deliveries)
    redis.call('XACK', KEYS[1], 'g', id)
    redis.call('XDEL', KEYS[1], id)
  end
end
"""
)


def bury_large_command(keys: QueueKeys, consumer: str, most: int) -> Command:
    """Settle as dead, without sending it, what a consumer holds that has more than `most` bytes: its beginning is kept."""
    return _BURY_LARGE.command((keys.work, keys.dead), (consumer, str(most)))


_REQUEUE = Script(
    """
local entry = redis.call('XRANGE', KEYS[2], ARGV[1], ARGV[1])[1]
if not entry then return 0 end
redis.call('XADD', KEYS[1], '*', 'e', entry[2][2])
return redis.call('XDEL', KEYS[2], ARGV[1])
"""
)


async def requeue(link: Link, keys: QueueKeys, letter_id: str) -> bool:
    """Make work of a dead letter; False if there is none."""
    return bool(await link.run_script(_REQUEUE, (keys.work, keys.dead), (letter_id,)))


SCRIPTS = (
    _PUT,
    _PROMOTE,
    _CLAIM,
    _JOIN,
    _LEAVE,
    _RELEASE,
    _ACK,
    _STANDING,
    _FAIL,
    _BURY_LARGE,
    _REQUEUE,
)
