"""Attention over blocks is attention: whatever the blocks, the neighbours and the cuts of a prompt."""

from __future__ import annotations

import gc
import math
import mmap
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoinfer.cache import paged, ragged
from nanoinfer.cache.blocks import BlockTable
from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.cache.paged import NewTokens, PagedCache, clear, zeros
from nanoinfer.cache.ragged import RaggedFlash, RaggedSdpa
from nanoinfer.configs.config import ModelConfig
from tests.engines.helpers import GPT2, LLAMA, tiny
from tests.examples import examples

MHA = ModelConfig("llama", 2, 8, 2, 2, 4, 8, 16, 64)
GQA = ModelConfig("llama", 2, 24, 6, 2, 4, 8, 16, 64)
TINY = {config.family: tiny(config) for config in (GPT2, LLAMA)}


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of the last ``T`` of ``S`` tokens, in fp64: ``[T, n_q, d]``, ``[S, n_kv, d]`` to ``[T, n_q, d]``."""
    n_new, n_q, d_head = q.shape
    k, v = (x.double().repeat_interleave(n_q // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("tnd,snd->nts", q.double(), k) / math.sqrt(d_head)
    hidden = torch.ones(n_new, len(k), dtype=torch.bool).triu(len(k) - n_new + 1)
    return torch.einsum("nts,snd->tnd", scores.masked_fill(hidden, -math.inf).softmax(-1), v).float()


@dataclass
class Text:
    """Queries, keys and values of one sequence, ``[L, S, n, d]``, and where they are."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: BlockTable = field(default_factory=BlockTable)

    @classmethod
    def random(cls, config: ModelConfig, length: int, blocks: list[int]) -> Text:
        heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
        return cls(*(torch.randn(config.n_layers, length, n, config.d_head) for n in heads), BlockTable(blocks))

    def new(self, layer: int, n: int) -> tuple[Tensor, ...]:
        return tuple(x[layer, self.table.length : self.table.length + n] for x in (self.q, self.k, self.v))

    def expected(self, layer: int, n: int) -> Tensor:
        end = self.table.length + n
        return by_hand(self.q[layer, self.table.length : end], self.k[layer, :end], self.v[layer, :end])


def step(cache: PagedCache, work: list[tuple[Text, int]], copies: list[tuple[int, int]] | None = None) -> None:
    """One pass in which each text brings so many tokens; every layer is held to attention by hand."""
    now = cache.step([NewTokens(text.table, n) for text, n in work], copies or [])
    assert now.positions.tolist() == [[i for t, n in work for i in range(t.table.length, t.table.length + n)]]
    for layer in range(cache.k.shape[0]):
        packed = [torch.cat(parts) for parts in zip(*(t.new(layer, n) for t, n in work), strict=True)]
        q, k, v = (x.transpose(0, 1)[None] for x in packed)  # as a model hands them over: [1, n, N, d]
        got = now.attend(layer, q, k, v, None)
        expected = torch.cat([text.expected(layer, n) for text, n in work]).flatten(1)
        torch.testing.assert_close(got, expected[None], atol=2e-6, rtol=1e-5)
    now.advance(len(packed[0]))
    for text, n in work:
        text.table.length += n


def varlen_by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """PyTorch's kernel as documented, for causal windows: the last query of a row sees its last key."""
    assert (ends_q.dtype, ends_k.dtype, window_size) == (torch.int32, torch.int32, (-1, 0))
    assert enable_gqa or q.shape[1] == k.shape[1]
    rows_q, rows_k = ([slice(a, b) for a, b in pairwise(ends.tolist())] for ends in (ends_q, ends_k))
    assert longest_q == max(row.stop - row.start for row in rows_q)
    assert longest_k == max(row.stop - row.start for row in rows_k)
    assert (rows_q[-1].stop, rows_k[-1].stop) == (len(q), len(k))
    return torch.cat([by_hand(q[a], k[b], v[b]) for a, b in zip(rows_q, rows_k, strict=True)])


