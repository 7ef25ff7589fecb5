"""What each rank does in the tests of expert parallel."""

from __future__ import annotations

from typing import Any

import torch

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.configs.config import SHAPES
from nanoinfer.engines.load import load
from nanoinfer.models.llama import Llama
from nanoinfer.parallel import expert
from nanoinfer.parallel.collectives import Communicator
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import tiny

CONFIG = SHAPES["tiny-moe"]
ROWS, PROMPT, STEPS = 4, 9, 3
UNIFORM = 4000  # tokens of each rank
DRAWS = 10


def rows() -> torch.Tensor:
    """Distinct texts ``[ROWS, PROMPT + STEPS]``."""
    return torch.randint(CONFIG.vocab_size, (ROWS, PROMPT + STEPS), generator=torch.Generator().manual_seed(7))


def passes(model: Llama, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits ``[B, T, V]`` of a prefill and of decode steps over a cache, the tokens given."""
    cache = ContiguousCache(CONFIG, len(ids), ids.shape[1], "cpu", torch.float32)
    out = []
    with torch.inference_mode():
        for start, end in [(0, PROMPT)] + [(i, i + 1) for i in range(PROMPT, ids.shape[1])]:
            positions = torch.arange(start, end).expand(len(ids), -1)
            out.append(model(ids[:, start:end], positions, cache))
    return out


def prompts(count: int) -> list[list[int]]:
    """Prompts of unlike lengths."""
    return [[(7 * i + 3 * j) % 256 for j in range(4 + 3 * i)] for i in range(count)]


def wanted(prompt: int) -> SamplingParams:
    """Answers of unlike lengths."""
    return SamplingParams(max_tokens=3 + 2 * prompt)


def check(comm: Communicator) -> dict[str, Any]:
    """Logits, tokens of three engines with fewer prompts than ranks, and traffic of random routing."""
    local = expert.shard(tiny(CONFIG), comm)
    model = local.model
    assert isinstance(model, Llama)
    logits = passes(model, rows()[comm.rank :: comm.size])
    expert.serve_idle_rank(model, comm)
    record = {
        "logits": [one.tolist() for one in logits],
        "sent": [[sent.kind, sent.message, sent.sent] for sent in comm.log],
        "computed": [list(layer) for layer in expert.rows_computed(model)],
        "held": len(model.get_submodule("layers.0.mlp.experts")),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    for engine in ("naive", "cached", "continuous"):
        mine = range(3)[comm.rank :: comm.size]
        options = {"token_budget": 5, "max_running": 4} if engine == "continuous" else {}  # prompts in chunks
        made = load(local, engine, **options)
        done = made.generate([prompts(3)[i] for i in mine], [wanted(i) for i in mine]) if mine else []
        expert.serve_idle_rank(model, comm)
        record[engine] = {i: one.token_ids for i, one in zip(mine, done, strict=True)}
    record["task"] = expert.generate(comm, "random:tiny-moe", prompts(3), {"max_tokens": 5}, seed=2)
    record["uniform"] = uniform(comm)
    return record


def uniform(comm: Communicator) -> list[float]:
    """Bytes that this rank sent with its tokens and with its answers, where any expert is as good as any other."""
    layer = expert.ShardedExperts(tiny(CONFIG).model.get_submodule("layers.0.mlp"), comm)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(comm.rank)
    there = back = 0.0
    for _ in range(DRAWS):
        chosen = torch.rand(UNIFORM, layer.n_experts, generator=generator).topk(layer.top_k).indices
        counts = chosen.flatten().bincount(minlength=layer.n_experts)
        layer.compute(torch.zeros(UNIFORM * layer.top_k, CONFIG.d_model), counts)
        there, back = there + comm.log[-2].sent, back + comm.log[-1].sent
    return [there / DRAWS, back / DRAWS]
