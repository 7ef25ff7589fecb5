"""What ``nanoinfer bench`` was asked for, checked before anything is sent: a mistake costs a line, no minutes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

from nanoinfer.bench.slo import parse_slo
from nanoinfer.bench.sweep import Kind, parse_levels
from nanoinfer.errors import RequestError
from nanoinfer.workload import arrivals, lengths, replay
from nanoinfer.workload.workload import Work, due

#: Requests of a run that says neither how many nor how long.
REQUESTS: Final = 32
#: Warm-up requests of an open loop; a closed one sends one for each user, so that their first rush is not measured.
WARMUP: Final = 4


@dataclass(frozen=True)
class Options:
    """The command's options as they were written; ``nanoinfer bench --help`` says what each means."""

    target: str
    model: str | None = None
    endpoint: str | None = None
    api_key: str | None = None
    speed: str | None = None
    device: str | None = None
    dtype: str | None = None
    rate: float | None = None
    arrivals: str = "poisson"
    burstiness: float | None = None
    to: float | None = None
    users: int | None = None
    think: float | None = None
    replay: Path | None = None
    speedup: float | None = None
    requests: int | None = None
    seconds: float | None = None
    prompt_tokens: str = "128"
    output_tokens: str = "64"
    lengths: Path | None = None
    prompts: Path | None = None
    warmup: int | None = None
    seed: int = 0
    timeout: float = 600.0
    slo: str | None = None
    sweep: str | None = None
    share: float = 0.99
    out: Path | None = None
    floor: bool = True


def is_url(target: str) -> bool:
    """Whether the target is the address of a server; a model's name may hold a colon too (``random:gpt2``)."""
    return "://" in target or re.fullmatch(r"(\[[0-9a-f:]+\]|[\w.-]+):\d{1,5}(/.*)?", target) is not None


