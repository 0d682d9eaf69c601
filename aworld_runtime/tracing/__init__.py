"""Traces: an episode's log as OpenTelemetry spans, and their way to a collector. Nothing here is on the hot path."""
