"""Whether what was measured is what was promised. A benchmark that doesn't look is not believed.

Each check returns what is wrong, in sentences; nothing is wrong where it returns none.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aworld_runtime.events import Event

NAMED = 3
"""Faults of one kind that are named; the others are counted."""


def check_log(log: str, expected: Sequence[str], found: Sequence[Event]) -> list[str]:
    """Every expected event stands in the log once, in order, at its seq, and nothing else does."""
    faults: list[str] = []
    ids = [event.id for event in found]
    if len(set(ids)) < len(ids):
        faults.append(f"{log}: {len(ids) - len(set(ids))} events stand in it twice")
    if missing := [i for i in expected if i not in set(ids)]:
        faults.append(
            f"{log}: {len(missing)} of {len(expected)} events are missing: {_some(missing)}"
        )
    if extra := set(ids) - set(expected):
        faults.append(f"{log}: {len(extra)} events that nobody appended: {_some(extra)}")
    if not faults and ids != list(expected):
        faults.append(f"{log}: its events stand in another order than they were appended")
    seqs = [event.seq for event in found]
    if seqs != list(range(1, len(seqs) + 1)):
        first = next(i for i, seq in enumerate(seqs, 1) if seq != i)
        faults.append(f"{log}: seq {seqs[first - 1]} stands where {first} belongs")
    return faults


def check_deliveries(role: str, sent: Collection[str], acked: Collection[str]) -> list[str]:
    """Every event that was put for a role was delivered to it and acknowledged."""
    faults: list[str] = []
    if missing := set(sent) - set(acked):
        faults.append(
            f"{role}: {len(missing)} of {len(sent)} events were not acked: {_some(missing)}"
        )
    if strange := set(acked) - set(sent):
        faults.append(f"{role}: {len(strange)} events that nobody put for it: {_some(strange)}")
    return faults


def _some(ids: Collection[str]) -> str:
    named = sorted(ids)[:NAMED]
    return ", ".join(named) + (", …" if len(ids) > NAMED else "")
