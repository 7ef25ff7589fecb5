"""What a run says: every figure with its definition, its number of samples and how sure it is.

Latencies, goodput and errors are of the requests that were due inside the window; rates, concurrency
and Little's law are of the window itself, so they count by event time whatever was in flight. What was
not measured is ``None``, never 0.

A client that sends late or sleeps through chunks measures itself. How much of that is borne stands in
:class:`ErrorBudget`, and a run beyond it says so in ``beyond_budget``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nanoinfer.bench.run import Run
from nanoinfer.bench.slo import METRICS
from nanoinfer.measure import metrics
from nanoinfer.measure.stats import TAILS, percentile, percentile_interval, summarize
from nanoinfer.measure.trace import Trace

#: Figures that pool the gaps of all requests.
POOLED: Final[Mapping[str, Callable[[Trace], list[float]]]] = {
    "itl": metrics.itl_samples,
    "chunk_gap": metrics.chunk_gaps,
}
#: Their values lean on token counts, and are only as good as these.
COUNTED: Final = frozenset({"tpot", "itl", "normalized_latency"})
#: The lines for figures of a run that :mod:`nanoinfer.measure.metrics` holds as parts of a whole.
DEFINITIONS: Final[Mapping[str, str]] = {
    **metrics.DEFINITIONS,
    "request_rate": "requests that ended well inside the window / the window's length",
    "input_rate": "prompt tokens of the requests whose first token came inside the window / the window's length",
    "drained_throughput": "all output tokens of the requests sent in the window / time from its start to their last",
    "little": "Little's law: mean concurrency against requests sent per second x their mean time in the system",
    "loop_stalls": "how late a periodic tick of the client's event loop was",
    "adjusted": "percentiles in which each failed request counts as infinitely slow",
}


@dataclass(frozen=True)
class ErrorBudget:
    """What the client may add before its figures are its own and not the server's.

    ``send_lag_p99_s``: the latest 1% of requests, after their time. ``late_s`` and ``late_share``: the share
    of the run, warm-up and all, in which the event loop was later than so much.
    """

    send_lag_p99_s: float = 0.010
    late_s: float = 0.010
    late_share: float = 0.01


BUDGET: Final = ErrorBudget()
#: Beyond this relative error of Little's law the window is no steady state (or the records are wrong).
LITTLE_TOLERANCE: Final = 0.1


def summarise(run: Run, slo: Mapping[str, float] | None = None, budget: ErrorBudget = BUDGET) -> dict[str, Any]:
    """All figures of a run, as JSON.

    Args:
        run: as it was measured or loaded.
        slo: limits in seconds, as :func:`nanoinfer.bench.slo.parse_slo` gives them; without, no goodput.
        budget: what the client may add.

    Raises:
        NanoinferError: traces whose clock ran backwards, a limit on an unknown metric.
    """
    due = run.measured()
    # Ctrl-C is no fault of the server: what it cut short says nothing.
    judged = [trace for trace in due if not (run.interrupted and trace.status == "cancelled")]
    estimated = sum(trace.estimated for trace in judged)
    failures = Counter(trace.error or trace.status for trace in judged if trace.status != "ok")
    record: dict[str, Any] = {
        "load": run.settings,
        "window": {"start_s": run.start, "end_s": run.end, "seconds": run.end - run.start},
        "interrupted": run.interrupted,
        "requests": {
            "attempted": len(judged),
            "ok": sum(trace.status == "ok" for trace in judged),
            "by_status": dict(Counter(trace.status for trace in judged)),
            "failures": dict(failures.most_common()),
            "warmup": sum(trace.t_scheduled < run.start for trace in run.traces),
            "cut_short": len(due) - len(judged),
        },
        "tokens": {
            "prompt": _known(trace.prompt_tokens for trace in judged if trace.token_chunks),
            "output": sum(metrics.output_tokens(trace) for trace in judged) if judged else None,
            "estimated_requests": estimated,
        },
        "latency": {
            **{name: _per_request(judged, name) for name in METRICS},
            **{name: _pooled(judged, name) for name in POOLED},
            "client_delay": _figure("client_delay", [metrics.client_delay(trace) for trace in judged]),
        },
        "rates": _rates(run, bool(estimated)),
        "concurrency": _concurrency(run),
        "goodput": _goodput(run, judged, slo) if slo else None,
        "client": _client(run, judged, budget.late_s),
        "provenance": run.provenance,
    }
    for name in COUNTED:
        record["latency"][name]["estimated_requests"] = estimated
    record["beyond_budget"] = list(_beyond(record, budget))
    record["notes"] = list(_notes(record))
    return record


# --- latencies ----------------------------------------------------------------------


def _per_request(traces: Sequence[Trace], name: str) -> dict[str, Any]:
    found = metrics.collect(traces, name)
    figure = _figure(name, found.values) | {"undefined": found.undefined, "failed": found.failed}
    adjusted = sorted(metrics.collect(traces, name, failed_as_infinite=True).values)
    return figure | {"adjusted": {f"p{q:g}": _json(percentile(adjusted, q)) for q in (50.0, *TAILS)}}


def _pooled(traces: Sequence[Trace], name: str) -> dict[str, Any]:
    """Gaps of one request hang together, so the pool has no interval; TPOT is the figure that has one."""
    good = [trace for trace in traces if trace.status == "ok"]
    figure = _figure(name, [value for trace in good for value in POOLED[name](trace)], independent=False)
    return figure | {"requests": len(good)}


def _figure(name: str, values: Sequence[float], independent: bool = True) -> dict[str, Any]:
    """One figure in seconds. The intervals hold with 95%; ``too_small`` names what ``n`` cannot support."""
    ordered = sorted(values)
    found = summarize(ordered)
    points = {"median": found.median, "p90": found.p90, "p95": found.p95, "p99": found.p99}
    intervals = {f"p{q:g}": percentile_interval(ordered, q, found.confidence) for q in TAILS}
    return {
        "definition": DEFINITIONS[name],
        "unit": "s",
        "n": found.n,
        "mean": found.mean,
        "std": found.std,
        "min": found.minimum,
        **points,
        "max": found.maximum,
        "confidence": found.confidence,
        "intervals": {"median": (found.low, found.high), **intervals} if independent else None,
        "too_small": list(found.too_small),
    }


def _json(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return "inf" if value == math.inf else value


def _known(counts: Iterable[int]) -> int | None:
    """The sum, where each is known: no prompt has 0 tokens, so a 0 is a server that did not say."""
    found = list(counts)
    return sum(found) if found and all(found) else None


# --- rates and goodput --------------------------------------------------------------


def _rates(run: Run, estimated: bool) -> dict[str, Any]:
    names = {
        "output_tok_s": "throughput",
        "requests_s": "request_rate",
        "input_tok_s": "input_rate",
        "drained_tok_s": "drained_throughput",
        "peak_tok_s": "peak_throughput",
    }
    values: dict[str, float | None] = dict.fromkeys(names)
    if run.traces and run.end > run.start:
        found = metrics.throughput(run.traces, run.start, run.end)
        prompts = _known(trace.prompt_tokens for trace in run.traces if trace.token_chunks)
        values = {
            "output_tok_s": found.output_tok_s,
            "requests_s": found.requests_s,
            "input_tok_s": None if prompts is None else found.input_tok_s,
            "drained_tok_s": found.drained_tok_s,
            "peak_tok_s": metrics.peak_throughput(run.traces, run.start, run.end),
        }
    return {
        key: {
            "definition": DEFINITIONS[name],
            "unit": "requests/s" if key == "requests_s" else "tok/s",
            "value": values[key],
            "estimated": estimated and key in ("output_tok_s", "drained_tok_s", "peak_tok_s"),
        }
        for key, name in names.items()
    }


def _concurrency(run: Run) -> dict[str, Any]:
    record: dict[str, Any] = {"definition": DEFINITIONS["concurrency"], "mean": None, "little": None}
    if run.traces and run.end > run.start:
        law = metrics.little(run.traces, run.start, run.end)
        record["mean"] = law.concurrency
        record["little"] = {
            "definition": DEFINITIONS["little"],
            "rate_per_s": law.rate,
            "time_s": law.time,
            "error": law.error,
            "relative_error": law.error / law.concurrency if law.concurrency else None,
        }
    return record


def _goodput(run: Run, traces: Sequence[Trace], slo: Mapping[str, float]) -> dict[str, Any]:
    record: dict[str, Any] = {"definition": DEFINITIONS["goodput"], "slo_s": dict(slo)}
    is_window = run.end > run.start
    found = metrics.goodput(traces, slo, run.start, run.end if is_window else run.start + 1)
    broken = {name: sum(_breaks(trace, name, limit) for trace in traces) for name, limit in slo.items()}
    judged = found.attempted - found.excluded
    return record | {
        "share": found.share,
        "interval": wilson(found.good, judged) if judged else None,
        "good": found.good,
        "attempted": found.attempted,
        "excluded": found.excluded,
        "failed": sum(trace.status != "ok" for trace in traces),
        "broken_by": broken,
        "requests_s": found.requests_s if is_window and traces else None,
        "tok_s": found.tok_s if is_window and traces else None,
    }


def _breaks(trace: Trace, name: str, limit: float) -> bool:
    value = metrics.metric_named(name)(trace) if trace.status == "ok" else None
    return value is not None and value > limit


def wilson(good: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% score interval of a share (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927): sound at 0 and 1 too."""
    share, spread = good / n, z * z / n
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, middle - half), min(1.0, middle + half)


