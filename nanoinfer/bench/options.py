"""The options of ``nanoinfer bench``, and what they ask to send, checked before anything is sent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from nanoinfer.bench.summary import METRICS
from nanoinfer.bench.sweep import Kind, parse_levels
from nanoinfer.errors import RequestError, check, nearest
from nanoinfer.option_types import Share, Slo
from nanoinfer.workload import arrivals, files, items
from nanoinfer.workload.items import WorkItem, schedule_at

#: Requests of a run that says neither how many nor how long.
REQUESTS: Final = 32
#: Warm-up requests of an open loop; a closed one sends one for each user, so that their first rush is not measured.
WARMUP: Final = 4
LOADS: Final = ("rate", "users", "replay")
#: How many of a unit make a second: dividing rounds once, so that 70ms is exactly 0.07.
PER_SECOND: Final = {"us": 1e6, "ms": 1e3, "s": 1.0}
#: Options of which at most one may be set, and why.
EXCLUSIVE: Final = (
    (LOADS, "are different loads"),
    (("prompts", "lengths", "replay"), "each say what to send"),
    (("requests", "seconds"), "each say when to end"),
)


@dataclass(frozen=True)
class BenchConfig:
    """The command's options as they were written.

    Raises:
        RequestError: options that contradict each other, or a number out of its range.
    """

    target: Annotated[str, typer.Argument(help="A server (http://host:port), or a model to run in this process.")]
    model: Annotated[str | None, typer.Option(help="Its name there; the first one that the server lists.")] = None
    endpoint: Annotated[str | None, typer.Option(help="completions or chat.")] = None
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="For the server.")] = field(
        default=None, repr=False
    )
    rate: Annotated[float | None, typer.Option(help="Open loop: requests a second, whatever becomes of them.")] = None
    arrivals: Annotated[str, typer.Option(help="Of the open loop: constant, poisson, gamma or ramp.")] = "poisson"
    burstiness: Annotated[float | None, typer.Option(help="Of gamma: below 1 in bursts, 1 poisson, above even.")] = None
    to: Annotated[float | None, typer.Option(help="Rate at which a ramp ends, after --seconds.")] = None
    users: Annotated[int | None, typer.Option(help="Closed loop: each waits for an answer before it asks again.")] = (
        None
    )
    think: Annotated[float | None, typer.Option(help="Seconds from an answer to a user's next request.")] = None
    replay: Annotated[Path | None, typer.Option(help="A recorded trace: our .jsonl or Azure's .csv.")] = None
    speedup: Annotated[float | None, typer.Option(help="Times that the replay runs faster than it was.")] = None
    sweep: Annotated[str | None, typer.Option(help="Rates 1,2,4 or 1..16 (doublings), or users:1..16.")] = None
    requests: Annotated[int | None, typer.Option(help="How many (at each level); 32 if not for --seconds.")] = None
    seconds: Annotated[float | None, typer.Option(help="Length of the measured window (at each level).")] = None
    prompt_tokens: Annotated[str, typer.Option(help="128, uniform:10-200 or lognormal:10-200.")] = "128"
    output_tokens: Annotated[str, typer.Option(help="Likewise, of the answers.")] = "64"
    lengths: Annotated[Path | None, typer.Option(help="File of prompt and output lengths: .csv or .jsonl.")] = None
    prompts: Annotated[Path | None, typer.Option(help="File of real prompts: one a line, or .jsonl.")] = None
    warmup: Annotated[
        int | None, typer.Option(help="Requests before the window; one for each user, or 4 of an open loop.")
    ] = None
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0
    timeout: Annotated[float, typer.Option(help="Seconds after which a request is given up.")] = 600.0
    slo: Slo = None
    share: Share = 0.99
    out: Annotated[
        Path | None, typer.Option(help="Folder for traces.jsonl, run.json, summary.json and report.html.")
    ] = None
    no_floor: Annotated[bool, typer.Option("--no-floor", help="Do not measure what the client itself adds.")] = False
    speed: Annotated[str | None, typer.Option(help="Of a model in this process: see `nanoinfer serve`.")] = None
    device: Annotated[str | None, typer.Option(help="Of a model in this process; cpu.")] = None
    dtype: Annotated[str | None, typer.Option(help="Of a model in this process; bfloat16.")] = None

    def __post_init__(self) -> None:
        self._check_together()
        for name in ("requests", "users", "seconds", "timeout", "speedup", "burstiness"):
            if (value := getattr(self, name)) is not None:
                check(f"--{name}", value, above=0)
        for name in ("warmup", "think"):
            if (value := getattr(self, name)) is not None:
                check(f"--{name}", value, at_least=0)
        check("--share", self.share, above=0, at_most=1)

    @property
    def is_remote(self) -> bool:
        """Whether the target is the address of a server; a model's name may hold a colon too (``random:gpt2``)."""
        return "://" in self.target or bool(re.fullmatch(r"(\[[0-9a-f:]+\]|[\w.-]+):\d{1,5}(/.*)?", self.target))

    def _are_set(self, names: tuple[str, ...]) -> list[str]:
        return [f"--{name}" for name in names if getattr(self, name) is not None]

    def _check_together(self) -> None:
        """Raise :class:`RequestError` for options of which one makes the other meaningless."""
        for names, why in EXCLUSIVE:
            if len(options := self._are_set(names)) > 1:
                raise RequestError(f"{' and '.join(options)} {why}: give one")
        if self.sweep is not None and (options := self._are_set(LOADS)):
            raise RequestError(f"--sweep sets the level itself: leave {options[0]} out (--sweep 1..16 or users:1..16)")
        if self.arrivals == "ramp" and None in (self.rate, self.to, self.seconds):
            raise RequestError("a ramp goes from --rate to --to in --seconds: give all three")
        if self.arrivals == "gamma" and self.burstiness is None:
            raise RequestError("--arrivals gamma needs --burstiness: below 1 comes in bursts, 1 is poisson")
        is_open = self.rate is not None or (self.sweep is not None and not self.sweep.startswith("users:"))
        here, there = f"a model in this process, not {self.target}", f"the address of a server, not {self.target}"
        for name, is_met, what in (
            ("arrivals", is_open or self.arrivals == "poisson", "--rate"),
            ("to", self.arrivals == "ramp", "--arrivals ramp"),
            ("burstiness", self.arrivals == "gamma", "--arrivals gamma"),
            ("speedup", self.replay is not None, "--replay"),
            ("think", not is_open and self.replay is None, "--users"),
            *((name, not self.is_remote, here) for name in ("speed", "device", "dtype")),
            *((name, self.is_remote, there) for name in ("model", "endpoint")),
        ):
            if getattr(self, name) is not None and not is_met:
                raise RequestError(f"--{name} goes with {what}")


