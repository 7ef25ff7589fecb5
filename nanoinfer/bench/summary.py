"""What a run (:func:`summarise`) or a simulation (:class:`SimulationScores`) shows.

Each figure comes with its definition, its number of samples and how sure it is.

Latencies, goodput and errors are of the requests due inside the window; rates, concurrency and Little's law are of the
window itself, by event time. What was not measured is ``None``, never 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from nanoinfer.bench.loadgen import Run
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import (
    TAILS,
    BatchMeans,
    BinnedBatchMeans,
    Interval,
    least_n,
    percentile,
    percentile_interval,
    sorted_percentile,
    summarize,
)
from nanoinfer.measure.trace import Trace
from nanoinfer.simulate import Span

#: Figures that pool the gaps of all requests: each gap with how often it counts.
GAPS: Final[Mapping[str, Callable[[Trace], Iterable[tuple[float, int]]]]] = {
    "itl": metrics.itl,
    "chunk_gap": lambda trace: ((gap, 1) for gap in metrics.chunk_gaps(trace)),
}
#: Figures that failed requests have too.
DELAYS: Final[Mapping[str, Callable[[Trace], float]]] = {
    "client_delay": metrics.client_delay,
    "wait": lambda trace: (trace.t_sent if trace.t_start is None else trace.t_start) - trace.t_scheduled,
}
#: Metrics that a request can be held to; client_delay is not an SLO metric.
METRICS: Final = tuple(name for name in metrics.PER_REQUEST if name != "client_delay")
#: Their values depend on token counts, and are only as good as these.
COUNTED: Final = ("tpot", "itl", "normalized_latency")
#: Rates by their keys: as people call them, the definition's name, and the unit.
RATES: Final = {
    "output_tok_s": ("output tokens/s", "throughput", "tok/s"),
    "peak_tok_s": ("output tokens/s, peak", "peak_throughput", "tok/s"),
    "drained_tok_s": ("output tokens/s, drained", "drained_throughput", "tok/s"),
    "input_tok_s": ("input tokens/s", "input_rate", "tok/s"),
    "requests_s": ("requests/s", "request_rate", "requests/s"),
}
CONFIDENCE: Final = 0.95
#: Share of a window's requests by which more may come than end while the queue counts as stable.
GROWTH: Final = 0.01
AT_ONCE: Final = 1024  # traces of a simulation that are scored at a time
#: The definitions of :mod:`nanoinfer.measure.metrics`, and those of figures that it holds as parts of a whole.
DEFINITIONS: Final[Mapping[str, str]] = {
    **metrics.DEFINITIONS,
    "request_rate": "requests that ended well inside the window / the window's length",
    "input_rate": "prompt tokens of the requests whose first token came inside the window / the window's length",
    "drained_throughput": "all output tokens of the requests sent in the window / time from its start to their last",
    "little": "Little's law: mean concurrency against requests sent per second x their mean time in the system",
    "loop_stalls": "how late a periodic tick of the client's event loop was",
    "wait": "first step that computes any of the prompt - t_scheduled: the queue's part of the time to first token",
}
#: Figures of a simulation alone, and those that it defines otherwise.
SIMULATED: Final[Mapping[str, str]] = {
    "interval": "95%, by batch means over 20 stretches of the window; none where fewer than 200 samples came",
    "requests_s": "requests that ended inside the window / the window's length",
    "concurrency": "time-weighted mean number of requests that came and have not yet ended",
    "queued": "time-weighted mean number of requests that came and have not yet started",
    "busy": "share of the window in which a step ran",
    "running": "sequences in a step, mean over the time in which steps ran",
    "kv_used": "share of the KV blocks that sequences hold, mean over the time in which steps ran",
}


@dataclass(frozen=True)
class ErrorBudget:
    """What the client may add before its figures are its own and not the server's."""

    send_lag_p99_s: float = 0.010
    late_s: float = 0.010
    late_share: float = 0.01  # of the run, warm-up included, in which the event loop was later than ``late_s``


BUDGET: Final = ErrorBudget()
LITTLE_TOLERANCE: Final = 0.1  # a larger relative error: the window is no steady state, or the records are wrong


class SampleList(list[float]):
    """Every sample, whenever it was taken."""

    def add(self, t: float, value: float, n: int = 1) -> None:
        """Note ``n`` samples of this value."""
        self.extend([value] * n)


Samples = SampleList | BatchMeans


