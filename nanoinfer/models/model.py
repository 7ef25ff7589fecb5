"""What every model of this library looks like from outside."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig, check_runnable
from nanoinfer.models.attention import KVCache
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import MLP, Llama
from nanoinfer.models.moe import MixtureOfExperts


class Model(Protocol):
    """A decoder that maps token ids to logits; it keeps no state between calls."""

    config: ModelConfig

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits for new tokens.

        Args:
            ids: ``[B, T]`` int64, the new tokens.
            positions: ``[B, T]`` int64, where in its sequence each of them stands.
            cache: where older keys and values are, and the new ones go; None recomputes.
            mask: ``[B, 1, T, S]`` bool over all ``S`` visible tokens; None means causal without padding.
            last_only: compute the head for the last position alone.

        Returns:
            ``[B, T, V]``, or ``[B, 1, V]`` with ``last_only``.
        """
        ...

    def hidden(
        self, ids: Tensor, positions: Tensor, cache: KVCache | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """What comes out of the last layer, ``[B, T, d]``; for a caller who wants the logits of some tokens only."""
        ...

    def head(self, x: Tensor) -> Tensor:
        """Last norm and head: ``[..., d]`` to logits ``[..., V]``."""
        ...


def build(config: ModelConfig) -> GPT2 | Llama:
    """An uninitialised model of this shape. Under ``torch.device("meta")`` it costs no memory.

    Raises :class:`ModelError` for a shape that can be counted but not run.
    """
    check_runnable(config)
    if config.family == "gpt2":
        return GPT2(config)
    return Llama(config, MLP if config.moe is None else MixtureOfExperts)


def n_parameters(model: nn.Module) -> int:
    """Parameters, a tied matrix counted once."""
    return sum(p.numel() for p in model.parameters())
