"""What choosing tokens costs: sorting the vocabulary against the sort-free path, in turns.

Logits are made, not a model's: peaked ones fall off with rank as a trained model's do, flat ones
are near a uniform distribution, where few ids are nearly all of them and a sort-free path has the
least to gain. Both ways choose the same tokens, which is checked first. Run
``python -m benchmarks.sampling`` on a quiet machine (about a minute on two cores); the result is
stored under ``results/``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.store import options, store
from nanoinfer.measure.clock import Timing, paired, repeat
from nanoinfer.measure.environment import provenance
from nanoinfer.sampling.filters import Limits, best_few, keep_by_sorting
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.sampling.sample import SamplerState, sample, sample_by_sorting, softmax_with_temperature

VOCABULARIES = (49_152, 128_256)
ROWS = (1, 32)
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "both": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
#: How fast logits fall with the logarithm of their rank, and the noise about that.
LOGITS = {"peaked": (1.5, 1.0), "flat": (0.0, 0.1)}


@dataclass(frozen=True)
class Point:
    """One setting. Seconds are medians with their range; ``sorting`` is None where nothing is filtered.

    ``kept`` is the median number of ids that a row keeps; ``few`` the share of rows whose best few ids were
    enough; ``ratio`` is sorting / sort-free with its 95% interval.
    """

    logits: str
    vocabulary: int
    rows: int
    setting: str
    kept: int
    few: float
    seconds: tuple[float, float, float]
    sorting: tuple[float, float, float] | None
    ratio: tuple[float, float | None, float | None] | None


def made_logits(kind: str, rows: int, vocabulary: int, device: str) -> Tensor:
    """``[rows, vocabulary]`` fp32; every row has its own order of ids."""
    fall, noise = LOGITS[kind]
    generator = torch.Generator().manual_seed(0)
    level = -fall * torch.arange(1, vocabulary + 1, dtype=torch.float32).log()
    made = [level[torch.randperm(vocabulary, generator=generator)] for _ in range(rows)]
    return (torch.stack(made) + noise * torch.randn(rows, vocabulary, generator=generator)).to(device)


def point(kind: str, vocabulary: int, rows: int, setting: str, device: str, repeats: int) -> Point:
    """Check that both ways choose the same, then time them in turns."""
    logits = made_logits(kind, rows, vocabulary, device)
    fields = SETTINGS[setting]

    def chooser(way: Callable[[Tensor, list[SamplerState]], Tensor]) -> Callable[[], list[int]]:
        states = [SamplerState(SamplingParams(**fields, seed=row), [0]) for row in range(rows)]  # type: ignore[arg-type]
        return lambda: way(logits, states).tolist()

    def spread(timing: Timing) -> tuple[float, float, float]:
        return statistics.median_low(timing.samples), min(timing.samples), max(timing.samples)

    if not {"top_k", "top_p"} & set(fields):
        timing = repeat(chooser(sample), device=device, warmup=2, repeats=repeats)
        return Point(
            kind, vocabulary, rows, setting, 1 if setting == "greedy" else vocabulary, 0.0, spread(timing), None, None
        )
    if chooser(sample)() != chooser(sample_by_sorting)():
        raise SystemExit(f"{kind}, {vocabulary}, {setting}: the two ways chose different tokens")
    params = [SamplingParams(**fields)] * rows  # type: ignore[arg-type]
    probs, limits = softmax_with_temperature(logits, params), Limits.of(params, vocabulary, logits.device)
    kept = int(keep_by_sorting(probs, limits).sum(dim=-1).median())
    few = float(best_few(probs, limits)[2].float().mean())
    both = paired(chooser(sample_by_sorting), chooser(sample), device=device, warmup=2, repeats=repeats)
    ratio = both.ratio.value, both.ratio.low, both.ratio.high
    return Point(kind, vocabulary, rows, setting, kept, few, spread(both.b), spread(both.a), ratio)


def main() -> None:
    """Measure, print and store."""
    args = options(__doc__, "results/sampling.json", device="cpu", repeats=9)
    points = []
    print(
        f"{'logits':8}{'vocabulary':>11}{'rows':>6}  {'setting':12}{'kept':>8}{'ms':>9}{'sorting, ms':>13}{'ratio':>8}"
    )
    for kind in LOGITS:
        for vocabulary in VOCABULARIES:
            for rows in ROWS:
                for setting in SETTINGS:
                    p = point(kind, vocabulary, rows, setting, args.device, args.repeats)
                    points.append(p)
                    line = f"{kind:8}{vocabulary:11,}{rows:6}  {setting:12}{p.kept:8,}{1e3 * p.seconds[0]:9.2f}"
                    if p.sorting and p.ratio:
                        line += f"{1e3 * p.sorting[0]:13.2f}{p.ratio[0]:8.1f} ({p.ratio[1]:.1f} to {p.ratio[2]:.1f})"
                    print(line, flush=True)
    record = {"provenance": provenance(), "device": args.device, "points": [asdict(p) for p in points]}
    store(args.out, record)
    print(f"{len(points)} points written to {args.out}")


if __name__ == "__main__":
    main()
