"""`aworld bench`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from aworld_runtime.cli.log_lines import add_logging
from aworld_runtime.cli.shared import add_json, run_async

if TYPE_CHECKING:
    from aworld_runtime.bench.backpressure import BackpressureReport
    from aworld_runtime.bench.bus import BusReport
    from aworld_runtime.bench.fork import ForkBenchReport
    from aworld_runtime.bench.idle import IdleReport
    from aworld_runtime.bench.replay import ReplayBenchReport

    Report = BusReport | IdleReport | BackpressureReport | ReplayBenchReport | ForkBenchReport

LOG_LEVEL = "error"
"""Full queues and redeliveries are what is measured here: the report counts them."""
DESCRIPTION = "Measure the product on this machine, and verify what was measured."
BUS = """\
Measure an event bus. Throughput: every event is appended to its episode's log, delivered to a consumer of its role and
acknowledged; then logs, queues and feed are checked. Latency: single events at a steady rate, from before the append
until a consumer has it, with redis-py alone beside it. Exit code 1: the verification failed; a target that isn't
reached is only said."""
BACKPRESSURE = """\
Put more events than their consumer handles: publishers are refused and wait, memory stays flat, and every event that was
accepted is consumed. The slope of the memory is that of the second half, by least squares."""
IDLE = """\
Measure the memory of episodes that are claimed and wait for a human, with workers that join and leave meanwhile; then
answer each, and see it end. Everything is in one process."""
REPLAY = """\
Record episodes of several agents on worker processes (calls of 0.2 s and more, tools in parallel, failures, handoffs, a
person's answers, one worker killed), then run "aworld replay --all" over them and compare its time with theirs. Exit code
1: an episode was different, or the replay less than 50 times as fast.
"""
FORK = """\
Write an episode of very many events into a store, fork it at its first, middle and last event and at random ones, and say how
long each fork takes and by how much the store grows; then see forks go on. Exit code 1: a fork took more than 100 ms.
"""
BUS_EXAMPLES = """\
examples:
  aworld bench bus                                       a private server, 200,000 events
  aworld bench bus --url memory://
  aworld bench bus --peers nats,faststream               beside other buses (scripts/bench-peers installs them)
  aworld bench bus --url redis://127.0.0.1:6379/0 --events 1000000 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    what = parser.add_subparsers(
        dest="what", required=True, metavar="bus|backpressure|idle|replay|fork"
    )
    raw = argparse.RawDescriptionHelpFormatter
    _add_bus(
        what.add_parser(
            "bus",
            help="throughput and latency",
            description=BUS,
            epilog=BUS_EXAMPLES,
            formatter_class=raw,
        )
    )
    _add_backpressure(
        what.add_parser(
            "backpressure", help="memory under a slow consumer", description=BACKPRESSURE
        )
    )
    _add_idle(what.add_parser("idle", help="memory of an episode that waits", description=IDLE))
    _add_replay(
        what.add_parser(
            "replay", help="a replay's time, beside that of the live runs", description=REPLAY
        )
    )
    _add_fork(what.add_parser("fork", help="forks of a very long episode", description=FORK))
    for measured in what.choices.values():
        add_logging(measured)


def _add_backpressure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="as for bus (default: a private server)")
    parser.add_argument(
        "--seconds", type=float, default=300.0, metavar="S", help="how long (default 300)"
    )
    numbers = (
        ("rate", 1000, "events per second that the publishers want to put"),
        ("pace", 200, "events per second that the consumer handles"),
        ("limit", 5000, "watermark of the queue"),
    )
    for name, default, text in numbers:
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})"
        )
    add_json(parser)


def _add_idle(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--roles", type=int, default=100, metavar="N", help="of each episode (default 100)"
    )
    parser.add_argument(
        "--episodes", type=int, default=1000, metavar="N", help="that wait (default 1000)"
    )
    add_json(parser)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--episodes", type=int, default=200, metavar="N", help="to record (default 200)"
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="keep the record there: sqlite:///… or mongodb://…, without any episodes yet (default: a temporary file)",
    )
    add_json(parser)


