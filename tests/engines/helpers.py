"""Small loaded models for the engine tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nanoinfer.models.config import ModelConfig
from nanoinfer.models.model import build
from nanoinfer.models.registry import LoadedModel
from nanoinfer.tokenizer import Tokenizer

GPT2 = ModelConfig("gpt2", 2, 16, 2, 2, 8, 64, 256, 12)
LLAMA = ModelConfig("llama", 2, 32, 4, 2, 8, 48, 256, 24, tied=False)


def tiny(config: ModelConfig, eos: Sequence[int] = (), seed: int = 0) -> LoadedModel:
    """A random model whose logits are spread widely enough for greedy choices to be clear."""
    model = build(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.4)
    return LoadedModel("tiny", model, Tokenizer.byte_level(), frozenset(eos), "random, for tests")


class Scripted(nn.Module):
    """A model that says a fixed sequence: after a prompt of ``start`` tokens, ``script[i]`` follows."""

    def __init__(self, script: Sequence[int], start: int, context: int = 64) -> None:
        super().__init__()
        self.config = ModelConfig("llama", 1, 2, 1, 1, 2, 2, 256, context)
        self.script, self.start_at = list(script), start
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, ids: Tensor, positions: Tensor, cache=None, mask=None, last_only: bool = False) -> Tensor:  # type: ignore[no-untyped-def]
        if cache is not None:
            cache.update(
                0, torch.zeros(ids.shape[0], 1, ids.shape[1], 2), torch.zeros(ids.shape[0], 1, ids.shape[1], 2)
            )
            cache.advance(ids.shape[1])
        step = (positions[:, -1] + 1 - self.start_at).clamp(max=len(self.script) - 1)
        return torch.nn.functional.one_hot(torch.tensor(self.script)[step], 256).float()[:, None] * 10


def scripted(text: str | Sequence[int], start: int, eos: Sequence[int] = (), context: int = 64) -> LoadedModel:
    tokenizer = Tokenizer.byte_level()
    ids = tokenizer.encode(text) if isinstance(text, str) else text
    return LoadedModel("scripted", Scripted(ids, start, context), tokenizer, frozenset(eos), "scripted, for tests")
