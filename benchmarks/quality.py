"""What each way to decode costs in quality: perplexity, KL divergence and top-1 agreement with float32.

The text that ships with the library is cut into windows, and every token of a window is scored with those before it
in view. The native step decodes the windows one token a step, as it would generate them. What is calibrated is
calibrated on the rest of the text, which is not scored.

The weights of smollm2-135m come in 4 bits already, in groups of 32 with a step and a lowest number (Q4_1). So 4 bits in
groups of 32 find nearly the same numbers again and cost nearly nothing, which they would not with weights that were
never rounded. Groups of 64 straddle two of those: they show what 4 bits can cost and what calibration brings.

``python -m benchmarks.quality`` takes about two minutes on two cores and stores its result under ``results/``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.store import options, store
from nanoinfer.cache.blocks import BlockPool
from nanoinfer.cache.paged import NewTokens, PagedCache
from nanoinfer.data import sample_text
from nanoinfer.measure.environment import provenance
from nanoinfer.measure.quality import kl_and_agreement, token_nll
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.cpu_kernel import GROUP, DecodeKernel, Weights
from nanoinfer.optimize.linear import share_weights
from nanoinfer.optimize.quantise import Calibration, Quantised, bits_per_weight, channel_energy, quantise

WINDOW = 512
#: KL divergence from float32 that a way may cost and still be offered as a default, in nats.
MOST_KL = 0.004


@dataclass(frozen=True)
class Quality:
    """Of one way: perplexity, mean KL(float32 || it) in nats, share of positions with the same best token.

    ``bits`` are those of a weight of the layers with its share of scales; ``faithful``: the KL is within ``MOST_KL``.
    """

    perplexity: float
    kl: float
    top1: float
    bits: float
    faithful: bool


@dataclass(frozen=True)
class Way:
    """What gives logits ``[T, V]`` of a window, and the bits of a weight of its layers."""

    logits: Callable[[Sequence[int]], Tensor]
    bits: float


@torch.inference_mode()
def by_model(model: GPT2 | Llama, window: Sequence[int]) -> Tensor:
    """Logits ``[T, V]`` in one pass."""
    logits: Tensor = model(torch.tensor([window]), torch.arange(len(window))[None])
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
    args = options(__doc__, "results/quality.json", model="smollm2-135m", windows=4)
    exact, narrow, half = (load_model(args.model, dtype=dtype) for dtype in ("float32", "bfloat16", "float16"))
    assert exact.tokenizer is not None
    ids = exact.tokenizer.encode(sample_text())
    scored = args.windows * WINDOW
    if not 0 < scored < len(ids):
        sys.exit(f"--windows must leave some of the text's {len(ids)} tokens to calibrate on, windows of {WINDOW}")
    windows = [ids[i : i + WINDOW] for i in range(0, scored, WINDOW)]
    energies = channel_energy(narrow.model, ids[scored:])

    def plain(model: GPT2 | Llama) -> Way:
        return Way(lambda window: by_model(model, window), bits_per_weight(model))

    def kernel(loaded: LoadedModel, weights: Weights) -> Way:
        step = DecodeKernel(loaded.model, weights)
        bits = {"float32": 32, "bfloat16": 16, "int8": 8 + 16 / GROUP}[weights]
        return Way(lambda window: by_kernel(loaded, window, step), bits)

    def quantised(weights: Quantised, calibration: Calibration | None = None, group: int = 32) -> Way:
        model = share_weights(narrow.model)
        quantise(model, weights, calibration, group)
        return plain(model)

    ways = {
        "float32": plain(exact.model),
        "float32, kernel": kernel(exact, "float32"),
        "bfloat16": plain(narrow.model),
        "bfloat16, kernel": kernel(narrow, "bfloat16"),
        "bfloat16, kernel, int8 weights": kernel(narrow, "int8"),
        "float16": plain(half.model),
        "bfloat16, int8 rows": quantised("int8"),
        "bfloat16, int8 rows, calibrated": quantised("int8", energies),
        "bfloat16, int4 groups of 32": quantised("int4"),
        "bfloat16, int4 groups of 32, calibrated": quantised("int4", energies),
        "bfloat16, int4 groups of 64": quantised("int4", group=64),
        "bfloat16, int4 groups of 64, calibrated": quantised("int4", energies, group=64),
    }
    sums = {name: [0.0, 0.0, 0.0] for name in ways}
    for window in windows:
        reference = by_model(exact.model, window)[:-1]
        targets = torch.tensor(window[1:])
        for name, way in ways.items():
            logits = way.logits(window)[:-1]
            kl, top1 = kl_and_agreement(reference, logits)
            for i, value in enumerate((float(token_nll(logits, targets).mean()), kl, top1)):
                sums[name][i] += value / len(windows)
    found = {
        name: Quality(math.exp(nll), kl, top1, ways[name].bits, kl <= MOST_KL) for name, (nll, kl, top1) in sums.items()
    }
    for name, q in found.items():
        verdict = "within" if q.faithful else "beyond"
        print(
            f"{name:40}{q.bits:6.2f} bits a weight  perplexity {q.perplexity:.3f}  KL {q.kl:.2e}, {verdict} {MOST_KL}"
            f"  same best token {q.top1:.1%}"
        )
    record = {
        "provenance": provenance(),
        "settings": {
            "model": args.model,
            "window": WINDOW,
            "windows": len(windows),
            "most_kl": MOST_KL,
            "calibration_tokens": len(ids) - scored,
        },
        "ways": {name: asdict(q) for name, q in found.items()},
    }
    store(args.out, record)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