def _add_fork(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--events",
        type=int,
        default=1_000_000,
        metavar="N",
        help="of the episode (default 1,000,000)",
    )
    add_json(parser)


def _add_bus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        help="redis://…, rediss://…, unix://…, redis+cluster://… or memory:// (default: a private server)",
    )
    numbers = (
        ("events", 200_000, "of the throughput phase"),
        ("roles", 10, "each with a queue and a consumer"),
        ("episodes", 1000, "at once, each with a log and an owner"),
        ("batch", 100, "most events in one append and one put"),
        ("rate", 1000, "events per second of the latency phase"),
    )
    for name, default, text in numbers:
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})"
        )
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="of the latency phase, each way (default 10)",
    )
    parser.add_argument(
        "--peers",
        nargs="?",
        const="all",
        default="",
        metavar="NAMES",
        help="measure other buses too: faststream, taskiq, autogen-local, autogen-grpc, nats (default: all)",
    )
    parser.add_argument(
        "--peers-python",
        type=Path,
        metavar="PATH",
        help="interpreter that has them (default: the one that scripts/bench-peers makes, else this one)",
    )
    add_json(parser)


def bench_command(arguments: argparse.Namespace) -> int:
    """Run `aworld bench`; returns the exit code."""
    commands = {
        "bus": _bus,
        "idle": _idle,
        "backpressure": _backpressure,
        "replay": _replay,
        "fork": _fork,
    }
    return commands[arguments.what](arguments)


def _bus(arguments: argparse.Namespace) -> int:
    from aworld_runtime.bench.bus import Settings, bench_bus
    from aworld_runtime.bench.compare import chosen, default_python
    from aworld_runtime.bench.latency import Pace
    from aworld_runtime.bench.load import Load
    from aworld_runtime.bench.progress import Progress
    from aworld_runtime.bench.text import bus_text

    load = Load(
        events=arguments.events,
        roles=arguments.roles,
        episodes=arguments.episodes,
        batch=arguments.batch,
    )
    pace = Pace(rate=arguments.rate, seconds=arguments.seconds, roles=arguments.roles)
    python = arguments.peers_python or default_python()
    settings = Settings(load, pace, Progress(), chosen(arguments.peers), python)
    report = run_async(bench_bus, arguments.url, settings)
    return _tell(report, bus_text(report), arguments)


def _idle(arguments: argparse.Namespace) -> int:
    from aworld_runtime.bench.idle import IdleBench
    from aworld_runtime.bench.progress import Progress
    from aworld_runtime.bench.text import idle_text

    report = run_async(IdleBench(arguments.episodes, arguments.roles, Progress()).run)
    return _tell(report, idle_text(report), arguments)


def _backpressure(arguments: argparse.Namespace) -> int:
    from aworld_runtime.bench.backpressure import BackpressureBench, Pressure
    from aworld_runtime.bench.progress import Progress
    from aworld_runtime.bench.text import backpressure_text

    pressure = Pressure(
        seconds=arguments.seconds,
        rate=arguments.rate,
        pace=arguments.pace,
        limit=arguments.limit,
    )
    report = run_async(BackpressureBench(arguments.url, pressure, Progress()).run)
    return _tell(report, backpressure_text(report), arguments)


def _replay(arguments: argparse.Namespace) -> int:
    from aworld_runtime.bench.progress import Progress
    from aworld_runtime.bench.replay import ReplayBench
    from aworld_runtime.bench.text import replay_text

    bench = ReplayBench(arguments.episodes, arguments.store, Progress())
    report = run_async(bench.run)
    return _tell(report, replay_text(report), arguments)


def _fork(arguments: argparse.Namespace) -> int:
    from aworld_runtime.bench.fork import ForkBench
    from aworld_runtime.bench.progress import Progress
    from aworld_runtime.bench.text import fork_text

    report = run_async(ForkBench(arguments.events, Progress()).run)
    return _tell(report, fork_text(report), arguments)


def _tell(report: Report, text: str, arguments: argparse.Namespace) -> int:
    print(report.model_dump_json(indent=2) if arguments.json else text)
    return 0 if report.verified else 1
