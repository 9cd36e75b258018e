"""GET /metrics, for Prometheus. Requests' own figures are observed here; the engine's are read when they are asked for.

Names follow vLLM's habits (`time_to_first_token_seconds`, `num_requests_running`, ...) with the prefix `guided_`;
`docs/http.md` lists them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.async_llm import AsyncLLM
from engine.outputs import RequestMetrics, RequestOutput
from engine.sampling_params import SamplingParams
from guided.errors import GuidedError, InvalidRequest
from guided.pool import BackendStatus

__all__ = ["Metrics", "router"]

router = APIRouter(tags=["operation"])

_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_STEP = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_COMPILE = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {CONTENT_TYPE_LATEST.partition(";")[0]: {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    registry: CollectorRegistry = request.app.state.context.metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class Metrics:
    """What this server counts. One registry an app, so that a process may hold several."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.registry = registry = CollectorRegistry()
        self._first_token = Histogram(
            "guided_time_to_first_token_seconds",
            "From the request's arrival to its first token.",
            buckets=_LATENCY,
            registry=registry,
        )
        self._inter_token = Histogram(
            "guided_inter_token_latency_seconds",
            "Streams: between one piece of output and the next, a token where the reader keeps up.",
            buckets=_STEP,
            registry=registry,
        )
        self._per_token = Histogram(
            "guided_request_time_per_output_token_seconds",
            "A request's mean time between tokens.",
            buckets=_STEP,
            registry=registry,
        )
        self._end_to_end = Histogram(
            "guided_e2e_request_latency_seconds",
            "From the request's arrival to its end.",
            buckets=_LATENCY,
            registry=registry,
        )
        self._grammar_wait = Histogram(
            "guided_grammar_wait_seconds",
            "What a constrained request waited for its grammar: compilation, and the queue before it.",
            ["backend", "kind"],
            buckets=_COMPILE,
            registry=registry,
        )
        self._compile = Histogram(
            "guided_grammar_compile_seconds",
            "Compilations, without those that came from the cache.",
            ["backend", "kind"],
            buckets=_COMPILE,
            registry=registry,
        )
        self._cache_hits = Counter(
            "guided_grammar_cache_hits",
            "Constrained requests whose grammar was compiled already.",
            ["backend", "kind"],
            registry=registry,
        )
        self._prompt_tokens = Counter("guided_prompt_tokens", "Prompt tokens of admitted requests.", registry=registry)
        self._generation_tokens = Counter("guided_generation_tokens", "Generated tokens.", registry=registry)
        self._successes = Counter(
            "guided_request_success", "Sequences that ended well, by reason.", ["finished_reason"], registry=registry
        )
        self._failures = Counter(
            "guided_request_failures",
            "Requests that were answered with an error or whose stream ended with one, by its code.",
            ["code"],
            registry=registry,
        )
        self._grammar_failures = Counter(
            "guided_grammar_failures",
            "Constrained requests whose grammar was refused, or not compiled, by the error's code.",
            ["code", "kind"],
            registry=registry,
        )
        self._abandoned = Counter(
            "guided_request_aborts",
            "Requests that were aborted because of their client: it disconnected, or stalled (didn't read its stream).",
            ["reason"],
            registry=registry,
        )
        registry.register(_EngineCollector(engine))

    def abandoned(self, reason: str) -> None:
        """A request was aborted because of its client: it `disconnected`, or `stalled`."""
        self._abandoned.labels(reason).inc()

    def not_compiled(self, code: str, kind: str) -> None:
        """A constrained request ended before it had a grammar."""
        self._grammar_failures.labels(code, kind).inc()

    def failed(self, code: str) -> None:
        """A request was answered with an error, or its stream ended with one."""
        self._failures.labels(code).inc()

    def compiled(self, backend: str, kind: str, compile_seconds: float, wait_seconds: float) -> None:
        """A constrained request was admitted; no compile seconds is a cache hit."""
        self._grammar_wait.labels(backend, kind).observe(wait_seconds)
        if compile_seconds > 0:
            self._compile.labels(backend, kind).observe(compile_seconds)
        else:
            self._cache_hits.labels(backend, kind).inc()

    async def observed(
        self, outputs: AsyncGenerator[RequestOutput, None], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """Pass a request's outputs on, and measure them as they come."""
        timer = _Timer(self, params)
        try:
            async for output in outputs:
                timer.see(output)
                yield output
        except GuidedError as error:
            # An `InvalidRequest` itself is about another field than the constraint.
            if params.constraint is not None and not timer.admitted and type(error) is not InvalidRequest:
                self.not_compiled(error.code, params.constraint.kind)
            raise
        finally:
            await outputs.aclose()


class _Timer:
    """One request's times and counts, from its outputs: every snapshot of a stream, or the last alone."""

    def __init__(self, metrics: Metrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._constraint = params.constraint
        self._latest = 0.0
        self.admitted = False
        """Its constraint is compiled."""
        self._tokens = 0

    def see(self, output: RequestOutput) -> None:
        metrics, times, now = self._metrics, output.metrics, time.monotonic()
        assert times is not None
        if not self.admitted:
            self.admitted = True
            metrics._prompt_tokens.inc(len(output.prompt_token_ids))
            if self._constraint is not None and output.backend is not None and times.compiled_time is not None:
                waited = times.compiled_time - times.arrival_time
                metrics.compiled(output.backend, self._constraint.kind, output.compile_seconds, waited)
        count = sum(len(each.token_ids) for each in output.outputs)
        if count > self._tokens:
            metrics._generation_tokens.inc(count - self._tokens)
            if self._tokens == 0 and times.first_token_time is not None:
                metrics._first_token.observe(times.first_token_time - times.arrival_time)
            else:
                metrics._inter_token.observe(now - self._latest)
            self._tokens, self._latest = count, now
        if output.finished:
            self._finished(output, times)

    def _finished(self, output: RequestOutput, times: RequestMetrics) -> None:
        metrics, ended = self._metrics, times.finished_time or time.monotonic()
        metrics._end_to_end.observe(ended - times.arrival_time)
        longest = max(len(each.token_ids) for each in output.outputs)
        if times.first_token_time is not None and longest > 1:
            metrics._per_token.observe((ended - times.first_token_time) / (longest - 1))
        for each in output.outputs:
            if each.error is None and each.finish_reason is not None:
                metrics._successes.labels(each.finish_reason).inc()


class _EngineCollector(Collector):
    """The engine's and the pool's own counters, as they stand when the page is asked for."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        health = self._engine.health()
        stats, workers = health.stats, health.pool.workers
        gauges = (
            ("num_requests_running", "Sequences that run.", health.num_running),
            ("num_requests_waiting", "Requests that wait to run.", health.num_waiting),
            ("num_requests_waiting_for_grammar", "Requests whose grammar is compiled.", health.num_waiting_for_grammar),
            ("num_sequences_parked", "Sequences whose mask is late: the others go on.", stats.parked),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", health.kv_cache_usage),
            ("grammar_compiling", "Constraints that are compiled or queue for it.", health.pool.compiling),
            ("mask_actors_up", "Mask actors that are up.", sum(worker.state == "up" for worker in workers)),
            ("mask_actors_down", "Mask actors in a crash loop.", sum(worker.state == "down" for worker in workers)),
            ("mask_actors", "Mask actors there should be.", len(workers)),
            ("mask_open_sequences", "Matchers that are open.", sum(worker.open_sequences for worker in workers)),
        )
        exposed = stats.prepare_seconds + stats.wait_seconds + stats.kernel_seconds
        counters = (
            ("num_preemptions", "Sequences preempted.", health.num_preemptions),
            ("engine_steps", "Steps of the engine.", stats.steps),
            ("engine_step_seconds", "Seconds spent in steps.", stats.step_seconds),
            ("mask_exposed_seconds", "Mask time that the forward pass did not hide.", exposed),
            ("mask_hidden_seconds", "Mask time that the forward pass hid.", stats.hidden_seconds),
            ("mask_wait_seconds", "Part of the exposed: waiting for masks.", stats.wait_seconds),
            ("mask_seconds", "Seconds that workers spent on masks, exposed or hidden.", stats.mask_seconds),
            ("mask_parkings", "Times that a sequence was parked, its mask being late.", stats.parkings),
            ("mask_parked_seconds", "Seconds that sequences were parked.", stats.parked_seconds),
            ("mask_actor_restarts", "Mask actors replaced.", sum(worker.restarts for worker in workers)),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"guided_{name}", text, value=value)
        for name, text, value in counters:
            yield CounterMetricFamily(f"guided_{name}", text, value=value)
        yield from _by_backend(health.pool.backends)
        ends = CounterMetricFamily("guided_mask_actor_ends", "Mask actors that ended.", labels=["cause"])
        for cause in sorted({cause for worker in workers for cause in worker.ends}):
            ends.add_metric([cause], sum(worker.ends.get(cause, 0) for worker in workers))
        yield ends
        failures = CounterMetricFamily("guided_engine_failures", "Groups that ended with an error.", labels=["code"])
        for code, count in list(stats.failures.items()):
            failures.add_metric([code], count)
        yield failures


def _by_backend(backends: Sequence[BackendStatus]) -> Iterator[Metric]:
    up = GaugeMetricFamily("guided_backend_up", "0 while a backend is left alone for its crashes.", labels=["backend"])
    crashes = CounterMetricFamily(
        "guided_compile_crashes", "Compile processes that ended by themselves.", labels=["backend"]
    )
    timeouts = CounterMetricFamily("guided_compile_timeouts", "Compilations that took too long.", labels=["backend"])
    for backend in backends:
        up.add_metric([backend.name], float(backend.state == "up"))
        crashes.add_metric([backend.name], backend.crashes)
        timeouts.add_metric([backend.name], backend.timeouts)
    yield from (up, crashes, timeouts)