class WindowScores:
    """Figures of the requests of one window, added in lists as they end; each metric is computed once a request.

    What is due before ``start`` is warm-up, and after ``end`` load that is in no latency. ``figures`` take samples by
    name (metrics of a request, :data:`GAPS`, :data:`DELAYS`), ``verdicts`` 1 for a good request and 0 for a bad one.
    Where a run was ``interrupted``, Ctrl-C cut requests short, which is no fault of the server: none of them is judged.
    """

    def __init__(
        self,
        start: float,
        end: float,
        slo: Mapping[str, float] | None,
        figures: Mapping[str, Samples],
        verdicts: Samples,
        interrupted: bool = False,
    ) -> None:
        self.start, self.end, self.slo, self.interrupted = start, end, slo or {}, interrupted
        self.width = end - start
        self.figures, self.verdicts = figures, verdicts
        self.metrics = {name: metrics.metric_named(name) for name in dict.fromkeys([*METRICS, *self.slo])}
        self.broken_by = dict.fromkeys(self.slo, 0)
        self.due = self.warmup = self.late = self.failed = self.good = self.excluded = self.good_tokens = 0
        self.output_tokens = 0
        self.concurrency = self.sent_per_s = self.in_system = 0.0

    def add(self, traces: Sequence[Trace]) -> metrics.Throughput | None:
        """Note requests that have ended. Returns their rates; ``None`` without any, or without a window."""
        for trace in traces:
            self.warmup += trace.t_scheduled < self.start
            self.late += trace.t_scheduled >= self.end
            if self.is_judged(trace):
                self._add_due(trace)
        if not traces or self.width <= 0:
            return None
        law = metrics.little(traces, self.start, self.end)
        self.concurrency += law.concurrency
        self.sent_per_s += law.rate
        self.in_system += law.rate * law.time
        return metrics.throughput(traces, self.start, self.end)

    def is_judged(self, trace: Trace) -> bool:
        """Whether a request was due inside the window and not cut short."""
        is_due = self.start <= trace.t_scheduled < self.end
        return is_due and not (self.interrupted and trace.status == "cancelled")

    def _add_due(self, trace: Trace) -> None:
        t = trace.t_scheduled
        self.due += 1
        self.output_tokens += metrics.output_tokens(trace)
        for name in DELAYS.keys() & self.figures.keys():
            self.figures[name].add(t, DELAYS[name](trace))
        if trace.status != "ok":
            self.failed += 1
            self.verdicts.add(t, 0.0)
            return
        values = {name: metric(trace) for name, metric in self.metrics.items()}
        for name in METRICS:
            if name in self.figures and (value := values[name]) is not None:
                self.figures[name].add(t, value)
        for name in GAPS.keys() & self.figures.keys():
            for value, n in GAPS[name](trace):
                self.figures[name].add(t, value, n)
        # As metrics.goodput: excluded is what breaks no limit but lacks a value for one.
        broken = [name for name, limit in self.slo.items() if (value := values[name]) is not None and value > limit]
        for name in broken:
            self.broken_by[name] += 1
        if not broken and any(values[name] is None for name in self.slo):
            self.excluded += 1
            return
        self.verdicts.add(t, float(not broken))
        if not broken:
            self.good += 1
            self.good_tokens += metrics.output_tokens(trace)

    def little(self) -> dict[str, Any]:
        """Little's law over the window."""
        error = abs(self.concurrency - self.in_system)
        return {
            "definition": DEFINITIONS["little"],
            "rate_per_s": self.sent_per_s,
            "time_s": self.in_system / self.sent_per_s if self.sent_per_s else 0.0,
            "error": error,
            "relative_error": error / self.concurrency if self.concurrency else None,
        }

    def goodput(self, interval: tuple[float, float] | None) -> dict[str, Any] | None:
        """Goodput with the share's interval; ``None`` without limits."""
        if not self.slo:
            return None
        judged, is_rate = self.due - self.excluded, self.width > 0
        return {
            "definition": DEFINITIONS["goodput"],
            "slo_s": dict(self.slo),
            "share": self.good / judged if judged else None,
            "interval": interval,
            "good": self.good,
            "attempted": self.due,
            "excluded": self.excluded,
            "broken_by": self.broken_by,
            "requests_s": self.good / self.width if is_rate else None,
            "tok_s": self.good_tokens / self.width if is_rate else None,
        }


def figure(
    name: str, n: int, mean: float | None, std: float | None, ends: Sequence[float | None], points: Sequence[Interval]
) -> dict[str, Any]:
    """One figure in seconds: ``ends`` are its extremes, ``points`` the median and the :data:`TAILS`."""
    percentiles = dict(zip(("median", *(f"p{q:g}" for q in TAILS)), points, strict=True))
    return {
        "definition": DEFINITIONS[name],
        "unit": "s",
        "n": n,
        "mean": mean,
        "std": std,
        "min": ends[0],
        **{key: point.value for key, point in percentiles.items()},
        "max": ends[1],
        "confidence": CONFIDENCE,
        "intervals": {key: (point.low, point.high) for key, point in percentiles.items()},
    }


