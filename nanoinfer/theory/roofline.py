"""How long a step takes, before it is run.

A step is a list of operators. Each needs arithmetic and moves bytes, and takes as long as
the slower of the two, plus what it costs to start it:

    t = max(FLOPs / rate, bytes / bandwidth) + launches * launch time

A :class:`Machine` has the rates: a datasheet's, ceilings measured here, or one model's own operators, timed. Rows that
are all alike make a :class:`StepShape`; the continuous engine packs chunks of prompts with decoding rows
(:func:`mixed_step`). Sources: Williams et al., "Roofline" (2009); Chen, "Transformer Inference Arithmetic" (2022).
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Literal, NamedTuple

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.theory import arithmetic, capacity, communication, hardware
from nanoinfer.theory.communication import Network, Traffic
from nanoinfer.theory.curves import OperatorCurves, Rows, interpolate
from nanoinfer.theory.parameters import (
    Matrix,
    bytes_per_element,
    check_sizes,
    experts_touched,
    head_matrix,
    layer_matrices,
)

#: What an operator waits for; ``idle`` is a device that waits for the others.
Bound = Literal["compute", "memory", "launch", "link", "idle"]
Phase = Literal["prefill", "decode"]

#: Operators of one layer besides its matrix products: norms, rotation, attention, cache, residuals.
SMALL_OPERATORS = {"gpt2": 18, "llama": 44}
#: What is left of them once a compiler has fused them: two norms, the rotation, the activation.
FUSED_OPERATORS = 4


@dataclass(frozen=True)
class Machine:
    """The rates to predict with: FLOP/s, bytes/s, seconds.

    ``linear`` holds measured ``(rows, FLOP/s)`` of products whose weights come from memory; where it is
    empty, a product runs at ``peak`` or at ``bandwidth``, whichever is slower. ``curves``, timings of one
    model's own operators, take the place of all rates for that model. ``network`` links it to others.
    """

    name: str
    dtype: str
    peak: float
    bandwidth: float
    launch_s: float = 0.0
    linear_launch_s: float = 0.0
    linear: tuple[tuple[int, float], ...] = ()
    curves: OperatorCurves | None = None
    network: Network | None = None

    @classmethod
    def datasheet(cls, name: str, dtype: str = "bfloat16", launch_s: float = 0.0) -> Machine:
        """A device's dense peak and bandwidth as its vendor states them. Raises :class:`DeviceError`.

        Without ``launch_s`` small operators count as fused; eager PyTorch on a GPU pays some 4 us for each operator.
        """
        device = hardware.device(name)
        network = None if device.link is None else Network(device.link.gbs_one_way * 1e9)
        bandwidth = device.bandwidth_gbs * 1e9
        peak = hardware.peak(device, dtype)
        return cls(device.name, dtype, peak, bandwidth, launch_s, launch_s, network=network)

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


@dataclass(frozen=True)
class Operator:
    """One operator of a step, all its calls together. Seconds; ``bound`` is the larger part.

    ``nbytes`` go through memory, or, where ``bound`` is ``link``, to other devices.
    """

    name: str
    flops: float
    nbytes: float
    calls: int
    seconds: float
    bound: Bound

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.nbytes if self.nbytes else math.inf

    def times(self, n: int) -> Operator:
        """``n`` of it, one after the other."""
        return replace(
            self, flops=n * self.flops, nbytes=n * self.nbytes, calls=n * self.calls, seconds=n * self.seconds
        )

    def plus(self, other: Operator) -> Operator:
        """Both together, under this one's name."""
        return replace(
            self,
            flops=self.flops + other.flops,
            nbytes=self.nbytes + other.nbytes,
            calls=self.calls + other.calls,
            seconds=self.seconds + other.seconds,
        )


def merged(operators: Iterable[Operator]) -> tuple[Operator, ...]:
    """Operators of the same name added up, in order of first appearance."""
    by_name: dict[str, Operator] = {}
    for op in operators:
        by_name[op.name] = by_name[op.name].plus(op) if op.name in by_name else op
    return tuple(by_name.values())


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

    @property
    def bound(self) -> Bound:
        """What most of the step's time goes to."""
        shares: dict[Bound, float] = {}
        for op in self.operators:
            shares[op.bound] = shares.get(op.bound, 0.0) + op.seconds
        return max(shares, key=lambda kind: shares[kind])


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


