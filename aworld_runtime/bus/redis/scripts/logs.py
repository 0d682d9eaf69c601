"""Scripts over a log, its mail and its large content."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import NamedTuple

from aworld_runtime.bus.base import Mail
from aworld_runtime.bus.redis.entries import packed
from aworld_runtime.bus.redis.keys import LogKeys
from aworld_runtime.bus.redis.link import Link, Script
from aworld_runtime.bus.redis.wire import Argument
from aworld_runtime.payloads import Blob, in_pieces

MAIL_TTL_S = 24 * 3600
"""Life of mail for a log that isn't there (yet, or any more)."""
STAGING_TTL_S = 300
BLOBS_BYTES = 8 * 1024 * 1024
"""Content in one reply."""

_ADD = """
local function add(log, seq, from, to)
  while from <= to do
    local events, fields = ARGV[from], ARGV[from + 1]
    local added = redis.pcall('XADD', log, seq + events .. '-0', unpack(ARGV, from + 2, from + 1 + fields))
    if added.err then return added end
    seq, from = seq + events, from + 2 + fields
  end
end
"""
"""Adds the entries in a range of the arguments after an event of a log; what went wrong, if anything."""

_APPEND = Script(
    _ADD
    + """
local function last_seq(log)
  return string.match(redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1][1], '%d+') + 0
end
local results, a = {}, 1
for k = 1, #KEYS, 6 do
  local log, mail, control, feed_id = KEYS[k], KEYS[k + 1], KEYS[k + 2], KEYS[k + 5]
  local name, expected, fork, events = ARGV[a], ARGV[a + 1] + 0, ARGV[a + 2] == '1', ARGV[a + 3] + 0
  local same, ack, first = ARGV[a + 6], a + 7, a + 7 + ARGV[a + 4]
  a = first + ARGV[a + 5]
  -- A log that begins at 1 and holds each event by itself is as long as its last seq. Others are shorter: look.
  local last = redis.call('XLEN', log)
  local retired = last == 1 and redis.call('TTL', log) ~= -1
  if last > 0 and (last ~= expected or events == 0 or ARGV[first] ~= '1') then last = last_seq(log) end
  local refused = retired or last ~= expected and not (fork and last == 0)
    or same ~= '' and redis.call('GET', feed_id) ~= same
  local failed = not refused and add(log, expected, first, a - 1)
  if failed then
    -- As long as expected, but one of the others. Any other error is one.
    if not string.find(failed.err, 'equal or smaller') then return failed end
    refused, last = true, last_seq(log)
  end
  if refused then
    results[#results + 1] = -1 - last
  else
    if events > 0 then
      redis.call('XADD', KEYS[k + 3], '*', 'a', expected + 1 .. ' ' .. expected + events .. ' ' .. name)
      redis.call('PUBLISH', log, '')
      for i = k + 1, last == 0 and k + 4 or 0 do redis.call('PERSIST', KEYS[i]) end
    end
    for i = ack, first - 1 do
      local lane, id = string.match(ARGV[i], '^(c?)(.*)$')
      redis.call('XDEL', lane == 'c' and control or mail, id)
    end
    results[#results + 1] = expected + events
  end
end
return results
""",
    merges=True,
    adds=True,
)


class Place(NamedTuple):
    """Where an append wants to stand."""

    log: str
    expected_seq: int
    fork: bool
    """Whether it may begin the log in the middle."""
    feed_id: str | None
    """Of the feed that the server must have."""


def append(
    link: Link, keys: LogKeys, place: Place, bodies: Sequence[bytes], acks: Sequence[Mail]
) -> Awaitable[int]:
    """Add `bodies` and free mail. The new last seq, or -1 - the last seq there is.

    What is left of a retired log, one event that has a TTL, takes no more.
    """
    added = _added(bodies)
    arguments: list[Argument] = [
        place.log,
        str(place.expected_seq),
        "1" if place.fork else "0",
        str(len(bodies)),
        str(len(acks)),
        str(len(added)),
        place.feed_id or "",
        *(f"c{mail.id}" if mail.lane == "control" else mail.id for mail in acks),
        *added,
    ]
    return link.run_script(_APPEND, keys, arguments)


def _added(bodies: Sequence[bytes]) -> list[Argument]:
    """The entries of these events, as `_ADD` takes them."""
    arguments: list[Argument] = []
    for events, fields in packed(bodies):
        arguments += (str(events), str(len(fields)), *fields)
    return arguments


_STAGE = Script(
    _ADD
    + f"""
local failed = add(KEYS[1], ARGV[1] - 1, 2, #ARGV)
if failed then return failed end
redis.call('EXPIRE', KEYS[1], {STAGING_TTL_S})
""",
    adds=True,
)


async def stage(link: Link, staging: bytes, first_seq: int, bodies: Sequence[bytes]) -> None:
    """Add to a log that is being put together."""
    await link.run_script(_STAGE, (staging,), (str(first_seq), *_added(bodies)))


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
local tail = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
if ARGV[2] ~= '' and ARGV[2] ~= (tail and tail[1] or '0-0') then return end
local body = tail and tail[2][2]
if tail and tail[2][4] then body = string.sub(body, -string.match(tail[2][4], '%d+$')) end
local sha256 = tail and string.match(body, '{"blob":"(%x+)","size":%d+}}$')
local blob = sha256 and redis.call('HGET', KEYS[2], sha256)
redis.call('UNLINK', KEYS[1], KEYS[2])
for i = 3, 4 do
  -- Emptied, not deleted: a new stream would use the ids of this millisecond again.
  redis.call('XTRIM', KEYS[i], 'MAXLEN', 0)
  redis.call('EXPIRE', KEYS[i], 1)
end
if tail and tonumber(ARGV[1]) > 0 then
  redis.call('XADD', KEYS[1], tail[1], 'e', body)
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
  if blob then
    redis.call('HSET', KEYS[2], sha256, blob)
    redis.call('PEXPIRE', KEYS[2], ARGV[1])
  end
end
"""
)


async def retire(link: Link, keys: LogKeys, keep_ms: int, last: int | None) -> None:
    """Free a log, its mail and its blobs but for the log's last event, which gets a TTL; not where that isn't `last`.
    Works on a full server, too: it begins by freeing. A new stream for the log, because a trimmed one keeps the
    memory of its last node.
    """
    expected = "" if last is None else f"{last}-0"
    owned = (keys.log, keys.blobs, keys.mail, keys.control)
    await link.run_script(_RETIRE, owned, (str(keep_ms), expected))


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


SCRIPTS = (
    _APPEND,
    _STAGE,
    _UNSTAGE,
    _RETIRE,
    _KEEP_BLOB,
    _SEND_MAIL,
)
