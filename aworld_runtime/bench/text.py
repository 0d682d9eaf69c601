"""Reports as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from aworld_runtime.bench.backpressure import BackpressureReport, Slope
from aworld_runtime.bench.bus import BusReport
from aworld_runtime.bench.ceiling import Ceiling
from aworld_runtime.bench.compare import PeerReport
from aworld_runtime.bench.fork import ForkBenchReport
from aworld_runtime.bench.idle import IdleReport
from aworld_runtime.bench.replay import ReplayBenchReport
from aworld_runtime.bench.targets import Hold
from aworld_runtime.cli.shared import table

ANSWERS = {True: "yes", False: "no", None: "not measured"}


def bus_text(report: BusReport) -> str:
    """The report of `aworld bench bus`."""
    load = report.load
    rows = [
        ("events per core-second", f"{report.events_per_core_second:,.0f}", _cpu(report)),
        (
            "events per second",
            f"{report.events_per_second:,.0f}",
            f"{report.events:,} events in {report.wall_s:.1f} s",
        ),
        ("p50, p99 ms", f"{report.p50_ms:.2f}, {report.p99_ms:.2f}", _pace(report)),
    ]
    if report.raw_latency is not None:
        raw = report.raw_latency
        rows.append(("  redis-py alone", f"{raw.p50_ms:.2f}, {raw.p99_ms:.2f}", "the same pace"))
    rows.append(("ceiling per core-second", *_ceiling(report.ceiling)))
    where = report.server or "no server"
    head = (
        f"{report.url}, {where}: {load.roles} roles, {load.episodes:,} episodes, {report.bytes} bytes"
        f" an event, {load.batch} in an append"
    )
    parts = [head, table(("", "figure", ""), rows)]
    if report.peers:
        parts.append(_peers(report.peers))
    return "\n\n".join([*parts, holds_text(report.holds), _end(report)])


def _peers(peers: Sequence[PeerReport]) -> str:
    rows = [
        (
            peer.name,
            _number(peer.events_per_core_second),
            _number(peer.events_per_second),
            peer.reason or f"{peer.versions}: {peer.what}",
        )
        for peer in peers
    ]
    return table(("peer", "per core-second", "per second", "measured"), rows)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def idle_text(report: IdleReport) -> str:
    """The report of `aworld bench idle`."""
    rows = [
        (
            "KB per idle episode",
            f"{report.kb_per_episode:.1f}",
            f"{report.episodes:,} of {report.roles} roles",
        ),
        ("RSS before, after MB", f"{report.rss_before_mb:.0f}, {report.rss_after_mb:.0f}", ""),
        ("CPU while all wait", f"{report.idle_cpu_percent:.1f} %", "of one core"),
        ("workers joined, left", f"{report.joins}, {report.leaves}", "while they waited"),
    ]
    return "\n\n".join([table(("", "figure", ""), rows), holds_text(report.holds), _end(report)])


def backpressure_text(report: BackpressureReport) -> str:
    """The report of `aworld bench backpressure`."""
    rows = [
        ("events put", f"{report.put:,}", f"{report.refused:,} puts were refused, and made again"),
        ("consumed", f"{report.consumed:,}", f"{report.redelivered:,} of them came again"),
        (
            "in the queue",
            f"{report.backlog_max:,}",
            f"at most; its limit is {report.pressure.limit:,}",
        ),
        ("memory here", *_slope(report.client_memory)),
    ]
    if report.server_memory is not None:
        rows.append(("memory of the server", *_slope(report.server_memory)))
    head = f"{report.url}, {report.server or 'no server'}: {report.pressure.seconds:g} s"
    return "\n\n".join(
        [head, table(("", "figure", ""), rows), holds_text(report.holds), _end(report)]
    )


def replay_text(report: ReplayBenchReport) -> str:
    """The report of `aworld bench replay`."""
    calls = f"{report.calls:,} calls, the shortest of {report.shortest_call_s:.3f} s"
    rows = [
        ("episodes", f"{report.episodes:,}", f"{report.events:,} events; {calls}"),
        *(
            (f"  with {kind.replace('_', ' ')}", f"{episodes:,}", "")
            for kind, episodes in report.kinds.items()
        ),
        ("identical", f"{report.identical:,}", f"different {report.different}"),
        ("live calls of the replay", f"{report.live_calls}", f"{report.handlers:,} handlers ran"),
        ("live, one by one, s", f"{report.live_s:.1f}", "the episodes' durations, added up"),
        ("live, many at once, s", f"{report.live_wall_s:.1f}", "on the clock"),
        (
            "replay, s",
            f"{report.replay_s:.2f}",
            f"aworld replay --all --json, its start included; {report.replay_cpu_s:.2f} s of CPU",
        ),
        ("times as fast", f"{report.ratio:.0f}", f"and {report.wall_ratio:.1f} by the clock"),
    ]
    return "\n\n".join([table(("", "figure", ""), rows), holds_text(report.holds), _end(report)])


def fork_text(report: ForkBenchReport) -> str:
    """The report of `aworld bench fork`."""
    log = f"of {report.log_mb:,.0f} MB, written in {report.write_s:.0f} s"
    own = f"{report.kept_events:g} events of its own"
    rows = [
        ("events of the log", f"{report.events:,}", log),
        (
            "a fork: p50, max ms",
            f"{report.p50_ms:.1f}, {report.max_ms:.1f}",
            f"{len(report.forks)}",
        ),
        ("the store grew by, KB", f"{report.kept_bytes / 1024:.1f}", f"for each: {own}"),
        *(
            (
                f"a fork at {went.at:,} goes on",
                f"{went.claimed_s:.2f}",
                f"s to its claim, {went.handled_s:.2f} s to the end of its first handler",
            )
            for went in report.went_on
        ),
        ("memory MB", f"{report.rss_mb:,.0f}", "of this process in the end"),
    ]
    return "\n\n".join([table(("", "figure", ""), rows), holds_text(report.holds), _end(report)])


def _slope(slope: Slope) -> tuple[str, str]:
    return f"{slope.kb_per_s:+.2f} KB/s", f"{slope.first_mb:.1f} to {slope.last_mb:.1f} MB"


def holds_text(holds: Sequence[Hold]) -> str:
    rows = [
        (
            hold.target,
            "–" if hold.value is None else f"{hold.value:,.2f}",
            ANSWERS[hold.holds],
        )
        for hold in holds
    ]
    return table(("target", "figure", "holds"), rows)


def faults_text(faults: Sequence[str]) -> str:
    return "\n".join(["verification failed:", *(f"  {fault}" for fault in faults)])


def _end(
    report: BusReport | IdleReport | BackpressureReport | ReplayBenchReport | ForkBenchReport,
) -> str:
    machine = report.machine
    where = (
        f"Python {machine.python}, {machine.cpu_count} cores, load average {machine.load_average:.2f}"
        " before"
    )
    if report.verified:
        return f"verified. {where}"
    return f"{faults_text(report.faults)}\n{where}"


def _ceiling(ceiling: Ceiling) -> tuple[str, str]:
    if ceiling.per_core_second is None:
        return "–", ceiling.reason or ""
    alone = f"{ceiling.per_server_core_second:,.0f} over the server's CPU alone"
    return f"{ceiling.per_core_second:,.0f}", f"{ceiling.program}: XADD alone; {alone}"


def _cpu(report: BusReport) -> str:
    client, server = report.cpu_s.client, report.cpu_s.server
    return f"CPU: {client:.2f} s here, {server:.2f} s in the server"


def _pace(report: BusReport) -> str:
    return f"at {report.pace.rate:,} a second, {report.latency.samples:,} events"
