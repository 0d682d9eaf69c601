"""Sends spans to a collector, as OTLP over HTTP. The packages it needs load when a `Collector` is made."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from anyio.to_thread import run_sync

from aworld_runtime.errors import ConfigError, ExportError
from aworld_runtime.telemetry import INSTALL
from aworld_runtime.tracing.spans import Span
from aworld_runtime.urls import shown
from aworld_runtime.version import code_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

ANSWER_S = 10.0
"""Seconds that a collector has for one batch; what it refuses for the moment is sent again meanwhile."""
TOLD = 300
"""Characters of why it refused a batch."""


class Collector:
    """Takes spans at an OTLP/HTTP address such as http://localhost:4318/v1/traces; close it after use.

    Raises:
        ConfigError: the OpenTelemetry packages are not installed, or the address is none.
    """

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"endpoint {shown(endpoint)!r}: expected http://HOST:4318/v1/traces or https://…"
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        except ImportError:
            raise ConfigError(f"spans need the OpenTelemetry exporter: {INSTALL}") from None
        self.endpoint = shown(endpoint)
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=ANSWER_S)
        # Without what is different each time: a span that is sent again is the same.
        ours = Resource({"service.name": "aworld", "service.version": code_version()})
        self._resource = ours.merge(OTELResourceDetector().detect())
        # It logs each refusal, with tracebacks: whoever sends says it in a line.
        self._logger = logging.getLogger("opentelemetry.exporter.otlp")
        self._logger.setLevel(logging.WARNING)
        self._logger.propagate = False
        self._heard = Heard()
        self._logger.addHandler(self._heard)

    async def send(self, spans: Sequence[Span]) -> None:
        """Returns once the collector has them.

        Raises:
            ExportError: it doesn't take them now; says why.
        """
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._heard.lines.clear()
        readable = [self._readable(span) for span in spans]
        result = await run_sync(self._exporter.export, readable, abandon_on_cancel=True)
        if result is not SpanExportResult.SUCCESS:
            raise ExportError(self._heard.lines[0] if self._heard.lines else "it does not say why")

    def close(self) -> None:
        """End what is being sent, too."""
        self._exporter.shutdown()
        self._logger.removeHandler(self._heard)

    def _readable(self, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span_id: int) -> SpanContext:
            flags = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(span.trace_id, span_id, is_remote=False, trace_flags=flags)

        failed = span.error is not None
        return ReadableSpan(
            name=span.name,
            context=context(span.span_id),
            parent=None if span.parent_id is None else context(span.parent_id),
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[Event(moment.name, timestamp=_ns(moment.time)) for moment in span.moments],
            kind=SpanKind.CLIENT if span.kind == "client" else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error or None) if failed else Status(),
            start_time=_ns(span.start),
            end_time=_ns(span.end),
            instrumentation_scope=InstrumentationScope("aworld_runtime.tracing"),
        )


class Heard(logging.Handler):
    """What the exporter logs: the first line about a batch says what the collector, or the network, has against it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=100)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(" ".join(record.getMessage().split())[:TOLD])


def _ns(moment: datetime) -> int:
    """Nanoseconds since 1970, exact to the microsecond."""
    return int(moment.timestamp()) * 10**9 + moment.microsecond * 1000