def prefill_step(config: ModelConfig, machine: Machine, batch: int, tokens: int, tp: int = 1) -> Step:
    """A causal pass over ``batch`` prompts of ``tokens`` each; head on the last position alone."""
    return uniform_step(config, machine, StepShape.prefill(batch, tokens), tp)


def decode_step(config: ModelConfig, machine: Machine, batch: int, context: int, tp: int = 1) -> Step:
    """One new token for each of ``batch`` rows that then hold ``context`` tokens."""
    return uniform_step(config, machine, StepShape.decode(batch, context), tp)


def uniform_step(config: ModelConfig, machine: Machine, shape: StepShape, tp: int = 1) -> Step:
    """A step of rows that are all alike, its layers shared by ``tp`` devices."""
    shape.check(config)
    capacity.check_tp(config, tp)
    operators = uniform_operators(config, machine, shape, shape.batch, tp)
    return Step(shape.phase, shape.batch, shape.context, machine, tuple(operators))


def mixed_step(config: ModelConfig, machine: Machine, rows: Rows, ends: int, tp: int = 1) -> Step:
    """A step of unlike rows over a paged cache, operator by operator, its layers shared by ``tp`` devices.

    The head is computed for the ``ends`` alone: how many rows' last token chooses the next one.
    """
    tokens = sum(new for _, new in rows)
    check_sizes(tokens=tokens)
    capacity.check_tp(config, tp)
    timed = machine.curves.mixed_attention(rows) if machine.curves is not None and tp == 1 else None
    phase = _phase(rows, tokens)
    operators = (
        *weight_products(config, machine, tokens, ends, tp),
        attention(config, machine, mixed_attention_work(config, rows), tp, timed),
        small_operators(config, machine, tokens, phase, paged=True),
        *tp_messages(config, machine, tokens, ends, tp),
    )
    return Step(phase, len(rows), max(old + new for old, new in rows), machine, operators)


class StepTimes:
    """Seconds of the steps of :func:`mixed_step`, cheap enough for the millions of a simulation.

    All but attention depends on the numbers of packed tokens and of ends, and is computed once for each. Attention of
    decoding rows depends, without windows, on the sum of their contexts alone.
    Raises :class:`RequestError` for devices that cannot share the model, or have no link to do it over.
    """

    def __init__(self, config: ModelConfig, machine: Machine, tp: int = 1) -> None:
        capacity.check_tp(config, tp)
        self.config, self.machine, self.tp = config, machine, tp
        self._curves = machine.curves if tp == 1 else None
        token_bytes = arithmetic.kv_width(config) * bytes_per_element(machine.dtype) * capacity.kv_share(config, tp)
        self._flops_per_s, self._tokens_per_s = tp * machine.peak, machine.bandwidth / token_bytes
        self._launch_s = config.n_layers * machine.launch_s

        @cache
        def body(tokens: int, phase: Phase) -> float:
            operators = weight_products(config, machine, tokens, 0, tp)
            operators.append(small_operators(config, machine, tokens, phase, paged=True))
            operators += tp_messages(config, machine, tokens, 0, tp)
            return sum(op.seconds for op in operators)

        @cache
        def head(ends: int) -> float:
            if not ends:
                return 0.0
            seconds = _product(head_matrix(config), machine, ends, tp).seconds
            if tp > 1:
                gather = communication.logits_gather(config, ends, tp, bytes_per_element(machine.dtype))
                seconds += machine.require_network().seconds((gather,), tp)
            return seconds

        self._body, self._head = body, head
        self._body(1, "decode")  # what cannot be predicted is refused now

    def seconds(self, rows: Rows, ends: int) -> float:
        """Seconds of one step; rows and ends as in :func:`mixed_step`."""
        tokens = sum(new for _, new in rows)
        fixed = self._body(tokens, _phase(rows, tokens)) + self._head(ends)
        if self._curves is not None:
            return fixed + self.config.n_layers * self._curves.mixed_attention(rows)
        return fixed + self._attention(*mixed_attention_work(self.config, rows))

    def decoding(self, contexts: Sequence[int]) -> Iterator[float]:
        """Seconds of one decode step after another, without end: each row holds one token more in each.

        ``contexts`` are the tokens that the rows hold in the first of them, its new one included.
        """
        config, n = self.config, len(contexts)
        fixed = self._body(n, "decode") + self._head(n)
        if self._curves is not None:
            for total in count(sum(contexts), n):
                yield fixed + config.n_layers * self._curves.paged(n, total / n)
        pair, windows = arithmetic.pair_flops(config, absorbed=True), _windows(config)
        if any(size < sys.maxsize for size, _ in windows):
            for step in count():
                seen = sum(_seen(windows, context + step) for context in contexts)
                yield fixed + self._attention(pair * seen, seen)
        for seen in count(config.n_layers * sum(contexts), config.n_layers * n):
            yield fixed + self._attention(pair * seen, seen)

    def _attention(self, flops: float, seen: int) -> float:
        return max(flops / self._flops_per_s, seen / self._tokens_per_s) + self._launch_s


