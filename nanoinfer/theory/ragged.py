"""How long a step of unlike rows takes: prompts' chunks and decoding rows, packed one behind the other.

The rows of :mod:`nanoinfer.theory.roofline` are all alike. Those of the continuous engine are not: each has its own
context, and some bring one token, some a chunk of a prompt. Products do not care, they see the packed tokens.
Attention does: a row's new tokens meet all that this row holds.

A simulation asks for millions of such steps. Products and small operators depend on the number of packed tokens alone,
so :class:`StepTimes` works them out once for each; attention of decoding rows, without windows, depends on the
sum of their contexts alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

from nanoinfer.configs.config import ModelConfig
from nanoinfer.theory import arithmetic, capacity, communication
from nanoinfer.theory.parameters import bytes_per_element, check_sizes, head_matrix, layer_matrices
from nanoinfer.theory.roofline import (
    Machine,
    Operator,
    Phase,
    Step,
    _bound,
    _product,
    _products,
    _shared,
    _side,
    _small,
)

Rows = Sequence[tuple[int, int]]


def mixed_step(config: ModelConfig, machine: Machine, rows: Rows, ends: int, tp: int = 1) -> Step:
    """A step of unlike rows, operator by operator.

    Args:
        rows: of each row, tokens that are in the cache already, and new ones.
        ends: rows whose last token chooses the next one; the head is computed for those alone.
        tp: devices that share each layer.

    Raises:
        RequestError: no tokens, or devices that cannot share the model.
    """
    packed = sum(new for _, new in rows)
    check_sizes(tokens=packed)
    capacity.check_tp(config, tp)
    element, phase = bytes_per_element(machine.dtype), _phase(rows, packed)
    operators = _products(config, machine, packed, ends, element, tp)
    operators.append(_attention(config, machine, rows, tp))
    operators.append(_small(phase, config, machine, packed, element, paged=True))
    operators += _shared(config, machine, packed, ends, element, tp)
    return Step(phase, len(rows), max(old + new for old, new in rows), machine, tuple(operators))


class StepTimes:
    """Seconds of the steps of :func:`mixed_step`, cheap enough for a simulation.

    Args:
        config: the model.
        machine: the rates of one device.
        tp: devices that share each layer.

    Raises:
        RequestError: devices that cannot share the model, or have no link to do it over.
    """

    def __init__(self, config: ModelConfig, machine: Machine, tp: int = 1) -> None:
        capacity.check_tp(config, tp)
        self.config, self.machine, self.tp = config, machine, tp
        self._element = bytes_per_element(machine.dtype)
        self._matrices = Counter(m for layer in range(config.n_layers) for m in layer_matrices(config, layer))
        self._windows = _windows(config)
        self._has_windows = any(size < sys.maxsize for size in self._windows)
        self._bases: dict[tuple[int, Phase], float] = {}
        self._heads: dict[int, float] = {0: 0.0}
        self._base(1, "decode")  # what cannot be predicted is refused now

    def seconds(self, rows: Rows, ends: int) -> float:
        """Of one step; rows and ends as in :func:`mixed_step`."""
        packed = sum(new for _, new in rows)
        fixed = self._base(packed, _phase(rows, packed)) + self._head(ends)
        if self.machine.curves is not None and self.tp == 1:
            return fixed + _timed_attention(self.config, self.machine, rows)
        flops, seen = _attention_work(self.config, self._windows, rows)
        return fixed + self._attention(flops, seen)

    def decoding(self, contexts: Sequence[int]) -> Iterator[float]:
        """Of one decode step after another, without end: each row holds one token more in each.

        ``contexts`` are the tokens that the rows hold in the first of them, its new one included.
        """
        n = len(contexts)
        fixed = self._base(n, "decode") + self._head(n)
        if self.machine.curves is not None and self.tp == 1:
            for total in count(sum(contexts), n):
                yield fixed + self.config.n_layers * self.machine.curves.paged(n, total / n)
        pair = arithmetic.pair_flops(self.config, absorbed=True)
        if self._has_windows:
            for step in count():
                seen = sum(_seen(self._windows, context + step) for context in contexts)
                yield fixed + self._attention(pair * seen, seen)
        for seen in count(self.config.n_layers * sum(contexts), self.config.n_layers * n):
            yield fixed + self._attention(pair * seen, seen)

    def _base(self, packed: int, phase: Phase) -> float:
        """All but head and attention."""
        if (found := self._bases.get((packed, phase))) is None:
            config, machine, element, tp = self.config, self.machine, self._element, self.tp
            found = sum(n * _product(m, machine, packed, element, tp).seconds for m, n in self._matrices.items())
            found += _small(phase, config, machine, packed, element, paged=True).seconds
            found += sum(op.seconds for op in _shared(config, machine, packed, 0, element, tp))
            self._bases[packed, phase] = found
        return found

    def _head(self, ends: int) -> float:
        if (found := self._heads.get(ends)) is None:
            config, machine, element, tp = self.config, self.machine, self._element, self.tp
            found = _product(head_matrix(config), machine, ends, element, tp).seconds
            if tp > 1:
                found += machine.network.seconds((communication.logits_gather(config, ends, tp, element),), tp)
            self._heads[ends] = found
        return found

    def _attention(self, flops: int, seen: int) -> float:
        return _attention_seconds(self.config, self.machine, flops, seen, self.tp)[0]


def _phase(rows: Rows, packed: int) -> Phase:
    return "decode" if packed == len(rows) else "prefill"


# --- attention ------------------------------------------------------------------------


def _windows(config: ModelConfig) -> Counter[int]:
    """How many layers see at most so many tokens."""
    return Counter(config.window_of(layer) or sys.maxsize for layer in range(config.n_layers))


def _seen(windows: Counter[int], context: int) -> int:
    """Tokens of a row that are read, summed over layers."""
    return sum(layers * min(context, size) for size, layers in windows.items())


def _pairs(windows: Counter[int], old: int, new: int) -> int:
    """Pairs of a new token and one that it sees, summed over layers."""
    total = 0
    for size, layers in windows.items():
        rising = max(0, min(new, size - old))  # new tokens that see one more than the token before
        total += layers * (rising * old + rising * (rising + 1) // 2 + (new - rising) * size)
    return total


def _attention_work(config: ModelConfig, windows: Counter[int], rows: Rows) -> tuple[int, int]:
    """FLOPs, and tokens read summed over layers."""
    one, many = arithmetic.pair_flops(config, absorbed=True), arithmetic.pair_flops(config)
    flops = seen = 0
    for old, new in rows:
        flops += _pairs(windows, old, new) * (one if new == 1 else many)
        seen += _seen(windows, old + new)
    return flops, seen


def _attention_seconds(
    config: ModelConfig, machine: Machine, flops: int, seen: int, tp: int
) -> tuple[float, float, float]:
    """Seconds of all layers' attention, and which parts of it are arithmetic and reading."""
    share = capacity.kv_share(config, tp)
    nbytes = seen * arithmetic.kv_width(config) * bytes_per_element(machine.dtype) * share
    compute, memory = flops / tp / machine.peak, nbytes / machine.bandwidth
    return max(compute, memory) + config.n_layers * machine.launch_s, compute, memory


def _timed_attention(config: ModelConfig, machine: Machine, rows: Rows) -> float:
    """Seconds of all layers' attention by the model's own timings."""
    curves, seconds = machine.curves, 0.0
    assert curves is not None
    if singles := [old + 1 for old, new in rows if new == 1]:
        seconds += curves.paged(len(singles), sum(singles) / len(singles))
    # A chunk is the lower part of a triangle.
    chunk = curves.prefill_attention
    seconds += sum(chunk.at(old + new) - (chunk.at(old) if old else 0.0) for old, new in rows if new > 1)
    return config.n_layers * seconds


def _attention(config: ModelConfig, machine: Machine, rows: Rows, tp: int) -> Operator:
    """Scores and weighted sums of rows of unlike lengths over a paged cache."""
    flops, seen = _attention_work(config, _windows(config), rows)
    seconds, compute, memory = _attention_seconds(config, machine, flops, seen, tp)
    nbytes = memory * machine.bandwidth
    if machine.curves is not None and tp == 1:
        seconds, bound = _timed_attention(config, machine, rows), _side(machine, flops, nbytes)
    else:
        bound = _bound(compute, memory, config.n_layers * machine.launch_s)
    return Operator("attention", flops / tp, nbytes, config.n_layers, seconds, bound)
