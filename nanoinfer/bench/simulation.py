"""What a simulation shows: a run's figures, but of traces that are not kept: a number a request, gaps in bins.

Intervals are by batch means (:mod:`nanoinfer.measure.stats`), because requests of one queue are correlated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final

from nanoinfer.bench.summary import WindowScores, figure, rate, wilson
from nanoinfer.measure.stats import TAILS, BatchMeans, BinnedBatchMeans, least_n
from nanoinfer.measure.trace import Trace
from nanoinfer.simulate.simulator import Span

RATES: Final = ("output_tok_s", "requests_s", "input_tok_s")
AT_ONCE: Final = 1024  # traces that are scored at a time
SIMULATED: Final[Mapping[str, str]] = {
    "interval": "95%, by batch means over 20 stretches of the window; none where fewer than 200 samples came",
    "requests_s": "requests that ended inside the window / the window's length",
    "concurrency": "time-weighted mean number of requests that came and have not yet ended",
    "queued": "time-weighted mean number of requests that came and have not yet started",
    "busy": "share of the window in which a step ran",
    "running": "sequences in a step, mean over the time in which steps ran",
    "kv_used": "share of the KV blocks that sequences hold, mean over the time in which steps ran",
}


class SimulationScores(WindowScores):
    """Takes the traces and steps of one or several replicas, of ``kv_blocks`` each."""

    def __init__(
        self, start: float, end: float, kv_blocks: int, slo: Mapping[str, float] | None = None, replicas: int = 1
    ) -> None:
        self.batches = {name: BatchMeans(start, end) for name in ("wait", "ttft", "tpot", "e2e", "normalized_latency")}
        self.batches["itl"] = BinnedBatchMeans(start, end)
        self.judged = BatchMeans(start, end)
        super().__init__(start, end, slo, self.batches, self.judged)
        self.kv_blocks, self.replicas = kv_blocks, replicas
        self.rates = dict.fromkeys(RATES, 0.0)
        self.prompt_tokens = self.preemptions = self.most_blocks = 0
        self.queued = self.busy_s = self.row_s = self.block_s = self.steps = 0.0

    def add_all(self, traces: Iterable[Trace]) -> None:
        """Score traces as they come, and keep none."""
        traces = iter(traces)
        while some := list(islice(traces, AT_ONCE)):
            if (throughput := self.add(some)) is not None:
                for name in RATES:
                    self.rates[name] += getattr(throughput, name)
            for trace in some:
                started = trace.t_sent if trace.t_start is None else trace.t_start
                self.queued += _overlap(trace.t_sent, started, self.start, self.end) / self.width
                if self.is_judged(trace):
                    self.prompt_tokens += trace.prompt_tokens
                    self.preemptions += trace.preemptions

    def add_span(self, span: Span) -> None:
        """Note a step, or several; only what lies inside the window counts."""
        inside = _overlap(span.start, span.end, self.start, self.end)
        self.busy_s += inside
        self.row_s += inside * span.rows
        self.block_s += inside * span.blocks
        if span.end > span.start:
            self.steps += span.steps * inside / (span.end - span.start)
        self.most_blocks = max(self.most_blocks, span.blocks)

    @property
    def good_share(self) -> float | None:
        """Of the judged requests, those that met every limit; ``None`` of none."""
        return self.judged.mean().value

    def record(self) -> dict[str, Any]:
        """All figures, as JSON."""
        rates = {name: rate(name, value) for name, value in self.rates.items()}
        rates["requests_s"]["definition"] = SIMULATED["requests_s"]
        return {
            "window": {"start_s": self.start, "end_s": self.end, "seconds": self.width},
            "requests": {"measured": self.due, "warmup": self.warmup, "after_window": self.late},
            "tokens": {"prompt": self.prompt_tokens, "output": self.output_tokens},
            "latency": {name: self._figure(name) for name in self.batches},
            "rates": rates,
            "concurrency": {
                "definition": SIMULATED["concurrency"],
                "mean": self.concurrency,
                "queued": {"definition": SIMULATED["queued"], "mean": self.queued},
                "little": self.little() if self.due else None,
            },
            "engine": self._engine(),
            "goodput": self.goodput(self._share_interval()),
            "interval_definition": SIMULATED["interval"],
        }

    def _figure(self, name: str) -> dict[str, Any]:
        batches = self.batches[name]
        n, mean, points = batches.n, batches.mean(), [batches.percentile(q) for q in (50.0, *TAILS)]
        ends = (batches.minimum, batches.maximum) if n else (None, None)
        record = figure(name, n, mean.value, batches.std, ends, points)
        record["intervals"] = {"mean": (mean.low, mean.high), **record["intervals"]}
        least = min(n, self.due)  # the gaps of one request count as no more than it
        return record | {
            "undefined": self.undefined[name],
            "too_small": [f"p{q:g}" for q in TAILS if least < least_n(q)],
            "bins": batches.resolution or None,
        }

    def _engine(self) -> dict[str, Any]:
        busy_s, is_used = self.busy_s, self.busy_s > 0
        return {
            "busy": {"definition": SIMULATED["busy"], "share": busy_s / (self.width * self.replicas)},
            "running": {"definition": SIMULATED["running"], "mean": self.row_s / busy_s if is_used else None},
            "kv_used": {
                "definition": SIMULATED["kv_used"],
                "mean": self.block_s / busy_s / self.kv_blocks if is_used else None,
                "max": self.most_blocks / self.kv_blocks,
            },
            "steps": self.steps,
            "step_mean_s": busy_s / self.steps if self.steps else None,
            "preemptions": self.preemptions,
        }

    def _share_interval(self) -> tuple[float, float] | None:
        """The wider of both: batches that are all good alike say nothing of the requests that did not come."""
        if not self.judged.n:
            return None
        (low, high), batches = wilson(self.good, self.judged.n), self.judged.mean()
        if batches.low is not None and batches.high is not None:
            low, high = min(low, batches.low), max(high, batches.high)
        return max(0.0, low), min(1.0, high)


def _overlap(start: float, end: float, low: float, high: float) -> float:
    return max(0.0, min(end, high) - max(start, low))
