"""What each way to decode costs in quality: perplexity, KL divergence and top-1 agreement with float32.

The text that ships with the library is cut into windows, and every token of a window is scored with those before it
in view. The native step decodes the windows side by side, one token a step, as it would generate them.
``python -m benchmarks.quality`` takes about a minute on two cores and stores its result under ``results/``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.store import store
from nanoinfer.cache.blocks import BlockPool
from nanoinfer.cache.paged import NewTokens, PagedCache
from nanoinfer.data import sample_text
from nanoinfer.measure.machine import provenance
from nanoinfer.measure.quality import kl_and_agreement, token_nll
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.speed.kernel import DecodeKernel, Weights

WINDOW = 512
#: KL divergence from float32 that a way may cost and still be offered as a default, in nats.
MOST_KL = 0.004


@dataclass(frozen=True)
class Quality:
    """Of one way: perplexity, mean KL(float32 || it) in nats, share of positions with the same best token."""

    perplexity: float
    kl: float
    top1: float


@torch.inference_mode()
def by_model(loaded: LoadedModel, window: Sequence[int]) -> Tensor:
    """Logits ``[T, V]`` in one pass."""
    logits: Tensor = loaded.model(torch.tensor([window]), torch.arange(len(window))[None])
    return logits[0].float()


@torch.inference_mode()
def by_kernel(loaded: LoadedModel, window: Sequence[int], step: DecodeKernel) -> Tensor:
    """Logits ``[T, V]``, one token a step."""
    pool = BlockPool(len(window) // 8 + 1, 8, share_prefixes=False)
    cache = PagedCache(loaded.model.config, pool.n_blocks, 8, "cpu", next(loaded.model.parameters()).dtype)
    table, out = pool.open([]), []
    for token in window:
        pool.grow(table, 1)
        row = NewTokens(table, 1)
        cache.step([row])
        out.append(step(cache, [row], [token])[0])
        pool.commit(table, window, 1)
    return torch.stack(out)


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("results/quality.json"))
    args = parser.parse_args()
    exact, narrow = (load_model(args.model, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert exact.tokenizer is not None
    ids = exact.tokenizer.encode(sample_text())
    windows = [ids[i : i + WINDOW] for i in range(0, args.windows * WINDOW, WINDOW)]

    def kernel(loaded: LoadedModel, weights: Weights) -> Callable[[Sequence[int]], Tensor]:
        step = DecodeKernel(loaded.model, weights)
        return lambda window: by_kernel(loaded, window, step)

    ways: dict[str, Callable[[Sequence[int]], Tensor]] = {
        "float32": lambda window: by_model(exact, window),
        "float32, kernel": kernel(exact, "float32"),
        "bfloat16": lambda window: by_model(narrow, window),
        "bfloat16, kernel": kernel(narrow, "bfloat16"),
        "bfloat16, kernel, int8 weights": kernel(narrow, "int8"),
    }
    sums = {name: [0.0, 0.0, 0.0] for name in ways}
    for window in windows:
        reference = by_model(exact, window)[:-1]
        targets = torch.tensor(window[1:])
        for name, way in ways.items():
            logits = way(window)[:-1]
            kl, top1 = kl_and_agreement(reference, logits)
            for i, value in enumerate((float(token_nll(logits, targets).mean()), kl, top1)):
                sums[name][i] += value / len(windows)
    found = {name: Quality(math.exp(nll), kl, top1) for name, (nll, kl, top1) in sums.items()}
    for name, q in found.items():
        verdict = "" if q.kl <= MOST_KL else f"  beyond the bound of {MOST_KL}: no default"
        print(f"{name:32} perplexity {q.perplexity:.3f}  KL {q.kl:.2e}  same best token {q.top1:.1%}{verdict}")
    record = {
        "provenance": provenance(),
        "settings": {"model": args.model, "window": WINDOW, "windows": len(windows), "most_kl": MOST_KL},
        "ways": {name: q.__dict__ for name, q in found.items()},
    }
    store(args.out, record)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
