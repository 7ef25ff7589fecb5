"""Static batches: the tokens of each request alone, in their order, and an exact account of what was wasted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.load import load
from nanoinfer.engines.static import BatchedEngine, Waste, left_pad
from nanoinfer.errors import RequestError
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import GPT2, LLAMA, scripted, tiny
from tests.examples import examples

TINY = {config.family: tiny(config) for config in (GPT2, LLAMA)}
SHORT = tiny(ModelConfig("gpt2", 2, 16, 2, 2, 8, 64, 32, 8))  # a context of 8, so that every place of it counts
EOS = 7
Prompts = list[list[int]]


def tokens(engine: BatchedEngine, prompts: Prompts, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    return [c.token_ids for c in engine.generate(prompts, params)]


def alone(family: str, prompts: Prompts, params: list[SamplingParams]) -> list[list[int]]:
    naive = load(TINY[family], "naive")
    return [naive.generate([prompt], p)[0].token_ids for prompt, p in zip(prompts, params, strict=True)]


@examples(40)
@given(
    family=st.sampled_from(sorted(TINY)),
    prompts=st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=9), min_size=1, max_size=7),
    batch_size=st.integers(1, 8),
    data=st.data(),
)
def test_tokens_do_not_depend_on_the_batch(family: str, prompts: Prompts, batch_size: int, data: st.DataObject) -> None:
    params = [
        SamplingParams(
            max_tokens=data.draw(st.integers(0, 20)),
            temperature=data.draw(st.sampled_from([0.0, 0.9])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.2])),
            stop_ids=tuple(data.draw(st.lists(st.integers(0, 255), max_size=30))),
            seed=11,
            on_full=data.draw(st.sampled_from(["stop", "crop"])),
        )
        for _ in prompts
    ]
    engine = BatchedEngine(TINY[family], batch_size)
    assert tokens(engine, prompts, params) == alone(family, prompts, params)
    for share in (engine.waste.padding_share, engine.waste.ended_share, engine.waste.kv_idle_share):
        assert 0 <= share <= 1


def test_results_come_in_the_order_of_the_prompts_and_batches_in_theirs() -> None:
    loaded = scripted([40, 41, 42, 43], start=2)
    params = [SamplingParams(max_tokens=n) for n in (3, 1, 2, 1, 4)]
    generation = BatchedEngine(loaded, 2).stream([[1, 2]] * 5, params)
    assert [event.request for event in generation] == [0, 1, 0, 0, 2, 3, 2, 4, 4, 4, 4]
    assert [c.text for c in generation.completions] == ["IJK", "I", "IJ", "I", "IJKL"]
    ends = [c.trace.t_end for c in generation.completions]
    assert ends[1] < ends[0] < ends[3] < ends[2] < ends[4]  # type: ignore[operator]


class TestLeftPadding:
    """Rows of 3 and 5 tokens in one batch, in a model of learned positions and a context of 8."""

    ROWS: Prompts = [[5, 6, 7], [1, 2, 3, 4, 9]]  # noqa: RUF012

    def test_positions_and_mask_come_from_lengths(self) -> None:
        batch = left_pad(self.ROWS)
        assert batch.positions[0, 2:].tolist() == [0, 1, 2]
        assert batch.positions[1].tolist() == [0, 1, 2, 3, 4]
        assert batch.mask is not None
        assert batch.mask[:, 0, -1].tolist() == [[False, False, True, True, True], [True] * 5]

    @torch.inference_mode()
    def test_logits_equal_each_row_alone(self) -> None:
        batch = left_pad(self.ROWS)
        together = SHORT.model(batch.ids, batch.positions, mask=batch.mask)[:, -1]
        for row, logits in zip(self.ROWS, together, strict=True):
            solo = SHORT.model(torch.tensor([row]), torch.arange(len(row))[None])[0, -1]
            assert torch.allclose(logits, solo, atol=1e-5)

    @torch.inference_mode()
    def test_a_step_stands_behind_the_row_and_not_behind_the_padding(self) -> None:
        seen: list[list[list[int]]] = []
        hook = SHORT.model.register_forward_pre_hook(lambda module, args: seen.append(args[1].tolist()))  # type: ignore[attr-defined]
        try:
            BatchedEngine(SHORT).generate(self.ROWS, SamplingParams(max_tokens=2))
        finally:
            hook.remove()
        assert seen[1] == [[3], [5]]

    # Id 0 fills the padding, and in the second pair it is a token of the prompt, which must be seen.
    @pytest.mark.parametrize("rows", [[[5, 6, 7], [1, 2, 3, 4, 9]], [[0, 5, 6], [1, 2, 3, 4, 9]], [[0], [0, 0, 0]]])
    def test_tokens_equal_each_row_alone(self, rows: Prompts) -> None:
        engine, params = BatchedEngine(SHORT), SamplingParams(max_tokens=3)
        assert tokens(engine, rows, params) == [tokens(engine, [row], params)[0] for row in rows]

    @torch.inference_mode()
    def test_a_real_token_of_the_padding_id_is_seen(self) -> None:
        rows = [[0, 5, 6], [1, 2, 3, 4, 9]]
        batch = left_pad(rows)
        right, solo = (
            SHORT.model(batch.ids, batch.positions, mask=batch.mask)[0, -1],
            SHORT.model(torch.tensor([rows[0]]), torch.arange(3)[None])[0, -1],
        )
        assert batch.mask is not None
        by_id = batch.mask & (batch.ids != 0)[:, None, None, :] | torch.eye(5, dtype=torch.bool)
        wrong = SHORT.model(batch.ids, batch.positions, mask=by_id)[0, -1]
        assert torch.allclose(right, solo, atol=1e-5)
        assert (wrong - solo).abs().max() > 1e-2


def test_padding_is_no_history_to_be_penalised() -> None:
    """Id 0 is the padding's. It was said in the long row, and wins in the short one, which never said it."""
    loaded = scripted([0], start=1)
    logits = torch.zeros(256)
    logits[:4] = torch.tensor([2.0, 1.9, 0.0, 1.7])  # with a penalty of 1.25 on ids 0 and 1: 1.6, 1.52, 0, 1.7
    loaded.model.register_forward_hook(lambda module, args, out: logits.expand_as(out))  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=1, repetition_penalty=1.25)
    assert tokens(BatchedEngine(loaded), [[0, 1, 1, 4], [2]], params) == [[3], [0]]