def rate(key: str, value: float | None) -> dict[str, Any]:
    """One rate over the window."""
    _, definition, unit = RATES[key]
    return {"definition": DEFINITIONS[definition], "unit": unit, "value": value}


def wilson(good: int, n: int) -> tuple[float, float]:
    """The 95% score interval of a share (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927): sound at 0 and 1 too."""
    z = 1.96
    share, spread = good / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def summarise(run: Run, slo: Mapping[str, float] | None = None, budget: ErrorBudget = BUDGET) -> dict[str, Any]:
    """All figures of a run, as JSON; goodput where there are limits (``slo``, in seconds)."""
    samples = {name: SampleList() for name in (*METRICS, *GAPS, "client_delay")}
    scores = WindowScores(run.start, run.end, slo, samples, SampleList(), run.interrupted)
    throughput = scores.add(run.traces)
    judged = [trace for trace in run.traces if scores.is_judged(trace)]
    statuses = Counter(trace.status for trace in judged)
    estimated = sum(trace.estimated for trace in judged)
    n_judged = scores.due - scores.excluded
    goodput = scores.goodput(wilson(scores.good, n_judged) if n_judged else None)
    if goodput is not None:
        goodput |= {"failed": scores.failed} | ({} if judged else {"requests_s": None, "tok_s": None})
    record: dict[str, Any] = {
        "load": run.settings,
        "window": {"start_s": run.start, "end_s": run.end, "seconds": run.end - run.start},
        "interrupted": run.interrupted,
        "requests": {
            "attempted": scores.due,
            "ok": statuses["ok"],
            "by_status": dict(statuses),
            "failures": dict(Counter(t.error or t.status for t in judged if t.status != "ok").most_common()),
            "warmup": scores.warmup,
            "cut_short": len(run.traces) - scores.warmup - scores.late - scores.due,
        },
        "tokens": {
            "prompt": _known_prompts(judged),
            "output": scores.output_tokens if judged else None,
            "estimated_requests": estimated,
        },
        "latency": {name: _run_figure(name, scores, samples[name]) for name in samples},
        "rates": _rates(run, throughput, bool(estimated)),
        "concurrency": {
            "definition": DEFINITIONS["concurrency"],
            "mean": None if throughput is None else scores.concurrency,
            "little": None if throughput is None else scores.little(),
        },
        "goodput": goodput,
        "client": _client(run, samples["client_delay"], budget.late_s),
        "provenance": run.provenance,
    }
    for name in COUNTED:
        record["latency"][name]["estimated_requests"] = estimated
    record["beyond_budget"] = list(_beyond(record, budget))
    record["notes"] = list(_notes(record))
    return record


def _run_figure(name: str, scores: WindowScores, values: SampleList) -> dict[str, Any]:
    """Percentiles of all samples with exact intervals for independent ones."""
    values.sort()
    s = summarize(values, CONFIDENCE)
    at = {50.0: s.median, 90.0: s.p90, 95.0: s.p95, 99.0: s.p99}
    points = [Interval(value, *percentile_interval(values, q, CONFIDENCE)) for q, value in at.items()]
    record = figure(name, s.n, s.mean, s.std, (s.minimum, s.maximum), points) | {"too_small": list(s.too_small)}
    if name in GAPS:
        # Gaps of one request are correlated, so the pool has no interval; TPOT is the figure that has one.
        return record | {"intervals": None, "requests": scores.due - scores.failed}
    if name in DELAYS:
        return record
    # Failed requests are counted, not mixed in: a fast refusal is no low latency.
    adjusted = [*values, *[math.inf] * scores.failed]
    tails = {f"p{q:g}": sorted_percentile(adjusted, q) if adjusted else None for q in at}
    return record | {
        "undefined": scores.due - scores.failed - s.n,
        "failed": scores.failed,
        "adjusted": {q: "inf" if value == math.inf else value for q, value in tails.items()},  # JSON has no infinity
    }


def _known_prompts(traces: Iterable[Trace]) -> int | None:
    """Prompt tokens, where each count is known: no prompt has 0 tokens, so a 0 is a server that did not send it."""
    counts = [trace.prompt_tokens for trace in traces if trace.token_chunks]
    return sum(counts) if counts and all(counts) else None


def _rates(run: Run, throughput: metrics.Throughput | None, is_estimated: bool) -> dict[str, Any]:
    values: dict[str, float | None] = dict.fromkeys(RATES)
    if throughput is not None:
        values |= {key: getattr(throughput, key) for key in values if key != "peak_tok_s"}
        values["peak_tok_s"] = metrics.peak_throughput(run.traces, run.start, run.end)
        if _known_prompts(run.traces) is None:
            values["input_tok_s"] = None
    counted = ("output_tok_s", "drained_tok_s", "peak_tok_s")
    return {key: rate(key, value) | {"estimated": is_estimated and key in counted} for key, value in values.items()}


