"""Every change of more than one key, as a typed function over one Lua script.

In each, the first command that needs memory comes before any change: a full server refuses it as a
whole, while reading and acknowledging go on. Work is settled, renewed and given back only by who
holds it; the server's clock decides what is due. Scripts marked `merges` take many calls at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from aworld_runtime.bus.base import Mail, Standing
from aworld_runtime.bus.redis.keys import GROUP, LogKeys, QueueKeys
from aworld_runtime.bus.redis.link import Link, Script
from aworld_runtime.bus.redis.wire import Argument, Command, Reply
from aworld_runtime.payloads import Blob, in_pieces

BODY = b"e"
"""Field of a stream entry: the encoded event."""
FAILURES = b"f"
"""Field of a work entry that failed before: how often."""
DELIVERIES = b"d"
"""Field of a work entry that failed before, or of a dead letter: how often it was delivered."""
REASON = b"r"
"""Field of a dead letter."""
LOG = b"l"
"""Field of a dead letter that was mail: whose."""
MAIL_TTL_S = 24 * 3600
"""Life of mail for a log that isn't there (yet, or any more)."""
REPLY_TTL_S = 60
"""Life of a reply; who waits for it looks every second."""
STAGING_TTL_S = 300
BLOBS_BYTES = 8 * 1024 * 1024
"""Content in one reply."""
PROMOTE = 100
"""Most delayed events moved at once."""

Entry = tuple[bytes, list[bytes]]
"""Id and fields of a stream entry."""

# --- logs and mail ---------------------------------------------------------------------------------

_APPEND = Script(
    """
local function last_seq(log)
  return string.match(redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1][1], '%d+') + 0
end
local results, a = {}, 1
for k = 1, #KEYS, 5 do
  local log, mail, control = KEYS[k], KEYS[k + 1], KEYS[k + 2]
  local name, expected, bodies, acks = ARGV[a], ARGV[a + 1] + 0, ARGV[a + 2] + 0, ARGV[a + 3] + 0
  local fork, first = ARGV[a + 4] == '1', a + 5
  a = first + bodies + acks
  -- A log that begins at 1 is as long as its last seq. A fork's is longer than that says: look.
  local last = redis.call('XLEN', log)
  if last ~= expected and last > 0 then last = last_seq(log) end
  local refused = last ~= expected and not (fork and last == 0)
  for i = 1, refused and 0 or bodies do
    local added = redis.pcall('XADD', log, (expected + i) .. '-0', 'e', ARGV[first + i - 1])
    if added.err then
      -- As long as expected, but a fork: its last seq is higher. Any other error is one.
      if not (i == 1 and string.find(added.err, 'equal or smaller')) then return added end
      refused, last = true, last_seq(log)
      break
    end
  end
  if refused then
    results[#results + 1] = -1 - last
  else
    if bodies > 0 then
      redis.call('XADD', KEYS[k + 3], '*', 'a', expected + 1 .. ' ' .. expected + bodies .. ' ' .. name)
      redis.call('PUBLISH', log, '')
      for i = k + 1, last == 0 and k + 4 or 0 do redis.call('PERSIST', KEYS[i]) end
    end
    for i = first + bodies, a - 1 do
      local lane, id = string.match(ARGV[i], '^(c?)(.*)$')
      redis.call('XDEL', lane == 'c' and control or mail, id)
    end
    results[#results + 1] = expected + bodies
  end
end
return results
""",
    merges=True,
    adds=True,
)


def append(
    link: Link,
    keys: LogKeys,
    name: str,
    expected_seq: int,
    bodies: Sequence[bytes],
    *,
    fork: bool,
    acks: Sequence[Mail],
) -> Awaitable[int]:
    """Add `bodies` after `expected_seq` and free mail. The new last seq, or -1 - the last seq there is."""
    arguments: list[Argument] = [
        name,
        str(expected_seq),
        str(len(bodies)),
        str(len(acks)),
        "1" if fork else "0",
        *bodies,
        *(f"c{mail.id}" if mail.lane == "control" else mail.id for mail in acks),
    ]
    return link.run_script(_APPEND, keys, arguments)


_STAGE = Script(
    f"""
for i = 2, #ARGV do
  redis.call('XADD', KEYS[1], (tonumber(ARGV[1]) + i - 2) .. '-0', 'e', ARGV[i])
end
redis.call('EXPIRE', KEYS[1], {STAGING_TTL_S})
""",
    adds=True,
)


async def stage(link: Link, staging: bytes, first_seq: int, bodies: Sequence[bytes]) -> None:
    """Add to a log that is being put together."""
    await link.run_script(_STAGE, (staging,), (str(first_seq), *bodies))


_UNSTAGE = Script(
    """
-- A log that is there has no TTL; a retired one has, and is replaced.
if redis.call('TTL', KEYS[2]) == -1 then return redis.call('UNLINK', KEYS[1]) end
redis.call('XADD', KEYS[5], '*', 'a', ARGV[1])
redis.call('RENAME', KEYS[1], KEYS[2])
for i = 2, #KEYS do redis.call('PERSIST', KEYS[i]) end
redis.call('PUBLISH', KEYS[2], '')
"""
)


async def unstage(
    link: Link, staging: bytes, keys: LogKeys, name: str, first: int, last: int
) -> None:
    """Make it the log, unless there is one, and tell the feed of its events `first` … `last`."""
    await link.run_script(_UNSTAGE, (staging, *keys), (f"{first} {last} {name}",))


