"""How long the episodes of a worker that died, or was stopped, were without an owner. Only while the server was there."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

from aworld_runtime.chaos.checker import FINISHED, TAKEN_OVER, Evidence
from aworld_runtime.chaos.history import Operation
from aworld_runtime.chaos.plan import KINDS
from aworld_runtime.names import EPISODES_QUEUE, episode_log, episode_of_log

DEATHS = ("worker_killed", "worker_stopped")
SETTLED_S = 1.0
"""Seconds after an outage in which clients may still be finding their way back."""


def takeovers(evidence: Evidence) -> list[float]:
    """Seconds from each death to each `episode.taken_over` of the dead worker's episodes, shortest first."""
    deaths = sorted((b.began, b.target, b.held) for b in evidence.blows if b.kind in DEATHS)
    emptied = [b.began for b in evidence.blows if b.kind == "server_emptied"]
    claims = _claims(evidence)
    times: list[float] = []
    for log, appends in _appends(evidence).items():
        for died, worker, _ in deaths:
            done = bisect_right(appends, died, key=lambda op: op.began)
            last = appends[done - 1] if done else None
            if last is None or last.process != worker or FINISHED in last.types:
                continue  # it wasn't the owner then
            heirs = [op for op in appends[done:] if TAKEN_OVER in op.types and op.process != worker]
            if heirs and heirs[0].ended is not None:
                later = [op for op in claims[log] if died < op.began < heirs[0].began]
                lost = _claims_lost(log, later, deaths, emptied)
                since = max([died, *(at for at in lost if died < at < heirs[0].began)])
                if not _outage(evidence, since, heirs[0].ended):
                    times.append(heirs[0].ended - since)
    return sorted(times)


def p99(times: Sequence[float]) -> float | None:
    """The 99th percentile; None of nothing."""
    return times[min(math.ceil(0.99 * len(times)), len(times)) - 1] if times else None


def _appends(evidence: Evidence) -> dict[str, list[Operation]]:
    """What was appended to each episode's log, in order."""
    appends: dict[str, list[Operation]] = defaultdict(list)
    for op in sorted(evidence.calls["append"], key=lambda op: op.began):
        if op.outcome == "ok" and episode_of_log(op.target):
            appends[op.target].append(op)
    return appends


def _claims(evidence: Evidence) -> dict[str, list[Operation]]:
    """By an episode's log, who took the episode from the queue."""
    claims: dict[str, list[Operation]] = defaultdict(list)
    for op in evidence.calls["take"]:
        for episode in op.episodes if op.target == EPISODES_QUEUE else ():
            claims[episode_log(episode)].append(op)
    return claims


def _claims_lost(
    log: str,
    claims: Sequence[Operation],
    deaths: Sequence[tuple[float, str, Sequence[str]]],
    emptied: Sequence[float],
) -> Iterator[float]:
    """When a claim on the episode was lost by its holder's death, as the server says or by `claims`, of those that the server
    had not lost before.
    """
    episode = episode_of_log(log)
    for at, worker, held in deaths:
        kept = max((moment for moment in emptied if moment < at), default=-math.inf)
        if episode in held or any(op.process == worker and kept < op.began < at for op in claims):
            yield at


def _outage(evidence: Evidence, began: float, ended: float) -> bool:
    """Whether server or network were away, or had just come back, in this span."""
    return any(
        blow.began < ended and blow.ended + SETTLED_S > began
        for blow in evidence.blows
        if blow.kind in KINDS and KINDS[blow.kind].track == "server"
    )
