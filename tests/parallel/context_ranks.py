"""What ranks do for the tests of context parallel; they look at what comes back."""

from __future__ import annotations

from typing import Any

from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.static import CachedEngine
from nanoinfer.parallel.collectives import Communicator
from nanoinfer.parallel.context import ContextBatch, ContextEngine
from nanoinfer.parallel.experiments import measure_overlap
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import tiny
from tests.parallel.pipeline_ranks import ENDLESS, SETTINGS, STEPS, compared, generated, log_of, refused, step_logits

CONFIGS = {
    "gpt2": ModelConfig("gpt2", 3, 16, 2, 2, 8, 64, 256, 32),
    "llama": ModelConfig("llama", 3, 32, 4, 2, 8, 48, 256, 64, tied=False),
}
#: Shorter than there are chunks; a token too many for even chunks; even ones; GPT-2's whole context but a decode's.
LENGTHS = (5, 13, 16, 26)
ROWS = 4


def prompts(length: int) -> list[list[int]]:
    """Four rows that have nothing in common."""
    return [[(17 * row + 31 * i + 7 * i * i) % 256 for i in range(length)] for row in range(ROWS)]


def check(comm: Communicator, eos: dict[str, list[int]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"differences": {}, "tokens": {}, "log": {}, "kept": {}}
    for family, config in CONFIGS.items():
        loaded = tiny(config, eos[family])
        engine = ContextEngine(loaded, comm)
        for length in LENGTHS:
            key = f"{family} {length}"
            expected = step_logits(CachedEngine(loaded), prompts(length))
            answer["differences"][key] = [
                compared(ContextEngine(loaded, comm, overlap), prompts(length), expected) for overlap in (True, False)
            ]
            log_of(comm)
            requests = engine.admit(prompts(length), SamplingParams(max_tokens=STEPS, ignore_eos=True))
            batches: list[ContextBatch] = []
            engine.start = lambda r, e=engine, b=batches: b.append(ContextBatch(e, r)) or b[0]  # type: ignore
            list(engine.run(requests))
            del engine.start
            answer["log"][key] = log_of(comm)
            cache = batches[0].cache
            answer["kept"][key] = [cache.own.length, cache.own.capacity, cache.length]
        answer["tokens"][family] = [generated(engine, prompts(13), params) for params in (SETTINGS, ENDLESS)]
    answer["unseeded"] = generated(engine, prompts(9), [SamplingParams(max_tokens=20, temperature=2.0)] * ROWS)
    answer["refused"] = [
        refused(engine, [[1, 2, 3, 4, 5], [1, 2, 3, 4]]),
        refused(engine, [[1]]),
        refused(engine, prompts(5), logprobs=1),
        refused(engine, prompts(5), on_full="crop"),
    ]
    log_of(comm)
    answer["overlap"] = measure_overlap(comm, tokens=(12, 16), layers=1, repeats=2)
    return answer