_RETIRE = Script(
    """
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if ARGV[2] ~= '' and ARGV[2] ~= (last and last[1] or '0-0') then return end
local sha256 = last and string.match(last[2][2], '{"blob":"(%x+)","size":%d+}}$')
local blob = sha256 and redis.call('HGET', KEYS[4], sha256)
redis.call('UNLINK', unpack(KEYS))
if last and tonumber(ARGV[1]) > 0 then
  redis.call('XADD', KEYS[1], last[1], unpack(last[2]))
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
  if blob then
    redis.call('HSET', KEYS[4], sha256, blob)
    redis.call('PEXPIRE', KEYS[4], ARGV[1])
  end
end
"""
)


async def retire(link: Link, keys: LogKeys, keep_ms: int, last: int | None) -> None:
    """Free a log, its mail and its blobs but for the log's last event, which gets a TTL; not where that isn't `last`.

    Works on a full server, too: it begins by freeing. A new stream, because a trimmed one keeps the
    memory of its last node.
    """
    expected = "" if last is None else f"{last}-0"
    streams = (keys.log, keys.mail, keys.control, keys.blobs)
    await link.run_script(_RETIRE, streams, (str(keep_ms), expected))


_KEEP_BLOB = Script(
    f"""
redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
if redis.call('TTL', KEYS[2]) ~= -1 then redis.call('EXPIRE', KEYS[1], {MAIL_TTL_S}) end
""",
    adds=True,
)


async def keep_blobs(link: Link, keys: LogKeys, blobs: Iterable[Blob]) -> None:
    """Add content that events of the log will refer to. The append that begins the log takes its TTL away."""
    for blob in blobs:
        await link.run_script(_KEEP_BLOB, (keys.blobs, keys.log), blob)


async def blobs_of(link: Link, keys: LogKeys, wanted: Mapping[str, int]) -> dict[str, bytes]:
    """Content by its sha256; `wanted` says how many bytes each has. What isn't there is left out."""
    found: dict[str, bytes] = {}
    for names in in_pieces(wanted, BLOBS_BYTES):
        contents = await link.call(b"HMGET", keys.blobs, *names)
        found |= {n: c for n, c in zip(names, contents, strict=True) if c is not None}
    return found


_SEND_MAIL = Script(
    f"""
local refused, a = {{}}, 1
for k = 1, #KEYS, 3 do
  local limit, counts, first = ARGV[a] + 0, {{ARGV[a + 1] + 0, ARGV[a + 2] + 0}}, a + 3
  local length = 0
  for lane = 1, 2 do
    if counts[lane] > 0 then length = math.max(length, redis.call('XLEN', KEYS[k + lane - 1])) end
  end
  for lane = 1, length < limit and 2 or 0 do
    local mail = KEYS[k + lane - 1]
    for i = first, first + counts[lane] - 1 do redis.call('XADD', mail, '*', 'e', ARGV[i]) end
    if counts[lane] > 0 then
      if redis.call('TTL', KEYS[k + 2]) ~= -1 then redis.call('EXPIRE', mail, {MAIL_TTL_S}) end
      redis.call('PUBLISH', mail, '')
    end
    first = first + counts[lane]
  end
  refused[#refused + 1] = length < limit and 0 or length
  a = a + 3 + counts[1] + counts[2]
end
return refused
""",
    merges=True,
    adds=True,
)


def send_mail(
    link: Link, keys: LogKeys, bodies: Sequence[bytes], control: Sequence[bytes], limit: int
) -> Awaitable[int]:
    """Add mail for the owner of a log, and hint. Where there are `limit` already, add none and say how many.

    Control mail goes out before what waits in the link.
    """
    arguments = (str(limit), str(len(bodies)), str(len(control)), *bodies, *control)
    streams = (keys.mail, keys.control, keys.log)
    return link.run_script(_SEND_MAIL, streams, arguments, urgent=bool(control))


# --- queues ----------------------------------------------------------------------------------------

_NOW = """
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
"""
"""Milliseconds by the server's clock."""

_PUT = Script(
    _NOW
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


_PROMOTE = Script(
    _NOW
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
local found, start = {}, '0-0'
repeat
  local page = redis.call('XAUTOCLAIM', KEYS[1], 'g', ARGV[1], ARGV[2], start, 'COUNT',
    ARGV[3] - #found)
  start = page[1]
  for _, entry in ipairs(page[2]) do
    entry[3] = redis.call('XPENDING', KEYS[1], 'g', entry[1], entry[1], 1)[1][4]
    found[#found + 1] = entry
  end
until start == '0-0' or #found >= tonumber(ARGV[3])
return found
"""
)


def claim_command(keys: QueueKeys, consumer: str, lease_ms: int, count: int) -> Command:
    """Take over work whose lease ran out. Replies with [id, fields, deliveries] of each."""
    return _CLAIM.command((keys.work,), (consumer, str(lease_ms), str(count)))


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
    redis.call('XCLAIM', KEYS[1], 'g', ARGV[1], 0, ARGV[i], 'IDLE', 86400000,
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
    _NOW
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


# --- replies and nodes -----------------------------------------------------------------------------

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
    _NOW
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
    _NOW
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
    _APPEND,
    _STAGE,
    _UNSTAGE,
    _RETIRE,
    _KEEP_BLOB,
    _SEND_MAIL,
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
    _REPLY,
    _ANNOUNCE,
    _NODES,
)
"""Loaded on every new connection."""


def entries(reply: Reply) -> list[Entry]:
    """The entries in the reply of XRANGE."""
    return [(entry_id, fields) for entry_id, fields in reply]


def position(entry_id: bytes) -> tuple[int, int]:
    """Where an entry stands in its stream: ids compare by number, not as text."""
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number or 0)
