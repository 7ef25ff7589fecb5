"""What a run says while it runs: counts and running percentiles, on standard error.

Drawing happens in the event loop that also reads the chunks, so it is kept short (a line, twice a second
at most, over the last thousand requests) instead of moved to a thread that would take the interpreter
away at a moment of its own choice. What it costs shows among the loop's stalls.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nanoinfer.measure import metrics
from nanoinfer.measure.clock import now
from nanoinfer.measure.stats import least_n, percentile
from nanoinfer.measure.trace import Trace
from nanoinfer.show.text import ms

#: Requests that the running percentiles are of.
LAST: Final = 1000
SHOWN: Final = ("ttft", "tpot")


class Progress:
    """Takes each trace as it ends (``with Progress(...) as progress: open_loop(..., watch=progress)``).

    Args:
        title: what runs.
        total: requests that will come, where that is known.
        stream: standard error if not given. Where it is no terminal, whole lines come out, and fewer.
        clock: seconds.
    """

    def __init__(
        self, title: str, total: int | None = None, stream: TextIO | None = None, clock: Callable[[], float] = now
    ) -> None:
        self.title, self.total = title, total
        self._stream = sys.stderr if stream is None else stream
        self._live: Live | None = None
        if self._stream.isatty():
            console = Console(file=self._stream)
            self._live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
        self._every = 0.5 if self._live else 5.0
        self._clock, self._begun = clock, clock()
        self._drawn = self._begun
        self._ended: Counter[str] = Counter()
        self._tokens = 0
        self._last: dict[str, deque[float]] = {name: deque(maxlen=LAST) for name in SHOWN}

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        if self._ended:
            print(self.line(), file=self._stream, flush=True)

    def __call__(self, trace: Trace) -> None:
        """Count a request that has ended, and draw if it is time."""
        self._ended[trace.status] += 1
        self._tokens += metrics.output_tokens(trace)
        if trace.status == "ok":
            for name, values in self._last.items():
                if (value := metrics.metric_named(name)(trace)) is not None:
                    values.append(value)
        if (time := self._clock()) - self._drawn >= self._every:
            self._drawn = time
            if self._live:
                self._live.update(Text(self.line(), overflow="ellipsis", no_wrap=True), refresh=True)
            else:
                print(self.line(), file=self._stream, flush=True)

    def line(self) -> str:
        """Where the run stands."""
        done, seconds = sum(self._ended.values()), self._clock() - self._begun
        failed = [f"{n} {status}" for status, n in self._ended.items() if status != "ok"]
        rate = f", {self._tokens / seconds:,.0f} tok/s" if seconds > 0 else ""
        percentiles = [f"{name.upper()} {self._percentiles(name)}" for name in SHOWN]
        counted = f"{done:,}" if self.total is None else f"{done:,} of {self.total:,}"
        return " | ".join(
            [f"{self.title}: {counted} ended{rate}", *([", ".join(failed)] if failed else []), *percentiles]
        )

    def _percentiles(self, name: str) -> str:
        values = sorted(self._last[name])
        shown = [q for q in (50.0, 90.0, 99.0) if q == 50 or len(values) >= least_n(q)]
        found = [(q, percentile(values, q)) for q in shown]
        words = [f"p{q:g} {ms(value)}" for q, value in found if value is not None]
        return " ".join([*words, "ms"]) if words else "not measured yet"
