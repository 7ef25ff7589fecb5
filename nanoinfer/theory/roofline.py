"""How long a step takes, before it is run.

A step is a list of operators. Each needs arithmetic and moves bytes, and takes as long as
the slower of the two, plus what it costs to start it:

    t = max(FLOPs / rate, bytes / bandwidth) + launches * launch time

The sum over the step is the prediction. A :class:`Machine` says what the rates are: a
datasheet's peaks, or ceilings that were measured on the machine at hand. Sources: Williams
et al., "Roofline" (2009); Chen, "Transformer Inference Arithmetic" (2022).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.theory import arithmetic, capacity, communication, hardware
from nanoinfer.theory.curves import OperatorCurves, between
from nanoinfer.theory.network import Network
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

#: Operators of one layer of our models beside its matrix products: norms, rotation, attention, cache, residuals.
SMALL_OPERATORS = {"gpt2": 18, "llama": 44}
#: What is left of them once a compiler has fused them: two norms, the rotation, the activation.
FUSED_OPERATORS = 4


class Ceilings(Protocol):
    """What a calibration offers; :class:`nanoinfer.calibrate.machine.Calibration` is one."""

    @property
    def device_name(self) -> str:
        """What it is."""

    @property
    def read_bandwidth(self) -> float:
        """Bytes/s."""

    def peak(self, dtype: str) -> float:
        """FLOP/s of the fastest product."""

    def flops_at(self, dtype: str, rows: int, *, streamed: bool = False) -> float:
        """FLOP/s of a product of so many rows."""

    def launch_seconds(self, dtype: str) -> tuple[float, float]:
        """Seconds to start a small operator, and a matrix product."""


@dataclass(frozen=True)
class Machine:
    """The rates to predict with: FLOP/s, bytes/s, seconds.

    ``linear`` holds measured ``(rows, FLOP/s)`` of products whose weights come from memory; where it is
    empty, a product runs at ``peak`` or at ``bandwidth``, whichever is slower. ``curves``, timings of one
    model's own operators, take the place of all rates for that model. ``link`` is bytes/s one way
    to each neighbour and ``alpha`` the seconds that one collective costs however small it is; ``nodes_link``
    and ``nodes_alpha`` are the same between servers of ``gpus_per_node`` devices, ``None`` where there is one.
    """

    name: str
    dtype: str
    peak: float
    bandwidth: float
    launch_s: float = 0.0
    linear_launch_s: float = 0.0
    linear: tuple[tuple[int, float], ...] = ()
    curves: OperatorCurves | None = None
    link: float | None = None
    alpha: float = 8e-6
    nodes_link: float | None = None
    nodes_alpha: float = 10e-6
    gpus_per_node: int = 8

    @classmethod
    def datasheet(cls, name: str, dtype: str = "bfloat16", launch_s: float = 0.0) -> Machine:
        """A device's dense peak and bandwidth as its vendor states them. Raises :class:`DeviceError`.

        Without ``launch_s`` this is the roofline itself, as if small operators were fused and nothing
        cost time to start; eager PyTorch on a GPU pays some 4 microseconds for each operator.
        """
        device = hardware.device(name)
        link = device.link.gbs_one_way * 1e9 if device.link is not None and device.link.gbs_one_way else None
        return cls(
            device.name, dtype, hardware.peak(device, dtype), device.bandwidth_gbs * 1e9, launch_s, launch_s, link=link
        )

    @classmethod
    def measured(cls, ceilings: Ceilings, dtype: str = "float32") -> Machine:
        """The ceilings of the machine at hand."""
        rows = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        linear = tuple((r, ceilings.flops_at(dtype, r, streamed=True)) for r in rows)
        small, product = ceilings.launch_seconds(dtype)
        return cls(ceilings.device_name, dtype, ceilings.peak(dtype), ceilings.read_bandwidth, small, product, linear)

    @property
    def network(self) -> Network:
        """Its links. Raises :class:`RequestError` where there are none."""
        if self.link is None:
            raise RequestError(f"{self.name} has no link in the table, so no split can be predicted: name one (--link)")
        return Network(self.link, self.alpha, self.nodes_link, self.nodes_alpha, self.gpus_per_node)

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which a kernel is bound by arithmetic."""
        return self.peak / self.bandwidth

    def attainable(self, intensity: float) -> float:
        """FLOP/s that a kernel of this intensity (FLOPs per byte) can reach at best."""
        return min(self.peak, self.bandwidth * intensity)

    def linear_rate(self, rows: int) -> float:
        """Measured FLOP/s of a product of ``rows`` rows; on a line in log-log between the points, flat beyond."""
        at = bisect.bisect_left(self.linear, rows, key=lambda point: point[0])
        if at == 0 or at == len(self.linear):
            return self.linear[min(at, len(self.linear) - 1)][1]
        return between(rows, self.linear[at - 1], self.linear[at])


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


