"""Fused and packed products give the same numbers, share what they do not replace, and leave the original alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.static import CachedEngine
from nanoinfer.errors import DeviceError
from nanoinfer.models.llama import Llama
from nanoinfer.models.registry import LoadedModel, load_model
from nanoinfer.optimize.linear import PackedLinear, fuse, pack, share_weights
from nanoinfer.sampling.params import SamplingParams
from tests.engines.helpers import GPT2, LLAMA, tiny

CONFIGS = {
    "gpt2": GPT2,
    "gpt2 untied": replace(GPT2, tied=False),
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tied=True),
}


def fused(loaded: LoadedModel) -> LoadedModel:
    quick = share_weights(loaded.model)
    fuse(quick)
    return replace(loaded, model=quick)


def packed(loaded: LoadedModel) -> LoadedModel:
    quick = share_weights(loaded.model)
    pack(quick)
    return replace(loaded, model=quick)


def both(loaded: LoadedModel) -> LoadedModel:
    return packed(fused(loaded))


Change = Callable[[LoadedModel], LoadedModel]


def logits(loaded: LoadedModel, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        return loaded.model(ids, torch.arange(ids.shape[1]).expand_as(ids)).float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [fused, packed, both])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_greedy_tokens_are_the_same(config: ModelConfig, change: Change) -> None:
    loaded = tiny(config)
    prompts, greedy = [[3, 1, 4, 1, 5], [9, 2], [6]], SamplingParams(max_tokens=12)
    expected = CachedEngine(loaded).generate(prompts, greedy)
    found = CachedEngine(change(loaded)).generate(prompts, greedy)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]


@pytest.mark.parametrize("change", [fused, packed])
@pytest.mark.parametrize("name", ["random:tiny-gpt2", "random:tiny-llama"])
def test_bfloat16_logits_are_close(name: str, change: Change) -> None:
    loaded = load_model(name, dtype="bfloat16")
    ids = torch.arange(24).view(2, 12)
    plain = logits(loaded, ids)
    assert (logits(change(loaded), ids) - plain).norm() < 0.01 * plain.norm()


@pytest.mark.parametrize("rows", [1, 2, 31, 32, 33, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_any_size(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    plain = nn.Linear(37, 53).to(dtype).requires_grad_(False)
    x = torch.randn(2, rows, 37, generator=generator).to(dtype)
    wide = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double())
    found = PackedLinear(plain.weight, plain.bias)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wide, atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)


def test_nothing_is_left_unpacked_and_the_original_is_left_alone() -> None:
    for name in ("random:tiny-gpt2", "random:tiny-llama"):
        loaded = load_model(name)
        before = str(loaded.model)
        quick = packed(loaded).model
        kinds = [type(m) for m in quick.modules()]
        linears = sum(isinstance(m, nn.Linear) for m in loaded.model.modules())
        assert kinds.count(nn.Linear) == 0
        assert kinds.count(PackedLinear) == linears + 1  # the head is tied, and packed in addition to the embedding
        assert str(loaded.model) == before
        assert loaded.model.lm_head is None


def test_one_graph_serves_any_number_of_rows() -> None:
    linear, more = PackedLinear(torch.randn(53, 37), torch.randn(53)), torch.randn(53)
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: linear(x * 2) + more, backend=count, dynamic=True, fullgraph=True)
    with torch.inference_mode():
        for rows in (2, 9, 40):
            x = torch.randn(1, rows, 37)
            torch.testing.assert_close(compiled(x), linear(x * 2) + more)
    assert len(graphs) == 1


def test_what_cannot_be_packed_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError, match=r"not on cpu in torch\.float16"):
        packed(load_model("random:tiny-llama", dtype="float16"))
    loaded = load_model("random:tiny-llama", dtype="bfloat16")
    with pytest.raises(DeviceError, match="not on meta"):
        pack(share_weights(loaded.model).to("meta"))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    with pytest.raises(DeviceError, match="no bfloat16 on this processor"):
        packed(loaded)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"no oneDNN \(torch\.backends\.mkldnn\)"):
        packed(loaded)


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


def test_fusing_leaves_the_original_and_gpt2_alone() -> None:
    loaded = load_model("random:tiny-llama")
    before, weights = str(loaded.model), dict(loaded.model.named_parameters())
    fused(loaded)
    assert str(loaded.model) == before
    assert dict(loaded.model.named_parameters()) == weights
    gpt2 = load_model("random:tiny-gpt2")
    assert str(fused(gpt2).model) == str(gpt2.model)
    assert dict(fused(gpt2).model.named_parameters()) == dict(gpt2.model.named_parameters())
