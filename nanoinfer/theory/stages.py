"""Which layers each stage of a pipeline has, and what it holds of the rest: embedding first, norm and head last."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.theory.parameters import (
    bytes_per_element,
    check_sizes,
    head_matrix,
    norm_parameters,
    position_parameters,
    weight_bytes,
)


def evenly(count: int, parts: int) -> tuple[range, ...]:
    """``count`` things in so many parts of neighbours, as even as can be, the larger ones first."""
    size, larger = divmod(count, parts)
    starts = [i * size + min(i, larger) for i in range(parts + 1)]
    return tuple(range(start, end) for start, end in itertools.pairwise(starts))


@cache
def stages(n_layers: int, pp: int) -> tuple[range, ...]:
    """The layers of each of ``pp`` stages.

    Raises:
        RequestError: fewer layers than stages.
    """
    check_sizes(pp=pp)
    if pp > n_layers:
        raise RequestError(f"pp {pp} stages need a layer each and the model has {n_layers}: take at most {n_layers}")
    return evenly(n_layers, pp)


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