def prefill_step(config: ModelConfig, machine: Machine, batch: int, tokens: int, tp: int = 1) -> Step:
    """A causal pass over ``batch`` prompts of ``tokens`` each; head on the last position alone."""
    return _step("prefill", config, machine, batch, tokens, tokens, tp)


def decode_step(config: ModelConfig, machine: Machine, batch: int, context: int, tp: int = 1) -> Step:
    """One new token for each of ``batch`` rows that then hold ``context`` tokens."""
    return _step("decode", config, machine, batch, 1, context, tp)


def _step(
    phase: Phase,
    config: ModelConfig,
    machine: Machine,
    batch: int,
    new: int,
    context: int,
    tp: int,
) -> Step:
    check_sizes(batch=batch, context=context)
    if context > config.context:
        raise RequestError(f"context {context} is beyond the model's {config.context}")
    capacity.check_tp(config, tp)
    element = bytes_per_element(machine.dtype)
    rows = batch * new
    operators = _products(config, machine, rows, batch, element, tp)
    operators.append(_attention(config, machine, batch, new, context, tp))
    operators.append(_small(phase, config, machine, rows, element))
    operators += _shared(config, machine, rows, batch, element, tp)
    return Step(phase, batch, context, machine, tuple(operators))


def _products(
    config: ModelConfig, machine: Machine, rows: int, head_rows: int, element: int, tp: int
) -> list[Operator]:
    """All weight matrices against ``rows`` rows, and the head against those whose logits are wanted."""
    products: dict[str, Operator] = {}
    for layer in range(config.n_layers):
        for matrix in layer_matrices(config, layer):
            _add(products, _product(matrix, machine, rows, element, tp))
    if head_rows:
        _add(products, _product(head_matrix(config), machine, head_rows, element, tp))
    return list(products.values())


def _product(matrix: Matrix, machine: Machine, rows: int, element: int, tp: int) -> Operator:
    """One weight matrix against ``rows`` rows: read once however many rows there are. Experts: those touched."""
    touched = experts_touched(matrix.copies, matrix.used, rows) if matrix.copies > 1 else 1.0
    flops = 2.0 * rows * matrix.used * matrix.rows * matrix.columns / tp
    weights = touched * matrix.size * element / tp
    nbytes = weights + rows * matrix.used * (matrix.rows / tp + matrix.columns) * element
    if machine.curves is not None and tp == 1:
        seconds = machine.curves.products[matrix.name].at(rows)
        return Operator(matrix.name, flops, nbytes, 1, seconds, _side(machine, flops, nbytes))
    return _timed(matrix.name, machine, flops, nbytes, rows * matrix.used / touched)


def _timed(name: str, machine: Machine, flops: float, nbytes: float, rows: float) -> Operator:
    """One product at the machine's rates; ``rows`` are those that each weight meets."""
    launch = machine.linear_launch_s
    if machine.linear:
        seconds = flops / machine.linear_rate(max(1, round(rows))) + launch
        return Operator(name, flops, nbytes, 1, seconds, _side(machine, flops, nbytes))
    compute, memory = flops / machine.peak, nbytes / machine.bandwidth
    return Operator(name, flops, nbytes, 1, max(compute, memory) + launch, _bound(compute, memory, launch))


