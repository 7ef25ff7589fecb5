"""Recorded decode steps say what computed ones say, whatever has changed since they were recorded.

On a CPU a :class:`Tape` stands in for a CUDA graph. It too repeats operations with the arguments they had, and calls
no Python of ours: a number of one step that is baked into the recording makes the next step wrong.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from nanoinfer.cache import ragged
from nanoinfer.cache.blocks import BlockPool
from nanoinfer.cache.paged import NewTokens, PagedCache
from nanoinfer.cache.ragged import RaggedFlash
from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.errors import DeviceError
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.cuda_graphs import DecodeGraphs, Recorder, Work
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import checked_after_each_step, tiny

MODELS = ["random:tiny-llama", "random:tiny-gpt2"]  # the first has grouped queries
SHAPES = {
    "llama": ModelConfig("llama", 2, 32, 4, 2, 8, 48, 256, 96, tied=False),
    "llama-mha": ModelConfig("llama", 2, 32, 4, 4, 8, 48, 256, 96, tied=False),
    "gpt2": ModelConfig("gpt2", 2, 16, 2, 2, 8, 64, 256, 96),
}
SIZE = 4  # tokens a block
#: Of the sequences below: some end a block, some begin one, some are longer than 64 tokens, as in the larger graphs.
LENGTHS = (1, 3, 4, 7, 30, 62, 63, 64, 65, 79)
MOST_ROWS = 6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


# --- a stand-in for CUDA graphs -----------------------------------------------------------------


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations done while it is on; :meth:`replay` does them again, over what is in their memory by then."""

    waits = (
        torch.ops.aten._local_scalar_dense,  # .item(), .tolist(), an if over a tensor
        torch.ops.aten.nonzero,
        torch.ops.aten.masked_select,
    )

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in self.waits, f"{func} waits for the device"
        with self:  # where it is made of others, those are taped
            if (out := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                return out
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, (args, kwargs or {}), out))
        return out

    def replay(self) -> None:
        made: dict[int, Tensor] = {}  # by what was there when it was recorded
        for func, given, recorded in self.calls:
            args, kwargs = tree_map_only(Tensor, lambda t: made.get(id(t), t), given)
            out = func(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(out), strict=True):
                made[id(old)] = new


