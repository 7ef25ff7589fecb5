"""How long a step takes, before it is run.

A step is a list of operators. Each needs arithmetic and moves bytes, and takes as long as
the slower of the two, plus what it costs to start it:

    t = max(FLOPs / rate, bytes / bandwidth) + launches * launch time

A :class:`Machine` has the rates: a datasheet's, ceilings measured here, or one model's own operators, timed. Rows that
are all alike make a :class:`StepShape`; the continuous engine packs chunks of prompts with decoding rows
(:func:`mixed_step`). Sources: Williams et al., "Roofline" (2009); Chen, "Transformer Inference Arithmetic" (2022).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import count
from typing import Literal

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.theory import capacity, communication, hardware
from nanoinfer.theory.arithmetic import (
    Matrix,
    bytes_per_element,
    causal_flops,
    check_sizes,
    experts_touched,
    head_matrix,
    kv_width,
    layer_matrices,
    pair_flops,
    tokens_seen,
)
from nanoinfer.theory.communication import Network, Traffic
from nanoinfer.theory.curves import OperatorCurves, Rows, interpolate

#: What an operator waits for; ``idle`` is a device that waits for the others.
Bound = Literal["compute", "memory", "launch", "link", "idle"]
Phase = Literal["prefill", "decode"]

#: Operators of one layer besides its matrix products: norms, rotation, attention, cache, residuals.
SMALL_OPERATORS = {"gpt2": 18, "llama": 44}
#: What is left of them once a compiler has fused them: two norms, the rotation, the activation.
FUSED_OPERATORS = 4


@dataclass(frozen=True)
class Operator:
    """One operator of a step, all its calls together."""

    name: str
    flops: float
    nbytes: float  # through memory, or, where ``bound`` is ``link``, to other devices
    calls: int
    seconds: float
    bound: Bound  # what takes the larger part of it

    def times(self, n: int) -> Operator:
        """``n`` of it, one after the other."""
        return replace(self, **{name: n * getattr(self, name) for name in ADDED})

    def plus(self, other: Operator) -> Operator:
        """Both together, under this one's name."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in ADDED})


#: What adds up over calls.
ADDED = ("flops", "nbytes", "calls", "seconds")