def _client(run: Run, send_lags: Sequence[float], late_s: float) -> dict[str, Any]:
    """How late requests were sent, and how late the event loop ran from the run's first moment to its last."""
    stalls, seconds = run.loop_stalls_s, max([run.end, *(t.t_end or 0.0 for t in run.traces)])
    is_known = bool(stalls) and seconds > 0
    late_share = math.fsum(stall for stall in stalls if stall > late_s) / seconds if is_known else None
    return {
        "send_lag": {"definition": DEFINITIONS["client_delay"], **_tail(send_lags)},
        "loop_stalls": {"definition": DEFINITIONS["loop_stalls"], **_tail(stalls), "late_share": late_share},
    }


def _tail(values: Sequence[float]) -> dict[str, Any]:
    tail = {f"p{q}_s": percentile(values, q) for q in (50, 99)}
    return {"n": len(values), **tail, "max_s": max(values, default=None)}


def _beyond(record: Mapping[str, Any], budget: ErrorBudget) -> Iterator[str]:
    lag, late = record["client"]["send_lag"]["p99_s"], record["client"]["loop_stalls"]["late_share"]
    if lag is not None and lag > budget.send_lag_p99_s:
        yield (
            f"send lag p99 {lag * 1e3:.1f} ms, budget {budget.send_lag_p99_s * 1e3:g} ms: "
            "requests left late, so the load was not the one asked for"
        )
    if late is not None and late > budget.late_share:
        yield (
            f"the client's event loop was over {budget.late_s * 1e3:g} ms late for {late:.1%} of the time, "
            f"budget {budget.late_share:.0%}: chunks were read late"
        )
    # The floor was measured at this load, against a server of known timing.
    yield from (f"the floor: {problem}" for problem in record["load"].get("floor", {}).get("problems", ()))


def _notes(record: Mapping[str, Any]) -> Iterator[str]:
    requests, law = record["requests"], record["concurrency"]["little"]
    if record["interrupted"]:
        yield (
            f"Interrupted: requests under way ({requests['cut_short']}) were left out, and long ones are more often "
            "under way than short ones."
        )
    if not requests["ok"]:
        yield "No request ended well: there is no latency to speak of."
    if record["tokens"]["estimated_requests"]:
        yield (
            f"Token counts of {record['tokens']['estimated_requests']} of {requests['attempted']} requests are "
            "estimates, because the server did not send any; what is counted in tokens is an estimate too."
        )
    if requests["ok"] and record["tokens"]["prompt"] is None:
        yield "The server did not say how many tokens the prompts had, so there is no input rate."
    if law is not None and (law["relative_error"] or 0) > LITTLE_TOLERANCE:
        yield (
            f"Little's law is off by {law['relative_error']:.0%}: the window is no steady state (a queue that grows, "
            "or a window short against a request's time)."
        )


# --- simulations --------------------------------------------------------------------------


class SimulationScores(WindowScores):
    """Scores of one or several simulated replicas, of ``kv_blocks`` each, whose traces are not kept.

    Kept are a number a request, and gaps in bins. Intervals are by batch means (:mod:`nanoinfer.measure.stats`),
    because requests of one queue are correlated.
    """

    def __init__(
        self, start: float, end: float, kv_blocks: int, slo: Mapping[str, float] | None = None, replicas: int = 1
    ) -> None:
        self.batches = {name: BatchMeans(start, end) for name in ("wait", "ttft", "tpot", "e2e", "normalized_latency")}
        self.batches["itl"] = BinnedBatchMeans(start, end)
        self.judged = BatchMeans(start, end)
        super().__init__(start, end, slo, self.batches, self.judged)
        self.kv_blocks, self.replicas = kv_blocks, replicas
        self.rates = dict.fromkeys(("output_tok_s", "requests_s", "input_tok_s"), 0.0)
        self.prompt_tokens = self.preemptions = self.most_blocks = 0
        self.queued = self.busy_s = self.row_s = self.block_s = self.steps = 0.0

    def add_all(self, traces: Iterable[Trace], most_bad: float = math.inf) -> None:
        """Score traces as they come, and keep none; stop when more than ``most_bad`` have missed a limit."""
        traces = iter(traces)
        while self.judged.n - self.good <= most_bad and (some := list(islice(traces, AT_ONCE))):
            if (throughput := self.add(some)) is not None:
                for name in self.rates:
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

    @property
    def is_stable(self) -> bool:
        """Whether as many requests ended in the window as came, but for chance; true where it is too short to tell."""
        if self.due < 10 * self.concurrency:  # shorter than ten stays
            return True
        growth = self.due - self.rates["requests_s"] * self.width
        return growth <= GROWTH * self.due + 3 * math.sqrt(max(0.0, self.concurrency))

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
            "undefined": self.due - self.failed - n if name in METRICS else 0,
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
