"""What ranks do for the tests of the comm, the ring, the link's rates and tensor parallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.calibrate.links import time_calls
from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.static import CachedEngine, left_pad
from nanoinfer.models.registry import LoadedModel
from nanoinfer.parallel.collectives import Communicator, ring_all_reduce
from nanoinfer.parallel.tensor import shard
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import tiny

#: 101 tokens: neither 2 nor 4 ranks divide that.
SHAPES = {
    "llama": ModelConfig("llama", 2, 32, 4, 4, 8, 48, 101, 48, tied=False),
    "grouped, tied": ModelConfig("llama", 2, 32, 8, 2, 4, 48, 101, 48),
    "gpt2": ModelConfig("gpt2", 2, 32, 4, 4, 8, 64, 101, 48),
}
#: Heads and an MLP that two ranks cannot share evenly; the latter not in any way.
UNEVEN = ModelConfig("llama", 2, 36, 9, 3, 4, 51, 101, 48)
PROMPTS = [[3, 14, 15, 92, 65], [35, 8, 97], [9, 32, 38, 46, 26, 43, 38]]
#: Fed after the prompts, one column a step.
FED = [[100, 2, 71], [50, 51, 0], [27, 18, 28]]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
#: The longest is more than two ranks swap.
RING_LENGTHS = (1, 3, 8, 1000, 40_000)


def check(comm: Communicator) -> dict[str, Any]:
    """One entry for each test file."""
    found: dict[str, Any] = {"comm": collectives(comm), "ring": rings(comm), "link": time_calls(comm, 1)}
    for name, config in SHAPES.items():
        found[name] = sliced(tiny(config), comm)
    if comm.size == 2:
        found["uneven"] = sliced(tiny(UNEVEN), comm, uneven=True)
    return found


def collectives(comm: Communicator) -> dict[str, Any]:
    """What comes out of each, and what it notes."""
    n, rank = comm.size, comm.rank
    previous, following = (rank - 1) % n, (rank + 1) % n
    x = torch.tensor([[rank, 10.0], [20.0, rank]])
    found: dict[str, Any] = {
        "all-reduce": comm.all_reduce(x.clone()).tolist(),
        "all-gather": comm.all_gather(x).tolist(),
        "exchange": comm.exchange(x, following, previous).tolist(),
        "broadcast": comm.broadcast(x.clone(), 1).tolist(),
    }
    # rank r has r + i numbers for rank i, so that all parts are of unlike lengths and one is empty
    parts = [torch.full((rank + i,), 10.0 * rank + i) for i in range(n)]
    found["all-to-all"] = [t.tolist() for t in comm.all_to_all(parts, [torch.empty(i + rank) for i in range(n)])]
    if rank == 0:
        comm.send(x, 1)
    elif rank == 1:
        found["receive"] = comm.receive(torch.empty(2, 2), 0).tolist()
    found["log"] = [[call.kind, call.message, call.sent, call.seconds > 0] for call in comm.log]
    comm.log.clear()
    return found


def rings(comm: Communicator) -> dict[str, Any]:
    """The ring all-reduce and PyTorch's, and the bytes of its exchanges."""
    found = {}
    for length in RING_LENGTHS:
        of_ranks = [torch.randn(length, generator=torch.Generator().manual_seed(rank)) for rank in range(comm.size)]
        x, total = of_ranks[comm.rank], sum(of_ranks)
        sums = [comm.all_reduce(x.clone()), comm.all_gather(x).view(comm.size, -1).sum(0)]
        comm.log.clear()
        sums.append(ring_all_reduce(comm, x))
        assert sums[-1] is x
        off = [(by - total).abs().max().item() for by in sums]
        found[str(length)] = [off, {call.kind for call in comm.log} == {"exchange"}, sum(c.sent for c in comm.log)]
        comm.log.clear()
    return found


def sliced(loaded: LoadedModel, comm: Communicator, uneven: bool = False) -> dict[str, Any]:
    """A rank's slice, driven as the test drives the whole."""
    before = [p.clone() for p in loaded.model.parameters()]
    part = shard(loaded, comm, uneven=uneven)
    untouched = all(torch.equal(a, b) for a, b in zip(before, loaded.model.parameters(), strict=True))
    whole_memory = {p.untyped_storage().data_ptr() for p in loaded.model.parameters()}
    kept = sum(p.nbytes for p in part.model.parameters() if p.untyped_storage().data_ptr() in whole_memory)
    comm.log.clear()
    config = part.model.config
    return {
        **drive(part, comm),
        "config": [config.n_heads, config.n_kv_heads, config.d_ff],
        "untouched": untouched,
        "shared": kept,  # bytes of the whole that the slice keeps alive
        "bytes": sum(p.nbytes for p in part.model.parameters()),
    }


@torch.inference_mode()
def drive(loaded: LoadedModel, comm: Communicator | None = None) -> dict[str, Any]:
    """Logits of a ragged batch's prefill and of decode steps, the calls of each, and what two engines say."""
    model, log = loaded.model, [] if comm is None else comm.log
    batch = left_pad(PROMPTS)
    longest = batch.ids.shape[1]
    cache = ContiguousCache(model.config, len(PROMPTS), longest + len(FED[0]), "cpu", torch.float32)
    logits: list[Tensor] = [model(batch.ids, batch.positions, cache, batch.mask, last_only=True)[:, -1]]
    marks = [len(log)]
    for step in range(len(FED[0])):
        ids = torch.tensor([[row[step]] for row in FED])
        positions = torch.tensor([[len(prompt) + step] for prompt in PROMPTS])
        mask = (torch.arange(longest + step + 1) >= batch.pads[:, None])[:, None, None, :]
        logits.append(model(ids, positions, cache, mask)[:, -1])
        marks.append(len(log))
    calls = [[[c.kind, c.message, c.sent] for c in log[a:b]] for a, b in zip([0, *marks], marks, strict=False)]
    engines = (
        CachedEngine(loaded),
        ContinuousEngine(loaded, max_running=4, token_budget=6, block_size=4, cache_tokens=128),
    )
    settings = (GREEDY, SEEDED)
    said = [[[done.token_ids for done in e.generate(PROMPTS, p)] for p in settings] for e in engines]
    return {"logits": [t.tolist() for t in logits], "calls": calls, "said": said}
