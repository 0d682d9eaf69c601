"""Every metric of the runtime, declared once, and what a log line says beside its message.

Metrics are plain numbers of the process: adding to one costs less than a microsecond and needs no package. What can be
read off an object when somebody asks (what a consumer holds, what waits in a link) is watched, and costs nothing until
then. `exposition` writes them all in Prometheus' text format, with `prometheus-client`.

Labels have few values: roles, tools, models, reasons; never ids.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from weakref import WeakKeyDictionary

from aworld_runtime.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

T = TypeVar("T")

INSTALL = "pip install 'aworld-rt[telemetry]'"


# --- kinds of metrics ----------------------------------------------------------------------------------------------


class Counter:
    """Only grows."""

    kind: Literal["counter"] = "counter"

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name, self.help, self.labels = name, text, labels
        self._total: float = 0
        self._by_labels: dict[tuple[str, ...], float] = {}

    def add(self, amount: float = 1, *labels: str) -> None:
        if labels:
            self._by_labels[labels] = self._by_labels.get(labels, 0) + amount
        else:
            self._total += amount

    def family(self) -> Family:
        from prometheus_client.metrics_core import CounterMetricFamily

        family = CounterMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in self._by_labels.copy().items():
            family.add_metric(labels, value)
        if not self.labels:
            family.add_metric((), self._total)
        return family


class Gauge:
    """Goes up and down: what was added to it, and what is read off the objects it watches."""

    kind: Literal["gauge"] = "gauge"

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name, self.help, self.labels = name, text, labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}
        self._watched: WeakKeyDictionary[Any, tuple[Callable[[Any], float], tuple[str, ...]]] = (
            WeakKeyDictionary()
        )

    def add(self, amount: float, *labels: str) -> None:
        values = self._values
        values[labels] = values.get(labels, 0) + amount

    def watch(self, source: T, read: Callable[[T], float], *labels: str) -> None:
        """Add what `read(source)` says, as long as `source` lives."""
        self._watched[source] = (read, labels)

    def family(self) -> Family:
        from prometheus_client.metrics_core import GaugeMetricFamily

        family = GaugeMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in self._now().items():
            family.add_metric(labels, value)
        return family

    def _now(self) -> Mapping[tuple[str, ...], float]:
        values = self._values.copy()
        for source, (read, labels) in list(self._watched.items()):
            values[labels] = values.get(labels, 0) + read(source)
        return values


@dataclass(slots=True)
class Observed:
    """What a histogram knows of one set of labels."""

    buckets: list[int]
    """How many in each bucket alone; the last is for what is above all bounds."""
    total: float = 0


class Histogram:
    """How many observations were at most as large as each bound, and their sum."""

    kind: Literal["histogram"] = "histogram"

    def __init__(self, name: str, text: str, *labels: str, bounds: Sequence[float]) -> None:
        self.name, self.help, self.labels = name, text, labels
        self._bounds = tuple(map(float, bounds))
        self._observed: dict[tuple[str, ...], Observed] = {}
        if not labels:
            self._of(())

    def observe(self, value: float, *labels: str) -> None:
        observed = self._observed.get(labels) or self._of(labels)
        observed.buckets[bisect_left(self._bounds, value)] += 1
        observed.total += value

    def count(self, *labels: str) -> int:
        observed = self._observed.get(labels)
        return sum(observed.buckets) if observed else 0

    def family(self) -> Family:
        from prometheus_client.metrics_core import HistogramMetricFamily

        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for labels, observed in self._observed.copy().items():
            below, buckets = 0, list[tuple[str, float]]()
            for bound, count in zip((*self._bounds, "+Inf"), observed.buckets, strict=True):
                below += count
                buckets.append((str(bound), below))
            family.add_metric(labels, buckets, observed.total)
        return family

    def _of(self, labels: tuple[str, ...]) -> Observed:
        return self._observed.setdefault(labels, Observed([0] * (len(self._bounds) + 1)))


Metric = Counter | Gauge | Histogram

# --- the bus -------------------------------------------------------------------------------------------------------

APPENDED = Counter("aworld_bus_appended_events_total", "Events that this process appended to logs.")
FENCED = Counter(
    "aworld_bus_fenced_appends_total",
    "Appends that were refused because another owner had appended.",
)
APPEND_SECONDS = Histogram(
    "aworld_bus_append_seconds",
    "Time from the call of an append to its acknowledgement by the server; memory:// has none.",
    bounds=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5),
)
PUT = Counter("aworld_bus_put_events_total", "Events that this process put on queues.")
REFUSED = Counter(
    "aworld_bus_refused_calls_total",
    "Puts and mails that were refused: a queue or mailbox was full.",
)
MAILED = Counter("aworld_bus_mailed_events_total", "Events that this process sent to logs' owners.")
DELIVERED = Counter(
    "aworld_bus_delivered_events_total", "Events that consumers of this process took from queues."
)
ACKED = Counter("aworld_bus_acked_events_total", "Deliveries that were settled as done.")
RETRIED = Counter("aworld_bus_retried_events_total", "Deliveries that go back to be tried again.")
DEAD = Counter(
    "aworld_bus_dead_letters_total", "Events that this process gave up on: dead letters of queues."
)
LOST_LEASES = Counter(
    "aworld_bus_lost_leases_total", "Deliveries whose lease went to another consumer."
)
HELD = Gauge(
    "aworld_bus_held_deliveries", "Deliveries that consumers hold and have not settled.", "queue"
)
RECONNECTS = Counter(
    "aworld_bus_reconnects_total", "Times that the connection for calls was made anew."
)
LINK_CALLS = Gauge("aworld_bus_waiting_calls", "Calls that wait to be sent to the server.")
LINK_BYTES = Gauge("aworld_bus_waiting_bytes", "Bytes of the calls that have no answer yet.")

# --- nodes ---------------------------------------------------------------------------------------------------------

EPISODES_RUNNING = Gauge("aworld_episodes_running", "Episodes that this process owns now.")
EPISODES_FINISHED = Counter(
    "aworld_episodes_finished_total", "Episodes that ended in this process, by reason.", "reason"
)
TAKEOVERS = Counter(
    "aworld_episode_takeovers_total", "Episodes that this process took over from another owner."
)
TOOL_CALLS = Counter("aworld_tool_calls_total", "Tool calls made in this process.", "tool")
TOOL_FAILURES = Counter(
    "aworld_tool_failures_total", "Tool calls made in this process that failed.", "tool"
)
MODEL_CALLS = Counter("aworld_model_calls_total", "Completions that were asked for.", "model")
MODEL_FAILURES = Counter("aworld_model_failures_total", "Completions that failed.", "model")
MODEL_SECONDS = Histogram(
    "aworld_model_seconds",
    "Time from asking for a completion to its end, retries included.",
    "model",
    bounds=(0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60, 120),
)
INPUT_TOKENS = Counter("aworld_model_input_tokens_total", "Tokens of prompts.", "model")
OUTPUT_TOKENS = Counter("aworld_model_output_tokens_total", "Tokens of completions.", "model")

# --- the archiver --------------------------------------------------------------------------------------------------

ARCHIVED = Counter("aworld_archiver_events_total", "Events that were copied to the store.")
ARCHIVER_LAG = Gauge(
    "aworld_archiver_lag_seconds",
    "Age of the oldest event that an archiver has read and not finished copying; 0 where none is.",
)
INCIDENTS = Counter(
    "aworld_archiver_incidents_total", "Logs that can't be archived: rewound, lost or unreadable."
)
STORE_OUTAGES = Counter(
    "aworld_archiver_store_outages_total", "Times that the store began to fail; archiving waits."
)

# --- the janitor ---------------------------------------------------------------------------------------------------

RETIRED = Counter("aworld_janitor_retired_logs_total", "Finished logs that were freed on the bus.")
TRIMS = Counter("aworld_janitor_trims_total", "Times that the feed was trimmed behind its readers.")
RESTORED = Counter(
    "aworld_janitor_restored_logs_total",
    "Logs that a server lost and that came back from the store.",
)
LOST_LOGS = Counter(
    "aworld_janitor_lost_logs_total", "Logs that a server lost and that can't be restored."
)

# --- training ------------------------------------------------------------------------------------------------------

POLICY_VERSION = Gauge("aworld_policy_version", "Version of the weights that this trainer has.")
STEP_SECONDS = Histogram(
    "aworld_learner_step_seconds",
    "Time of a step on this rank of the learner, from rows to new weights.",
    bounds=(0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300),
)
SAMPLED_TOKENS = Counter("aworld_sampler_tokens_total", "Tokens that this sampler has sampled.")
SAMPLING = Gauge(
    "aworld_sampler_completions", "Completions that this sampler works on, or that wait for it."
)

# --- traces --------------------------------------------------------------------------------------------------------

SPANS = Counter("aworld_otel_spans_total", "Spans that a collector has taken.")
SPANS_REFUSED = Counter(
    "aworld_otel_refused_spans_total", "Spans that a collector did not take; they are sent again."
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)


class Everything:
    """A `prometheus-client` collector of all metrics."""

    def collect(self) -> Iterator[Family]:
        for metric in METRICS:
            yield metric.family()


def exposition() -> tuple[str, bytes]:
    """The content type and the text of all metrics, and of the process: CPU time, memory, files.

    Raises:
        ConfigError: `prometheus-client` is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
        from prometheus_client.exposition import CONTENT_TYPE_LATEST
    except ImportError:
        raise ConfigError(f"metrics need prometheus-client: {INSTALL}") from None
    registry = CollectorRegistry()
    registry.register(Everything())
    ProcessCollector(registry=registry)
    return CONTENT_TYPE_LATEST, generate_latest(registry)


# --- log lines -----------------------------------------------------------------------------------------------------

_about: ContextVar[Mapping[str, str] | None] = ContextVar("about", default=None)


@contextmanager
def about(**fields: str | None) -> Generator[None]:
    """Log lines of this task, and of those it starts, carry these fields: `episode`, `run`, `worker`."""
    token = _about.set({**log_fields(), **{k: v for k, v in fields.items() if v is not None}})
    try:
        yield
    finally:
        _about.reset(token)


def log_fields() -> Mapping[str, str]:
    """What the current task is about."""
    return _about.get() or {}