def _attention(config: ModelConfig, machine: Machine, batch: int, new: int, context: int, tp: int) -> Operator:
    """Scores and weighted sums of all layers; keys and values are read once a pass."""
    if new == 1:
        flops = float(batch * (arithmetic.decode_flops(config, context) - 2 * arithmetic.active_parameters(config)))
    else:
        linear = 2 * arithmetic.active_parameters(config) * new
        flops = float(batch * (arithmetic.prefill_flops(config, new, last_only=False) - linear))
    nbytes = arithmetic.kv_bytes(config, batch, context, machine.dtype) * capacity.kv_share(config, tp)
    compute, memory = flops / tp / machine.peak, nbytes / machine.bandwidth
    if machine.curves is not None and tp == 1:
        seconds = config.n_layers * machine.curves.attention(batch, new, context)
        return Operator("attention", flops, nbytes, config.n_layers, seconds, _side(machine, flops, nbytes))
    launch = config.n_layers * machine.launch_s
    return Operator(
        "attention", flops / tp, nbytes, config.n_layers, max(compute, memory) + launch, _bound(compute, memory, launch)
    )


def _small(
    phase: Phase, config: ModelConfig, machine: Machine, rows: int, element: int, paged: bool = False
) -> Operator:
    """Norms, rotation, activation and residuals: no products, all bytes and launches."""
    eager = SMALL_OPERATORS.get(config.family, SMALL_OPERATORS["llama"])
    calls = config.n_layers * (eager if machine.launch_s else FUSED_OPERATORS)
    # Each operator reads and writes one activation; most are of the model's width.
    nbytes = 2.0 * calls * rows * config.d_model * element
    if machine.curves is not None:
        # One layer more stands for what a step does once: embedding, last norm, choice of the token.
        curve = getattr(machine.curves, ("paged_" if paged else "") + ("rest" if phase == "decode" else "rest_prefill"))
        seconds, least = ((config.n_layers + 1) * curve.at(n) for n in (rows, 1))
        return Operator("small operators", 0.0, nbytes, calls, seconds, "launch" if seconds < 2 * least else "memory")
    memory, launch = nbytes / machine.bandwidth, calls * machine.launch_s
    return Operator("small operators", 0.0, nbytes, calls, memory + launch, "launch" if launch > memory else "memory")


def _shared(
    config: ModelConfig, machine: Machine, tokens: int, ends: int, element: int, tp: int, embeds: bool = True
) -> list[Operator]:
    """What the devices that share each layer say to each other: see :func:`communication.tensor_parallel`."""
    if tp == 1:
        return []
    traffic = communication.tensor_parallel(config, tokens, tp, element, ends, embeds=embeds)
    return [_link(part.kind, part, machine.network.seconds((part,), tp)) for part in traffic if part.calls]


def _link(name: str, part: communication.Traffic, seconds: float) -> Operator:
    return Operator(name, 0.0, part.sent, part.calls, seconds, "link")


def _side(machine: Machine, flops: float, nbytes: float) -> Bound:
    return "compute" if flops / nbytes > machine.ridge else "memory"


def _bound(compute: float, memory: float, launch: float) -> Bound:
    if launch > compute + memory:
        return "launch"
    return "compute" if compute > memory else "memory"


def _add(into: dict[str, Operator], op: Operator) -> None:
    old = into.get(op.name)
    into[op.name] = (
        op
        if old is None
        else replace(
            old,
            flops=old.flops + op.flops,
            nbytes=old.nbytes + op.nbytes,
            calls=old.calls + op.calls,
            seconds=old.seconds + op.seconds,
        )
    )


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

    Raises:
        RequestError: lists of unlike lengths, a batch size or prompt below 1, or a request beyond the context.
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
        # A long prompt beside a long answer: padded rows may be wider than the context that each of them fits.
        wide = replace(config, context=max(config.context, longest + new))
        seconds.append(sum(cached_seconds(wide, machine, len(rows), longest, new)))
    return seconds
