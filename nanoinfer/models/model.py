"""What every model looks like to an engine, and the parts that all decoders share."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig
from nanoinfer.models.attention import KVCache


class Model(Protocol):
    """Maps token ids to logits; keeps no state between calls."""

    config: ModelConfig

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits for new tokens: ``[B, T, V]``, or with ``last_only`` those of the last position, ``[B, 1, V]``.

        Args:
            ids: ``[B, T]`` int64, the new tokens.
            positions: ``[B, T]`` int64, of each in its sequence.
            cache: holds older keys and values and takes the new ones; None recomputes.
            mask: ``[B, 1, T, S]`` bool over all ``S`` visible tokens; None means causal without padding.
        """

    def hidden(
        self, ids: Tensor, positions: Tensor, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The output of the last layer, ``[B, T, d]``; for a caller that needs the logits of some tokens only."""

    def head(self, x: Tensor) -> Tensor:
        """Final norm and head: ``[..., d]`` to logits ``[..., V]``."""


class Decoder(nn.Module):
    """A :class:`Model` of blocks between an embedding and a head. A family defines the parts.

    Each block maps ``(x, *shared, cache, mask)`` to ``x``, where ``shared`` are :meth:`shared_inputs`.
    """

    #: Names of the token embedding, the layers and the final norm, as published checkpoints have them.
    parts: ClassVar[tuple[str, str, str]]
    lm_head: nn.Linear | None  # None where the head is tied to the embedding

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding, whose weight a tied head uses too."""
        module: nn.Embedding = getattr(self, self.parts[0])
        return module

    @property
    def blocks(self) -> nn.ModuleList:
        layers: nn.ModuleList = getattr(self, self.parts[1])
        return layers

    @property
    def final_norm(self) -> nn.Module:
        norm: nn.Module = getattr(self, self.parts[2])
        return norm

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The input of the first layer, ``[B, T, d]``."""
        raise NotImplementedError

    def shared_inputs(self, positions: Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        """What is computed once a pass for all blocks."""
        return ()

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        x = self.hidden(ids, positions, cache, mask)
        return self.head(x[:, -1:] if last_only else x)

    def hidden(
        self, ids: Tensor, positions: Tensor, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        return self.through_layers(self.embed(ids, positions), positions, cache, mask)

    def through_layers(self, x: Tensor, positions: Tensor, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        """From the input of the first layer to the output of the last: ``[B, T, d]`` to the same."""
        shared = self.shared_inputs(positions, x.dtype)
        for block in self.blocks:
            x = block(x, *shared, cache, mask)
        if cache is not None:
            cache.advance(x.shape[1])
        return x

    def head(self, x: Tensor) -> Tensor:
        x = self.final_norm(x)
        return F.linear(x, self.embedding.weight) if self.lm_head is None else self.lm_head(x)


def n_parameters(model: nn.Module) -> int:
    """Parameters, a tied matrix counted once."""
    return sum(p.numel() for p in model.parameters())