def _phase(rows: Rows, tokens: int) -> Phase:
    return "decode" if tokens == len(rows) else "prefill"


# --- operators ----------------------------------------------------------------------


def uniform_operators(
    config: ModelConfig, machine: Machine, shape: StepShape, ends: int, tp: int, *, embeds: bool = True
) -> list[Operator]:
    """A step's operators; ``ends`` rows go through the head, and ``embeds`` tells whether the embedding is here too."""
    return [
        *weight_products(config, machine, shape.tokens, ends, tp),
        uniform_attention(config, machine, shape, tp),
        small_operators(config, machine, shape.tokens, shape.phase),
        *tp_messages(config, machine, shape.tokens, ends, tp, embeds=embeds),
    ]


@cache
def _matrix_counts(config: ModelConfig) -> tuple[tuple[Matrix, int], ...]:
    """Each matrix of the layers, and in how many it is."""
    return tuple(Counter(m for layer in range(config.n_layers) for m in layer_matrices(config, layer)).items())


def weight_products(config: ModelConfig, machine: Machine, tokens: int, ends: int, tp: int) -> list[Operator]:
    """All weight matrices against ``tokens`` tokens, and the head against the ``ends`` whose logits are wanted."""
    products = [_product(matrix, machine, tokens, tp).times(n) for matrix, n in _matrix_counts(config)]
    if ends:
        products.append(_product(head_matrix(config), machine, ends, tp))
    return list(merged(products))


def _product(matrix: Matrix, machine: Machine, rows: int, tp: int) -> Operator:
    """One weight matrix against ``rows`` rows: read once however many rows there are. Experts: those touched."""
    element = bytes_per_element(machine.dtype)
    touched = experts_touched(matrix.copies, matrix.used, rows) if matrix.copies > 1 else 1.0
    flops = 2.0 * rows * matrix.used * matrix.rows * matrix.columns / tp
    weights = touched * matrix.size * element / tp
    nbytes = weights + rows * matrix.used * (matrix.rows / tp + matrix.columns) * element
    if machine.curves is not None and tp == 1:
        seconds = machine.curves.products[matrix.name].at(rows)
        return Operator(matrix.name, flops, nbytes, 1, seconds, _side(machine, flops, nbytes))
    return product_at_rates(matrix.name, machine, flops, nbytes, rows * matrix.used / touched)


def product_at_rates(name: str, machine: Machine, flops: float, nbytes: float, rows: float) -> Operator:
    """One product at the machine's rates; each weight is multiplied with ``rows`` rows."""
    launch = machine.linear_launch_s
    if machine.linear:
        seconds = flops / machine.linear_rate(max(1, round(rows))) + launch
        return Operator(name, flops, nbytes, 1, seconds, _side(machine, flops, nbytes))
    compute, memory = flops / machine.peak, nbytes / machine.bandwidth
    return Operator(name, flops, nbytes, 1, max(compute, memory) + launch, bound_of(compute, memory, launch))


class AttentionWork(NamedTuple):
    """FLOPs of attention, and tokens whose keys and values are read, both summed over rows and layers."""

    flops: float
    seen: int


