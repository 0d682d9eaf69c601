"""What came of a run: as data, and as people read it."""

from __future__ import annotations

import textwrap

from aworld_runtime.chaos.checker import Violation
from aworld_runtime.chaos.plan import KINDS
from aworld_runtime.cli.shared import table
from aworld_runtime.messages import Data

MOST_TAKEOVER_S = 3.0
WIDTH = 118


class Episodes(Data):
    """How many there were of them."""

    requested: int
    finished: int
    taken_over: int
    """Times."""
    misbehaved: int
    """Poison: requested beside the others."""


class Report(Data):
    """Of one run. What the figures count: docs/chaos.md."""

    ok: bool
    seed: int
    seconds: float
    acked: int
    faults: dict[str, int]
    """How often each kind struck."""
    skipped: dict[str, str]
    """Kinds that can't be had here, and why."""
    acked_lost: int
    duplicate_commits: int
    order_violations: int
    silent_hangs: int
    wrong_ends: int
    queue_lost: int
    not_archived: int
    crashes: int
    takeover_p99_s: float | None
    """None where nothing was taken over while the server was there."""
    takeovers_timed: int
    load_per_core: float
    failed_loudly: int
    zombie_appends_refused: int
    processes_left: int
    episodes: Episodes
    store: str
    violations: tuple[Violation, ...]
    """One of each sort in each log, the first of them."""


def text(report: Report) -> str:
    """For people: what struck, each figure beside its bound, what was violated."""
    head = (
        f"seed {report.seed}: {report.seconds:g} s of faults, store {report.store}; up to"
        f" {report.load_per_core:g} processes wanted each core"
    )
    parts = [head, _faults(report), _figures(report)]
    if report.violations:
        parts.append("\n".join(line for v in report.violations for line in _violation(v)))
    violated = ", ".join(row[0] for row in _bounded(report) if row[3] == "no")
    parts.append("all holds" if report.ok else f"violated: {violated}")
    return "\n\n".join(parts)


def _faults(report: Report) -> str:
    rows = [(kind, count, KINDS[kind].does) for kind, count in report.faults.items()]
    rows += [(kind, "skipped", why) for kind, why in report.skipped.items()]
    return table(("fault", "times", "what it is"), rows)


def _figures(report: Report) -> str:
    episodes = report.episodes
    requested = f"{episodes.requested:,} requested, {episodes.misbehaved} that misbehave"
    counted = (
        ("acked", report.acked, "events whose append was acknowledged"),
        ("episodes", episodes.finished, f"of {requested}; taken over {episodes.taken_over} times"),
        ("failed_loudly", report.failed_loudly, "logs that tell of a loss themselves"),
        ("zombie_appends_refused", report.zombie_appends_refused, "of stopped workers, continued"),
    )
    rows = [(name, f"{figure:,}", "", "", what) for name, figure, what in counted]
    return table(("", "figure", "bound", "holds", ""), [*rows, *_bounded(report)])


def _bounded(report: Report) -> list[tuple[str, str, str, str, str]]:
    counts = (
        ("acked_lost", report.acked_lost, "acknowledged, and not where they were"),
        ("duplicate_commits", report.duplicate_commits, "something is there twice"),
        ("order_violations", report.order_violations, "something isn't where it belongs"),
        ("silent_hangs", report.silent_hangs, "episodes without an end"),
        ("wrong_ends", report.wrong_ends, "healthy episodes that ended otherwise"),
        ("queue_lost", report.queue_lost, "work that nobody ever got"),
        ("not_archived", report.not_archived, "logs that the store lacks events of"),
        ("crashes", report.crashes, "processes that ended of themselves"),
        ("processes_left", report.processes_left, "processes that outlived the run"),
    )
    rows = [
        (name, f"{figure:,}", "0", "no" if figure else "yes", what) for name, figure, what in counts
    ]
    slowest = report.takeover_p99_s
    holds = "not timed" if slowest is None else "yes" if slowest <= MOST_TAKEOVER_S else "no"
    figure = "–" if slowest is None else f"{slowest:.2f}"
    timed = f"of {report.takeovers_timed} takeovers, while the server was there"
    return [*rows, ("takeover_p99_s", figure, f"≤ {MOST_TAKEOVER_S:g}", holds, timed)]


def _violation(violation: Violation) -> list[str]:
    place = f" {violation.log}@{violation.seq}" if violation.log else ""
    told = f"{violation.what}{place}: {violation.detail}"
    return textwrap.wrap(told, WIDTH, subsequent_indent="    ")