class LoadPlan:
    """What to send at which level (requests/s or users; one level where nothing is swept), read and drawn beforehand.

    Raises:
        RequestError: an option or a file that cannot be read.
    """

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.slo = None if config.slo is None else parse_slo(config.slo)
        self.prompt, self.output = map(items.parse_lengths, (config.prompt_tokens, config.output_tokens))
        self.pairs = None if config.lengths is None else files.read_pairs(config.lengths)
        self.entries = None if config.replay is None else files.read_trace(config.replay)
        self.kind, self.levels = self._levels()
        self.most = config.requests or (REQUESTS if config.seconds is None and self.entries is None else None)
        self.offsets = [self._offsets(index) for index in range(len(self.levels))]
        prompts = [] if config.prompts is None else files.read_prompts(config.prompts)
        # Each level has prompts of its own, or one would warm the prefix cache for the next.
        self.prompts = [
            items.split_warmup(prompts[index :: len(self.levels)], self.warmup(index), config.seed)
            for index in range(len(self.levels))
            if prompts
        ]

    def _levels(self) -> tuple[Kind, list[float]]:
        config = self.config
        if config.sweep is not None:
            kind, colon, text = config.sweep.rpartition(":")
            if kind not in ("", "rate", "users") or (colon and not kind):
                raise RequestError(f"--sweep '{config.sweep}': write rates as 1..16, or users as users:1..16")
            levels = parse_levels(text)
            if kind == "users" and any(level % 1 for level in levels):
                raise RequestError(f"--sweep '{config.sweep}': users are whole numbers")
            return cast("Kind", kind or "rate"), levels
        if self.entries is not None:
            return "rate", [(config.speedup or 1.0) * (files.gap_rate(self.entries) or 1.0)]
        return ("users", [float(config.users or 1)]) if config.rate is None else ("rate", [config.rate])

    @property
    def most_level(self) -> float:
        """The highest load that will come, for which the client must be good."""
        return max(self.levels[-1], self.config.to or 0.0)

    def warmup(self, index: int) -> int:
        """Warm-up requests of a level."""
        if self.config.warmup is not None:
            return self.config.warmup
        return int(self.levels[index]) if self.kind == "users" else WARMUP

    def shape(self, level: float) -> str:
        """How arrivals come, as :func:`nanoinfer.workload.arrivals.schedule` reads it."""
        config = self.config
        shapes = {"gamma": f"gamma:{config.burstiness!r}", "ramp": f"ramp:{level!r}-{config.to!r}"}
        return shapes.get(config.arrivals, config.arrivals)

    def _offsets(self, index: int) -> list[float]:
        """When the requests of an open loop are due; empty for other loads."""
        config, level = self.config, self.levels[index]
        if self.kind == "users" or self.entries is not None:
            return []
        seed, seconds = config.seed + index, config.seconds
        offsets = arrivals.schedule(self.shape(level), level, n=self.most, seconds=seconds, seed=seed)
        if not offsets:
            raise RequestError(f"no request is due within {seconds:g} s at {level:g} a second: give more --seconds")
        return offsets

    def work(self, index: int, vocab_size: int | None) -> tuple[list[WorkItem], list[WorkItem] | Iterator[WorkItem]]:
        """Warm-up and measured work of a level, with prompts that no other level has.

        ``vocab_size`` is for prompts of token ids; None for words.
        """
        config, seed = self.config, self.config.seed + index
        warm = list(islice(self._items(index, vocab_size, "warm-up"), self.warmup(index)))
        if self.entries is not None:
            work = files.replayed(self.entries, speed_up=config.speedup or 1.0, seed=seed, vocab_size=vocab_size)
            seconds = math.inf if config.seconds is None else config.seconds
            return warm, [item for item in work if item.at < seconds][: config.requests]
        measured = self._items(index, vocab_size, "measured")
        if self.kind == "users":
            return warm, measured
        if config.arrivals != "ramp" and warm:  # before a ramp all at once: it starts with an empty engine
            warm = schedule_at(warm, arrivals.schedule("poisson", self.levels[index], n=len(warm), seed=seed))
        return warm, schedule_at(measured, self.offsets[index])

    def _items(self, index: int, vocab_size: int | None, stream: str) -> Iterator[WorkItem]:
        """Requests without end."""
        seed = self.config.seed + index
        if self.prompts:
            warm, measured = self.prompts[index]
            return items.from_prompts(warm if stream == "warm-up" else measured, self.output, seed=seed)
        if self.pairs is not None:
            return items.from_pairs(self.pairs, seed=seed, vocab_size=vocab_size, stream=stream)
        return items.synthetic(self.prompt, self.output, seed=seed, vocab_size=vocab_size, stream=stream)

    def settings(self, index: int) -> dict[str, Any]:
        """A level's load for the record; no key and no folder."""
        config, level = self.config, self.levels[index]
        sources = {name: getattr(config, name) for name in ("replay", "lengths", "prompts")}
        record: dict[str, Any] = {self.kind: level, "seed": config.seed + index}
        record |= {name: path.name for name, path in sources.items() if path is not None}
        if config.replay is not None:
            record["speedup"] = config.speedup or 1.0
        elif self.kind == "rate":
            record["arrivals"] = self.shape(level)
        if not sources.keys() & record.keys():
            record["prompt_tokens"] = str(self.prompt)
        if config.lengths is None and config.replay is None:
            record["output_tokens"] = str(self.output)
        return record


