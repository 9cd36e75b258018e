"""GET /metrics, for Prometheus. Request metrics are observed here. Engine metrics are
read at each scrape.

The names are those of vLLM (`time_to_first_token_seconds`, `num_requests_running`, ...)
with the prefix `guided_`. docs/http-reference.md lists them.
"""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from itertools import accumulate

from fastapi import APIRouter, Request, Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.async_llm import AsyncLLM
from engine.outputs import RequestMetrics, RequestOutput
from engine.sampling_params import SamplingParams
from engine.server.http_errors import QueueFull
from engine.stats import KEPT_MASS_BOUNDS
from guided.errors import CompileQueueFull, InternalError, errors_by_code
from guided.pools.metrics import counts_by, pool_metrics

router = APIRouter(tags=["operation"])

_LATENCY = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
_STEP = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_COMPILE = (
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    20,
    50,
)


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {
            "content": {
                CONTENT_TYPE_LATEST.partition(";")[0]: {"schema": {"type": "string"}}
            }
        }
    },
)
async def metrics(request: Request) -> Response:
    """Return all metrics in the text format of Prometheus."""
    registry: CollectorRegistry = request.app.state.context.metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class Metrics(Collector):
    """The metrics of one application. Each application has its own registry, so that a
    process can hold several."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.registry = CollectorRegistry()

        counter = partial(Counter, namespace="guided", registry=self.registry)
        latency = partial(
            Histogram, namespace="guided", registry=self.registry, buckets=_LATENCY
        )
        step = partial(latency, buckets=_STEP)
        compilation = partial(latency, labelnames=("backend", "kind"), buckets=_COMPILE)
        self._first_token = latency(
            "time_to_first_token_seconds", "Time from arrival to the first token."
        )
        self._inter_token = step(
            "inter_token_latency_seconds", "Streams: time between pieces of output."
        )
        self._per_token = step(
            "request_time_per_output_token_seconds", "Mean time between tokens."
        )
        self._end_to_end = latency(
            "e2e_request_latency_seconds", "Time from arrival to the end."
        )
        self._grammar_wait = compilation(
            "grammar_wait_seconds",
            "Time that a request waited for its grammar, in the queue too.",
        )
        self._compile = compilation(
            "grammar_compile_seconds", "Compilation time, if not cached."
        )
        self._cache_hits = counter(
            "grammar_cache_hits",
            "Requests with a grammar from the cache.",
            ("backend", "kind"),
        )
        self._prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens of admitted requests."
        )
        self._generation_tokens = counter("generation_tokens", "Generated tokens.")
        self._successes = counter(
            "request_success",
            "Sequences that ended without an error.",
            ["finished_reason"],
        )
        self._failures = counter(
            "request_failures", "Requests that ended with an error.", ("code", "fault")
        )
        self._grammar_failures = counter(
            "grammar_failures",
            "Constrained requests that ended before they had a grammar.",
            ("code", "kind"),
        )
        self.aborts = counter(
            "request_aborts", "Requests aborted because of their client.", ["reason"]
        )
        self.connection_ends = counter(
            "connections_ended", "Connections that the server ended.", ["reason"]
        )
        # Prometheus sees no increase when a counter first appears
        for code in errors_by_code(InternalError):
            self._failures.labels(code, "server")
        self.registry.register(self)

    def failed(self, code: str, status: int) -> None:
        """Count a request that was answered with an error, or with a stream that ended
        with one."""
        if code in (QueueFull.code, CompileQueueFull.code):
            fault = "load"
        elif status < 500:
            fault = "request"
        else:
            fault = "server"
        self._failures.labels(code, fault).inc()

    async def observed(
        self, outputs: AsyncGenerator[RequestOutput, None], params: SamplingParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """Pass the outputs of requests on and measure them: every snapshot of a stream,
        or only the last output."""
        seen: dict[str, tuple[int, float]] = {}
        """Admitted request -> its number of tokens, and the time of the last one."""
        async with aclosing(outputs):
            async for output in outputs:
                times = output.metrics
                now = time.monotonic()
                assert times is not None
                if output.request_id not in seen:
                    if output.error is not None:
                        if (
                            params.constraint is not None
                            and times.compiled_time is None
                        ):
                            self._grammar_failures.labels(
                                output.error.code, params.constraint.kind
                            ).inc()
                        yield output
                        continue
                    self._observe_admission(output, times, params)
                tokens, latest = seen.setdefault(output.request_id, (0, 0.0))
                count = sum(len(completion.token_ids) for completion in output.outputs)
                if count > tokens:
                    self._generation_tokens.inc(count - tokens)
                    if tokens == 0 and times.first_token_time is not None:
                        self._first_token.observe(
                            times.first_token_time - times.arrival_time
                        )
                    else:
                        self._inter_token.observe(now - latest)
                    seen[output.request_id] = count, now
                if output.finished:
                    self._observe_end(output, times)
                yield output

    def _observe_admission(
        self, output: RequestOutput, times: RequestMetrics, params: SamplingParams
    ) -> None:
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        if (
            params.constraint is not None
            and output.backend is not None
            and times.compiled_time is not None
        ):
            labels = (output.backend, params.constraint.kind)
            self._grammar_wait.labels(*labels).observe(
                times.compiled_time - times.arrival_time
            )
            if output.compile_seconds > 0:
                self._compile.labels(*labels).observe(output.compile_seconds)
            else:
                self._cache_hits.labels(*labels).inc()

    def _observe_end(self, output: RequestOutput, times: RequestMetrics) -> None:
        ended = times.finished_time or time.monotonic()
        self._end_to_end.observe(ended - times.arrival_time)
        longest = max(len(completion.token_ids) for completion in output.outputs)
        if times.first_token_time is not None and longest > 1:
            self._per_token.observe((ended - times.first_token_time) / (longest - 1))
        for completion in output.outputs:
            if completion.error is None and completion.finish_reason is not None:
                self._successes.labels(completion.finish_reason).inc()

    def collect(self) -> Iterator[Metric]:
        """Read the counters of the engine and the pool, at each scrape."""
        health = self._llm.health()
        stats = health.stats
        scheduler = self._llm.engine.scheduler
        blocks = self._llm.engine.blocks
        slots = 0
        if scheduler.layout is not None:
            slots = scheduler.prefills.max_num_seqs
        gauges = (
            ("num_requests_running", "Running sequences.", health.num_running),
            (
                "num_requests_waiting",
                "Requests that could run and wait.",
                health.num_waiting,
            ),
            (
                "num_requests_waiting_for_grammar",
                "Requests that wait for a grammar.",
                health.num_waiting_for_grammar,
            ),
            ("num_sequences_late", "Sequences that wait for a late mask.", stats.late),
            (
                "kv_cache_usage_perc",
                "Share of the KV cache in use, 0 to 1.",
                1 - blocks.num_free / blocks.num_blocks,
            ),
            (
                "recurrent_state_slots",
                "Sequences of which the recurrent states fit. 0: no such layers.",
                slots,
            ),
            (
                "recurrent_state_slots_used",
                "Sequences that have recurrent states.",
                min(slots, len(blocks.rows)),
            ),
        )
        exposed = stats.prepare_seconds + stats.wait_seconds + stats.kernel_seconds
        counters = (
            ("num_preemptions", "Sequences preempted.", scheduler.num_preemptions),
            (
                "prefix_cache_queries",
                "Tokens looked up in the prefix cache.",
                blocks.tokens_looked_up,
            ),
            (
                "prefix_cache_hits",
                "Tokens found in the prefix cache.",
                blocks.tokens_found,
            ),
            (
                "forced_tokens",
                "Tokens appended without a forward pass of their own.",
                stats.forced_tokens,
            ),
            ("engine_steps", "Steps of the engine.", stats.steps),
            ("engine_step_seconds", "Seconds spent in steps.", stats.step_seconds),
            (
                "mask_exposed_seconds",
                "Mask time that the forward pass did not hide.",
                exposed,
            ),
            (
                "mask_hidden_seconds",
                "Mask time that the forward pass hid.",
                stats.hidden_seconds,
            ),
            (
                "mask_wait_seconds",
                "Part of the exposed: waiting for masks.",
                stats.wait_seconds,
            ),
            (
                "mask_seconds",
                "Seconds that workers spent on masks, exposed or hidden.",
                stats.mask_seconds,
            ),
            (
                "mask_late_rows",
                "Rows without a mask at the step's deadline.",
                stats.late_rows,
            ),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"guided_{name}", text, value=value)
        for name, text, value in counters:
            yield CounterMetricFamily(f"guided_{name}", text, value=value)
        bounds = [*map(str, KEPT_MASS_BOUNDS[:-1]), "+Inf"]
        buckets = list(zip(bounds, accumulate(stats.kept_mass), strict=True))
        text = "Probability of the allowed tokens before the mask, of a few rows now and then."
        yield HistogramMetricFamily(
            "guided_kept_mass", text, buckets, stats.kept_mass_sum
        )
        yield from pool_metrics([health.pool])
        yield counts_by(
            "vetoes",
            "Tokens taken back because of a checked keyword.",
            "keyword",
            Counts(stats.vetoes),
        )
        yield counts_by(
            "engine_failures",
            "Groups that ended with an error.",
            "code",
            Counts(stats.failures),
        )
