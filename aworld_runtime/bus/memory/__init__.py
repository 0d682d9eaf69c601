"""The bus inside one process: `memory://`.

No loops, no timers, no tasks of its own: a call changes state in one synchronous step and wakes
whoever waits for that; who is woken looks again. So cancelling a waiter strands nothing, and nothing
polls. A consumer of a queue with delayed work waits until the first of it is due.

    append ─▶ log ──wakes─▶ tails                   put ─▶ ready ─wakes one─▶ take ─▶ held ─ack─▶ gone
       └────▶ feed ─wakes─▶ feed readers             │       ▲                         │
    send_mail ▶ mail ─wakes▶ mailboxes               └──▶ delayed ◀─ retry, lost lease ┤
    broadcast ▶ a bounded buffer per listener                  dead letters ◀──────────┘ third failure

Events are passed as the frozen objects they are; one that looks large is encoded, to see whether it
may pass. One event loop uses a bus; several workers share it as task groups.
"""

from aworld_runtime.bus.memory.bus import MemoryBus

__all__ = ["MemoryBus"]
