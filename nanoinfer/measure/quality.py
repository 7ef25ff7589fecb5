"""What a cheaper model costs in quality: how well it predicts a text, and how far it diverges from another model.

A perplexity means nothing without its text, its window and its stride, so all three are arguments, and the definition
is exact:

- The text is ids ``x_0 ... x_n``. ``x_0`` is never scored (put a begin token there where the model has one); the ``n``
  others are scored once each.
- Windows of ``context`` ids move forward by ``stride``. An id is scored in the first window that holds it, with all ids
  before it in that window in view: in the first window 1 to ``context - 1`` of them, later at least
  ``context - stride``. A small stride costs more passes and scores better.
- negative log-likelihood (NLL) = mean of ``-ln p(x_i | the ids in view)`` in nats; perplexity = ``exp(NLL)``;
  bits per byte = ``NLL * n / ln 2 /`` bytes of the scored text in UTF-8, which, unlike perplexity, compares
  models with different tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nanoinfer.errors import RequestError, check
from nanoinfer.models.model import Model

#: Rows computed in float64 at a time: 64 rows of a vocabulary of 128,000 take 65 MB.
ROWS = 64


@dataclass(frozen=True)
class Score:
    """How well a model predicts a text. ``nll`` in nats a token; ``bits_per_byte`` None where no bytes were given."""

    nll: float
    tokens: int
    bits_per_byte: float | None = None

    @property
    def perplexity(self) -> float:
        """``exp(nll)``: as uncertain as a fair choice among that many tokens."""
        return math.exp(self.nll)


@torch.inference_mode()
def scored_logits(model: Model, ids: Sequence[int], context: int, stride: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each window's logits ``[N, V]`` of the ids that it scores, and those ids ``[N]``; in all, each id but the first.

    Raises :class:`RequestError` for fewer than two ids, a context outside 2 .. the model's, a stride outside
    1 .. context - 1.
    """
    if len(ids) < 2:
        raise RequestError(f"a text of {len(ids)} tokens has none to score; give at least 2")
    check("context", context, at_least=2, at_most=model.config.context, whole=True)
    check("stride", stride, at_least=1, below=context, whole=True)
    assert isinstance(model, torch.nn.Module)
    device = next(model.parameters()).device
    scored = 1  # ids before this one have been scored
    for start in range(0, len(ids), stride):
        window = torch.tensor([ids[start : start + context]], device=device)
        length = window.shape[1]
        logits: Tensor = model(window, torch.arange(length, device=device)[None])
        first = scored - start
        yield logits[0, first - 1 : -1], window[0, first:]
        scored = start + length
        if scored == len(ids):
            return


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """``-ln p(target)`` of each row, ``[N]`` float64, from logits ``[N, V]`` in any dtype."""
    pairs = zip(torch.split(logits, ROWS), torch.split(targets, ROWS), strict=True)
    return torch.cat([F.cross_entropy(rows.double(), wanted, reduction="none") for rows, wanted in pairs])


def perplexity(model: Model, ids: Sequence[int], context: int, stride: int, n_bytes: int | None = None) -> Score:
    """Score ``ids`` over sliding windows, as the module's docstring defines it.

    ``n_bytes``: of the scored text in UTF-8 (all but the first id's). Raises :class:`RequestError` for what cannot be
    scored.
    """
    if n_bytes is not None:
        check("n_bytes", n_bytes, at_least=1, whole=True)
    total = math.fsum(float(token_nll(*part).sum()) for part in scored_logits(model, ids, context, stride))
    tokens = len(ids) - 1
    return Score(total / tokens, tokens, None if n_bytes is None else total / math.log(2) / n_bytes)


def kl_and_agreement(reference_logits: Tensor, logits: Tensor) -> tuple[float, float]:
    """Mean over rows of ``KL(reference || other)`` in nats, and the share of rows whose best token is the same.

    Both ``[N, V]``, any dtype and device; computed in float64 on the reference's device. On a tie the lowest id is
    best. Infinite where the other rules out a token that the reference allows. Raises :class:`RequestError` for shapes
    that differ or hold nothing.
    """
    if reference_logits.shape != logits.shape or reference_logits.ndim != 2 or not reference_logits.numel():
        raise RequestError(
            f"KL needs two [N, V] logits of one shape, got {list(reference_logits.shape)} and {list(logits.shape)}"
        )
    total, same = 0.0, 0
    for mine, theirs in zip(torch.split(reference_logits, ROWS), torch.split(logits, ROWS), strict=True):
        log_p = mine.double().log_softmax(-1)
        log_q = theirs.to(mine.device).double().log_softmax(-1)
        p = log_p.exp()
        total += float(torch.where(p > 0, p * (log_p - log_q), 0.0).sum())
        same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    return total / len(logits), same / len(logits)