class Taping:
    """Records as for a GPU: the work is done, then taped, then only replayed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, work: Work) -> Work:
        self.count += 1
        work()
        with (tape := Tape()):
            work()
        return tape.replay


def eager(work: Work) -> Work:
    """Records nothing: the work itself is called again."""
    return work


def test_a_tape_keeps_numbers_and_refuses_to_wait() -> None:
    x, y, number = torch.ones(3), torch.zeros(3), 2
    with (tape := Tape()):
        y.copy_((x * number)[:2].sum())
    x.fill_(5)
    number = 100
    tape.replay()
    assert y.tolist() == [20, 20, 20]
    with pytest.raises(AssertionError, match="waits for the device"), Tape():
        x[0].item()


# --- in the engine -----------------------------------------------------------------------


def engine_of(loaded: LoadedModel, **options: Any) -> ContinuousEngine:
    return ContinuousEngine(
        loaded, **{"max_running": MOST_ROWS, "token_budget": 40, "block_size": SIZE, "cache_tokens": 1200, **options}
    )


def with_graphs(engine: ContinuousEngine, recorder: Recorder | None) -> ContinuousEngine:
    scratch = engine.pool.n_blocks
    engine.cache = PagedCache(engine.config, scratch + 1, engine.pool.block_size, engine.device, engine.dtype)
    graphs = DecodeGraphs(engine.model, engine.scheduler.max_running, scratch, recorder)
    engine.kernel = graphs  # type: ignore[assignment]
    return engine


def work_for(engine: ContinuousEngine) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that get on side by side, over 64 and 128 tokens, and end one after the other."""
    rng = random.Random(3)
    lengths = (1, 3, 30, 58, 61, 64, 20, 90)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in lengths]
    room = min(engine.config.context - max(lengths), 50)
    params = [
        SamplingParams(
            max_tokens=rng.randrange(room // 2, room),
            temperature=0.9 * (i % 2),
            seed=i,
            n=1 + (i == 4),
            ignore_eos=True,
        )
        for i in range(len(prompts))
    ]
    return prompts, params


def recordings(err: str) -> list[tuple[int, int]]:
    """Rows and tokens of what was said on screen to be recorded."""
    said = re.findall(r"nanoinfer: recording a decode step of (\d+) rows?, up to (\d+) tokens each\n", err)
    return [(int(rows), int(tokens)) for rows, tokens in said]


@pytest.mark.parametrize(("recorder", "is_tight"), [(eager, True), (Taping(), False)], ids=["tight", "room"])
@pytest.mark.parametrize("name", MODELS)
def test_same_tokens_as_without(
    name: str, recorder: Recorder, is_tight: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(name)
    context = loaded.model.config.context
    cache_tokens = context + 16 if is_tight else MOST_ROWS * context
    plain, engine = (engine_of(loaded, cache_tokens=cache_tokens) for _ in range(2))
    checked_after_each_step(with_graphs(engine, recorder), poison="free")
    prompts, params = work_for(engine)
    expected = [c.token_ids for c in plain.generate(prompts, params)]
    assert [c.token_ids for c in engine.generate(prompts, params)] == expected
    recorded = recordings(capsys.readouterr().err)
    assert {rows for rows, _ in recorded} <= {1, 2, 4, MOST_ROWS}
    assert {tokens for _, tokens in recorded} == {64, 128, context}
    assert [c.token_ids for c in engine.generate(prompts, params)] == expected  # now with prefixes found
    recorded += recordings(capsys.readouterr().err)
    assert len(recorded) == len(set(recorded)), "one size was recorded twice"
    assert (engine.scheduler.preemptions > 0) == is_tight
    engine.pool.check([])


# --- step by step ------------------------------------------------------------------------


class Bench:
    """Sequences of several lengths in one paged cache, each with its next token to come."""

    def __init__(
        self,
        config: ModelConfig,
        lengths: Sequence[int] = LENGTHS,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = tiny(config).model.to(device, dtype)
        self.device, self.scratch = device, 150
        pool = BlockPool(self.scratch, SIZE, share_prefixes=False)
        self.cache = PagedCache(config, self.scratch + 1, SIZE, device, dtype)
        rng = random.Random(len(lengths))
        self.texts = [[rng.randrange(config.vocab_size) for _ in range(n + 1)] for n in lengths]
        self.tables = [pool.open([]) for _ in lengths]
        for table, text in zip(self.tables, self.texts, strict=True):
            n = len(text) - 1
            pool.grow(table, n)
            step = self.cache.step([NewTokens(table, n)])
            self.model.hidden(torch.tensor([text[:n]], device=device), step.positions, step)
            pool.commit(table, text, n)
            pool.grow(table, 1)

    def rows(self, which: Sequence[int]) -> tuple[PagedCache, list[NewTokens], list[int]]:
        """What a step is called with; blocks are ready."""
        rows = [NewTokens(self.tables[i], 1) for i in which]
        self.cache.step(rows)
        return self.cache, rows, [self.texts[i][-1] for i in which]

    def by_model(self, which: Sequence[int]) -> Tensor:
        _, rows, ids = self.rows(which)
        step = self.cache.step(rows)
        hidden = self.model.hidden(torch.tensor([ids], device=self.device), step.positions, step)
        return self.model.head(hidden[0]).float()

    def graphs(self, recorder: Recorder | None) -> DecodeGraphs:
        return DecodeGraphs(self.model, MOST_ROWS, self.scratch, recorder)

    def slots(self, which: Sequence[int]) -> list[int]:
        """Where the next tokens go."""
        tables = [self.tables[i] for i in which]
        return [table.blocks[table.length // SIZE] * SIZE + table.length % SIZE for table in tables]


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


#: Steps of one to six rows, which come in any order and have two sizes of text.
STEPS = ([0], [1, 2, 3], [9], [3, 2, 1], [4, 0, 9, 8, 5], [5, 6, 7], [0, 1, 2, 3, 4, 5], [2, 9, 8], [7], [4, 3])


def close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours, right, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_a_recording_takes_nothing_from_the_step_it_was_made_in(name: str) -> None:
    bench, recorder = Bench(SHAPES[name]), Taping()
    step = bench.graphs(recorder)
    held = []
    for which in STEPS:
        held.append((step(*bench.rows(which)), bench.by_model(which)))
    for ours, right in held:  # a result is the caller's, whatever is replayed after it
        close(ours, right)
        assert ours.dtype == torch.float32
    assert recorder.count == 7 < len(STEPS)  # 1, 2, 4 rows and one of 6 by 64 and 96 tokens, less one that never came


@pytest.mark.parametrize("name", SHAPES)
def test_a_step_writes_its_own_slots_and_reads_its_own_text(name: str) -> None:
    bench = Bench(SHAPES[name])
    which = [3, 5, 9]  # a fourth row is padding
    bench.tables[3].blocks.append(bench.scratch - 1)  # taken for later
    slots = torch.tensor(bench.slots(which))
    logits = bench.by_model(which)
    stores = bench.cache.k, bench.cache.v
    right = [store.flatten(1, 2)[:, slots] for store in stores]
    own = [block for i in which for block in bench.tables[i].blocks if block < bench.scratch - 1]
    others = torch.tensor(sorted(set(range(bench.scratch + 1)) - set(own)))
    for store in stores:
        store[:, others] = math.nan
        store.flatten(1, 2)[:, slots] = 7.0
    before = [store.clone() for store in stores]
    close(bench.graphs(Taping())(*bench.rows(which)), logits)
    for store, was, new in zip(stores, before, right, strict=True):
        close(store.flatten(1, 2)[:, slots], new)
        assert store[0, bench.scratch, 0].isfinite().all()  # where the padding went
        store.flatten(1, 2)[:, slots] = 7.0
        store[:, bench.scratch] = math.nan
        assert torch.equal(store.view(torch.int32), was.view(torch.int32))


def test_each_size_is_recorded_once_and_there_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(SHAPES["llama"], range(1, 12))
    step = bench.graphs(eager)
    for length in range(96):  # no matter what is in the blocks
        for n in range(1, MOST_ROWS + 1):
            cache, rows, ids = bench.rows(range(n))
            for row in rows:
                row.table.blocks = [*range(24)]
                row.table.length = length
            assert step(cache, rows, ids).shape == (n, 256)
    sizes = [(rows, tokens) for tokens in (64, 96) for rows in (1, 2, 4, MOST_ROWS)]
    assert recordings(capsys.readouterr().err) == sizes


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_anew_when_cache_or_weights_are_elsewhere(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(SHAPES["llama"], device=device)
    step = bench.graphs(Taping() if device == "cpu" else None)

    def check(times: int) -> None:
        for which in ([1, 2], [5, 6]):
            close(step(*bench.rows(which)), bench.by_model(which))
        assert recordings(capsys.readouterr().err) == [(2, 64)] * times

    check(1)
    check(0)
    old, bench.cache = bench.cache, PagedCache(bench.model.config, bench.scratch + 1, SIZE, device, torch.float32)
    for now, left in ((bench.cache.k, old.k), (bench.cache.v, old.v)):
        now.copy_(left)
        left.fill_(math.nan)
    check(1)
    assert old.k.isnan().all() and old.v.isnan().all()
    named = dict([*bench.model.named_parameters(), *bench.model.named_buffers()])
    for tensor in (named["layers.1.mlp.up_proj.weight"], named["inv_freq"]):
        left, tensor.data = tensor.data, tensor.data.clone() * 0.5
        left.fill_(math.nan)
        check(1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("name", SHAPES)
def test_in_every_dtype(name: str, dtype: torch.dtype, most: float, device: str) -> None:
    bench = Bench(SHAPES[name], device=device, dtype=dtype)
    exact = Bench(SHAPES[name], device=device)
    exact.model = copy.deepcopy(bench.model).float()
    exact.cache.k.copy_(bench.cache.k)
    exact.cache.v.copy_(bench.cache.v)
    step = bench.graphs(eager if device == "cpu" else None)
    for which in STEPS:
        ours, right = step(*bench.rows(which)), exact.by_model(which)
        assert (ours - right).norm() / right.norm() < most


def varlen_by_hand(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int, **options: Any
) -> Tensor:
    """What PyTorch's documentation says of ``varlen_attn`` with ``seqused_k``, one row after the other."""
    used = options.pop("seqused_k")
    assert options == {"enable_gqa": q.shape[1] != k.shape[1]}
    assert {t.dtype for t in (ends_q, ends_k, used)} == {torch.int32}
    assert used.shape == (len(ends_q) - 1,) and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    assert int(ends_q.diff().max()) == max_q and int(ends_k.diff().max()) == max_k
    out = torch.empty_like(q)
    for row, n in enumerate(used.tolist()):
        mine, its = slice(*ends_q[row : row + 2].tolist()), slice(int(ends_k[row]), int(ends_k[row]) + n)
        keys, values = (x[its].repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(0, 1) for x in (k, v))
        found = torch.nn.functional.scaled_dot_product_attention(q[mine].transpose(0, 1), keys, values)
        out[mine] = found.transpose(0, 1)
    return out


@pytest.mark.parametrize("name", SHAPES)
def test_flash_attention_is_given_each_rows_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(SHAPES[name])
    monkeypatch.setattr(RaggedFlash, "fits", lambda store: True)
    monkeypatch.setattr(ragged, "varlen_attn", varlen_by_hand)
    step = bench.graphs(eager)
    ours = [step(*bench.rows(which)) for which in STEPS]
    monkeypatch.undo()
    for mine, which in zip(ours, STEPS, strict=True):
        close(mine, bench.by_model(which))


def test_graphs_need_cuda() -> None:
    with pytest.raises(DeviceError, match="CUDA graphs need a CUDA device, and the model is on cpu"):
        DecodeGraphs(tiny(SHAPES["gpt2"]).model, 4, 0)


# --- on a GPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_graphs_say_what_the_engine_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_model(name, device="cuda")
    plain, engine = engine_of(loaded), with_graphs(engine_of(loaded), None)
    prompts, params = work_for(engine)
    expected = [c.token_ids for c in plain.generate(prompts, params)]
    for _ in range(2):
        assert [c.token_ids for c in engine.generate(prompts, params)] == expected
    recorded = recordings(capsys.readouterr().err)
    assert len(recorded) == len(set(recorded)) >= 4


@pytest.mark.gpu
def test_replays_take_no_memory_and_graphs_share_theirs() -> None:
    bench = Bench(SHAPES["llama"], device="cuda")
    step = bench.graphs(None)
    for which in (*STEPS, *STEPS):
        step(*bench.rows(which))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(20):
        for which in STEPS:
            step(*bench.rows(which))
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    graphs = step.recorder._graphs  # type: ignore[attr-defined]
    assert len(graphs) == 7
    assert len({graph.pool() for graph in graphs}) == 1