def parse_slo(text: str) -> dict[str, float]:
    """``"ttft=200ms,tpot=50ms,e2e=3s"`` as seconds by metric: ``{"ttft": 0.2, "tpot": 0.05, "e2e": 3.0}``.

    Raises:
        RequestError: naming the metric or the unit that is missing, unknown or given twice.
    """
    slo: dict[str, float] = {}
    for part in map(str.strip, text.split(",")):
        name, _, time = map(str.strip, part.partition("="))
        if not (name and time):
            raise RequestError(f"slo '{part}': write METRIC=TIME, as in ttft=200ms,tpot=50ms")
        if name not in METRICS:
            raise RequestError(f"slo '{part}': no metric '{name}' of a request; {nearest(name, METRICS)}")
        if name in slo:
            raise RequestError(f"slo '{part}': {name} has a limit already; give one for each metric")
        if (match := re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([^\W\d]*)", time)) is None:
            raise RequestError(f"slo '{part}': '{time}' is no time; write a number and a unit, as in 200ms")
        number, unit = match.groups()
        if unit not in PER_SECOND:
            problem = f"unknown unit '{unit}'" if unit else f"{number} of what?"
            raise RequestError(f"slo '{part}': {problem}; the units are {', '.join(PER_SECOND)}, as in {number}ms")
        slo[name] = float(number) / PER_SECOND[unit]
        check(f"slo '{part}': a limit", slo[name], above=0)
    return slo
