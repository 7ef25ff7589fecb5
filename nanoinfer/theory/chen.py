"""Chen's "Transformer Inference Arithmetic" (kipp.ly, 2022), figure by figure: what it prints, what it comes to.

The article is how many people learn to reason about inference, so its numbers are recomputed here rather than
quoted, and where the two differ :attr:`Figure.note` says why. Its setting: GPT-like blocks (``d_ff = 4 d``, a head
for each key and value), 16-bit weights, tensor parallelism over ``n`` A100 GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from nanoinfer.theory.arithmetic import check_sizes


@dataclass(frozen=True)
class Accelerator:
    """Peak FLOP/s, bytes/s of memory and of link (one way), bytes of memory, seconds per message."""

    flops: float
    bandwidth: float
    link: float
    memory: float
    message: float


#: The article's A100 40 GB. The datasheet says 1,555 GB/s; 8 us per message was measured on V100s.
A100: Final = Accelerator(flops=312e12, bandwidth=1.5e12, link=300e9, memory=40e9, message=8e-6)
WEIGHT_BYTES: Final = 2


@dataclass(frozen=True)
class Shape:
    """Layers, width and vocabulary of one of the article's models."""

    layers: int
    d: int
    vocabulary: int = 0


#: Anthropic's 52B, whose vocabulary is 65,536; the Gopher-like 260B has no vocabulary in the article.
B52: Final = Shape(64, 8192, 65_536)
GOPHER: Final = Shape(80, 16_384)
P52, P260 = 52e9, 260e9


def weights_time(parameters: float, n: int) -> float:
    """Seconds to read 16-bit weights once, split over ``n`` GPUs."""
    check_sizes(n=n)
    return WEIGHT_BYTES * parameters / (n * A100.bandwidth)


def communication(d: int, n: int) -> float:
    """Numbers that one GPU sends per token and layer under tensor parallelism: ``4 (n - 1) d / n``; 2 bytes each."""
    check_sizes(d=d, n=n)
    return 4 * (n - 1) * d / n


def small_batch_latency(shape: Shape, parameters: float, n: int) -> tuple[float, float]:
    """Seconds of (weights, messages) for one token: ``2 P / (n BW)`` and ``4 L`` messages; none on a single GPU."""
    return weights_time(parameters, n), 4 * shape.layers * A100.message if n > 1 else 0.0


def large_batch_latency(shape: Shape, parameters: float, n: int, batch: int) -> tuple[float, float]:
    """Seconds of (compute, communication) for one token of each row: ``B 2 P / (n C)``, ``B 2 L 4 d / link``.

    The ``2`` of the second is bytes per number. The slower one counts where the two overlap.
    """
    check_sizes(n=n, batch=batch)
    compute = batch * 2 * parameters / (n * A100.flops)
    return compute, batch * WEIGHT_BYTES * shape.layers * 4 * shape.d / A100.link


def flops_per_number_sent(d: int) -> dict[str, int]:
    """Multiply-adds per number communicated, as the article tabulates them; per 16-bit byte FLOPs are the same."""
    return {"qkv": 3 * d, "o": d, "w1": 4 * d, "w2": 4 * d}


def intermediates_share(share: float, d_from: int, d_to: int) -> float:
    """Share of time in memory-bound intermediate steps, moved to another width.

    They grow with ``d``, the products with ``d^2``: ``share x / (share x + (1 - share) x^2)``, ``x = d_to / d_from``.
    """
    check_sizes(d_from=d_from, d_to=d_to)
    x = d_to / d_from
    return share * x / (share * x + (1 - share) * x**2)


@dataclass(frozen=True)
class Figure:
    """One number of the article: ``computed`` here and ``printed`` there, in ``unit``; ``note`` names a slip."""

    name: str
    computed: float
    printed: float
    unit: str
    note: str = ""


def figures() -> tuple[Figure, ...]:
    """Every number that the article prints on its way, in its order."""
    n_layers, d = B52.layers, B52.d
    matrices = 12 * n_layers * d**2  # attention's four, the MLP's two of four times the width
    token = 2 * WEIGHT_BYTES * n_layers * d  # bytes of its keys and values
    free = A100.flops / A100.bandwidth  # tokens that compute while the weights are read, 2 bytes and 2 FLOPs each
    small, messages = small_batch_latency(GOPHER, P260, 16)
    large, volume = large_batch_latency(GOPHER, P260, 16, 512)
    exercise, exercise_volume = large_batch_latency(B52, P52, 4, 256)
    room3, room4 = (n * A100.memory - WEIGHT_BYTES * P52 for n in (3, 4))
    rounding = "56/0.002 is 28,000; with the exact bytes per token 26,703"
    numbers = "called bytes, but counts numbers of two bytes each"
    factor = "written 2*4*L*8us, evaluated as 4*L*8us: the factor is 4"
    goes_on = "the sentence goes on with 62 ms for the 53"
    unscaled = "0.43*8/64 leaves the other 57% unscaled: 8.6% of the whole"
    upside_down = "written as bandwidth over FLOP/s, which is 0.0048; the 208 is FLOP/s over bandwidth"
    return (
        Figure("k and v of a token, 52B", 2 * 2 * n_layers * d**2, 17_179_869_184, "FLOP"),
        Figure("tokens for free, A100", free, 208, "tokens"),
        Figure("weights, one GPU", 1e3 * weights_time(matrices, 1), 69, "ms"),
        Figure("weights, four GPUs", 1e3 * weights_time(matrices, 4), 17, "ms"),
        Figure("parameters, 52B", matrices + B52.vocabulary * d, 52e9, "parameters"),
        Figure("weights in memory", WEIGHT_BYTES * P52 / 1e9, 104, "GB", "52e12 is written for 52e9 parameters"),
        Figure("cache per token", token, 2_097_152, "B"),
        Figure("tokens that fit, three GPUs", room3 / token, 8000, "tokens", "rounded from 7,629"),
        Figure("tokens that fit, four GPUs", room4 / token, 23_000, "tokens", rounding),
        Figure("sent per token and layer, d 8192, four GPUs", communication(d, 4), 3 * d, "numbers", numbers),
        Figure("small batch, 260B on 16: weights", 1e3 * small, 22, "ms"),
        Figure("small batch, 260B on 16: messages", 1e3 * messages, 3, "ms", factor),
        Figure("large batch 512, 260B on 16: compute", 1e3 * large, 53, "ms", goes_on),
        Figure("large batch 512, 260B on 16: communication", 1e3 * volume, 18, "ms"),
        Figure("batch where compute takes over", free, 208, "tokens", upside_down),
        Figure("FLOPs per byte of link, A100", A100.flops / A100.link, 1040, "FLOP/B"),
        Figure("products per token, 52B", 2 * matrices, 103_079_215_104, "FLOP"),
        Figure("intermediates, 52B", 100 * intermediates_share(0.43, 1024, 8192), 5, "%", unscaled),
        Figure("13B, one GPU: weights", 1e3 * weights_time(12 * 40 * 5120**2, 1), 16.8, "ms"),
        Figure("13B, two GPUs: weights", 1e3 * weights_time(12 * 40 * 5120**2, 2), 8.4, "ms"),
        Figure("13B, two GPUs: messages", 1e3 * 4 * 40 * A100.message, 1, "ms", "rounded from 1.28"),
        Figure("exercise, batch 256, 52B on 4: compute", 1e3 * exercise, 21, "ms"),
        Figure("exercise, batch 256, 52B on 4: communication", 1e3 * exercise_volume, 4, "ms"),
    )
