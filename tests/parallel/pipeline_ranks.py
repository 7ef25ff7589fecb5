"""What ranks do for the tests of pipelines; they look at what comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.static import CachedBatch, CachedEngine, StaticEngine
from nanoinfer.errors import RequestError
from nanoinfer.models.model import n_parameters
from nanoinfer.parallel.collectives import Communicator
from nanoinfer.parallel.experiments import measure_bubble
from nanoinfer.parallel.pipeline import PipelineEngine, StageBatch
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import tiny

#: Five layers: two stages of unlike length, and four.
CONFIGS = {
    "gpt2": ModelConfig("gpt2", 5, 16, 2, 2, 8, 64, 256, 32),
    "llama": ModelConfig("llama", 5, 32, 4, 2, 8, 48, 256, 64, tied=False),
}
RAGGED = [[3, 1, 4, 1, 5, 9, 2], [6, 5], [35, 89, 79, 3], [17]]
EVEN = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [58, 9, 7, 93, 2], [38, 4, 62, 64, 33]]
MICRO_BATCHES = (1, 2, 3)  # the last does not divide four rows
STEPS = 6


#: Of four rows: greedy and sampled, short and long.
SETTINGS = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=4, temperature=0.9, top_p=0.8, seed=1),
    SamplingParams(max_tokens=12, repetition_penalty=1.2),
    SamplingParams(max_tokens=7, temperature=1.1, seed=2),
]
ENDLESS = [replace(params, ignore_eos=True) for params in SETTINGS]


def ends(config: ModelConfig, prompts: list[list[int]]) -> list[int]:
    """Ids that, taken for the end of a text, end the first and the third row early, and at different steps."""
    rows = [row for row, _, _ in generated(CachedEngine(tiny(config)), prompts, SETTINGS)]
    return [rows[0][4], rows[2][7]]


def step_logits(engine: StaticEngine, prompts: list[list[int]], follow: list[Tensor] | None = None) -> list[Tensor]:
    """Logits of a prefill and of decode steps, with the greedy tokens of these logits or of others to ``follow``."""
    requests = engine.admit(prompts, SamplingParams(max_tokens=STEPS, ignore_eos=True))
    steps = []
    with torch.inference_mode():
        forward = engine.start(requests)
        for step in range(STEPS):
            steps.append(forward(requests))
            chosen = steps[-1] if follow is None else follow[step]
            for request, token in zip(requests, chosen.argmax(-1).tolist(), strict=True):
                request.accept(token, 0.0)
    return steps


def compared(engine: StaticEngine, prompts: list[list[int]], expected: list[Tensor]) -> list[tuple[float, float]]:
    """For each step the largest difference from one device's logits, and the spread of those."""
    steps = zip(step_logits(engine, prompts, expected), expected, strict=True)
    return [(float((ours - one).abs().max()), float(one.std())) for ours, one in steps if ours.shape[-1]]


def generated(engine: StaticEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    return [[c.token_ids, c.text, c.finish_reason] for c in engine.generate(prompts, params)]


def log_of(comm: Communicator) -> list[tuple[str, int, float]]:
    """What was sent since the last call."""
    log = [(sent.kind, sent.message, sent.sent) for sent in comm.log]
    comm.log.clear()
    return log


def refused(engine: StaticEngine, prompts: list[list[int]], **params: Any) -> str:
    try:
        engine.generate(prompts, SamplingParams(**params))
    except RequestError as error:
        return str(error)
    return "nothing"


def check(comm: Communicator, eos: dict[str, list[int]]) -> dict[str, Any]:
    answer: dict[str, Any] = {"differences": {}, "tokens": {}, "log": {}, "bytes": {}, "parameters": {}}
    for family, config in CONFIGS.items():
        loaded = tiny(config, eos[family])
        expected = [step_logits(CachedEngine(loaded), prompts) for prompts in (RAGGED, EVEN)]
        for m in MICRO_BATCHES:
            engine = PipelineEngine(loaded, comm, m)
            key = f"{family} {m}"
            answer["differences"][key] = [compared(engine, p, e) for p, e in zip((RAGGED, EVEN), expected, strict=True)]
            answer["tokens"][key] = [generated(engine, RAGGED, params) for params in (SETTINGS, ENDLESS)]
            log_of(comm)
            engine.generate(EVEN, SamplingParams(max_tokens=STEPS, ignore_eos=True))
            answer["log"][key] = log_of(comm)
        requests = engine.admit(EVEN, SamplingParams(max_tokens=STEPS))
        whole = CachedBatch(CachedEngine(loaded), requests).cache.nbytes
        answer["bytes"][family] = [StageBatch(engine, requests).cache.nbytes, whole]
        answer["parameters"][family] = [n_parameters(engine.model), n_parameters(loaded.model)]
    answer["unseeded"] = generated(engine, EVEN, [SamplingParams(max_tokens=20, temperature=2.0)] * 4)
    answer["one row"] = generated(PipelineEngine(loaded, comm, 8), EVEN[:1], SETTINGS[:1])
    answer["refused"] = [refused(engine, EVEN, logprobs=1), refused(engine, EVEN, on_full="crop")]
    answer["bubble"] = measure_bubble(comm, layers_per_stage=1, rows=4, tokens=4, micro_batches=(1, 4), repeats=2)
    return answer
