"""One model on several devices: what each must hold, how long a step then takes, and where more stop paying.

- tensor parallel: every layer in ``tp`` parts; two all-reduces a layer;
- pipeline parallel: ``pp`` stages of whole layers. A row passes them one after the other, so a single stream gains
  nothing, and while micro-batches fill and leave the pipeline its devices wait;
- context parallel: ``cp`` parts of each row's tokens and of its cache, all weights on every device. A prompt's keys and
  values go round a ring during the arithmetic; in decode every device does all products and reads its part of it;
- expert parallel: ``ep`` parts of a mixture of experts, to which tokens travel, and of the batch; all else on every
  device;
- replicas: copies of all that, which share nothing.

A :class:`~nanoinfer.theory.roofline.Step` here is that of ONE device, the busiest, whose operators add up to the step.
Sources: :mod:`nanoinfer.theory.communication`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Final, Literal

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.theory import capacity, communication
from nanoinfer.theory.arithmetic import (
    activation_bytes,
    bytes_per_element,
    check_sizes,
    experts_touched,
    head_matrix,
    layer_matrices,
    norm_parameters,
    position_parameters,
    weight_bytes,
)
from nanoinfer.theory.communication import partition
from nanoinfer.theory.roofline import Machine, Operator, Shard, Step, StepShape, merged


@dataclass(frozen=True)
class ParallelConfig:
    """How many devices share a model in each dimension; ``replicas`` copies of all that run independently."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    replicas: int = 1

    @property
    def group(self) -> int:
        """Devices of one replica."""
        return self.tp * self.pp * self.cp * self.ep

    @property
    def devices(self) -> int:
        """All of them."""
        return self.group * self.replicas

    def __str__(self) -> str:
        parts = [f"{name} {n}" for name, n in vars(self).items() if n > 1]
        return " x ".join(parts) or "one device"

    def check(self, config: ModelConfig) -> None:
        """Raise :class:`RequestError` where a model cannot be split so, or two dimensions do not combine here."""
        check_sizes(**vars(self))
        capacity.check_tp(config, self.tp)
        stages(config.n_layers, self.pp)
        communication.check_ep(config, self.ep)
        if self.cp > 1 and self.pp > 1:
            raise RequestError("cp and pp together are not modelled: take cp with tp, or pp with tp")
        if self.ep > 1 and self.group > self.ep:
            raise RequestError(
                "ep spreads experts over devices that each hold all else, so it goes with replicas alone: "
                "leave out --tp, --pp and --cp"
            )


# --- stages of a pipeline ---------------------------------------------------------------


@cache
def stages(n_layers: int, pp: int) -> tuple[range, ...]:
    """The layers of each of ``pp`` stages. Raises :class:`RequestError` for fewer layers than stages."""
    check_sizes(pp=pp)
    if pp > n_layers:
        raise RequestError(f"pp {pp} stages need a layer each and the model has {n_layers}: take at most {n_layers}")
    return partition(n_layers, pp)


