"""Figures of a run whose traces come one at a time and are not kept.

Each figure is one of :mod:`nanoinfer.measure.metrics`, taken of each trace as it comes; what is kept is a number a
request, and for gaps between tokens, of which there are hundreds a request, how many lie in each bin. Intervals are by
batch means (:mod:`nanoinfer.measure.stats`): requests of one queue are autocorrelated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from nanoinfer.bench.summary import wilson
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import TAILS, BatchMeans, BinnedBatchMeans, Interval, least_n
from nanoinfer.measure.trace import Trace
from nanoinfer.simulate.virtual import Span

#: One value a request, of those due in the window.
FIGURES: Final = ("ttft", "tpot", "e2e", "normalized_latency")
CONFIDENCE: Final = 0.95
DEFINITIONS: Final[Mapping[str, str]] = {
    **{name: metrics.DEFINITIONS[name] for name in (*FIGURES, "itl", "throughput", "goodput")},
    "wait": "first step that computes any of the prompt - t_scheduled: the queue's part of the time to first token",
    "interval": "95%, by batch means over 20 stretches of the window; none where fewer than 200 samples came",
    "requests_s": "requests that ended inside the window / the window's length",
    "input_tok_s": "prompt tokens of the requests whose first token came inside the window / the window's length",
    "concurrency": "time-weighted mean number of requests that came and have not yet ended",
    "queued": "time-weighted mean number of requests that came and have not yet started",
    "little": "Little's law over the window: concurrency against requests due in it per second x their mean time",
    "busy": "share of the window in which a step ran",
    "running": "sequences in a step, mean over the time in which steps ran",
    "kv_used": "share of the KV blocks that sequences hold, mean over the time in which steps ran",
}


class Collector:
    """Takes traces and spans; :meth:`record` says what they were.

    Args:
        start: of the measured window. What was due earlier is warm-up.
        end: of it. What is due later is left out too, but serves as load.
        kv_blocks: that one replica has.
        slo: limits in seconds for goodput.
        replicas: that work side by side.
    """

    def __init__(
        self, start: float, end: float, kv_blocks: int, slo: Mapping[str, float] | None = None, replicas: int = 1
    ) -> None:
        self.start, self.end, self.kv_blocks, self.slo, self.replicas = start, end, kv_blocks, slo, replicas
        self.figures: dict[str, BatchMeans] = {name: BatchMeans(start, end) for name in ("wait", *FIGURES)}
        self.figures["itl"] = BinnedBatchMeans(start, end)
        self.good = BatchMeans(start, end)  # 1 or 0 a judged request
        self.undefined: dict[str, int] = dict.fromkeys(self.figures, 0)
        self.broken: dict[str, int] = dict.fromkeys(slo or {}, 0)
        self.due = self.early = self.late = self.excluded = self.preemptions = 0
        self.input_tokens = self.output_tokens = self.good_tokens = self.ended = 0
        self.rates = {"output_tok_s": 0.0, "requests_s": 0.0, "input_tok_s": 0.0}
        self.concurrency = self.queued = self.stay = 0.0
        self.busy = self.rows = self.blocks = 0.0
        self.steps, self.most_blocks = 0.0, 0

    # --- requests -------------------------------------------------------------------------

    def trace(self, trace: Trace) -> None:
        """Note a request that has ended."""
        start, end = self.start, self.end
        rates = metrics.throughput([trace], start, end)  # events count, whoever's they are
        for name in self.rates:
            self.rates[name] += getattr(rates, name)
        self.concurrency += metrics.mean_concurrency([trace], start, end)
        started = trace.t_sent if trace.t_start is None else trace.t_start
        self.queued += _overlap(trace.t_sent, started, start, end) / (end - start)
        self.early += trace.t_scheduled < start
        self.late += trace.t_scheduled >= end
        if start <= trace.t_scheduled < end:
            self._measured(trace, started)

    def _measured(self, trace: Trace, started: float) -> None:
        t = trace.t_scheduled
        self.due += 1
        self.input_tokens += trace.prompt_tokens
        self.output_tokens += trace.output_tokens
        self.preemptions += trace.preemptions
        self.stay += (trace.t_end or t) - trace.t_sent
        self.figures["wait"].add(t, started - t)
        values = {name: metrics.metric_named(name)(trace) for name in FIGURES}
        for name, value in values.items():
            if value is None:
                self.undefined[name] += 1
            else:
                self.figures[name].add(t, value)
        for value, n in metrics.itl(trace):
            self.figures["itl"].add(t, value, n)
        if self.slo:
            self._judge(trace, self.slo)

    def _judge(self, trace: Trace, slo: Mapping[str, float]) -> None:
        verdict = metrics.goodput([trace], slo, 0.0, 1.0)
        self.excluded += verdict.excluded
        if not verdict.excluded:
            self.good.add(trace.t_scheduled, verdict.good)
            self.good_tokens += verdict.good * trace.output_tokens
        for name, limit in slo.items():
            value = metrics.metric_named(name)(trace)
            self.broken[name] += value is not None and value > limit

    # --- steps ----------------------------------------------------------------------------

    def span(self, span: Span) -> None:
        """Note a step, or several."""
        inside = _overlap(span.start, span.end, self.start, self.end)
        self.busy += inside
        self.rows += inside * span.rows
        self.blocks += inside * span.blocks
        if span.end > span.start:
            self.steps += span.steps * inside / (span.end - span.start)
        self.most_blocks = max(self.most_blocks, span.blocks)

    # --- what they were ---------------------------------------------------------------------

    @property
    def share(self) -> float | None:
        """Of the judged requests, those that met every limit; ``None`` of none."""
        return self.good.mean().value

    def record(self) -> dict[str, Any]:
        """All figures, as JSON."""
        width = self.end - self.start
        return {
            "window": {"start_s": self.start, "end_s": self.end, "seconds": width},
            "requests": {"measured": self.due, "warmup": self.early, "after_window": self.late},
            "tokens": {"prompt": self.input_tokens, "output": self.output_tokens},
            "latency": {name: self._figure(name) for name in self.figures},
            "rates": {
                name: {"definition": DEFINITIONS[_DEFINED.get(name, name)], "value": value}
                for name, value in self.rates.items()
            },
            "concurrency": {
                "definition": DEFINITIONS["concurrency"],
                "mean": self.concurrency,
                "queued": {"definition": DEFINITIONS["queued"], "mean": self.queued},
                "little": self._little(width),
            },
            "engine": self._engine(width),
            "goodput": self._goodput(self.slo, width) if self.slo else None,
            "interval_definition": DEFINITIONS["interval"],
        }

    def _figure(self, name: str) -> dict[str, Any]:
        found, tails = self.figures[name], {f"p{q:g}": self.figures[name].percentile(q) for q in TAILS}
        middle, mean = found.percentile(50.0), found.mean()
        return {
            "definition": DEFINITIONS[name],
            "unit": "s",
            "n": found.n,
            "undefined": self.undefined[name],
            "mean": mean.value,
            "std": found.std,
            "min": found.minimum if found.n else None,
            "median": middle.value,
            **{key: interval.value for key, interval in tails.items()},
            "max": found.maximum if found.n else None,
            "confidence": CONFIDENCE,
            "intervals": {
                "mean": _bounds(mean),
                "median": _bounds(middle),
                **{key: _bounds(interval) for key, interval in tails.items()},
            },
            "too_small": [
                f"p{q:g}" for q in TAILS if min(found.n, self.due) < least_n(q)
            ],  # gaps of one request are no more
            "bins": found.resolution or None,
        }

    def _little(self, width: float) -> dict[str, Any] | None:
        if not self.due:
            return None
        rate, time = self.due / width, self.stay / self.due
        error = abs(self.concurrency - rate * time)
        return {
            "definition": DEFINITIONS["little"],
            "rate_per_s": rate,
            "time_s": time,
            "error": error,
            "relative_error": error / self.concurrency if self.concurrency else None,
        }

    def _engine(self, width: float) -> dict[str, Any]:
        busy = self.busy / (width * self.replicas)
        return {
            "busy": {"definition": DEFINITIONS["busy"], "share": busy},
            "running": {"definition": DEFINITIONS["running"], "mean": self.rows / self.busy if self.busy else None},
            "kv_used": {
                "definition": DEFINITIONS["kv_used"],
                "mean": self.blocks / self.busy / self.kv_blocks if self.busy else None,
                "max": self.most_blocks / self.kv_blocks,
            },
            "steps": self.steps,
            "step_mean_s": self.busy / self.steps if self.steps else None,
            "preemptions": self.preemptions,
        }

    def _goodput(self, slo: Mapping[str, float], width: float) -> dict[str, Any]:
        share, judged = self.good.mean(), self.good.n
        good = round(sum(self.good.sums))
        return {
            "definition": DEFINITIONS["goodput"],
            "slo_s": dict(slo),
            "share": share.value,
            "interval": _share_bounds(share, wilson(good, judged)) if judged else None,
            "good": good,
            "attempted": self.due,
            "excluded": self.excluded,
            "broken_by": self.broken,
            "requests_s": good / width,
            "tok_s": self.good_tokens / width,
        }


_DEFINED: Final = {"output_tok_s": "throughput"}


def _bounds(interval: Interval) -> tuple[float | None, float | None]:
    return interval.low, interval.high


def _share_bounds(batches: Interval, independent: tuple[float, float]) -> tuple[float, float]:
    """The wider of both: batches that are all good alike say nothing of the requests that did not come."""
    low, high = independent
    if batches.low is not None and batches.high is not None:
        low, high = min(low, batches.low), max(high, batches.high)
    return max(0.0, low), min(1.0, high)


def _overlap(start: float, end: float, low: float, high: float) -> float:
    return max(0.0, min(end, high) - max(start, low))
