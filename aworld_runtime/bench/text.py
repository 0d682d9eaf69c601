"""Reports as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from aworld_runtime.bench.bus import BusReport
from aworld_runtime.bench.ceiling import Ceiling
from aworld_runtime.bench.targets import Hold
from aworld_runtime.cli.shared import table


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
    return "\n\n".join(
        [head, table(("", "figure", ""), rows), holds_text(report.holds), _end(report)]
    )


def holds_text(holds: Sequence[Hold]) -> str:
    rows = [
        (
            hold.target,
            "–" if hold.value is None else f"{hold.value:,.2f}",
            "yes" if hold.holds else "no",
        )
        for hold in holds
    ]
    return table(("target", "figure", "holds"), rows)


def faults_text(faults: Sequence[str]) -> str:
    return "\n".join(["verification failed:", *(f"  {fault}" for fault in faults)])


def _end(report: BusReport) -> str:
    machine = report.machine
    where = (
        f"Python {machine.python}, {machine.cpu_count} cores, load average {machine.load_average:.2f}"
        " before"
    )
    if report.verified:
        return f"verified: every event once, in order, acknowledged. {where}"
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
