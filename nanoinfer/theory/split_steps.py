"""How long a step takes when several devices share a model.

Each split (:mod:`nanoinfer.theory.split`) gives a device a part of the work and something to say to the others. Here
both become a :class:`~nanoinfer.theory.roofline.Step` of ONE device, the busiest, whose operators add up to the step:

- tensor parallel: a part of every product, and two all-reduces a layer;
- pipeline parallel: a row passes the stages one after the other, so a single stream gains nothing, and while
  micro-batches fill and leave the pipeline its devices wait;
- context parallel: a prompt's keys and values go round a ring beside the arithmetic; in decode every device does all
  products and reads its part of the cache;
- expert parallel: rows are spread for all but the experts, to which tokens travel;
- replicas: nothing changes.

With one device each is :mod:`nanoinfer.theory.roofline`'s own step. Sources: :mod:`nanoinfer.theory.communication`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.theory import capacity, communication, roofline
from nanoinfer.theory.communication import Traffic
from nanoinfer.theory.parameters import Matrix, bytes_per_element, check_sizes, experts_touched, layer_matrices
from nanoinfer.theory.roofline import Machine, Operator, Phase, Step
from nanoinfer.theory.split import Split
from nanoinfer.theory.stages import layers_of, stages


def decode_step(
    config: ModelConfig,
    machine: Machine,
    split: Split,
    batch: int,
    context: int,
    *,
    micro_batches: int | None = None,
    drained: bool = False,
    imbalance: float = 1.0,
) -> Step:
    """One new token for each of ``batch`` rows, of one replica, that then hold ``context`` tokens.

    Args:
        config: the model.
        machine: the rates of one device, and its links.
        split: who shares what.
        batch: rows of each replica.
        context: tokens of each row, its new one included.
        micro_batches: that pass a pipeline; None for as many as there are stages, or rows if those are fewer.
        drained: every row's token is waited for before the next step begins. If not, a micro-batch goes on
            as soon as its own token has come back, and with as many of them as stages no stage waits.
        imbalance: the busiest device's share of the experts' tokens over the mean one.

    Raises:
        RequestError: what :meth:`Split.check` refuses, sizes below 1, a context beyond the model's, no link.
    """
    return _step("decode", config, machine, split, batch, 1, context, micro_batches, drained, imbalance)


def prefill_step(
    config: ModelConfig,
    machine: Machine,
    split: Split,
    batch: int,
    tokens: int,
    *,
    micro_batches: int | None = None,
    imbalance: float = 1.0,
) -> Step:
    """A causal pass over ``batch`` prompts of ``tokens`` each; arguments and errors as :func:`decode_step`."""
    return _step("prefill", config, machine, split, batch, tokens, tokens, micro_batches, True, imbalance)


def _step(
    phase: Phase,
    config: ModelConfig,
    machine: Machine,
    split: Split,
    batch: int,
    new: int,
    context: int,
    micro_batches: int | None,
    drained: bool,
    imbalance: float,
) -> Step:
    split.check(config)
    check_sizes(batch=batch, context=context)
    if context > config.context:
        raise RequestError(f"context {context} is beyond the model's {config.context}")
    if not 1 <= imbalance <= split.ep:
        raise RequestError(f"imbalance, the largest load over the mean, lies from 1 to ep {split.ep}; got {imbalance}")
    if split.pp == 1 and (micro_batches or 1) > 1:
        raise RequestError("micro-batches are those of a pipeline: give --pp too")
    if split.pp > 1:
        operators = _pipeline(phase, config, machine, split, batch, new, context, micro_batches, drained)
    elif split.cp > 1 and phase == "prefill":
        operators = _ring(config, machine, split, batch, new)
    elif split.cp > 1:
        operators = _spread_cache(config, machine, split, batch, context)
    elif split.ep > 1:
        operators = _experts(phase, config, machine, split.ep, batch, new, context, imbalance)
    else:
        operators = list(roofline._step(phase, config, machine, batch, new, context, split.tp).operators)
    merged: dict[str, Operator] = {}
    for op in operators:
        roofline._add(merged, op)
    return Step(phase, batch, context, machine, tuple(merged.values()))


# --- pipeline parallel ----------------------------------------------------------------


def _pipeline(
    phase: Phase,
    config: ModelConfig,
    machine: Machine,
    split: Split,
    batch: int,
    new: int,
    context: int,
    micro_batches: int | None,
    drained: bool,
) -> list[Operator]:
    """The busiest stage's operators for all micro-batches, its messages, and the time in which it waits."""
    pp, tp, network = split.pp, split.tp, machine.network
    element = bytes_per_element(machine.dtype)
    m = min(pp, batch) if micro_batches is None else micro_batches
    rows = communication.micro_batch_rows(batch, m)[0]  # of the larger ones, for which the others wait
    parts = [_stage(phase, config, stage, machine, rows, new, context, tp) for stage in stages(config.n_layers, pp)]
    hop = communication.pipeline_parallel(config, rows, new, pp, element, 1)[0]
    ids = communication.pipeline_parallel(config, batch, new, pp, element, m)[-1]
    crossings = network.nodes(pp, tp) - 1
    hops = (pp - 1 - crossings) * network.hop(hop, crosses=False) + crossings * network.hop(hop, crosses=True)
    slowest_hop = network.hop(hop, crosses=crossings > 0)
    busiest = max(parts, key=_seconds)
    path = sum(map(_seconds, parts)) + hops + network.seconds((ids,), pp, tp)
    tick = _seconds(busiest) + slowest_hop
    whole = path + (m - 1) * tick if drained else max(path, m * tick)
    operators = [
        replace(op, flops=m * op.flops, nbytes=m * op.nbytes, calls=m * op.calls, seconds=m * op.seconds)
        for op in busiest
    ]
    operators.append(Operator("send", 0.0, m * hop.sent, m, m * slowest_hop, "link"))
    return [*operators, Operator("waiting", 0.0, 0.0, m, whole - m * tick, "idle")]