@cache
def layers_of(config: ModelConfig, layers: range) -> ModelConfig:
    """The shape of some of a model's layers, as if they were a model; windows and experts stay where they are."""

    def moved(kept: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(i - layers.start for i in kept if i in layers)

    window, moe = config.window, config.moe
    return replace(
        config,
        n_layers=len(layers),
        window=window and replace(window, full_layers=moved(window.full_layers)),
        moe=moe and replace(moe, dense_layers=moved(moe.dense_layers)),
    )


@cache
def stage_weight_bytes(config: ModelConfig, layers: range, dtype: str) -> int:
    """Bytes of one stage's weights. A tied matrix is needed at both ends, so two stages hold it."""
    element, table = bytes_per_element(dtype), head_matrix(config).size
    ends = norm_parameters(config) + position_parameters(config) + table * (1 if config.tied else 2)
    is_first, is_last = layers.start == 0, layers.stop == config.n_layers
    if is_first and is_last:
        return weight_bytes(config, dtype)
    kept = is_first * (table + position_parameters(config)) + is_last * (table + norm_parameters(config))
    return weight_bytes(layers_of(config, layers), dtype) + element * (kept - ends)


# --- memory -----------------------------------------------------------------------------


def memory(
    config: ModelConfig, split: ParallelConfig, batch: int, context: int, dtype: str = "bfloat16", *, block: int = 1
) -> capacity.Bytes:
    """Bytes of the fullest device when each replica serves ``batch`` rows of ``context`` tokens."""
    split.check(config)
    rows, tokens = math.ceil(batch / split.ep), math.ceil(context / split.cp)
    if split.pp == 1:
        used = capacity.where_bytes_go(config, rows, tokens, dtype, tp=split.tp, block=block)
        return replace(used, weights=used.weights - _experts_elsewhere(config, dtype, split.ep))
    stage_bytes = []
    for stage in stages(config.n_layers, split.pp):
        part = layers_of(config, stage)
        used = capacity.where_bytes_go(part, batch, tokens, dtype, tp=split.tp, block=block)
        weights = stage_weight_bytes(config, stage, dtype) / split.tp
        activations = activation_bytes(config, math.ceil(batch / min(split.pp, batch)), 1, dtype=dtype)
        stage_bytes.append(replace(used, weights=weights, activations=activations))
    return max(stage_bytes, key=lambda used: used.total)


@cache
def _experts_elsewhere(config: ModelConfig, dtype: str, ep: int) -> float:
    """Bytes of the experts that other devices hold."""
    matrices = (m for layer in range(config.n_layers) for m in layer_matrices(config, layer) if m.copies > 1)
    return sum(m.copies * m.size for m in matrices) * bytes_per_element(dtype) * (1 - 1 / ep)


def largest_batch(
    config: ModelConfig,
    split: ParallelConfig,
    context: int,
    memory_bytes: float,
    dtype: str = "bfloat16",
    *,
    utilisation: float = 0.9,
    block: int = 16,
) -> int:
    """Rows of ``context`` tokens for which each replica has memory: 0 where not even one fits with the weights."""
    usable = memory_bytes * utilisation
    return capacity.largest(
        lambda rows: memory(config, split, rows, context, dtype, block=block).total <= usable, 2**30
    )


# --- steps ------------------------------------------------------------------------------


def decode_step(
    config: ModelConfig,
    machine: Machine,
    split: ParallelConfig,
    batch: int,
    context: int,
    *,
    micro_batches: int | None = None,
    imbalance: float = 1.0,
) -> Step:
    """One new token for each of ``batch`` rows, of one replica, that then hold ``context`` tokens.

    ``micro_batches`` pass a pipeline; None for as many as there are stages, or rows if those are fewer. Each goes on as
    soon as its own token has come back, so with as many of them as stages no stage waits. ``imbalance`` is the busiest
    device's share of the experts' tokens over the mean one. Raises as :meth:`ParallelConfig.check` does, and where
    there is no link.
    """
    return _step(config, machine, split, StepShape.decode(batch, context), micro_batches, imbalance)


def prefill_step(
    config: ModelConfig,
    machine: Machine,
    split: ParallelConfig,
    batch: int,
    tokens: int,
    *,
    micro_batches: int | None = None,
    imbalance: float = 1.0,
) -> Step:
    """A causal pass over ``batch`` prompts of ``tokens`` each, all waited for; otherwise as :func:`decode_step`."""
    return _step(config, machine, split, StepShape.prefill(batch, tokens), micro_batches, imbalance)


def _step(
    config: ModelConfig,
    machine: Machine,
    split: ParallelConfig,
    shape: StepShape,
    micro_batches: int | None,
    imbalance: float,
) -> Step:
    split.check(config)
    shape.check(config)
    if not 1 <= imbalance <= split.ep:
        raise RequestError(f"imbalance, the largest load over the mean, lies from 1 to ep {split.ep}; got {imbalance}")
    if split.pp == 1 and (micro_batches or 1) > 1:
        raise RequestError("micro-batches are those of a pipeline: give --pp too")
    shard = Shard(config, machine, split.tp)
    if split.pp > 1:
        m = min(split.pp, shape.batch) if micro_batches is None else micro_batches
        operators = _pipeline(shard, split.pp, shape, m)
    elif split.cp > 1 and shape.phase == "prefill":
        operators = _ring(shard, split.cp, shape)
    elif split.cp > 1:
        operators = _distributed_cache(shard, split.cp, shape)
    elif split.ep > 1:
        operators = _experts(shard, split.ep, shape, imbalance)
    else:
        return shard.uniform(shape)
    return Step(shape.phase, shape.batch, shape.context, machine, merged(operators))


def _pipeline(shard: Shard, pp: int, shape: StepShape, m: int) -> list[Operator]:
    """The busiest stage's operators for all ``m`` micro-batches, its messages, and the time in which it waits."""
    config, tp, network = shard.config, shard.tp, shard.machine.require_network()
    largest = replace(shape, batch=communication.micro_batch_rows(shape.batch, m)[0])  # the others wait for it
    parts = []
    for layers in stages(config.n_layers, pp):  # the embedding belongs to the first, the head to the last
        stage = replace(shard, config=layers_of(config, layers))
        ends = largest.batch if layers.stop == config.n_layers else 0
        attention = stage.uniform_attention(largest)
        parts.append(stage.operators(largest.tokens, ends, shape.phase, attention, embeds=layers.start == 0))
    hop = communication.pipeline_parallel(config, largest.batch, shape.new, pp, shard.element, 1)[0]
    ids = communication.pipeline_parallel(config, shape.batch, shape.new, pp, shard.element, m)[-1]
    crossings = network.nodes(pp, tp) - 1
    hops = (pp - 1 - crossings) * network.hop(hop, crosses=False) + crossings * network.hop(hop, crosses=True)
    slowest_hop = network.hop(hop, crosses=crossings > 0)
    busiest = max(parts, key=_seconds)
    path = sum(map(_seconds, parts)) + hops + network.seconds((ids,), pp, tp)
    tick = _seconds(busiest) + slowest_hop
    whole = max(path, m * tick) if shape.phase == "decode" else path + (m - 1) * tick
    send = Operator("send", 0.0, m * hop.sent, m, m * slowest_hop, "link")
    return [*(op.times(m) for op in busiest), send, Operator("waiting", 0.0, 0.0, m, whole - m * tick, "idle")]


def _seconds(operators: Sequence[Operator]) -> float:
    return sum(op.seconds for op in operators)


def _ring(shard: Shard, cp: int, shape: StepShape) -> list[Operator]:
    """A prefill whose tokens are divided evenly, causal work too; exchanges overlap with the attention."""
    config, tp = shard.config, shard.tp
    ring, *ends = communication.context_parallel(config, shape.batch, shape.new, cp, shard.element)
    ring = ring.scaled(capacity.kv_share(config, tp))
    local = shard.uniform(StepShape.prefill(shape.batch, math.ceil(shape.new / cp)))
    attention = _divided(shard, shard.uniform_attention(shape), cp)
    # The first of cp parts is local; each of the others arrives while the one before it is worked on.
    hidden = attention.seconds * (cp - 1) / cp
    exposed = max(0.0, shard.machine.require_network().seconds((ring,), cp, tp) - hidden)
    operators = [attention if op.name == "attention" else op for op in local.operators]
    operators.append(Operator("exposed exchange", 0.0, ring.sent, ring.calls, exposed, "link"))
    return [*operators, *shard.machine.messages(ends, cp, tp)]


def _distributed_cache(shard: Shard, cp: int, shape: StepShape) -> list[Operator]:
    """A decode step in which every device does all products and attends to its part of the cache."""
    gather, ids = communication.context_parallel_decode(shard.config, shape.batch, cp)
    operators = [
        _divided(shard, op, cp, read=cp) if op.name == "attention" else op for op in shard.uniform(shape).operators
    ]
    return [*operators, *shard.machine.messages((gather.scaled(1 / shard.tp), ids), cp, shard.tp)]


def _divided(shard: Shard, op: Operator, n: int, read: int = 1) -> Operator:
    """Attention whose arithmetic ``n`` devices share; each reads ``1/read`` of the cache."""
    flops, nbytes, machine = op.flops / n, op.nbytes / read, shard.machine
    if machine.curves is not None:
        return replace(op, flops=flops, nbytes=nbytes, seconds=op.seconds / n)
    # A ring attends to one part after the other.
    launch = shard.config.n_layers * machine.launch_s * (n if read == 1 else 1)
    return machine.operator(op.name, flops, nbytes, op.calls, launch=launch)


def _experts(shard: Shard, ep: int, shape: StepShape, imbalance: float) -> list[Operator]:
    """The rows are divided for all but the experts; those see all devices' tokens, the busiest device most of them."""
    config, machine = shard.config, shard.machine
    local = replace(shape, batch=math.ceil(shape.batch / ep))
    experts: list[Operator] = []
    for matrix in (m for layer in range(config.n_layers) for m in layer_matrices(config, layer) if m.copies > 1):
        # A device reads those of its own experts that any token chose.
        touched = experts_touched(matrix.copies, matrix.used, shape.tokens) / ep
        met = shape.tokens * matrix.used * imbalance / ep
        nbytes = (touched * matrix.size + met * (matrix.rows + matrix.columns)) * shard.element
        experts.append(machine.product(matrix.name, 2.0 * met * matrix.rows * matrix.columns, nbytes, met / touched))
    by_name = {op.name: op for op in merged(experts)}
    operators = [by_name.get(op.name, op) for op in shard.uniform(local).operators]
    *small, tokens = communication.expert_parallel(config, local.tokens, ep, shard.element)
    return [*operators, *machine.messages((*small, tokens.scaled(imbalance)), ep)]


# --- from one device to a thousand ------------------------------------------------------

#: One device, two, four, ... 1,024.
DOUBLINGS: Final = tuple(2**i for i in range(11))
#: Of a device's memory, what may be used.
FILLED: Final = 0.9
#: A step is shorter only if it is so by more than this share.
NOTICED: Final = 0.01
#: A device pays while it yields at least this share of the tokens that one yields where there are fewest.
PAYS: Final = 0.5


@dataclass(frozen=True)
class Point:
    """One number of devices."""

    split: ParallelConfig
    fits: bool
    rows: int  # that all replicas decode together
    prefill_s: float  # of one replica
    decode_s: float  # of one step: a user's wait for a token
    tokens_per_s: float  # of all devices, while they decode
    efficiency: float  # tokens/s a device over those of the fewest devices that the model fits (of the fewest, if none)
    link_share: float  # of the decode step's time, what goes to messages and to waiting for other devices
    prefill_link_share: float


@dataclass(frozen=True)
class Scaling:
    """One kind of parallelism, from few devices to many; ``ends`` says why there are no more points."""

    dimension: str  # a field of ParallelConfig
    points: tuple[Point, ...]
    ends: str

    @property
    def possible(self) -> tuple[Point, ...]:
        """The points that fit; all of them where none does."""
        return tuple(point for point in self.points if point.fits) or self.points

    def best_latency(self, phase: Literal["prefill", "decode"] = "decode") -> Point:
        """The possible point after which more devices no longer make the phase shorter."""
        best, *more = self.possible
        for point in more:
            if getattr(point, f"{phase}_s") > getattr(best, f"{phase}_s") * (1 - NOTICED):
                break
            best = point
        return best

    @property
    def last_that_pays(self) -> Point:
        """The possible point after which a device yields less than half of what it does where there are fewest."""
        return list(takewhile(lambda point: point.efficiency >= PAYS, self.possible))[-1]


def scale(
    config: ModelConfig,
    machine: Machine,
    memory_bytes: float,
    dimension: str,
    *,
    batch: int = 32,
    context: int = 2048,
) -> Scaling:
    """One kind of parallelism over up to 1,024 devices of ``memory_bytes`` each.

    A replica prefills one prompt and decodes ``batch`` rows, ``context`` tokens each: the same work for more devices,
    of which replicas alone get more. Raises :class:`RequestError` for a dimension that model or machine do not have.
    """
    check_sizes(batch=batch, context=context)
    points: list[Point] = []
    ends = "no more were asked for"
    for n in DOUBLINGS:
        split = ParallelConfig(**{dimension: n})
        try:
            first = prefill_step(config, machine, split, 1, context)
            step = decode_step(config, machine, split, batch, context)
        except RequestError as error:
            if len(points) < 2:
                raise  # not even two devices can
            ends = str(error)
            break
        fits = memory(config, split, batch, context, machine.dtype).total <= memory_bytes * FILLED
        rows, shares = split.replicas * batch, (each.share("link", "idle") for each in (step, first))
        points.append(Point(split, fits, rows, first.seconds, step.seconds, rows / step.seconds, 1.0, *shares))
    least = Scaling(dimension, tuple(points), ends).possible[0]
    base = least.tokens_per_s / least.split.devices
    rated = (replace(p, efficiency=p.tokens_per_s / p.split.devices / base) for p in points)
    return Scaling(dimension, tuple(rated), ends)
