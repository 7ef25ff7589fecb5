"""Our models against Hugging Face transformers, an independent reference, and a prompt split in every way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.configs.config import ModelConfig, RopeScaling
from nanoinfer.engines.static import left_pad
from nanoinfer.errors import RequestError
from nanoinfer.models.attention import attend, causal_mask
from nanoinfer.models.weights import build

GPT2 = ModelConfig("gpt2", 2, 16, 2, 2, 8, 64, 32, 8)
LLAMA = ModelConfig("llama", 2, 32, 4, 2, 8, 48, 40, 64, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16), tied=False)
SHAPES = [GPT2, LLAMA]


def random_model(config: ModelConfig, seed: int = 0) -> nn.Module:
    model = build(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def positions(ids: Tensor, start: int = 0) -> Tensor:
    return torch.arange(start, start + ids.shape[1]).expand_as(ids)


def test_gpt2_equals_transformers() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = random_model(GPT2)
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)).eval()
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = {f"transformer.{n}": p.T if n.endswith(conv1d) else p for n, p in ours.state_dict().items()}
    theirs.load_state_dict({**state, "lm_head.weight": state["transformer.wte.weight"]})
    ids = torch.tensor([[5, 6, 7, 1, 0, 31], [1, 2, 3, 4, 9, 9]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids, positions(ids)), theirs(ids).logits, atol=1e-5, rtol=1e-5)


def test_llama_equals_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = random_model(LLAMA)
    scaling = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0}
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            rope_parameters={**scaling, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
        )
    ).eval()
    state = {n if n.startswith("lm_head") else f"model.{n}": p for n, p in ours.state_dict().items()}
    theirs.load_state_dict(state)
    ids = torch.randint(40, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids, positions(ids)), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", SHAPES, ids=lambda c: c.family)
def test_every_split_of_a_prompt_equals_one_shot(config: ModelConfig) -> None:
    model = random_model(config)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [2, 7, 1, 8, 2, 8, 1]])
    whole = model(ids, positions(ids))
    for first in range(1, 7):
        for second in range(first, 7):
            cache = ContiguousCache(config, 2, 7, "cpu", torch.float32)
            parts = [ids[:, :first], ids[:, first:second], ids[:, second:]]
            out, start = [], 0
            for part in (p for p in parts if p.shape[1]):
                out.append(model(part, positions(part, start), cache))
                start += part.shape[1]
            torch.testing.assert_close(torch.cat(out, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_is_causal_would_be_wrong_for_a_later_chunk() -> None:
    """The trap that ``attend`` avoids: PyTorch aligns the causal triangle to the top left."""
    q, k, v = (torch.randn(1, 1, n, 4, generator=torch.Generator().manual_seed(n)) for n in (2, 5, 6))
    v = v[:, :, :5]
    right = attend(q, k, v)
    by_hand = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_mask(2, 5, q.device)).transpose(1, 2)
    torch.testing.assert_close(right, by_hand.reshape(1, 2, 4))
    trap = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, 2, 4)
    assert (right - trap).abs().max() > 0.1


@pytest.mark.parametrize("config", SHAPES, ids=lambda c: c.family)
def test_last_only_is_the_last_position(config: ModelConfig) -> None:
    model, ids = random_model(config), torch.tensor([[1, 2, 3, 4]])
    torch.testing.assert_close(model(ids, positions(ids), last_only=True), model(ids, positions(ids))[:, -1:])


def test_ragged_rows_equal_their_solo_runs() -> None:
    model, rows = random_model(GPT2), [[5, 6, 7], [1, 2, 3, 4, 9]]
    batch = left_pad(rows)
    assert batch.positions[0, 2:].tolist() == [0, 1, 2]
    assert batch.positions[1].tolist() == [0, 1, 2, 3, 4]
    assert batch.mask is not None
    assert batch.mask[:, 0, -1].int().tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    logits = model(batch.ids, batch.positions, mask=batch.mask)[:, -1]
    for row, out in zip(rows, logits, strict=True):
        ids = torch.tensor([row])
        torch.testing.assert_close(out, model(ids, positions(ids))[0, -1], atol=1e-5, rtol=1e-5)
    # The two usual mistakes are far outside that tolerance.
    slots = torch.arange(5).expand(2, 5)
    assert (model(batch.ids, slots, mask=batch.mask)[0, -1] - logits[0]).abs().max() > 1e-2
    assert (model(batch.ids, batch.positions)[0, -1] - logits[0]).abs().max() > 1e-2


def test_the_padding_id_is_a_real_token_where_it_is_real() -> None:
    model, row = random_model(GPT2), [0, 5, 6]
    batch = left_pad([row, [1, 2, 3, 4, 9]], pad_id=0)
    out = model(batch.ids, batch.positions, mask=batch.mask)[0, -1]
    ids = torch.tensor([row])
    torch.testing.assert_close(out, model(ids, positions(ids))[0, -1], atol=1e-5, rtol=1e-5)
    without = torch.tensor([row[1:]])
    assert (model(without, positions(without, 1))[0, -1] - out).abs().max() > 1e-2


def test_padding_makes_no_nan() -> None:
    batch = left_pad([[1], [1, 2, 3, 4, 5, 6]])
    assert model_is_finite(random_model(GPT2)(batch.ids, batch.positions, mask=batch.mask))


def model_is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def test_tanh_gelu() -> None:
    out = F.gelu(torch.tensor([1.0, -1.0]), approximate="tanh")
    assert out.tolist() == pytest.approx([0.84119199, -0.15880801], abs=1e-7)


def test_cache_overflow_is_an_error_and_bytes_are_exact() -> None:
    model = random_model(LLAMA)
    cache = ContiguousCache(LLAMA, 3, 10, "cpu", torch.bfloat16)
    assert cache.nbytes == 2 * 2 * 3 * 2 * 10 * 8 * 2
    cache = ContiguousCache(LLAMA, 1, 3, "cpu", torch.float32)
    ids = torch.tensor([[1, 2, 3, 4]])
    with pytest.raises(RequestError, match="holds 3 tokens a row and cannot take 4"):
        model(ids, positions(ids), cache)
