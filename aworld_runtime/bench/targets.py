"""What the figures are held against."""

from __future__ import annotations

from aworld_runtime.messages import Data

REDIS_PER_CORE_SECOND = 25_000
MEMORY_PER_CORE_SECOND = 100_000
P50_MS = 1.0
P99_MS = 5.0
P99_OF_RAW = 1.5
"""Or so many times what redis-py alone needs in the same run."""
TIMES_A_PEER = 5.0
IDLE_KB = 20.0
FLAT_KB_PER_S = 5.0
"""Less is the allocator's noise: 1.5 MB in five minutes."""
CALL_S = 0.2
"""What a live call takes at least, where a replay is compared with it."""
TIMES_LIVE = 50.0
"""How much faster a replay is than the episodes were."""
FORK_MS = 100.0


class Hold(Data):
    """A figure and its target."""

    target: str
    value: float | None
    holds: bool | None
    """None where it was not measured."""


def at_least(what: str, value: float, wanted: float) -> Hold:
    return Hold(target=f"{what} ≥ {wanted:,.0f}", value=value, holds=value >= wanted)


def at_most(what: str, value: float, wanted: float, unit: str) -> Hold:
    return Hold(target=f"{what} ≤ {wanted:g} {unit}", value=value, holds=value <= wanted)


def times_a_peer(peer: str, times: float | None) -> Hold:
    """`times` is None where the peer was not measured: then nothing is known."""
    holds = None if times is None else times >= TIMES_A_PEER
    return Hold(target=f"≥ {TIMES_A_PEER:g} × {peer}", value=times, holds=holds)


def p99(value: float, raw: float | None) -> Hold:
    limit = max(P99_MS, P99_OF_RAW * raw) if raw is not None else P99_MS
    or_raw = f" or {P99_OF_RAW:g} × raw ({P99_OF_RAW * raw:.2f} ms)" if raw is not None else ""
    return Hold(target=f"p99_ms ≤ {P99_MS:g} ms{or_raw}", value=value, holds=value <= limit)