# --- the client ---------------------------------------------------------------------


def _client(run: Run, traces: Sequence[Trace], late_s: float) -> dict[str, Any]:
    """How late requests were sent, and how late the event loop ran from the run's first moment to its last."""
    lags, stalls = [metrics.client_delay(trace) for trace in traces], run.client.loop_stalls_s
    return {
        "send_lag": {"definition": DEFINITIONS["client_delay"], **_tail(lags)},
        "loop_stalls": {
            "definition": DEFINITIONS["loop_stalls"],
            **_tail(stalls),
            "late_share": _late_share(stalls, late_s, max([run.end, *(t.t_end or 0.0 for t in run.traces)])),
        },
    }


def _tail(values: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(values)
    tail = {f"p{q}_s": percentile(ordered, q) for q in (50, 99)}
    return {"n": len(ordered), **tail, "max_s": ordered[-1] if ordered else None}


def _late_share(stalls: Sequence[float], late_s: float, seconds: float) -> float | None:
    if not stalls or seconds <= 0:
        return None
    return math.fsum(stall for stall in stalls if stall > late_s) / seconds


def _beyond(record: Mapping[str, Any], budget: ErrorBudget) -> Iterable[str]:
    client = record["client"]
    lag, late = client["send_lag"]["p99_s"], client["loop_stalls"]["late_share"]
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


def _notes(record: Mapping[str, Any]) -> Iterable[str]:
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
