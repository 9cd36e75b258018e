"""OpenTelemetry: the spans of requests, their parent, and off without the variables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.testclient import TestClient

from engine.async_llm import AsyncLLM
from engine.server.app import create_app
from engine.server.options import ServerSettings
from engine.server.tracing import Tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STEPS = ["prepare", "forward", "mask wait", "sample"]


class Traced:
    """A server, and the spans that it has exported."""

    def __init__(self, client: TestClient, exporter: InMemorySpanExporter) -> None:
        self.client = client
        self._exporter = exporter

    def post(self, headers: dict[str, str] | None = None, **body: object) -> int:
        body = {"model": "tiny", "prompt": "A", "max_tokens": 20, "seed": 1, **body}
        return self.client.post("/v1/completions", json=body, headers=headers).status_code

    def spans(self) -> dict[str, ReadableSpan]:
        """Return the spans since the last call, by name."""
        found = {span.name: span for span in self._exporter.get_finished_spans()}
        self._exporter.clear()
        return found


@pytest.fixture
def traced(tiny_engine: AsyncLLM) -> Iterator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(tiny_engine, ServerSettings(model_name="tiny"), Tracing(provider))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield Traced(client, exporter)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_a_guided_request_has_all_spans_and_the_callers_trace(traced: Traced) -> None:
    assert traced.post({"traceparent": f"00-{TRACE}-{PARENT}-01"}, regex="[0-9]{12}") == 200
    spans = traced.spans()
    assert list(spans) == ["compile", "queue", *STEPS, "llm_request"]
    root = spans["llm_request"]
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT
    assert all(f"{span.context.trace_id:032x}" == TRACE for span in spans.values())
    assert all(span.parent.span_id == root.context.span_id for span in spans.values() if span is not root)
    assert root.attributes is not None
    assert root.attributes["guided.backend"] == "llguidance"
    assert root.status.status_code is StatusCode.UNSET
    assert spans["queue"].end_time == spans["prepare"].start_time
    assert seconds(spans["forward"]) > 0
    assert sum(map(seconds, spans.values())) - seconds(root) <= seconds(root) + 1e-6, "parts of the whole"
    attributes = spans["sample"].attributes
    assert attributes is not None
    assert attributes["guided.steps"] == root.attributes["gen_ai.usage.output_tokens"]


def test_a_request_without_a_constraint_or_a_parent(traced: Traced) -> None:
    assert traced.post(prompt=["A", "B"], stream=True) == 200
    spans = traced.spans()
    assert set(spans) == {"queue", *STEPS, "llm_request"}
    assert spans["llm_request"].parent is None


def test_a_request_that_fails_has_its_error_and_what_was_done(traced: Traced) -> None:
    assert traced.post(regex="a{3}b(") == 400
    spans = traced.spans()
    assert list(spans) == ["compile", "llm_request"]
    root = spans["llm_request"]
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes is not None
    assert root.attributes["error.type"] == "invalid_constraint"


def test_the_variables_switch_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Tracing.from_environment() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert isinstance(Tracing.from_environment(), Tracing)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert Tracing.from_environment() is None
