"""Who shares what: how many devices split a model in each way, and what each of them must hold.

- tensor parallel: every layer in ``tp`` parts;
- pipeline parallel: ``pp`` stages of whole layers;
- context parallel: ``cp`` parts of each row's tokens and of its cache, all weights on every device;
- expert parallel: ``ep`` parts of a mixture of experts, and of the batch; all else on every device;
- replicas: copies of all that, which share nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.theory import arithmetic, capacity, communication
from nanoinfer.theory.parameters import bytes_per_element, check_sizes, layer_matrices
from nanoinfer.theory.stages import layers_of, stage_weight_bytes, stages


@dataclass(frozen=True)
class Split:
    """How many devices share a model in each way; ``replicas`` copies of all that work side by side."""

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
        """Raise :class:`RequestError` where a model cannot be split so, or two ways do not go together here."""
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


def memory(
    config: ModelConfig, split: Split, batch: int, context: int, dtype: str = "bfloat16", *, block: int = 1
) -> capacity.Bytes:
    """Bytes of the fullest device when each replica serves ``batch`` rows of ``context`` tokens.

    Raises:
        RequestError: what :meth:`Split.check` refuses, sizes below 1.
    """
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
        activations = arithmetic.activation_bytes(config, math.ceil(batch / min(split.pp, batch)), 1, dtype=dtype)
        stage_bytes.append(replace(used, weights=weights, activations=activations))
    return max(stage_bytes, key=lambda used: used.total)


@cache
def _experts_elsewhere(config: ModelConfig, dtype: str, ep: int) -> float:
    """Bytes of the experts that other devices hold."""
    matrices = (m for layer in range(config.n_layers) for m in layer_matrices(config, layer) if m.copies > 1)
    return sum(m.copies * m.size for m in matrices) * bytes_per_element(dtype) * (1 - 1 / ep)


def largest_batch(
    config: ModelConfig,
    split: Split,
    context: int,
    memory_bytes: float,
    dtype: str = "bfloat16",
    *,
    utilisation: float = 0.9,
    block: int = 16,
) -> int:
    """Rows of ``context`` tokens that each replica has room for: 0 where not even one fits beside the weights."""
    usable = memory_bytes * utilisation

    def fits(rows: int) -> bool:
        return memory(config, split, rows, context, dtype, block=block).total <= usable

    return capacity.largest(fits, 2**30)
