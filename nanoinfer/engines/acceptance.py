"""Which drafted tokens are kept, so that what comes out is distributed as if nothing had been drafted.

A token x was drawn from q, and should have been drawn from p. Keep it with probability min(1, p(x) / q(x)): so
min(p, q) of every token comes out this way. What is then lacking of p is max(p - q, 0), and it is drawn from that
whenever x is not kept. Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"
(2023); Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023).

A draft that rolls no dice has a q of one single token. Then the rule needs no q at all: draw from p as ever, and
call x kept where it is what was drawn. That happens with probability p(x), and anything else follows p without x.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.sampling.sample import sample_inverse_cdf


def judge(p: Tensor, q: Tensor, token: int, u: float, v: float) -> int:
    """The token for a place at which ``token`` was drafted: itself if it is kept, or another one.

    Args:
        p: what the token should be drawn from, ``[V]``, its sum 1.
        q: what it was drawn from, ``[V]``, its sum 1.
        token: an id with ``q[token] > 0``.
        u, v: independent uniform numbers in [0, 1): to keep it or not, and to draw another.
    """
    if u * float(q[token]) < float(p[token]):
        return token
    draw = torch.tensor([[v]], dtype=torch.float64, device=p.device)
    return int(sample_inverse_cdf(leftover(p, q)[None], draw))


def leftover(p: Tensor, q: Tensor) -> Tensor:
    """What is drawn from where a token was not kept: ``max(p - q, 0)``, its sum brought to 1; all are ``[V]``."""
    lacking = (p - q).clamp_(min=0)
    total = lacking.sum()
    # p and q can be equal but for their rounding, and q nowhere the smaller: then either will do.
    return lacking / total if total > 0 else p
