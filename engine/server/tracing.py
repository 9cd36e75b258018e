"""OpenTelemetry spans of requests, switched on by the usual OTEL_ variables (docs/operate.md).

The spans of a request are made at its end, from the times that the engine has noted. Without the variables
OpenTelemetry is not imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.metadata import entry_points
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from engine.sequence import SequenceGroup
from guided.errors import GuidedError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class Tracing:
    """Makes the spans of requests."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("guided")

    @classmethod
    def from_environment(cls) -> Tracing | None:
        """Return the tracing that the OTEL_ variables configure. None: they disable it, or name no endpoint."""
        given = os.environ
        exporter = given.get("OTEL_TRACES_EXPORTER", "otlp" if any(map(given.get, _ENDPOINTS)) else "none")
        if exporter == "none" or given.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        protocol = next(filter(None, map(given.get, _PROTOCOLS)), "http/protobuf")
        name = _EXPORTERS.get(protocol, protocol) if exporter == "otlp" else exporter
        try:
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            (found,) = entry_points(group="opentelemetry_traces_exporter", name=name)
            made = found.load()()
        except (ImportError, ValueError) as error:
            raise ValueError(
                f"the OTEL_ variables ask for the exporter {name}, which is not installed: pip install 'guided[otel]', "
                "or set OTEL_TRACES_EXPORTER=none"
            ) from error
        given.setdefault("OTEL_SERVICE_NAME", "guided")
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(made))
        return cls(provider)

    def record(self, group: SequenceGroup, headers: Mapping[str, str], error: GuidedError | None = None) -> None:
        """Make the spans of a request that has ended, below the span that `traceparent` in the HTTP headers names."""
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        now = time.monotonic()
        offset = time.time() - now

        def nanoseconds(at: float) -> int:
            return int((at + offset) * 1e9)

        ended = group.finished_time or now
        root = self._tracer.start_span(
            "llm_request",
            propagate.extract(headers),
            SpanKind.SERVER,
            _attributes(group),
            start_time=nanoseconds(group.arrival_time),
        )
        error = error or next((one.error for one in group.sequences if one.error is not None), None)
        if error is not None:
            root.set_attribute("error.type", error.code)
            root.set_status(Status(StatusCode.ERROR, str(error)))
        context = set_span_in_context(root)
        compiled = group.arrival_time
        if group.sampling_params.constraint is not None:
            compiled = group.compiled_time or ended
            self._span("compile", context, nanoseconds(group.arrival_time), nanoseconds(compiled))
        scheduled = max(compiled, group.scheduled_time or ended)
        if scheduled > compiled:
            self._span("queue", context, nanoseconds(compiled), nanoseconds(scheduled))
        if group.step_seconds is not None and group.finished_time is not None:
            seconds = group.step_seconds
            limits = [scheduled]
            for each in (seconds.prepare, seconds.forward, seconds.mask_wait, seconds.sample):
                limits.append(limits[-1] + each)
            names = ("prepare", "forward", "mask wait", "sample")
            for name, (start, end) in zip(names, pairwise(map(nanoseconds, limits)), strict=True):
                self._span(name, context, start, end, {"guided.steps": seconds.steps})
        root.end(nanoseconds(ended))

    def _span(
        self, name: str, context: Context, start: int, end: int, attributes: Mapping[str, Any] | None = None
    ) -> None:
        self._tracer.start_span(name, context, attributes=attributes, start_time=start).end(end)


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
