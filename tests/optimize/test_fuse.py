"""Fused products give the same tokens, share what they do not replace, and touch neither GPT-2 nor the original."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nanoinfer.engines.cached import CachedEngine
from nanoinfer.models.llama import Llama
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.apply import share_weights
from nanoinfer.optimize.fuse import fuse
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import LLAMA, tiny


def fused(loaded: LoadedModel) -> LoadedModel:
    quick = share_weights(loaded.model)
    fuse(quick)
    return replace(loaded, model=quick)


def logits(loaded: LoadedModel, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return loaded.model(ids, torch.arange(ids.shape[1]).expand_as(ids)).float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("tied", [True, False])
def test_greedy_tokens_are_the_same(tied: bool) -> None:
    loaded = tiny(replace(LLAMA, tied=tied))
    prompts, greedy = [[3, 1, 4, 1, 5], [9, 2], [6]], SamplingParams(max_tokens=12)
    expected = CachedEngine(loaded).generate(prompts, greedy)
    found = CachedEngine(fused(loaded)).generate(prompts, greedy)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_bfloat16_logits_are_close() -> None:
    loaded = load_model("random:tiny-llama", dtype="bfloat16")
    ids = torch.arange(24).view(2, 12)
    plain = logits(loaded, ids)
    assert (logits(fused(loaded), ids) - plain).norm() < 0.01 * plain.norm()


def test_weights_are_joined_in_plain_products_and_the_old_ones_are_not_kept() -> None:
    loaded = load_model("random:tiny-llama")
    plain, quick = loaded.model, fused(loaded).model
    assert isinstance(plain, Llama) and isinstance(quick, Llama)
    before, after = dict(plain.named_parameters()), dict(quick.named_parameters())
    for of in ("layers.0", "layers.1"):
        qkv = torch.cat([before[f"{of}.self_attn.{name}_proj.weight"] for name in "qkv"])
        gate_up = torch.cat([before[f"{of}.mlp.{name}_proj.weight"] for name in ("gate", "up")])
        assert torch.equal(after.pop(f"{of}.self_attn.qkv_proj.weight"), qkv)
        assert torch.equal(after.pop(f"{of}.mlp.gate_up_proj.weight"), gate_up)
        assert [type(m) for name, m in quick.named_modules() if name.startswith(of) and name.endswith("_proj")] == (
            [nn.Linear] * 4
        )
    assert after == {name: before[name] for name in after}  # all else is the very same tensors
    assert len(after) == len(before) - 10  # of each layer, five are gone
    assert not any(p.requires_grad for p in quick.parameters())


def test_the_original_and_gpt2_are_left_alone() -> None:
    loaded = load_model("random:tiny-llama")
    before, weights = str(loaded.model), dict(loaded.model.named_parameters())
    fused(loaded)
    assert str(loaded.model) == before
    assert dict(loaded.model.named_parameters()) == weights
    gpt2 = load_model("random:tiny-gpt2")
    assert str(fused(gpt2).model) == str(gpt2.model)
    assert dict(fused(gpt2).model.named_parameters()) == dict(gpt2.model.named_parameters())