@pytest.mark.parametrize("way", ["sdpa", "flash"])
def test_rows_that_have_nothing_in_common(way: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if way == "flash":
            patch.setattr(ragged, "varlen_attn", varlen_by_hand)
            patch.setattr(RaggedFlash, "fits", staticmethod(lambda store: True))

        @examples(60)
        @given(
            config=st.sampled_from([MHA, GQA]),
            size=st.sampled_from([1, 3, 4, 16]),
            rows=st.lists(
                st.lists(st.sampled_from([1, 1, 1, 2, 3, 4, 5, 9]), min_size=1, max_size=4), min_size=1, max_size=7
            ),
            seed=st.integers(0, 99),
        )
        def check(config: ModelConfig, size: int, rows: list[list[int]], seed: int) -> None:
            torch.manual_seed(seed)
            blocks = torch.randperm(200).tolist()
            cache = PagedCache(config, 200, size, "cpu", torch.float32)
            cache.k.fill_(math.nan)  # what an owner before may have left
            cache.v.fill_(math.nan)
            texts = []
            for chunks in rows:
                needed = -(-sum(chunks) // size)
                texts.append(Text.random(config, sum(chunks), blocks[:needed]))
                blocks = blocks[needed:]
            for turn in range(4):
                if work := [(text, c[turn]) for text, c in zip(texts, rows, strict=True) if len(c) > turn]:
                    step(cache, work)

        check()


class TestGroups:
    """Rows of one token are padded to one length as long as that reads little more than there is."""

    @pytest.mark.parametrize(
        ("lengths", "expected"),
        [
            ([8, 8, 8], [3]),
            ([5, 8], [2]),  # as many blocks
            ([16, 12], [2]),  # 8 blocks read for 7
            ([12, 4], [1, 1]),  # 6 read for 4
            ([4, 12, 12, 12], [1, 3]),
            ([1] * 5, [5]),
        ],
    )
    def test_which_go_together(self, lengths: list[int], expected: list[int]) -> None:
        rows = [([], n - 1, 1) for n in lengths]
        assert [len(group) for group in ragged.group_rows(rows, 4)] == expected

    def test_a_chunk_is_alone(self) -> None:
        rows = [([], 3, 1), ([], 3, 2), ([], 3, 2), ([], 3, 1), ([], 3, 1)]
        assert [len(group) for group in ragged.group_rows(rows, 4)] == [1, 1, 1, 2]

    @pytest.mark.parametrize("most", [1.0, 1.3, 1e9])
    def test_the_grouping_changes_nothing(self, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ragged, "MOST_PADDED", most)
        torch.manual_seed(3)
        cache = PagedCache(GQA, 40, 4, "cpu", torch.float32)
        texts = [Text.random(GQA, n + 3, list(range(i * 8, i * 8 + 8))) for i, n in enumerate([1, 13, 4, 29])]
        for text in texts:
            step(cache, [(text, len(text.q[0]) - 3)])
        for _ in range(3):
            step(cache, [(text, 1) for text in texts])


class TestBlocks:
    """What a step does to the blocks before anything is written."""

    def cache(self) -> PagedCache:
        cache = PagedCache(MHA, 6, 4, "cpu", torch.float32)
        for store in (cache.k, cache.v):
            store.copy_(torch.arange(6.0)[None, :, None, None, None].expand_as(store))
        return cache

    def content(self, cache: PagedCache) -> list[float]:
        assert torch.equal(cache.k, cache.v)
        assert torch.equal(cache.k, cache.k[:1, :, :1, :1, :1].expand_as(cache.k))
        return cache.k[0, :, 0, 0, 0].tolist()

    @pytest.mark.parametrize(
        ("length", "n", "begun"),
        [(0, 1, 0), (0, 3, 0), (0, 4, None), (0, 5, 1), (0, 8, None), (1, 2, None), (1, 3, None), (3, 2, 1), (4, 1, 1)],
    )
    def test_a_block_that_is_begun_and_not_filled_holds_zeros(self, length: int, n: int, begun: int | None) -> None:
        cache, blocks = self.cache(), [5, 3]
        cache.step([NewTokens(BlockTable(blocks, length), n)])
        zeroed = None if begun is None else blocks[begun]
        assert self.content(cache) == [0.0 if block == zeroed else block for block in range(6)]

    def test_copies_come_first_and_all_at_once(self) -> None:
        cache = self.cache()  # 2 goes to 4 and is itself overwritten by 5; then 1 is begun
        cache.step([NewTokens(BlockTable([4, 1], 4), 1)], [(2, 4), (5, 2)])
        assert self.content(cache) == [0, 0, 5, 3, 2, 5]

    def test_a_copied_block_goes_on_where_the_other_stood(self) -> None:
        torch.manual_seed(0)
        cache = PagedCache(GQA, 8, 4, "cpu", torch.float32)
        one = Text.random(GQA, 9, [0, 1, 2])
        step(cache, [(one, 6)])
        fork = Text(*(x.clone() for x in (one.q, one.k, one.v)), BlockTable([0, 5, 6], 6))
        for x in (fork.q, fork.k, fork.v):
            x[:, 6:] = torch.randn_like(x[:, 6:])
        step(cache, [(one, 1), (fork, 1)], [(1, 5)])
        step(cache, [(one, 2), (fork, 2)])

    def test_bytes(self) -> None:
        cache = PagedCache(GQA, 6, 4, "cpu", torch.bfloat16)
        assert cache.nbytes == 2 * 2 * 6 * 4 * 2 * 4 * 2 == cache.k.nbytes + cache.v.nbytes


@pytest.mark.parametrize("family", TINY)
@pytest.mark.parametrize("size", [1, 3, 16])
@torch.inference_mode()
def test_every_split_of_a_prompt_equals_one_shot(family: str, size: int) -> None:
    model, ids = TINY[family].model, [3, 1, 4, 1, 5, 9, 2]
    whole = model(torch.tensor([ids]), torch.arange(7)[None])
    for cuts in range(2**6):
        edges = [0, *(i + 1 for i in range(6) if cuts >> i & 1), 7]
        cache, table = PagedCache(model.config, 9, size, "cpu", torch.float32), BlockTable([8, 2, 5, 1, 7, 4, 6])
        logits = []
        for start, end in pairwise(edges):
            now = cache.step([NewTokens(table, end - start)])
            logits.append(model(torch.tensor([ids[start:end]]), now.positions, now))
            table.length = end
        torch.testing.assert_close(torch.cat(logits, dim=1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", TINY)
@torch.inference_mode()
def test_a_packed_step_equals_the_contiguous_cache(family: str) -> None:
    model = TINY[family].model
    rows = [[5, 6, 7], [1, 2, 3, 4, 9], [8], [1, 2, 3, 4, 9, 200, 7, 7]]
    cache = PagedCache(model.config, 20, 4, "cpu", torch.float32)
    tables = [BlockTable([i * 4 + 1, i * 4, i * 4 + 2]) for i in range(4)]
    solo = [ContiguousCache(model.config, 1, 12, "cpu", torch.float32) for _ in rows]
    fed = [len(row) - i for i, row in enumerate(rows)]  # all of the first; all but one of the second; ...
    fed[2] = 1
    for new in (fed, [1, 1, 1, 2], [1, 2, 3, 1]):
        chunks = [(row * 2)[t.length : t.length + n] for row, t, n in zip(rows, tables, new, strict=True)]
        chunks[2] = [8 + i for i in range(new[2])]
        now = cache.step([NewTokens(t, n) for t, n in zip(tables, new, strict=True)])
        packed = model(torch.tensor([[i for chunk in chunks for i in chunk]]), now.positions, now)[0].split(new)
        for own, table, ids, logits in zip(solo, tables, chunks, packed, strict=True):
            expected = model(torch.tensor([ids]), torch.arange(own.length, own.length + len(ids))[None], own)[0]
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            table.length += len(ids)


def test_the_kernel_is_for_16_bits_on_cuda() -> None:
    cpu = torch.zeros(1, dtype=torch.bfloat16)
    assert not RaggedFlash.fits(cpu)
    assert (
        type(paged.PagedStep(PagedCache(GQA, 1, 4, "cpu", torch.bfloat16), [NewTokens(BlockTable([0]), 1)]).ragged)
        is RaggedSdpa
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n_kv", [2, 8])
def test_the_kernel_equals_sdpa(dtype: torch.dtype, n_kv: int) -> None:
    torch.manual_seed(0)
    store = torch.randn(2, 40, 16, n_kv, 64, device="cuda", dtype=dtype)
    rows = [(list(range(0, 9)), 130, 1), ([9], 0, 7), ([12, 10, 11], 20, 20), (list(range(20, 30)), 159, 1)]
    assert RaggedFlash.fits(store)
    q = torch.randn(29, 8, 64, device="cuda", dtype=dtype)
    k, v = (torch.empty(29, n_kv, 64, device="cuda", dtype=dtype) for _ in range(2))
    at = 0
    for blocks, start, n in rows:  # the new tokens are in the blocks already
        for i in range(start, start + n):
            k[at], v[at] = store[0, blocks[i // 16], i % 16], store[1, blocks[i // 16], i % 16]
            at += 1
    ways = [way(rows, store)(q, k, v, store[0], store[1]) for way in (RaggedFlash, RaggedSdpa)]
    torch.testing.assert_close(*ways, atol=2e-2, rtol=2e-2)


# --- memory ---------------------------------------------------------------------

SHAPE = (2, 5, 4, 3, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_are_a_plain_tensor_that_outlives_its_function(dtype: torch.dtype) -> None:
    x = zeros(SHAPE, "cpu", dtype)
    gc.collect()
    assert x.shape == SHAPE and x.dtype == dtype and x.is_contiguous() and not x.any()
    x += 1
    assert float(x.float().sum()) == 2 * 5 * 4 * 3 * 8


def test_no_zeros_and_a_system_without_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zeros((2, 0, 4), "cpu", torch.float32).numel() == 0
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not zeros(SHAPE, "cpu", torch.float32).any()


def test_clear_takes_the_named_blocks_of_every_layer_and_no_others() -> None:
    store = torch.full(SHAPE, float("nan"), dtype=torch.bfloat16)
    clear(store, [1, 4])
    assert [int(store[:, block].isnan().sum()) for block in range(5)] == [192, 0, 192, 192, 0]
