"""The bus on a Redis (7.0 or newer) or Valkey server: `redis://`, `rediss://`, `unix://`; on a cluster of
them: `redis+cluster://`, `rediss+cluster://`.

    callers ──▶ Link.run ── one connection a server; calls made meanwhile travel together ──▶ server
                                                                                               │
    Hints.run ◀── one pub/sub connection: lossy hints, broadcasts, replies ◀───────────────────┤
        └─▶ Follows.run ── XREAD of what was hinted, and of everything once a second           │
              └─▶ mailboxes, tails                                                             │
    Consumer.run ◀── a connection each: expired leases, then XREADGROUP, ≤ 0.5 s a time ◀──────┤
    Timers.run ── moves delayed work when it is due; consumers do so too ──▶                   │
    feed readers ◀── a connection each: XREAD, ≤ 1 s a time; on a cluster over Link, as hinted ┤
    Heartbeat, a thread a server with a client of its own: renews leases while the loop is busy┘

Every change of more than one key is a script (`scripts`), every key is built in `keys`, every event passes `codec`. A
command whose reply was lost is sent again: appends are recognized by their ids, acks and retries by who holds the work;
mail and work may then arrive twice, which their receivers must stand anyway.
"""

from aworld_runtime.bus.redis.bus import RedisBus

__all__ = ["RedisBus"]
