"""The raw records of a load, and what is needed to judge them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nanoinfer.errors import NanoinferError
from nanoinfer.measure.trace import Trace, load_traces, save_traces
from nanoinfer.store import write_whole

TRACES, RUN = "traces.jsonl", "run.json"


@dataclass
class ClientHealth:
    """How well the client itself did, in seconds: how late each request was sent, and how late each tick of a clock
    in its event loop was (one tick for a stall, however long)."""

    send_lag_s: list[float] = field(default_factory=list)
    loop_stalls_s: list[float] = field(default_factory=list)


@dataclass
class Run:
    """One load on one target.

    Args:
        traces: in the order in which they were due; seconds from the run's start, warm-up included.
        start: where the measured window begins; requests due before are warm-up.
        end: where it ends; nothing was due from then on, but requests may have been under way.
        settings: load, target, lengths and seed, as JSON.
        interrupted: Ctrl-C ended it; requests that were under way are ``cancelled``.
        provenance: machine, versions, date, commit.
        zero: the run's start on this machine's clock; not stored.
    """

    traces: list[Trace]
    start: float
    end: float
    settings: dict[str, Any]
    client: ClientHealth
    interrupted: bool = False
    provenance: dict[str, Any] = field(default_factory=dict)
    zero: float = field(default=0.0, compare=False)

    def measured(self) -> list[Trace]:
        """The traces that were due inside the window."""
        return [trace for trace in self.traces if self.start <= trace.t_scheduled < self.end]


def save_run(run: Run, folder: Path) -> None:
    """Write ``traces.jsonl`` (raw records) and ``run.json`` (all else) into a folder, made if need be.

    Raises:
        OSError: a disk that refuses.
    """
    record = {
        "start_s": run.start,
        "end_s": run.end,
        "interrupted": run.interrupted,
        "settings": run.settings,
        "client": asdict(run.client),
        "provenance": run.provenance,
    }
    text = json.dumps(record, allow_nan=False)
    save_traces(folder / TRACES, run.traces)
    write_whole(folder / RUN, text + "\n")


def load_run(folder: Path) -> Run:
    """Read what :func:`save_run` wrote.

    Raises:
        NanoinferError: a folder that holds no run, naming the file.
    """
    path = folder / RUN
    for file in (path, folder / TRACES):
        if not file.is_file():
            raise NanoinferError(f"{file} is missing: name a folder that `nanoinfer bench` wrote")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Run(
            list(load_traces(folder / TRACES)),
            float(record["start_s"]),
            float(record["end_s"]),
            _flat(dict(record["settings"])),
            ClientHealth(**record["client"]),
            bool(record["interrupted"]),
            dict(record["provenance"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise NanoinferError(f"{path}: not the record of a run ({error!r})") from None


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they are written today; earlier runs nest them, as ``loop.kind`` and ``load.users``."""
    if not isinstance(loop := settings.get("loop"), dict):
        return settings
    rest = {name: value for name, value in settings.items() if name not in ("loop", "load")}
    return {"loop": loop.pop("kind"), **loop, **rest, **settings.get("load", {})}
