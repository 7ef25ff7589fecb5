"""``/metrics`` for Prometheus: counts and histograms of requests, and the engine's state as it is now."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.request import Request
from nanoinfer.measure import metrics

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)
BUCKETS = {"ttft": SECONDS, "itl": GAPS, "e2e": SECONDS}


class EngineState:
    """A collector: reads the engine when Prometheus asks. Numbers may be a step apart from each other."""

    def __init__(self, engine: ContinuousEngine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        scheduler, pool = self.engine.scheduler, self.engine.pool
        gauges = {
            "requests_running": ("sequences that have a slot in the engine's steps", len(scheduler.running)),
            "requests_waiting": ("sequences that wait for a slot or for cache", len(scheduler.waiting)),
            "kv_cache_blocks": ("blocks of the KV cache", pool.n_blocks),
            "kv_cache_usage_ratio": ("share of the KV cache's blocks in use", pool.used / pool.n_blocks),
        }
        counters = {
            "preemptions": ("sequences that gave their cache back to be computed again", scheduler.preemptions),
            "prefix_cache_queries": ("tokens looked up in the prefix cache", pool.counts.asked_tokens),
            "prefix_cache_hits": ("tokens found there, and not computed", pool.counts.found_tokens),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"nanoinfer_{name}", text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"nanoinfer_{name}", text, value)


class Metrics:
    """Counts of one server."""

    def __init__(self, engine: ContinuousEngine) -> None:
        self.registry = registry = CollectorRegistry()
        registry.register(EngineState(engine))
        self.requests = Counter("nanoinfer_requests", "choices that have ended, by how", ["reason"], registry=registry)
        self.prompt_tokens = Counter("nanoinfer_prompt_tokens", "prompt tokens of ended choices", registry=registry)
        self.tokens = Counter("nanoinfer_generation_tokens", "tokens that ended choices generated", registry=registry)
        names = {"ttft": "time_to_first_token", "itl": "inter_token_latency", "e2e": "e2e_request_latency"}
        self.ttft, self.itl, self.e2e = (
            Histogram(f"nanoinfer_{name}_seconds", metrics.DEFINITIONS[key], buckets=BUCKETS[key], registry=registry)
            for key, name in names.items()
        )

    def note_first_token(self, request: Request) -> None:
        if (seconds := metrics.ttft(request.trace)) is not None:
            self.ttft.observe(seconds)

    def note_end(self, request: Request) -> None:
        """Count it: finished, cancelled or failed."""
        trace = request.trace
        # The engine may not have noted yet that it was dropped.
        reason = request.finish_reason or ("cancelled" if trace.status == "ok" else trace.status)
        self.requests.labels(reason).inc()
        self.prompt_tokens.inc(trace.prompt_tokens)
        self.tokens.inc(trace.output_tokens)
        for gap in metrics.itl_samples(trace):
            self.itl.observe(gap)
        if request.finish_reason is not None and (seconds := metrics.e2e(trace)) is not None:
            self.e2e.observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)