def uniform_attention(config: ModelConfig, machine: Machine, shape: StepShape, tp: int) -> Operator:
    """Scores and weighted sums of rows that are all alike; keys and values are read once a pass."""
    if shape.new == 1:
        flops = arithmetic.pair_flops(config, absorbed=True) * arithmetic.tokens_seen(config, shape.context)
    else:
        flops = arithmetic.causal_flops(config, shape.new)
    work = AttentionWork(float(shape.batch * flops), shape.batch * arithmetic.tokens_seen(config, shape.context))
    timed = None
    if machine.curves is not None and tp == 1:
        timed = machine.curves.attention(shape.batch, shape.new, shape.context)
    return attention(config, machine, work, tp, timed)


def mixed_attention_work(config: ModelConfig, rows: Rows) -> AttentionWork:
    """Of rows of unlike lengths, each as ``(cached, new)`` tokens."""
    windows = _windows(config)
    single, several = arithmetic.pair_flops(config, absorbed=True), arithmetic.pair_flops(config)
    flops = seen = 0
    for old, new in rows:
        flops += _pairs(windows, old, new) * (single if new == 1 else several)
        seen += _seen(windows, old + new)
    return AttentionWork(flops, seen)


def attention(config: ModelConfig, machine: Machine, work: AttentionWork, tp: int, timed: float | None) -> Operator:
    """Attention of all layers; ``timed`` are measured seconds of one layer, which take the place of the rates."""
    read = work.seen * arithmetic.kv_width(config) * bytes_per_element(machine.dtype) * capacity.kv_share(config, tp)
    compute, memory = work.flops / tp / machine.peak, read / machine.bandwidth
    launch = config.n_layers * machine.launch_s
    flops = work.flops / tp
    if timed is None:
        seconds, bound = max(compute, memory) + launch, bound_of(compute, memory, launch)
    else:
        seconds, bound = config.n_layers * timed, _side(machine, flops, read)
    return Operator("attention", flops, read, config.n_layers, seconds, bound)


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


def small_operators(
    config: ModelConfig, machine: Machine, tokens: int, phase: Phase, *, paged: bool = False
) -> Operator:
    """Norms, rotation, activation and residuals: no products, all bytes and launches."""
    eager = SMALL_OPERATORS.get(config.family, SMALL_OPERATORS["llama"])
    calls = config.n_layers * (eager if machine.launch_s else FUSED_OPERATORS)
    # Each operator reads and writes one activation; most are of the model's width.
    nbytes = 2.0 * calls * tokens * config.d_model * bytes_per_element(machine.dtype)
    if machine.curves is not None:
        # One layer more stands for what a step does once: embedding, last norm, choice of the token.
        curve = machine.curves.rest_of(phase, paged=paged)
        seconds, least = ((config.n_layers + 1) * curve.at(n) for n in (tokens, 1))
        return Operator("small operators", 0.0, nbytes, calls, seconds, "launch" if seconds < 2 * least else "memory")
    memory, launch = nbytes / machine.bandwidth, calls * machine.launch_s
    return Operator("small operators", 0.0, nbytes, calls, memory + launch, "launch" if launch > memory else "memory")


def tp_messages(
    config: ModelConfig, machine: Machine, tokens: int, ends: int, tp: int, *, embeds: bool = True
) -> list[Operator]:
    """What the devices that share each layer send each other: see :func:`communication.tensor_parallel`."""
    if tp == 1:
        return []
    element = bytes_per_element(machine.dtype)
    traffic = communication.tensor_parallel(config, tokens, tp, element, ends, embeds=embeds)
    return list(message_operators(traffic, machine, tp))


def message_operators(traffic: Iterable[Traffic], machine: Machine, n: int, stride: int = 1) -> Iterator[Operator]:
    """The calls of a group of ``n`` ranks, each ``stride`` devices from the next."""
    network = machine.require_network()
    for part in traffic:
        if part.calls:
            yield link_operator(part.kind, part, network.seconds((part,), n, stride))


def link_operator(name: str, part: Traffic, seconds: float) -> Operator:
    """Messages as an operator."""
    return Operator(name, 0.0, part.sent, part.calls, seconds, "link")


def _side(machine: Machine, flops: float, nbytes: float) -> Bound:
    return "compute" if flops / nbytes > machine.ridge else "memory"


def bound_of(compute: float, memory: float, launch: float) -> Bound:
    """What an operator of these seconds waits for."""
    if launch > compute + memory:
        return "launch"
    return "compute" if compute > memory else "memory"


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