class TestWaste:
    """Every number worked out by hand."""

    def test_two_batches(self) -> None:
        # Prompts of 2 and 4 tokens, which get 3 and 1: 8 slots; two steps more, in which the second row has ended;
        # 2 x 6 places held through three passes, of which 2 + 4, 3 and 4 are live.
        # Then 3 tokens, of whose 5 only 2 come: 3 slots, one step more; 7 places held twice, 3 and 4 live.
        engine = BatchedEngine(scripted([40, 41, EOS], start=2, eos=[EOS]), 2)
        params = [SamplingParams(max_tokens=n) for n in (3, 1, 5)]
        assert [len(t) for t in tokens(engine, [[1, 2], [1, 2, 3, 4], [1, 2, 3]], params)] == [3, 1, 2]
        assert engine.waste == Waste(8 + 3, 2, 4 + 1, 2, 3 * 12 + 2 * 7, 13 + 7)
        shares = engine.waste.padding_share, engine.waste.ended_share, engine.waste.kv_idle_share
        assert shares == (2 / 11, 2 / 5, 1 - 20 / 50)

    def test_a_batch_that_crops_takes_whole_rows(self) -> None:
        # 7 and 2 tokens: 14 slots; a step that fills the context of 8; then passes over 8 and 4 tokens, and over 5.
        engine = BatchedEngine(SHORT)
        params = [SamplingParams(max_tokens=3, on_full="crop"), SamplingParams(max_tokens=4)]
        assert [len(t) for t in tokens(engine, [[1] * 7, [2, 3]], params)] == [3, 4]
        assert engine.waste == Waste(14 + 16 + 5, 5 + 4, 2, 0, 4 * 2 * (7 + 4 - 1), 7 + 2 + 8 + 3)

    def test_equal_rows_waste_only_what_is_not_yet_filled(self) -> None:
        engine = BatchedEngine(TINY["gpt2"], 4)
        tokens(engine, [[1, 2, 3]] * 4, SamplingParams(max_tokens=3))
        assert engine.waste == Waste(12, 0, 8, 0, 3 * 4 * 5, 4 * (3 + 4 + 5))

    def test_the_places_counted_are_the_places_allocated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held: list[int] = []
        advance = ContiguousCache.advance
        monkeypatch.setattr(
            ContiguousCache,
            "advance",
            lambda cache, n: (held.append(cache.k.shape[1] * cache.k.shape[3]), advance(cache, n))[1],
        )
        engine = BatchedEngine(TINY["llama"], 3)
        tokens(engine, [[1], [2] * 5, [3], [4] * 2], [SamplingParams(max_tokens=n) for n in (4, 2, 0, 6)])
        assert engine.waste.kv_held == sum(held)

    def test_each_run_counts_anew_and_nothing_wastes_nothing(self) -> None:
        engine = BatchedEngine(TINY["gpt2"])
        assert engine.waste == Waste()
        tokens(engine, [[1], [2, 3]], SamplingParams(max_tokens=3))
        first = engine.waste
        tokens(engine, [[1], [2, 3]], SamplingParams(max_tokens=3))
        assert engine.waste == first != Waste()
        tokens(engine, [[1]], SamplingParams(max_tokens=1))
        assert engine.waste == Waste(1, 0, 0, 0, 1, 1)
        assert (engine.waste.ended_share, Waste().padding_share, Waste().kv_idle_share) == (0, 0, 0)


def test_samples_of_a_prompt_may_fall_into_several_batches() -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=5, n=5)
    whole, cut = (tokens(BatchedEngine(TINY["llama"], size), [[1, 2]], params) for size in (32, 2))
    assert whole == cut
    assert len(cut) == 5
    assert len({tuple(t) for t in cut}) > 1


def test_a_closed_stream_cancels_the_batches_to_come_as_well() -> None:
    engine = BatchedEngine(TINY["llama"], 2)
    generation = engine.stream([[1], [2], [3], [4]], [SamplingParams(max_tokens=n) for n in (1, 9, 9, 9)])
    next(generation)
    generation.close()
    assert [r.trace.status for r in generation.requests] == ["ok", *["cancelled"] * 3]
    assert all(r.trace.t_end is not None for r in generation.requests)
    assert list(generation) == []


@pytest.mark.parametrize("size", [0, -1, 2.5, "8", None, True])
def test_a_batch_size_that_is_no_size(size: object) -> None:
    with pytest.raises(RequestError, match=f"batch_size must be a whole number at least 1, got {size!r}"):
        BatchedEngine(TINY["gpt2"], size)  # type: ignore[arg-type]
