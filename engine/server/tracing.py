"""OpenTelemetry spans of requests, switched on by the usual OTEL_ variables (docs/operate.md).

The spans of a request are made at its end, from the times that the engine has noted. Without the variables
OpenTelemetry is not imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.sequence import SequenceGroup
from guided.errors import GuidedError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Tracing:
    """Makes the spans of requests."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("guided")

    @classmethod
    def from_environment(cls) -> Tracing | None:
        """Return the tracing that the OTEL_ variables configure. None: they disable it, or name no endpoint.

        Raises:
            ValueError: OpenTelemetry is not installed.
        """
        if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(map(os.environ.get, _ENDPOINTS)):
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ValueError("the OTEL_ variables ask for traces: pip install 'guided[otel]'") from error
        os.environ.setdefault("OTEL_SERVICE_NAME", "guided")
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def record(self, group: SequenceGroup, headers: Mapping[str, str], error: GuidedError | None = None) -> None:
        """Make the spans of a request that has ended, below the span that `traceparent` in the HTTP headers names."""
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        now = time.monotonic()
        offset = time.time() - now

        def span(name: str, start: float, end: float, attributes: Mapping[str, Any] | None = None) -> None:
            at = int((start + offset) * 1e9)
            self._tracer.start_span(name, context, attributes=attributes, start_time=at).end(int((end + offset) * 1e9))

        ended = group.finished_time or now
        arrived = int((group.arrival_time + offset) * 1e9)
        parent = propagate.extract(headers)
        root = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, _attributes(group), start_time=arrived)
        error = error or next((one.error for one in group.sequences if one.error is not None), None)
        if error is not None:
            root.set_attribute("error.type", error.code)
            root.set_status(Status(StatusCode.ERROR, str(error)))
        context = set_span_in_context(root)
        compiled = group.arrival_time
        if group.sampling_params.constraint is not None:
            compiled = group.compiled_time or ended
            span("compile", group.arrival_time, compiled)
        root.end(int((ended + offset) * 1e9))


def _attributes(group: SequenceGroup) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {
        "gen_ai.request.id": group.request_id,
        "gen_ai.usage.input_tokens": len(group.prompt_token_ids),
        "gen_ai.usage.output_tokens": sum(one.num_output_tokens for one in group.sequences),
    }
    if group.sampling_params.constraint is not None:
        found["guided.constraint"] = group.sampling_params.constraint.kind
        found["guided.compile_seconds"] = group.compile_seconds
    if group.backend is not None:
        found["guided.backend"] = group.backend
    if group.first_token_time is not None:
        found["gen_ai.server.time_to_first_token"] = group.first_token_time - group.arrival_time
    return found
