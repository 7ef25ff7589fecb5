"""Which question decides how a model is to be spread over devices, what the numbers answer, and every split compared.

Five questions settle most deployments. Two of them (what memory lacks, whether one device holds the model) are
arithmetic; the others are the reader's, and an answer that was not given is not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError, check, nearest
from nanoinfer.theory.capacity import Bytes
from nanoinfer.theory.parallel import ParallelConfig, decode_step, largest_batch, memory, prefill_step
from nanoinfer.theory.roofline import Machine, mixed_step

QUESTIONS: Final = (
    "one large model or many small ones?",
    "is memory short of room for weights, or for the KV cache?",
    "lower latency, higher throughput, or both?",
    "are requests independent, or do they share long prefixes?",
    "does one device hold the model, or must it be split?",
)
#: The options that answer them; the others are answered by arithmetic.
OPTION_OF: Final = ("--models", "", "--want", "--shared-prefix", "")
WANTS: Final = ("latency", "throughput", "both")
#: Splits of equally many devices that are compared, apart from the requested one.
MOST_SHOWN: Final = 6


@dataclass(frozen=True)
class Preferences:
    """What only the reader can know; ``None`` is not given.

    ``want`` is one of :data:`WANTS`, ``shared_prefix`` counts the tokens with which all prompts begin, and ``models``
    the models of this size to be served.
    """

    want: str | None = None
    shared_prefix: int | None = None
    models: int | None = None

    def check(self, context: int) -> None:
        """Raise :class:`RequestError` for an unknown ``want``, or a prefix as long as the prompt of ``context``."""
        if self.want is not None and self.want not in WANTS:
            raise RequestError(f"--want {self.want}: {nearest(self.want, WANTS)}")
        if self.models is not None:
            check("--models", self.models, at_least=1)
        if self.shared_prefix is not None and not 0 <= self.shared_prefix < context:
            raise RequestError(
                f"--shared-prefix {self.shared_prefix}: a prefix has 0 tokens or more and is shorter than the prompt "
                f"({context})"
            )


@dataclass(frozen=True)
class Demand:
    """What each replica is to serve: ``batch`` rows with prompts of ``context`` tokens that grow to ``longest``.

    ``machine`` is one device with its links, ``memory_bytes`` what it has.
    """

    config: ModelConfig
    machine: Machine
    memory_bytes: float
    batch: int
    context: int
    longest: int

    def bytes_of(self, rows: int) -> Bytes:
        """Bytes of a single device that serves this number of rows."""
        return memory(self.config, ParallelConfig(), rows, self.longest, self.machine.dtype)

    @property
    def fits(self) -> bool:
        """Whether one device holds the model and all rows of a replica."""
        return self.bytes_of(self.batch).total <= self.memory_bytes


def advise(demand: Demand, split: ParallelConfig, preferences: Preferences) -> dict[str, Any]:
    """The five answers, which of them decides and why, and what it suggests; for the record of ``predict``.

    Other splits of equally many devices are compared with ``split``.
    """
    answers = _answers(demand, preferences)
    number, reason = _decides(demand, preferences)
    order = preferences.want or ("smallest" if number in (2, 5) and not demand.fits else "latency")
    options = parallel_options(demand, split.devices, demand.batch * split.replicas, order)
    return {
        "answers": [
            {
                "question": i + 1,
                "asks": QUESTIONS[i],
                "answer": answer,
                "from": "the numbers" if not OPTION_OF[i] else None if answer is None else "given",
                "give": OPTION_OF[i] if answer is None else None,
            }
            for i, answer in enumerate(answers)
        ],
        "decides": number,
        "why": reason,
        "suggestion": _suggestion(demand, preferences, number, options),
        "choices": [
            option.record(as_asked=option.split == split)
            for i, option in enumerate(options)
            if i < MOST_SHOWN or option.split == split
        ],
    }


def _answers(demand: Demand, preferences: Preferences) -> Iterator[str | None]:
    one, full, gb = demand.bytes_of(1), demand.bytes_of(demand.batch), demand.memory_bytes / 1e9
    models, shared = preferences.models, preferences.shared_prefix
    if models is None:
        yield None
    else:
        held = int(demand.memory_bytes // one.weights)
        yield "one" if models == 1 else f"{models}, of which one device holds the weights of {held}"
    larger = "weights" if full.weights >= full.kv else "the KV cache"
    rows = f"{demand.batch:,} row{'s' if demand.batch > 1 else ''} of {demand.longest:,} tokens"
    yield f"{larger}: {full.weights / 1e9:.1f} GB of weights, {full.kv / 1e9:.1f} GB of cache for {rows}"
    yield preferences.want
    if shared is None:
        yield None
    else:
        yield f"{shared:,} of {demand.context:,} tokens are shared" if shared else "independent"
    holds = "holds" if one.total <= demand.memory_bytes else "does not hold"
    yield f"one device ({gb:.0f} GB) {holds} the weights and one row, {one.total / 1e9:.1f} GB"


def _decides(demand: Demand, preferences: Preferences) -> tuple[int, str]:
    """The number of the first question whose answer leaves no choice, and why."""
    one, full = demand.bytes_of(1), demand.bytes_of(demand.batch)
    if one.total > demand.memory_bytes:
        return 5, (
            f"One device has {demand.memory_bytes / 1e9:.0f} GB and the model needs {one.total / 1e9:.1f} GB with a "
            "single row: it must be split, whatever else is wanted."
        )
    if not demand.fits:
        return 2, (
            f"One device holds the weights ({full.weights / 1e9:.1f} GB) but not the cache of all rows next to them "
            f"({full.kv / 1e9:.1f} GB): the KV cache asks for more devices, or for fewer rows on each."
        )
    if (preferences.models or 1) > 1:
        return 1, f"Each of {preferences.models} models fits one device: they are to be placed, not split."
    shared, context = preferences.shared_prefix or 0, demand.context
    if 2 * shared >= context:
        whole = mixed_step(demand.config, demand.machine, [(0, context)], 1).seconds
        rest = mixed_step(demand.config, demand.machine, [(shared, context - shared)], 1).seconds
        return 4, (
            f"The shared prefix is most of the prompt: found in a cache, it leaves {1e3 * rest:.3g} of "
            f"{1e3 * whole:.3g} ms of prefill, more than a split would save."
        )
    if preferences.want is not None:
        return 3, f"One device holds the model and all rows, so what is wanted decides: {preferences.want}."
    return 5, "One device holds the model and all rows, so nothing must be split; whether to is question 3 (--want)."


def _suggestion(demand: Demand, preferences: Preferences, number: int, options: Sequence[ParallelOption]) -> str:
    if number == 1:
        return "A device for each model, or several to a device where they are idle; no split."
    if number == 4:
        return "Replicas with a prefix cache each, and requests with one beginning sent to the same replica."
    if number == 5 and demand.fits and preferences.want is None:
        return "Replicas: as many as the load asks for, each a device of its own."
    best = options[0]
    figures = f"{1e3 * best.decode_s:.3g} ms a token, up to {best.tokens_per_s:,.0f} tokens/s"
    return f"Of {best.split.devices} device{'s' if best.split.devices > 1 else ''}: {best.split}, {figures}."


# --- the splits compared ----------------------------------------------------------------


@dataclass(frozen=True)
class ParallelOption:
    """One split: ``ttft_s`` of one prompt, ``decode_s`` of a step with the requested rows, and the most rows that fit.

    ``most_rows`` counts all replicas, and ``tokens_per_s`` is the rate with them.
    """

    split: ParallelConfig
    ttft_s: float
    decode_s: float
    most_rows: int
    tokens_per_s: float

    def record(self, as_asked: bool) -> dict[str, Any]:
        """As JSON."""
        keys = ("ttft_s", "decode_seconds", "most_rows", "tokens_per_s_with_most_rows")
        figures = dict(zip(keys, astuple(self)[1:], strict=True))
        return {"split": vars(self.split), "name": str(self.split), **figures, "as_asked": as_asked}


def splits(devices: int) -> Iterator[ParallelConfig]:
    """Every split into this number of devices that the theory has: tp with pp or cp, or ep, and replicas of that."""
    for group in _divisors(devices):
        replicas = devices // group
        for tp in _divisors(group):
            yield ParallelConfig(tp=tp, pp=group // tp, replicas=replicas)
            if group > tp:
                yield ParallelConfig(tp=tp, cp=group // tp, replicas=replicas)
        if group > 1:
            yield ParallelConfig(ep=group, replicas=replicas)


def _divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def parallel_options(demand: Demand, devices: int, rows: int, want: str) -> list[ParallelOption]:
    """The splits of ``devices`` devices on which ``rows`` rows in all fit, best first.

    ``want`` is ``latency`` (the shortest decode step for those rows), ``throughput`` (most tokens/s with as many rows
    as fit), ``both`` (the best product of the two) or ``smallest`` (fewest devices to a replica, then latency).
    """
    config, machine, context = demand.config, demand.machine, demand.context
    options = []
    for split in splits(devices):
        try:
            most = largest_batch(
                config, split, demand.longest, demand.memory_bytes, machine.dtype, utilisation=1.0, block=1
            )
            each = math.ceil(rows / split.replicas)
            if most < each:
                continue
            first = prefill_step(config, machine, split, 1, context)
            step, full = (decode_step(config, machine, split, n, context) for n in (each, most))
        except RequestError:  # the model does not divide so, or there is no link
            continue
        total = split.replicas * most
        options.append(ParallelOption(split, first.seconds, step.seconds, total, total / full.seconds))

    def key(option: ParallelOption) -> tuple[float, ...]:
        order = {
            "latency": option.decode_s,
            "throughput": -option.tokens_per_s,
            "both": option.decode_s / option.tokens_per_s,
            "smallest": option.split.group,
        }
        return order[want], option.decode_s, option.split.group

    return sorted(options, key=key)
