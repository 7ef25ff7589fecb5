"""Attention of new tokens over all visible ones.

A model without a cache calls :func:`attend` itself; with one, the cache does, which knows where older keys are.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

#: Queries per chunk on a CPU: few enough for their scores to stay in the processor's cache.
QUERIES = 64


class KVCache(Protocol):
    """What a model needs of a cache. One object holds all layers of one batch."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Store new keys and values ``[B, n_kv, T, d_h]``; attend with ``[B, n_q, T, d_h]`` to all visible ones.

        ``mask`` and the result ``[B, T, n_q * d_h]`` are as in :func:`attend`.
        """

    def advance(self, n_tokens: int) -> None:
        """Note that every layer has stored ``n_tokens`` more; called once a forward pass."""


def causal_mask(n_new: int, n_visible: int, device: torch.device) -> Tensor:
    """Which of ``S`` visible tokens each of the last ``T`` of them may see, ``[T, S]`` bool.

    PyTorch's ``is_causal`` aligns the triangle to the top left, which is wrong as soon as ``S > T``.
    """
    ones = torch.ones(n_new, n_visible, dtype=torch.bool, device=device)
    return ones.tril(diagonal=n_visible - n_new)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention of new tokens over visible ones, ``[B, T, n_q * d_h]``.

    Args:
        q: ``[B, n_q, T, d_h]``.
        k, v: ``[B, n_kv, S, d_h]`` with ``n_q`` a multiple of ``n_kv`` and ``S >= T``.
        mask: ``[B, 1, T, S]`` bool, true where a token may look; None means causal, no padding.
    """
    batch, n_q, n_new, d_head = q.shape
    n_kv, n_visible = k.shape[1], k.shape[2]
    group = n_q // n_kv
    if mask is None and n_new >= 2 * QUERIES and q.device.type == "cpu":
        return _in_chunks(q, k, v)
    is_causal = mask is None and n_new > 1 and n_new == n_visible
    if mask is None and n_new > 1 and not is_causal:
        mask = causal_mask(n_new, n_visible, q.device)
    if n_new == 1:
        # Grouped queries share their keys: make the group the "time" axis, and copy nothing.
        out = F.scaled_dot_product_attention(q.view(batch, n_kv, group, d_head), k, v, attn_mask=mask)
        return out.reshape(batch, 1, n_q * d_head)
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
    return out.transpose(1, 2).reshape(batch, n_new, n_q * d_head)


def _in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of a prompt on a CPU, a chunk of queries at a time; shapes as in :func:`attend`.

    Grouped queries share one product with their keys, which are not copied, and keys after a chunk are not read.
    PyTorch's own kernel takes 1.4 to 2 times as long.
    """
    batch, n_q, n_new, d_head = q.shape
    n_kv, n_visible = k.shape[1], k.shape[2]
    group = n_q // n_kv
    grouped = q.view(batch, n_kv, group, n_new, d_head)
    keys = (k * d_head**-0.5).transpose(2, 3)  # [B, n_kv, d_h, S]
    later = torch.full((QUERIES, QUERIES), -math.inf, dtype=q.dtype).triu(1)
    out = q.new_empty(batch, n_new, n_kv, group, d_head)
    for at in range(0, n_new, QUERIES):
        n = min(QUERIES, n_new - at)
        seen = n_visible - n_new + at + n
        chunk = grouped[:, :, :, at : at + n].reshape(batch, n_kv, group * n, d_head)
        scores = chunk @ keys[..., :seen]
        scores.view(batch, n_kv, group, n, seen)[..., seen - n :] += later[:n, :n]
        part = scores.softmax(-1) @ v[:, :, :seen]
        out[:, at : at + n] = part.view(batch, n_kv, group, n, d_head).permute(0, 3, 1, 2, 4)
    return out.view(batch, n_new, n_q * d_head)
