"""GPT-2: learned positions, layer norm before each block, tanh-GELU, a tied head.

Modules are named as in the published checkpoints, so that loading copies tensors and translates no names.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig
from nanoinfer.models.attention import KVCache, attend
from nanoinfer.models.model import Decoder


class GPT2Attention(nn.Module):
    """Multi-head self-attention with one fused projection for q, k and v."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.n_heads, self.d_head = layer, config.n_heads, config.d_head
        self.c_attn = nn.Linear(config.d_model, 3 * config.d_model)
        self.c_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        batch, n_new, _ = x.shape  # [B, T, d]
        qkv = self.c_attn(x).view(batch, n_new, 3, self.n_heads, self.d_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [B, n_q, T, d_h]
        out = attend(q, k, v, mask) if cache is None else cache.attend(self.layer, q, k, v, mask)
        return self.c_proj(out)  # type: ignore[no-any-return]


class GPT2MLP(nn.Module):
    """Two products with a tanh-GELU between: d -> f -> d."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.d_model, config.d_ff)
        self.c_proj = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  # type: ignore[no-any-return]


class GPT2Block(nn.Module):
    """Norm, attention, add; norm, MLP, add."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.attn = GPT2Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.mlp = GPT2MLP(config)

    def forward(self, x: Tensor, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, mask)
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT2(Decoder):
    """The whole decoder: token ids in, logits out."""

    parts = ("wte", "h", "ln_f")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.d_model)
        self.wpe = nn.Embedding(config.context, config.d_model)
        self.h = nn.ModuleList(GPT2Block(config, layer) for layer in range(config.n_layers))
        self.ln_f = nn.LayerNorm(config.d_model, eps=config.norm_eps)
        self.lm_head = None if config.tied else nn.Linear(config.d_model, config.vocab_size, bias=False)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe(positions)  # type: ignore[no-any-return]
