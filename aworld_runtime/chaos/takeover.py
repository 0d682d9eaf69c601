"""How long the episodes of a worker that died, or was stopped, were without an owner. Only while the server was there."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence

from aworld_runtime.chaos.checker import FINISHED, TAKEN_OVER, Evidence
from aworld_runtime.chaos.history import Operation
from aworld_runtime.chaos.plan import KINDS

DEATHS = ("worker_killed", "worker_stopped")
SETTLED_S = 1.0
"""Seconds after an outage in which clients may still be finding their way back."""


def takeovers(evidence: Evidence) -> list[float]:
    """Seconds from each death to each `episode.taken_over` of the dead worker's episodes, shortest first."""
    appends = [op for op in evidence.calls["append"] if op.outcome == "ok" and op.ended is not None]
    taken_over: dict[str, list[Operation]] = defaultdict(list)
    mine: dict[str, list[Operation]] = defaultdict(list)
    for op in sorted(appends, key=lambda op: op.began):
        mine[op.process].append(op)
        if TAKEN_OVER in op.types:
            taken_over[op.target].append(op)
    deaths = sorted((b.began, b.target) for b in evidence.blows if b.kind in DEATHS)
    dead = {target: began for began, target in deaths}
    times: list[float] = []
    for died, worker in deaths:
        for log in _owned(mine.get(worker, ()), died):
            after = [op for op in taken_over[log] if op.began > died and op.process != worker]
            if after and after[0].ended is not None:
                since = _last_claim_lost(evidence, log, dead, died, after[0])
                if not _outage(evidence, since, after[0].ended):
                    times.append(after[0].ended - since)
    return sorted(times)


def p99(times: Sequence[float]) -> float | None:
    """The 99th percentile; None of nothing."""
    return times[min(math.ceil(0.99 * len(times)), len(times)) - 1] if times else None


def _owned(appends: Sequence[Operation], at: float) -> list[str]:
    """Logs whose owner the process was then: it had appended to them, and not their end."""
    done = bisect_right([op.began for op in appends], at)
    last = {op.target: op for op in appends[:done] if op.target.startswith("episode:")}
    return [log for log, op in last.items() if FINISHED not in op.types]


def _last_claim_lost(
    evidence: Evidence, log: str, dead: Mapping[str, float], died: float, end: Operation
) -> float:
    """When the last of those that claimed the episode after `died` and never wrote a word died; else `died`."""
    episode = log.partition(":")[2]
    since = died
    for op in evidence.calls["take"]:
        if died < op.began < end.began and op.process != end.process and episode in op.episodes:
            since = max(since, dead.get(op.process, died))
    return since if since < end.began else died


def _outage(evidence: Evidence, began: float, ended: float) -> bool:
    """Whether server or network were away, or had just come back, in this span."""
    return any(
        blow.began < ended and blow.ended + SETTLED_S > began
        for blow in evidence.blows
        if blow.kind in KINDS and KINDS[blow.kind].track == "server"
    )
