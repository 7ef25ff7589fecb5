"""Llama, and so SmolLM2: rotary positions, RMS norm, grouped queries, a gated MLP, no biases."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig
from nanoinfer.models.attention import KVCache, attend
from nanoinfer.models.model import Decoder


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotation per position of each pair of dimensions, ``[d_h / 2]`` fp32, in radians.

    Llama 3's scaling stretches wavelengths above the original context by ``factor``, and blends towards short ones.
    """
    half = torch.arange(0, config.d_head, 2, dtype=torch.float64) / config.d_head
    plain = config.rope_theta**-half
    if (s := config.rope_scaling) is None:
        return plain.float()
    wavelength = 2 * math.pi / plain
    smooth = (s.original_context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)  # 1: short wave, kept; 0: long wave, divided by the factor
    return ((1 - smooth) * plain / s.factor + smooth * plain).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair ``(x[i], x[i + d_h/2])`` of ``x`` ``[B, n, T, d_h]``; cos and sin are ``[B, 1, T, d_h/2]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class RMSNorm(nn.Module):
    """Scale to unit root mean square, in fp32, then by a learned weight."""

    def __init__(self, d_model: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LlamaAttention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.d_head = layer, config.d_head
        d_q, d_kv = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.q_proj = nn.Linear(config.d_model, d_q, bias=False)
        self.k_proj = nn.Linear(config.d_model, d_kv, bias=False)
        self.v_proj = nn.Linear(config.d_model, d_kv, bias=False)
        self.o_proj = nn.Linear(d_q, config.d_model, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        """``[B, T, n * d_h]`` to ``[B, n, T, d_h]``."""
        return x.view(x.shape[0], x.shape[1], -1, self.d_head).transpose(1, 2)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache | None, mask: Tensor | None) -> Tensor:
        q = rotate(self.heads(self.q_proj(x)), *rope)  # [B, n_q, T, d_h]
        k = rotate(self.heads(self.k_proj(x)), *rope)  # [B, n_kv, T, d_h]
        v = self.heads(self.v_proj(x))  # [B, n_kv, T, d_h]
        out = attend(q, k, v, mask) if cache is None else cache.attend(self.layer, q, k, v, mask)
        return self.o_proj(out)  # type: ignore[no-any-return]


class LlamaMLP(nn.Module):
    """Gated: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class LlamaBlock(nn.Module):
    """Norm, attention, add; norm, MLP (or a mixture of experts), add."""

    def __init__(self, config: ModelConfig, layer: int, mlp: Callable[[ModelConfig], nn.Module] = LlamaMLP) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.self_attn = LlamaAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = mlp(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: KVCache | None, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, cache, mask)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Llama(Decoder):
    """The whole decoder: token ids in, logits out."""

    parts = ("embed_tokens", "layers", "norm")
    inv_freq: Tensor

    def __init__(self, config: ModelConfig, mlp: Callable[[ModelConfig], nn.Module] = LlamaMLP) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(LlamaBlock(config, layer, mlp) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.lm_head = None if config.tied else nn.Linear(config.d_model, config.vocab_size, bias=False)
        with torch.device("cpu"):  # a real tensor even while the weights are on the meta device
            self.set_inv_freq(inverse_frequencies(config))

    def set_inv_freq(self, inv_freq: Tensor) -> None:
        """Use these rotation frequencies ``[d_h / 2]``; kept in fp32 whatever the weights' dtype."""
        if inv_freq.shape != (self.config.d_head // 2,):
            raise ValueError(f"inv_freq has shape {tuple(inv_freq.shape)}, expected ({self.config.d_head // 2},)")
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.embed_tokens(ids)  # type: ignore[no-any-return]

    def shared_inputs(self, positions: Tensor, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor]]:
        return (self.rope(positions, dtype),)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine at positions ``[B, T]``, each ``[B, 1, T, d_h / 2]``; angles are computed in fp32."""
        angles = positions[:, None, :, None].float() * self.inv_freq.float()
        return angles.cos().to(dtype), angles.sin().to(dtype)