class Plan:
    """What to send at which level: requests/s or users, one of them where nothing is swept.

    Raises:
        RequestError: options that contradict each other, or one that cannot be read.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        _check_together(options)
        _check_numbers(options)
        self.slo = None if options.slo is None else parse_slo(options.slo)
        self.prompt, self.output = (
            lengths.parse_lengths(text) for text in (options.prompt_tokens, options.output_tokens)
        )
        self.pairs = None if options.lengths is None else lengths.read_pairs(options.lengths)
        self.entries = None if options.replay is None else replay.read_trace(options.replay)
        self.kind: Kind
        self.levels: list[float]
        self.kind, self.levels = self._levels()
        self.most = options.requests or (REQUESTS if options.seconds is None and self.entries is None else None)
        self.offsets = [self._offsets(index) for index in range(len(self.levels))]
        prompts = [] if options.prompts is None else lengths.read_prompts(options.prompts)
        # Each level has prompts of its own, or one would warm the prefix cache for the next.
        self.prompts = [
            lengths.set_aside(prompts[index :: len(self.levels)], self.warmup(index), options.seed)
            for index in range(len(self.levels))
            if prompts
        ]

    def _levels(self) -> tuple[Kind, list[float]]:
        asked = self.options
        if asked.sweep is not None:
            kind, colon, text = asked.sweep.rpartition(":")
            if kind not in ("", "rate", "users") or (colon and not kind):
                raise RequestError(f"--sweep '{asked.sweep}': write rates as 1..16, or users as users:1..16")
            levels = parse_levels(text)
            if kind == "users" and any(level % 1 for level in levels):
                raise RequestError(f"--sweep '{asked.sweep}': users are whole numbers")
            return cast("Kind", kind or "rate"), levels
        if self.entries is not None:
            return "rate", [(asked.speedup or 1.0) * (replay.describe(self.entries)["gap_rate"] or 1.0)]
        if asked.rate is not None:
            return "rate", [asked.rate]
        return "users", [float(asked.users or 1)]

    @property
    def most_level(self) -> float:
        """The highest load that will come, for which the client must be good."""
        return max(self.levels[-1], self.options.to or 0.0)

    def warmup(self, index: int) -> int:
        """Warm-up requests of a level."""
        if self.options.warmup is not None:
            return self.options.warmup
        return int(self.levels[index]) if self.kind == "users" else WARMUP

    def shape(self, level: float) -> str:
        """How arrivals come, as :func:`nanoinfer.workload.arrivals.schedule` reads it."""
        asked = self.options
        shapes = {"gamma": f"gamma:{asked.burstiness!r}", "ramp": f"ramp:{level!r}-{asked.to!r}"}
        return shapes.get(asked.arrivals, asked.arrivals)

    def _offsets(self, index: int) -> list[float]:
        """When the requests of an open loop are due; empty for other loads."""
        asked, level = self.options, self.levels[index]
        if self.kind == "users" or self.entries is not None:
            return []
        offsets = arrivals.schedule(
            self.shape(level), level, n=self.most, seconds=asked.seconds, seed=asked.seed + index
        )
        if not offsets:
            raise RequestError(
                f"no request is due within {asked.seconds:g} s at {level:g} a second: give more --seconds"
            )
        return offsets

    def work(self, index: int, vocab_size: int | None) -> tuple[list[Work], list[Work] | Iterator[Work]]:
        """Warm-up and measured work of a level, with prompts that no other level has.

        Args:
            index: of the level.
            vocab_size: for prompts of ids; None for words.
        """
        asked, seed, aside = self.options, self.options.seed + index, self.warmup(index)
        if self.prompts:
            first, rest = self.prompts[index]
            warm = list(islice(lengths.from_prompts(first, self.output, seed=seed), aside)) if first else []
            works = lengths.from_prompts(rest, self.output, seed=seed)
        else:
            warm = list(islice(self._made_up(seed, vocab_size, "warm-up"), aside))
            works = self._made_up(seed, vocab_size, "measured")
        if self.entries is not None:
            speedup = asked.speedup or 1.0
            again = replay.as_works(self.entries, speed_up=speedup, seed=seed, vocab_size=vocab_size)
            return warm, [work for work in again if asked.seconds is None or work.at < asked.seconds][: asked.requests]
        if self.kind == "users":
            return warm, works
        if asked.arrivals != "ramp" and warm:  # before a ramp all at once: its house opens empty
            warm = due(warm, arrivals.schedule("poisson", self.levels[index], n=aside, seed=seed))
        return warm, due(works, self.offsets[index])

    def _made_up(self, seed: int, vocab_size: int | None, stream: str) -> Iterator[Work]:
        if self.pairs is not None:
            return lengths.from_pairs(self.pairs, seed=seed, vocab_size=vocab_size, stream=stream)
        return lengths.synthetic(self.prompt, self.output, seed=seed, vocab_size=vocab_size, stream=stream)

    def settings(self, index: int) -> dict[str, Any]:
        """What was asked, for the record; no key and no folder."""
        asked, level = self.options, self.levels[index]
        words: dict[str, Any] = {self.kind: level, "seed": asked.seed + index}
        files = {"replay": asked.replay, "lengths": asked.lengths, "prompts": asked.prompts}
        words |= {name: path.name for name, path in files.items() if path is not None}
        if asked.replay is not None:
            words["speedup"] = asked.speedup or 1.0
        elif self.kind == "rate":
            words["arrivals"] = self.shape(level)
        if not files.keys() & words.keys():
            words["prompt_tokens"] = str(self.prompt)
        if asked.lengths is None and asked.replay is None:
            words["output_tokens"] = str(self.output)
        return words


def _check_together(asked: Options) -> None:
    """Raise :class:`RequestError` for options of which one makes the other meaningless."""
    loads = {"--rate": asked.rate, "--users": asked.users, "--replay": asked.replay}
    sources = {"--prompts": asked.prompts, "--lengths": asked.lengths, "--replay": asked.replay}
    ends = {"--requests": asked.requests, "--seconds": asked.seconds}
    for group, why in (
        (loads, "are different loads"),
        (sources, "each say what to send"),
        (ends, "each say when to end"),
    ):
        if len(named := [name for name, value in group.items() if value is not None]) > 1:
            raise RequestError(f"{' and '.join(named)} {why}: give one")
    if asked.sweep is not None and (named := [name for name, value in loads.items() if value is not None]):
        raise RequestError(f"--sweep sets the level itself: leave {named[0]} out (--sweep 1..16 or users:1..16)")
    if asked.arrivals == "ramp" and None in (asked.rate, asked.to, asked.seconds):
        raise RequestError("a ramp goes from --rate to --to in --seconds: give all three")
    if asked.arrivals == "gamma" and asked.burstiness is None:
        raise RequestError("--arrivals gamma needs --burstiness: below 1 comes in bursts, 1 is poisson")
    is_open = asked.rate is not None or (asked.sweep is not None and not asked.sweep.startswith("users:"))
    needs: dict[str, tuple[object, bool, str]] = {
        "--arrivals": (None if asked.arrivals == "poisson" else asked.arrivals, is_open, "--rate"),
        "--to": (asked.to, asked.arrivals == "ramp", "--arrivals ramp"),
        "--burstiness": (asked.burstiness, asked.arrivals == "gamma", "--arrivals gamma"),
        "--speedup": (asked.speedup, asked.replay is not None, "--replay"),
        "--think": (asked.think, not is_open and asked.replay is None, "--users"),
    }
    is_remote = is_url(asked.target)
    for name in ("speed", "device", "dtype"):
        needs[f"--{name}"] = (getattr(asked, name), not is_remote, f"a model in this process, not {asked.target}")
    for name in ("model", "endpoint"):
        needs[f"--{name}"] = (getattr(asked, name), is_remote, f"the address of a server, not {asked.target}")
    for name, (value, is_met, what) in needs.items():
        if value is not None and not is_met:
            raise RequestError(f"{name} goes with {what}")


def _check_numbers(asked: Options) -> None:
    for name in ("requests", "users", "seconds", "timeout", "speedup", "burstiness"):
        if (value := getattr(asked, name)) is not None and not 0 < value < float("inf"):
            raise RequestError(f"--{name} must be above 0, got {value:g}")
    for name in ("warmup", "think"):
        if (value := getattr(asked, name)) is not None and not 0 <= value < float("inf"):
            raise RequestError(f"--{name} must be 0 or more, got {value:g}")
    if not 0 < asked.share <= 1:
        raise RequestError(f"--share must be above 0 and at most 1, got {asked.share:g}")
