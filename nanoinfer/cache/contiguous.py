"""The simplest KV cache: one block of memory, allocated once, filled from the left."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.models.attention import attend


class ContiguousCache:
    """Keys and values of one batch, ``[L, B, n_kv, S, d_h]`` each; ``nbytes`` are those of both.

    All rows share one length: slot ``s`` of every row was written in the same forward pass. Rows of unlike lengths are
    therefore padded on the left, and the mask hides the padding.
    """

    def __init__(
        self, config: ModelConfig, batch: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (config.n_layers, batch, config.n_kv_heads, capacity, config.d_head)
        # Zeros, not empty: a masked slot still meets a product, and 0 * NaN is NaN.
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.nbytes = self.k.nbytes + self.v.nbytes
        self.capacity, self.length = capacity, 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``[B, n_kv, T, d_h]`` after what is there; return all of this layer, ``[B, n_kv, S, d_h]``."""
        end = self.length + k.shape[2]
        if end > self.capacity:
            raise RequestError(f"KV cache holds {self.capacity} tokens a row and cannot take {end}")
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """As in :class:`~nanoinfer.models.attention.KVCache`."""
        return attend(q, *self.update(layer, k, v), mask)

    def advance(self, n_tokens: int) -> None:
        """Move the end forward once every layer has written."""
        self.length += n_tokens
