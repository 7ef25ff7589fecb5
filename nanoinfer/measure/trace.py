"""The trace: the one record that every engine, server and simulation leaves.

Only times and counts are stored. :mod:`nanoinfer.measure.metrics` derives every metric from them, so a run saved today
can be scored again under another definition.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from nanoinfer.errors import NanoinferError
from nanoinfer.store import write_whole

Status = Literal["ok", "error", "timeout", "cancelled", "rejected"]
#: What a chunk of a stream is, where the transport says so. Tokens are in reasoning and content; a finish can hold the
#: end-of-sequence token.
ChunkKind = Literal["role", "reasoning", "content", "finish", "usage", "done"]


@dataclass
class Trace:
    """One request's life, in seconds of a monotonic clock.

    An engine that queues sets ``t_start``, ``cached_tokens`` and ``preemptions``; a client of a server ``kinds``,
    ``error`` and ``estimated``.
    """

    t_scheduled: float
    t_sent: float
    #: ``(t, n)``: ``n`` output tokens became visible at ``t``; 0 for a role or a usage frame.
    chunks: list[tuple[float, int]] = field(default_factory=list)
    t_end: float | None = None
    status: Status = "ok"
    prompt_tokens: int = 0
    output_tokens: int = 0
    t_start: float | None = None  # when the request left the queue
    cached_tokens: int = 0  # of the prompt, not computed
    preemptions: int = 0
    kinds: list[ChunkKind] = field(default_factory=list)  # one for each chunk
    error: str | None = None  # what went wrong: ``http 500``, ``connect``
    estimated: bool = False  # the server sent no counts: they are a guess

    def token(self, t: float, n: int = 1) -> None:
        """Note that ``n`` tokens arrived at time ``t``."""
        self.chunks.append((t, n))
        self.output_tokens += n

    @property
    def token_chunks(self) -> list[tuple[float, int]]:
        """The chunks that hold at least one token."""
        return [(t, n) for t, n in self.chunks if n > 0]


def save_traces(path: Path, traces: Iterable[Trace]) -> None:
    """Write one JSON object a line; the file appears whole or not at all."""
    write_whole(path, "".join(json.dumps(asdict(trace)) + "\n" for trace in traces))


def load_traces(path: Path) -> Iterator[Trace]:
    """Read what :func:`save_traces` wrote. Raises :class:`NanoinferError` naming the bad line."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                data: dict[str, Any] = json.loads(line)
                data["chunks"] = [(float(t), int(n)) for t, n in data["chunks"]]
                yield Trace(**data)
            except (ValueError, TypeError, KeyError) as error:
                raise NanoinferError(f"{path}, line {number}: not a trace record ({error})") from None