def merged(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """Operators of the same name added up, in order of first appearance."""
    by_name: dict[str, Operator] = {}
    for op in operators:
        by_name[op.name] = by_name[op.name].plus(op) if op.name in by_name else op
    return tuple(by_name.values())


@dataclass(frozen=True)
class Machine:
    """The rates to predict with: FLOP/s, bytes/s, seconds."""

    name: str
    dtype: str
    peak: float
    bandwidth: float
    launch_s: float = 0.0
    linear_launch_s: float = 0.0
    #: Measured ``(rows, FLOP/s)`` of products whose weights come from memory; without, ``peak`` or ``bandwidth`` limit.
    linear: tuple[tuple[int, float], ...] = ()
    curves: OperatorCurves | None = None  # timings of one model's own operators, in place of all rates for that model
    network: Network | None = None

    @classmethod
    def datasheet(cls, name: str, dtype: str = "bfloat16", launch_s: float = 0.0) -> Machine:
        """A device's dense peak and bandwidth as its vendor states them. Raises :class:`DeviceError`.

        Without ``launch_s`` small operators count as fused; eager PyTorch on a GPU pays some 4 us for each operator.
        """
        device = hardware.device(name)
        network = None if device.link is None else Network(device.link.gbs_one_way * 1e9)
        rates = hardware.peak(device, dtype), device.bandwidth_gbs * 1e9
        return cls(device.name, dtype, *rates, launch_s, launch_s, network=network)

    def require_network(self) -> Network:
        """Its links. Raises :class:`RequestError` where there are none."""
        if self.network is None:
            raise RequestError(f"{self.name} has no link in the table, so no split can be predicted: name one (--link)")
        return self.network

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which a kernel is bound by arithmetic."""
        return self.peak / self.bandwidth

    def linear_rate(self, rows: int) -> float:
        """Measured FLOP/s of a product of ``rows`` rows."""
        return interpolate(rows, self.linear)

    def operator(
        self, name: str, flops: float, nbytes: float, calls: int = 1, *, launch: float = 0.0, timed: float | None = None
    ) -> Operator:
        """An operator at these rates, all its launches together ``launch`` seconds, or of measured seconds."""
        compute, memory = flops / self.peak, nbytes / self.bandwidth
        bound: Bound = "compute" if compute > memory else "memory"
        if timed is not None:
            return Operator(name, flops, nbytes, calls, timed, bound)
        if launch > compute + memory:
            bound = "launch"
        return Operator(name, flops, nbytes, calls, max(compute, memory) + launch, bound)

    def product(self, name: str, flops: float, nbytes: float, rows: float) -> Operator:
        """A product in which each weight is multiplied with ``rows`` rows."""
        timed = None
        if self.linear:
            timed = flops / self.linear_rate(max(1, round(rows))) + self.linear_launch_s
        return self.operator(name, flops, nbytes, launch=self.linear_launch_s, timed=timed)

    def messages(self, traffic: Iterable[Traffic], n: int, stride: int = 1) -> list[Operator]:
        """The calls of a group of ``n`` ranks, each ``stride`` devices from the next."""
        network = self.require_network()
        return [
            Operator(part.kind, 0.0, part.sent, part.calls, network.seconds((part,), n, stride), "link")
            for part in traffic
            if part.calls
        ]


@dataclass(frozen=True)
class Step:
    """A predicted step: its operators, and what they add up to."""

    phase: Phase
    batch: int
    context: int
    machine: Machine
    operators: tuple[Operator, ...]

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(op.seconds for op in self.operators)

    @property
    def flops(self) -> float:
        """All arithmetic of the step."""
        return sum(op.flops for op in self.operators)

    @property
    def nbytes(self) -> float:
        """All bytes that the step moves through memory."""
        return sum(op.nbytes for op in self.operators if op.bound != "link")

    @property
    def sent(self) -> float:
        """All bytes that leave the device for others."""
        return sum(op.nbytes for op in self.operators if op.bound == "link")

    def share(self, *bounds: Bound) -> float:
        """Share of its time in operators that wait for one of these."""
        return sum(op.seconds for op in self.operators if op.bound in bounds) / self.seconds

    @property
    def bound(self) -> Bound:
        """What most of the step's time goes to."""
        return max((op.bound for op in self.operators), key=self.share)


@dataclass(frozen=True)
class StepShape:
    """Rows of a step that are all alike: ``batch`` rows bring ``new`` tokens each and then hold ``context`` each."""

    phase: Phase
    batch: int
    new: int
    context: int

    @classmethod
    def prefill(cls, batch: int, tokens: int) -> StepShape:
        """A causal pass over ``batch`` prompts."""
        return cls("prefill", batch, tokens, tokens)

    @classmethod
    def decode(cls, batch: int, context: int) -> StepShape:
        """One new token for each row, counted in ``context``."""
        return cls("decode", batch, 1, context)

    @property
    def tokens(self) -> int:
        """New tokens of all rows."""
        return self.batch * self.new

    def check(self, config: ModelConfig) -> None:
        """Raise :class:`RequestError` for sizes below 1 or a context beyond the model's."""
        check_sizes(batch=self.batch, context=self.context)
        if self.context > config.context:
            raise RequestError(f"context {self.context} is beyond the model's {config.context}")


@dataclass(frozen=True)
class Shard:
    """One of ``tp`` devices that share each layer of a model: the operators that it runs in a step.

    Raises :class:`RequestError` for heads that ``tp`` does not divide.
    """

    config: ModelConfig
    machine: Machine
    tp: int = 1

    def __post_init__(self) -> None:
        capacity.check_tp(self.config, self.tp)

    @cached_property
    def curves(self) -> OperatorCurves | None:
        """Timings of this model's operators, which hold for a single device."""
        return self.machine.curves if self.tp == 1 else None

    @cached_property
    def element(self) -> int:
        """Bytes of a number."""
        return bytes_per_element(self.machine.dtype)

    @cached_property
    def token_bytes(self) -> float:
        """Bytes of one token in one layer's KV cache here."""
        return kv_width(self.config) * self.element * capacity.kv_share(self.config, self.tp)

    def uniform(self, shape: StepShape) -> Step:
        """The step of rows that are all alike."""
        shape.check(self.config)
        operators = self.operators(shape.tokens, shape.batch, shape.phase, self.uniform_attention(shape))
        return Step(shape.phase, shape.batch, shape.context, self.machine, operators)

    def mixed(self, rows: Rows, ends: int) -> Step:
        """The step of rows that are not: see :func:`mixed_step`."""
        tokens = sum(new for _, new in rows)
        check_sizes(tokens=tokens)
        timed = None if self.curves is None else self.curves.mixed_attention(rows)
        attention = self.attention(*self.mixed_work(rows), timed)
        operators = self.operators(tokens, ends, _phase(rows, tokens), attention, paged=True)
        return Step(_phase(rows, tokens), len(rows), max(old + new for old, new in rows), self.machine, operators)

    def operators(
        self,
        tokens: int,
        ends: int,
        phase: Phase,
        attention: Operator | None,
        *,
        paged: bool = False,
        embeds: bool = True,
    ) -> tuple[Operator, ...]:
        """All of a step over ``tokens`` tokens, ``ends`` of which go through the head, in a token's order.

        ``embeds`` tells whether the embedding is here too.
        """
        parts = [*self.products(tokens), *self.head(ends), *([] if attention is None else [attention])]
        return *parts, self.small(tokens, phase, paged=paged), *self.messages(tokens, ends, embeds=embeds)

    def products(self, tokens: int) -> tuple[Operator, ...]:
        """All weight matrices of the layers against ``tokens`` tokens."""
        return merged(self._product(matrix, tokens).times(n) for matrix, n in _matrix_counts(self.config))

    def head(self, ends: int) -> list[Operator]:
        """The head against the tokens whose logits are wanted."""
        return [self._product(head_matrix(self.config), ends)] if ends else []

    def _product(self, matrix: Matrix, rows: int) -> Operator:
        """One weight matrix against ``rows`` rows: read once however many rows there are. Experts: those touched."""
        touched = experts_touched(matrix.copies, matrix.used, rows) if matrix.copies > 1 else 1.0
        flops = 2.0 * rows * matrix.used * matrix.rows * matrix.columns / self.tp
        moved = touched * matrix.size / self.tp + rows * matrix.used * (matrix.rows / self.tp + matrix.columns)
        if self.curves is not None:
            timed = self.curves.products[matrix.name].at(rows)
            return self.machine.operator(matrix.name, flops, moved * self.element, timed=timed)
        return self.machine.product(matrix.name, flops, moved * self.element, rows * matrix.used / touched)

    def uniform_attention(self, shape: StepShape) -> Operator:
        """Scores and weighted sums of rows that are all alike; keys and values are read once a pass."""
        config, seen = self.config, tokens_seen(self.config, shape.context)
        flops = causal_flops(config, shape.new) if shape.new > 1 else pair_flops(config, absorbed=True) * seen
        timed = None if self.curves is None else self.curves.attention(shape.batch, shape.new, shape.context)
        return self.attention(shape.batch * flops, shape.batch * seen, timed)

    def mixed_work(self, rows: Rows) -> tuple[int, int]:
        """FLOPs of attention and tokens whose keys and values are read, over all rows ``(cached, new)`` and layers."""
        windows = _windows(self.config)
        single, several = pair_flops(self.config, absorbed=True), pair_flops(self.config)
        flops = seen = 0
        for old, new in rows:
            flops += _pairs(windows, old, new) * (single if new == 1 else several)
            seen += _seen(windows, old + new)
        return flops, seen

    def attention(self, flops: float, seen: int, timed: float | None) -> Operator:
        """Attention of all layers; ``timed`` are measured seconds of one layer, which take the place of the rates."""
        n, launch = self.config.n_layers, self.config.n_layers * self.machine.launch_s
        whole = None if timed is None else n * timed
        work = flops / self.tp, seen * self.token_bytes
        return self.machine.operator("attention", *work, n, launch=launch, timed=whole)

    def small(self, tokens: int, phase: Phase, *, paged: bool = False) -> Operator:
        """Norms, rotation, activation and residuals: no products, all bytes and launches."""
        config, machine = self.config, self.machine
        eager = SMALL_OPERATORS.get(config.family, SMALL_OPERATORS["llama"])
        calls = config.n_layers * (eager if machine.launch_s else FUSED_OPERATORS)
        # Each operator reads and writes one activation; most are of the model's width.
        nbytes = 2.0 * calls * tokens * config.d_model * self.element
        if machine.curves is None:
            return machine.operator("small operators", 0.0, nbytes, calls, launch=calls * machine.launch_s)
        # One layer more stands for what a step does once: embedding, last norm, choice of the token.
        curve = machine.curves.rest_of(phase, paged=paged)
        seconds, least = ((config.n_layers + 1) * curve.at(n) for n in (tokens, 1))
        return Operator("small operators", 0.0, nbytes, calls, seconds, "launch" if seconds < 2 * least else "memory")

    def messages(self, tokens: int, ends: int, *, embeds: bool = True) -> list[Operator]:
        """What the devices that share each layer send each other: see :func:`communication.tensor_parallel`."""
        if self.tp == 1:
            return []
        traffic = communication.tensor_parallel(self.config, tokens, self.tp, self.element, ends, embeds=embeds)
        return self.machine.messages(traffic, self.tp)


@cache
def _matrix_counts(config: ModelConfig) -> tuple[tuple[Matrix, int], ...]:
    """Each matrix of the layers, and in how many it is."""
    return tuple(Counter(m for layer in range(config.n_layers) for m in layer_matrices(config, layer)).items())


@cache
def _windows(config: ModelConfig) -> tuple[tuple[int, int], ...]:
    """Each number of tokens that a layer sees at most, and how many layers do."""
    return tuple(Counter(config.window_of(layer) or sys.maxsize for layer in range(config.n_layers)).items())


def _seen(windows: Iterable[tuple[int, int]], context: int) -> int:
    """Tokens of a row that are read, summed over layers."""
    return sum(layers * min(context, size) for size, layers in windows)


def _pairs(windows: Iterable[tuple[int, int]], old: int, new: int) -> int:
    """Pairs of a new token and one that it sees, summed over layers."""
    total = 0
    for size, layers in windows:
        rising = max(0, min(new, size - old))  # new tokens that see one more than the token before
        total += layers * (rising * old + rising * (rising + 1) // 2 + (new - rising) * size)
    return total


def _phase(rows: Rows, tokens: int) -> Phase:
    return "decode" if tokens == len(rows) else "prefill"


# --- steps --------------------------------------------------------------------------


def prefill_step(config: ModelConfig, machine: Machine, batch: int, tokens: int, tp: int = 1) -> Step:
    """A causal pass over ``batch`` prompts of ``tokens`` each; head on the last position alone."""
    return Shard(config, machine, tp).uniform(StepShape.prefill(batch, tokens))


def decode_step(config: ModelConfig, machine: Machine, batch: int, context: int, tp: int = 1) -> Step:
    """One new token for each of ``batch`` rows that then hold ``context`` tokens."""
    return Shard(config, machine, tp).uniform(StepShape.decode(batch, context))


def mixed_step(config: ModelConfig, machine: Machine, rows: Rows, ends: int, tp: int = 1) -> Step:
    """A step of unlike rows over a paged cache, operator by operator, its layers shared by ``tp`` devices.

    The head is computed for the ``ends`` alone: how many rows' last token chooses the next one.
    """
    return Shard(config, machine, tp).mixed(rows, ends)


class StepTimes:
    """Seconds of the steps of :func:`mixed_step`, cheap enough for the millions of a simulation.

    All but attention depends on the numbers of packed tokens and of ends, and is computed once for each. Attention of
    decoding rows depends, without windows, on the sum of their contexts alone.
    Raises :class:`RequestError` for devices that cannot share the model, or have no link to do it over.
    """

    def __init__(self, config: ModelConfig, machine: Machine, tp: int = 1) -> None:
        self._shard = shard = Shard(config, machine, tp)
        self._flops_per_s, self._tokens_per_s = tp * machine.peak, machine.bandwidth / shard.token_bytes
        self._n_layers, self._launch_s = config.n_layers, config.n_layers * machine.launch_s

        @cache
        def body(tokens: int, phase: Phase) -> float:
            return sum(op.seconds for op in shard.operators(tokens, 0, phase, None, paged=True))

        @cache
        def head(ends: int) -> float:
            # The all-reduces are the body's: what the ends add to them is the last message.
            return sum(op.seconds for op in (*shard.head(ends), *shard.messages(1, ends)[1:]))

        self._body, self._head = body, head
        self._body(1, "decode")  # what cannot be predicted is refused now

    def seconds(self, rows: Rows, ends: int) -> float:
        """Seconds of one step; rows and ends as in :func:`mixed_step`."""
        tokens = sum(new for _, new in rows)
        fixed = self._body(tokens, _phase(rows, tokens)) + self._head(ends)
        if (curves := self._shard.curves) is not None:
            return fixed + self._n_layers * curves.mixed_attention(rows)
        return fixed + self._attention(*self._shard.mixed_work(rows))

    def decoding(self, contexts: Sequence[int]) -> Iterator[float]:
        """Seconds of one decode step after another, without end: each row holds one token more in each.

        ``contexts`` are the tokens that the rows hold in the first of them, its new one included.
        """
        config, n = self._shard.config, len(contexts)
        fixed = self._body(n, "decode") + self._head(n)
        if (curves := self._shard.curves) is not None:
            for total in count(sum(contexts), n):
                yield fixed + config.n_layers * curves.paged(n, total / n)
        pair, windows = pair_flops(config, absorbed=True), _windows(config)
        each: Iterator[int] = count(config.n_layers * sum(contexts), config.n_layers * n)
        if any(size < sys.maxsize for size, _ in windows):
            each = (sum(_seen(windows, context + step) for context in contexts) for step in count())
        for seen in each:
            yield fixed + self._attention(pair * seen, seen)

    def _attention(self, flops: float, seen: int) -> float:
        return max(flops / self._flops_per_s, seen / self._tokens_per_s) + self._launch_s


# --- engines ------------------------------------------------------------------------


def naive_seconds(config: ModelConfig, machine: Machine, batch: int, prompt: int, new: int) -> Sequence[float]:
    """Predicted seconds of each step of the naive engine: a pass over all tokens so far."""
    return [prefill_step(config, machine, batch, prompt + i).seconds for i in range(new)]


def cached_seconds(config: ModelConfig, machine: Machine, batch: int, prompt: int, new: int) -> Sequence[float]:
    """Predicted seconds of each step of the cached engine: a prefill, then decode steps."""
    first = prefill_step(config, machine, batch, prompt).seconds
    return [first, *(decode_step(config, machine, batch, prompt + i).seconds for i in range(1, new))]


def batched_seconds(
    config: ModelConfig, machine: Machine, prompts: Sequence[int], outputs: Sequence[int], batch_size: int
) -> Sequence[float]:
    """Predicted seconds of each static batch, one after the other; ``sum(...)`` is the whole.

    At most ``batch_size`` requests, in their order, are padded to the longest prompt and prefilled together; then all
    rows decode until the longest answer ends. ``prompts`` and ``outputs`` count each request's tokens; a request
    without output takes no row.
    """
    if len(prompts) != len(outputs):
        raise RequestError(
            f"{len(prompts)} prompt lengths but {len(outputs)} output lengths: give one of each a request"
        )
    check_sizes(batch_size=batch_size)
    served = [(prompt, new) for prompt, new in zip(prompts, outputs, strict=True) if new > 0]
    for prompt, new in served:
        check_sizes(prompt=prompt)
        if prompt + new > config.context:
            raise RequestError(f"{prompt} prompt and {new} output tokens are beyond the model's {config.context}")
    seconds = []
    for first in range(0, len(served), batch_size):
        rows = served[first : first + batch_size]
        longest, new = (max(lengths) for lengths in zip(*rows, strict=True))
        # A long prompt batched with a long answer: padded rows may be wider than the context that each of them fits.
        wide = replace(config, context=max(config.context, longest + new))
        seconds.append(sum(cached_seconds(wide, machine, len(rows), longest, new)))
    return seconds