def _stage(
    phase: Phase, config: ModelConfig, layers: range, machine: Machine, rows: int, new: int, context: int, tp: int
) -> list[Operator]:
    """One stage's operators for one micro-batch; the head belongs to the last stage, the embedding to the first."""
    part, element = layers_of(config, layers), bytes_per_element(machine.dtype)
    ends = rows if layers.stop == config.n_layers else 0
    return [
        *roofline._products(part, machine, rows * new, ends, element, tp),
        roofline._attention(part, machine, rows, new, context, tp),
        roofline._small(phase, part, machine, rows * new, element),
        *roofline._shared(part, machine, rows * new, ends, element, tp, embeds=layers.start == 0),
    ]


def _seconds(operators: Sequence[Operator]) -> float:
    return sum(op.seconds for op in operators)


# --- context parallel -----------------------------------------------------------------


def _ring(config: ModelConfig, machine: Machine, split: Split, batch: int, tokens: int) -> list[Operator]:
    """A prefill whose tokens are spread evenly, causal work too; exchanges run beside the attention."""
    cp, tp, element = split.cp, split.tp, bytes_per_element(machine.dtype)
    ring, *ends = communication.context_parallel(config, batch, tokens, cp, element)
    ring = _part(ring, capacity.kv_share(config, tp))
    c = math.ceil(tokens / cp)
    own = roofline._step("prefill", config, machine, batch, c, c, tp).operators
    whole = roofline._attention(config, machine, batch, tokens, tokens, tp)
    attention = _divided(whole, machine, config.n_layers, cp)
    # The first of cp parts is a device's own; each of the others comes while the one before it is worked on.
    hidden = attention.seconds * (cp - 1) / cp
    exposed = max(0.0, machine.network.seconds((ring,), cp, tp) - hidden)
    operators = [attention if op.name == "attention" else op for op in own]
    operators.append(roofline._link("exposed exchange", ring, exposed))
    return [*operators, *_said(ends, machine, cp, tp)]


def _spread_cache(config: ModelConfig, machine: Machine, split: Split, batch: int, context: int) -> list[Operator]:
    """A decode step in which every device does all products and attends to its part of the cache."""
    cp, tp = split.cp, split.tp
    own = roofline._step("decode", config, machine, batch, 1, context, tp).operators
    gather, ids = communication.context_parallel_decode(config, batch, cp)
    operators = [_divided(op, machine, config.n_layers, cp, read=cp) if op.name == "attention" else op for op in own]
    return [*operators, *_said((_part(gather, 1 / tp), ids), machine, cp, tp)]


def _said(traffic: Iterable[Traffic], machine: Machine, n: int, stride: int = 1) -> Iterator[Operator]:
    """The calls of a group as operators."""
    return (roofline._link(part.kind, part, machine.network.seconds((part,), n, stride)) for part in traffic)


def _divided(op: Operator, machine: Machine, layers: int, n: int, read: int = 1) -> Operator:
    """Attention whose arithmetic ``n`` devices share; each reads ``1/read`` of the cache."""
    flops, nbytes = op.flops / n, op.nbytes / read
    if machine.curves is not None:
        return replace(op, flops=flops, nbytes=nbytes, seconds=op.seconds / n)
    launch = layers * machine.launch_s * (n if read == 1 else 1)  # a ring attends to one part after the other
    compute, memory = flops / machine.peak, nbytes / machine.bandwidth
    bound = roofline._bound(compute, memory, launch)
    return replace(op, flops=flops, nbytes=nbytes, seconds=max(compute, memory) + launch, bound=bound)


def _part(traffic: Traffic, share: float) -> Traffic:
    return replace(traffic, message=traffic.message * share, sent=traffic.sent * share)


# --- expert parallel ------------------------------------------------------------------


def _experts(
    phase: Phase, config: ModelConfig, machine: Machine, ep: int, batch: int, new: int, context: int, imbalance: float
) -> list[Operator]:
    """The rows are spread for all but the experts; those see everybody's tokens, the busiest device most of them."""
    element, rows = bytes_per_element(machine.dtype), math.ceil(batch / ep)
    own = roofline._step(phase, config, machine, rows, new, context, 1).operators
    experts: dict[str, Operator] = {}
    for layer in range(config.n_layers):
        for matrix in layer_matrices(config, layer):
            if matrix.copies > 1:
                roofline._add(experts, _expert(matrix, machine, batch * new, element, ep, imbalance))
    operators = [experts.get(op.name, op) for op in own]
    *small, tokens = communication.expert_parallel(config, rows * new, ep, element)
    return [*operators, *_said((*small, _part(tokens, imbalance)), machine, ep)]


def _expert(matrix: Matrix, machine: Machine, tokens: int, element: int, ep: int, imbalance: float) -> Operator:
    """One expert matrix, its copies spread: a device reads those of its own that any token chose."""
    touched = experts_touched(matrix.copies, matrix.used, tokens) / ep
    met = tokens * matrix.used * imbalance / ep
    nbytes = touched * matrix.size * element + met * (matrix.rows + matrix.columns) * element
    return roofline._timed(matrix.name, machine, 2.0 * met * matrix.rows * matrix.columns, nbytes, met / touched)
