"""Ways to break a promise of the bus: what mutate.py tries, one at a time, and the machine must notice."""

from __future__ import annotations

from typing import NamedTuple

MEMORY = "aworld_runtime/bus/memory"
REDIS = "aworld_runtime/bus/redis"


class Mutant(NamedTuple):
    """A change of the product that is wrong."""

    file: str
    why: str
    """What it does wrong."""
    old: str
    """Stands in the file once."""
    new: str

    @property
    def backend(self) -> str:
        """The kind of bus that has it."""
        return "memory" if self.file.startswith(MEMORY) else "redis"


MUTANTS = (
    # --- memory: queues ---
    Mutant(
        f"{MEMORY}/queues.py",
        "work that comes back comes in reverse order",
        "insort(self.ready, work, key=lambda other: other.place)",
        "self.ready.appendleft(work)",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "work that comes back goes to the end of its queue",
        "insort(self.ready, work, key=lambda other: other.place)",
        "self.ready.append(work)",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "a lease that ends takes work from who has it now",
        "elif work.holder is lease:",
        "else:",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "the work of who died stays lost",
        "self.queue.delay(delivery.work, self._lease_s, delivery)",
        "pass",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "a lease ends early",
        "self.queue.delay(delivery.work, self._lease_s, delivery)",
        "self.queue.delay(delivery.work, 0.5 * self._lease_s, delivery)",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "deliveries aren't counted",
        "work.deliveries += 1",
        "work.deliveries = 1",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "one failure too many before a dead letter",
        "self.work.failures >= MAX_DELIVERIES",
        "self.work.failures > MAX_DELIVERIES",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "a lost lease counts as a failure",
        "        self.work.failures += 1\n        if",
        "        self.work.failures = self.count\n        if",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "who lost work settles it",
        "if self._settled or self.work.holder is not self:",
        "if self._settled:",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "delayed work comes early",
        "            if wait_s > 0:",
        "            if wait_s > 0.5:",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "a retry doesn't wait",
        "self._consumer.queue.delay(self.work, delay_s)",
        "self._consumer.queue.delay(self.work, 0.0)",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "work that is too late is begun",
        "reason = None if past_deadline else too_late(work.event, utc_now)",
        "reason = None",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "a batch goes beyond the credit",
        "while len(taken) < at_most and len(self.held) < self._credit:",
        "while len(taken) < at_most:",
    ),
    Mutant(
        f"{MEMORY}/queues.py",
        "what is settled stays in the backlog",
        "self.queue.unsettled -= len(settled)",
        "self.queue.unsettled -= 0",
    ),
    # --- memory: logs, mail, feed ---
    Mutant(
        f"{MEMORY}/logs.py",
        "a log takes an append of who was taken over",
        "if expected_seq == self.last:",
        "if expected_seq <= self.last:",
    ),
    Mutant(
        f"{MEMORY}/logs.py",
        "a retired log takes an append",
        "return self.retired_until is None",
        "return True",
    ),
    Mutant(
        f"{MEMORY}/logs.py",
        "any log may begin in the middle",
        "return isinstance(first, EpisodeForked) and first.at == expected_seq",
        "return True",
    ),
    Mutant(
        f"{MEMORY}/logs.py",
        "an append whose reply was lost is refused when asked again",
        "if index < 0 or not events:",
        "if True:",
    ),
    Mutant(
        f"{MEMORY}/logs.py",
        "an append of as many events as were lost passes for them",
        "return [e.id for e in self.events[index : index + len(events)]] == [e.id for e in events]",
        "return index + len(events) <= len(self.events)",
    ),
    Mutant(
        f"{MEMORY}/logs.py",
        "mail comes in reverse order",
        "return fresh[::-1]",
        "return fresh",
    ),
    Mutant(
        f"{MEMORY}/logs.py",
        "a mailbox gives mail twice",
        "self._seen[fresh[0].lane] = int(fresh[-1].id)",
        "self._seen[fresh[0].lane] = int(fresh[-1].id) - 1",
    ),
    Mutant(
        f"{MEMORY}/logs.py",
        "a feed is read on one entry too late",
        "skip = max(position - self._trimmed, 0)",
        "skip = max(position - self._trimmed, 0) + (position > 0)",
    ),
    Mutant(
        f"{MEMORY}/logs.py",
        "an entry of the feed too many is trimmed",
        "gone = min(max(upto - self._trimmed, 0), len(self._entries))",
        "gone = min(max(upto + 2 - self._trimmed, 0), len(self._entries))",
    ),
    Mutant(
        f"{MEMORY}/logs.py",
        "a tail begins one event too late",
        "        self._next = start\n",
        "        self._next = start + 1\n",
    ),
    Mutant(
        f"{MEMORY}/logs.py",
        "a retired log keeps nothing",
        "self.base, self.events = self.last - 1, self.events[-1:]",
        "self.base, self.events = 0, []",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "an append frees no mail",
        "        for mail in acks:\n            entry.acknowledge(mail)\n        return",
        "        return",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "a refused append frees mail",
        "                telemetry.FENCED.add()\n",
        "                [entry.acknowledge(mail) for mail in acks]\n",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "the feed doesn't tell of an append",
        "            self._feed.add(log, expected_seq + 1, last)\n",
        "",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "data mail passes control mail",
        'LANES: tuple[Lane, ...] = ("control", "data")',
        'LANES: tuple[Lane, ...] = ("data", "control")',
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "mail isn't forgotten with its log",
        "        entry.forget_mail()\n",
        "",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "a log is retired though it has grown",
        "if entry is None or last not in (None, entry.last):",
        "if entry is None:",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "what is left of a retired log stays for ever",
        "if entry is not None and entry.retired_until == due:",
        "if False:",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "a restore replaces a log",
        "        if not entry.last:\n            after = events[0].seq - 1\n",
        "        if events:\n            entry.forget_events()\n            after = events[0].seq - 1\n",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "another history replaces what is left of a retired log",
        "if entry.retired_until is not None and [e.id for e in entry.events] == [events[-1].id]:",
        "if entry.retired_until is not None:",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "a dead letter that is put back stays dead, too",
        "            self._queue(queue).add(Work(letter.event))\n        del self._queues[queue].dead[dead_letter_id]",
        "            self._queue(queue).add(Work(letter.event))",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "delayed work comes at once",
        "            if delay_s > 0:",
        "            if delay_s > 1000:",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "a full queue takes work",
        "        self._limits.check_queue(queue, place.unsettled)\n",
        "",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "a full mailbox takes mail",
        "self._limits.check_mail(log, len(entry.mail[lane]))",
        "pass",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "the last reply counts, not the first",
        "(waiting := self._replies.get(request.id)) and waiting.answer is None:",
        "(waiting := self._replies.get(request.id)):",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "a request has no deadline",
        "due_within(event, timeout_s, self.now())",
        "event",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "a reply to an episode isn't mailed",
        "if request.episode_id is not None:",
        "if False:",
    ),
    Mutant(
        f"{MEMORY}/bus.py",
        "one listener alone hears a broadcast",
        "            listener.hear(value, size)\n",
        "            listener.hear(value, size)\n            break\n",
    ),
    # --- Redis: queues ---
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "a full queue takes work",
        "  for i = a + 3, length < limit and last or 0 do",
        "  for i = a + 3, last do",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "delayed work comes at once",
        "    if wait == 0 then\n",
        "    if true then\n",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "work that was delayed comes twice",
        "  redis.call('ZREM', KEYS[2], member)\n",
        "",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "delayed work comes early",
        "'-inf', now(), 'LIMIT'",
        "'-inf', now() + 50, 'LIMIT'",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "failures are forgotten while work waits",
        "redis.call('XADD', KEYS[1], '*', 'e', body, 'f', f, 'd', d)",
        "redis.call('XADD', KEYS[1], '*', 'e', body, 'f', 0, 'd', d)",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "deliveries are forgotten while work waits",
        "redis.call('XADD', KEYS[1], '*', 'e', body, 'f', f, 'd', d)",
        "redis.call('XADD', KEYS[1], '*', 'e', body, 'f', f, 'd', 0)",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "work is taken from who is alive",
        "return _CLAIM.command((keys.work,), (consumer, str(lease_ms), str(idle_ms), str(count)))",
        'return _CLAIM.command((keys.work,), (consumer, "0", "0", str(count)))',
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "work of who died isn't taken over",
        "  if left == 0 and #ids < most then\n",
        "  if false then\n",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "what is given back waits for its lease",
        "'IDLE', 86400000",
        "'IDLE', 0",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "what is given back was never delivered",
        "deliveries - ARGV[i + 1]",
        "0",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "who lost work gives it back",
        "  local deliveries = mine[ARGV[i]]\n",
        "  local deliveries = mine[ARGV[i]] or 1\n",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "leases aren't renewed",
        "  elseif ARGV[2] == '1' then\n    redis.call('XCLAIM'",
        "  elseif ARGV[2] == '2' then\n    redis.call('XCLAIM'",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "leases of who is dead are renewed",
        "  elseif ARGV[2] == '1' then\n    redis.call('XCLAIM'",
        "  else\n    redis.call('XCLAIM'",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "who lost work isn't told",
        "    lost[#lost + 1] = ARGV[i]\n  elseif",
        "  elseif",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "who lost work acknowledges it",
        "    local to = mine[ARGV[i]] and done or lost\n",
        "    local to = done\n",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "what is settled stays in the backlog",
        "    redis.call('XDEL', work, unpack(done))\n",
        "",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "who lost work fails at it",
        "if not held(KEYS[1], ARGV[1], ARGV[2], ARGV[2])[ARGV[2]] then return 0 end\nlocal body",
        "local body",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "a retry doesn't wait",
        "elseif wait == 0 then\n",
        "elseif true then\n",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "deliveries are forgotten when work failed",
        "redis.call('XADD', KEYS[1], '*', 'e', body, 'f', failures, 'd', deliveries)",
        "redis.call('XADD', KEYS[1], '*', 'e', body, 'f', failures, 'd', 0)",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "what failed stays, too",
        "redis.call('XACK', KEYS[1], 'g', ARGV[2])\nredis.call('XDEL', KEYS[1], ARGV[2])\nreturn 1",
        "return 1",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "a dead letter loses its reason",
        "'e', body, 'r', reason, 'd', deliveries)\nelseif",
        "'e', body, 'r', '', 'd', deliveries)\nelseif",
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "a dead letter that is put back stays dead, too",
        "return redis.call('XDEL', KEYS[2], ARGV[1])",
        "return 1",
    ),
    Mutant(
        f"{REDIS}/consumer.py",
        "one failure too many before a dead letter",
        "if self._failures + 1 >= MAX_DELIVERIES:",
        "if self._failures >= MAX_DELIVERIES:",
    ),
    Mutant(
        f"{REDIS}/consumer.py",
        "work that is too late is begun",
        "reason = None if self._past_deadline else too_late(event, self.services.clock.now)",
        "reason = None",
    ),
    Mutant(
        f"{REDIS}/consumer.py",
        "who leaves keeps its work",
        "        await self._release(unsettled)\n",
        "",
    ),
    Mutant(
        f"{REDIS}/consumer.py",
        "more is held than the credit",
        "free = self._credit - self._unsettled - len(self._buffer)",
        "free = self._credit",
    ),
    # --- Redis: logs, mail, feed ---
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "a log takes an append at any place that is free",
        "local refused = retired or last ~= expected and not (fork and last == 0)",
        "local refused = retired",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "an append with mail alone isn't fenced",
        "(last ~= expected or events == 0 or ARGV[first] ~= '1') then last = last_seq(log) end",
        "(events > 0) then last = last_seq(log) else last = expected end",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "any log may begin in the middle",
        '"1" if place.fork else "0",',
        '"1",',
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "a retired log takes an append",
        "local retired = last == 1 and redis.call('TTL', log) ~= -1",
        "local retired = false",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "an append frees no mail",
        "      redis.call('XDEL', lane == 'c' and control or mail, id)\n",
        "",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "an append frees data mail alone",
        "lane == 'c' and control or mail, id)",
        "mail, id)",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "a refused append frees mail",
        "    results[#results + 1] = -1 - last\n",
        "    results[#results + 1] = -1 - last\n"
        "    for i = ack, first - 1 do redis.call('XDEL', mail, (string.gsub(ARGV[i], 'c', ''))) end\n",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "the feed doesn't tell of an append",
        "      redis.call('XADD', KEYS[k + 3], '*', 'a', expected + 1 .. ' ' .. expected + events .. ' ' .. name)\n",
        "",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "the feed tells of the first event of an append alone",
        "expected + 1 .. ' ' .. expected + events .. ' '",
        "expected + 1 .. ' ' .. expected + 1 .. ' '",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "the feed doesn't tell of a restored log",
        "redis.call('XADD', KEYS[5], '*', 'a', ARGV[1])\n",
        "",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "mail isn't forgotten with its log",
        "  redis.call('XTRIM', KEYS[i], 'MAXLEN', 0)\n",
        "",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "a log is retired though it has grown",
        "if ARGV[2] ~= '' and ARGV[2] ~= (tail and tail[1] or '0-0') then return end\n",
        "",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "a retired log keeps all events of its last entry",
        "redis.call('XADD', KEYS[1], tail[1], 'e', body)",
        "redis.call('XADD', KEYS[1], tail[1], unpack(tail[2]))",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "a retired log keeps nothing",
        "if tail and tonumber(ARGV[1]) > 0 then\n",
        "if false then\n",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "a full mailbox takes mail",
        "  for lane = 1, length < limit and 2 or 0 do\n",
        "  for lane = 1, 2 do\n",
    ),
    Mutant(
        f"{REDIS}/scripts/logs.py",
        "control mail is put with the other",
        "    local mail = KEYS[k + lane - 1]\n",
        "    local mail = KEYS[k]\n",
    ),
    Mutant(
        f"{REDIS}/bus.py",
        "an append whose reply was lost is refused when asked again",
        "        if last < 0 and not await self._stands(log, expected_seq, events):\n",
        "        if last < 0:\n",
    ),
    Mutant(
        f"{REDIS}/bus.py",
        "an append at a place that others took passes for theirs",
        "        return [event.id for event in there] == [event.id for event in events]\n",
        "        return len(there) == len(events)\n",
    ),
    Mutant(
        f"{REDIS}/bus.py",
        "data mail passes control mail",
        '{"control": keys.control, "data": keys.mail}\n        followed',
        '{"data": keys.mail, "control": keys.control}\n        followed',
    ),
    Mutant(
        f"{REDIS}/bus.py",
        "the feed is trimmed as far as who is ahead",
        "earliest = [min(",
        "earliest = [max(",
    ),
    Mutant(
        f"{REDIS}/feed.py",
        "a feed is read on from its beginning",
        "self._cursor = after.encode()",
        'self._cursor = b"0"',
    ),
    Mutant(
        f"{REDIS}/follow.py",
        "a mailbox gives mail twice",
        "        self.cursors[key] = found[-1][0]\n",
        "        self.cursors[key] = found[0][0]\n",
    ),
    Mutant(
        f"{REDIS}/bus.py",
        "a request has no deadline",
        "due_within(event, timeout_s, self.now())",
        "event",
    ),
    Mutant(
        f"{REDIS}/bus.py",
        "a reply to an episode isn't mailed",
        "        if request.episode_id is not None:\n",
        "        if False:\n",
    ),
    Mutant(
        f"{REDIS}/bus.py",
        "a broadcast is heard on every channel",
        "to = self._keys.broadcast(channel)\n",
        'to = self._keys.broadcast("other")\n',
    ),
    Mutant(
        f"{REDIS}/heartbeat.py",
        "leases aren't renewed",
        'mode = b"1" if lease.renewing else b"0"',
        'mode = b"0"',
    ),
    Mutant(
        f"{REDIS}/scripts/queues.py",
        "who goes on takes back what others took over",
        "  if not mine[ARGV[i]] then\n",
        "  if false then\n",
    ),
)
