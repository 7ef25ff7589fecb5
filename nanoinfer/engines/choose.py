"""From a step's logits to one token a request, with what was asked to be noted beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nanoinfer.engines.request import Request, TokenLogprob
from nanoinfer.errors import RequestError
from nanoinfer.sampling.sample import sample, top_logprobs


def choose(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """The next token of each request, from finite logits ``[R, V]``; back only once the device has them."""
    tokens = sample(logits, [r.sampler for r in requests])
    note_logprobs(logits, tokens, requests)
    return tokens.tolist()  # waits for the device


def not_finite(logits: Tensor) -> dict[int, RequestError]:
    """Rows of logits ``[R, V]`` from which no token can be chosen, and what to say of each."""
    on_cpu = logits.device.type == "cpu"  # there NumPy does it, without waking a thread team
    most = (logits.float().numpy().max(axis=-1) if on_cpu else logits.amax(dim=-1)).tolist()
    bad = [row for row, value in enumerate(most) if not math.isfinite(value)]
    if not bad:
        return {}
    reason = (
        f"the model's logits are not finite (in {str(logits.dtype).removeprefix('torch.')}): "
        "its weights are damaged, or its numbers too large for the dtype; take bfloat16 or float32"
    )
    return {row: RequestError(reason) for row in bad}


def note_logprobs(logits: Tensor, tokens: Tensor, running: Sequence[Request]) -> None:
    """Keep the log-probabilities of the requests that asked for them."""
    rows = [i for i, r in enumerate(running) if r.params.logprobs is not None]
    if not rows:
        return
    index = torch.tensor(rows, device=logits.device)
    count = max(running[i].params.logprobs or 0 for i in rows)
    chosen, best, ids = (t.tolist() for t in top_logprobs(logits[index], tokens[index], count))
    for n, i in enumerate(rows):
        top = list(zip(ids[n], best[n], strict=True))[: running[i].params.logprobs]
        running[i].logprobs.append(TokenLogprob(int(tokens[i]), chosen[n], tuple(top)))
