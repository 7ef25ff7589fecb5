"""A mixture of experts: transformers' logits, checkpoints as they are published, and every engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from nanoinfer.configs.catalog import MODELS
from nanoinfer.configs.config import SHAPES, ModelConfig, MoE, check_runnable
from nanoinfer.configs.huggingface import from_hf
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.load import ENGINES, load, trial
from nanoinfer.engines.speculative import SpeculativeEngine
from nanoinfer.errors import DeviceError, ModelError
from nanoinfer.measure.reference import hf_config, to_transformers
from nanoinfer.models import registry
from nanoinfer.models.gguf_file import GGUFFile
from nanoinfer.models.llama import LlamaMLP
from nanoinfer.models.moe import MixtureOfExperts, route
from nanoinfer.models.registry import load_model
from nanoinfer.models.weights import build
from nanoinfer.optimize.compile import compile_layers
from nanoinfer.optimize.cpu_kernel import DecodeKernel
from nanoinfer.optimize.cuda_graphs import DecodeGraphs
from nanoinfer.optimize.linear import share_weights
from nanoinfer.optimize.options import Optimizations
from nanoinfer.optimize.quantise import quantise
from nanoinfer.sampling.params import SamplingParams
from tests.configs.test_config import header
from tests.engines.helpers import tiny

CONFIG = SHAPES["tiny-moe"]
UNLIKE = replace(CONFIG, d_ff=48, moe=MoE(6, 3, 40), tied=True, n_layers=2)  # nothing is equal by chance
PROMPTS = [[1, 2, 3], [9], list(range(40, 70))]


def ids(count: int = 50) -> torch.Tensor:
    return torch.randint(256, (2, count), generator=torch.Generator().manual_seed(1))


def logits(model: Any, of: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(of, torch.arange(of.shape[1]).expand_as(of))
    return out


def layer(model: Any, index: int = 0) -> MixtureOfExperts:
    found = model.layers[index].mlp
    assert isinstance(found, MixtureOfExperts)
    return found


# --- the layer ------------------------------------------------------------------------


def test_the_weights_of_a_token_are_a_softmax_over_its_best() -> None:
    weights, chosen = route(torch.tensor([[0.0, 2.0, 1.0, -1.0], [5.0, 5.0, 0.0, 7.0]]), 2)
    assert chosen[0].tolist() == [1, 2] and chosen[1, 0].item() == 3
    e = 2.718281828459045
    assert weights[0].tolist() == pytest.approx([e / (e + 1), 1 / (e + 1)])
    assert weights.sum(1).tolist() == pytest.approx([1, 1])


def test_each_token_is_the_weighted_sum_of_its_experts() -> None:
    moe = layer(tiny(UNLIKE).model)
    x = torch.randn(2, 7, UNLIKE.d_model, generator=torch.Generator().manual_seed(0))
    out = moe(x)
    for token, got in zip(x.flatten(0, 1), out.flatten(0, 1), strict=True):
        probs = (moe.gate.weight @ token).softmax(0)
        best = probs.topk(3)
        wanted = sum(w / best.values.sum() * moe.experts[e](token) for w, e in zip(*best, strict=True))
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_only_the_chosen_experts_compute_and_none_sees_an_empty_batch() -> None:
    moe, rows = layer(tiny(UNLIKE).model), []
    for expert in moe.experts:
        expert.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    moe(torch.randn(1, 1, UNLIKE.d_model, generator=torch.Generator().manual_seed(0)))
    assert rows == [1, 1, 1]
    rows.clear()
    moe(torch.randn(3, 5, UNLIKE.d_model, generator=torch.Generator().manual_seed(0)))
    assert sum(rows) == 3 * 5 * 3 and min(rows) > 0
    assert moe(torch.empty(1, 0, UNLIKE.d_model)).shape == (1, 0, UNLIKE.d_model)


# --- transformers and checkpoints -----------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, UNLIKE], ids=["tiny-moe", "unlike"])
def test_logits_equal_transformers(config: ModelConfig) -> None:
    loaded = tiny(config)
    theirs = to_transformers(loaded)
    assert type(theirs).__name__ == "MixtralForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(logits(loaded.model, ids()), theirs(ids()).logits, atol=1e-4, rtol=1e-4)


def test_a_folder_that_transformers_saved_is_read_as_it_is(tmp_path: Path) -> None:
    loaded = tiny(UNLIKE)
    theirs = to_transformers(loaded)
    theirs.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "model.layers.1.block_sparse_moe.experts.5.w2.weight" in file.keys()  # noqa: SIM118
    again = load_model(tmp_path)
    # d_ff is nowhere in the file: it is what an expert has
    assert again.model.config == replace(UNLIKE, d_ff=40)
    assert torch.equal(logits(again.model, ids()), logits(loaded.model, ids()))


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    to_transformers(tiny(UNLIKE)).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.block_sparse_moe.experts.5.w2.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'layers\.1\.mlp\.experts\.5\.down_proj\.weight' is missing"):
        load_model(tmp_path)


def test_the_published_mixtral_can_run() -> None:
    config = from_hf(MODELS["Mixtral-8x7B"][0])
    with torch.device("meta"):
        assert sum(p.numel() for p in build(config).parameters()) == MODELS["Mixtral-8x7B"][1]


@pytest.mark.parametrize(
    "change",
    [
        {"moe": MoE(8, 2, 64, d_shared=64)},
        {"moe": MoE(8, 2, 64, dense_layers=(0,))},
        {"moe": MoE(8, 2, 64, router_bias=True)},
        {"moe": MoE(8, 2, 64, selection_bias=True)},
        {"family": "llama"},
    ],
    ids=str,
)
def test_other_forms_are_counted_not_run(change: dict[str, Any]) -> None:
    check_runnable(CONFIG)
    with pytest.raises(ModelError, match=r"can be counted, not run \(moe\); the engines run gpt2, llama, mixtral"):
        build(replace(CONFIG, **change))


def test_experts_in_a_gguf_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**MODELS["Mixtral-8x7B"][0], "num_hidden_layers": 1}
    meta = header("llama", values, expert_count=8, expert_used_count=2)
    path = tmp_path / "mixtral.gguf"
    path.touch()
    tensors: Any = {"output.weight": None, "token_embd.weight": None}
    monkeypatch.setattr(registry, "read_gguf", lambda _: GGUFFile(path, meta, tensors))
    with pytest.raises(ModelError, match=r"mixtral\.gguf: experts in GGUF files can be counted, not run"):
        load_model(path)


def test_the_config_of_transformers_says_the_same() -> None:
    assert from_hf(json.loads(hf_config(CONFIG).to_json_string())) == CONFIG


# --- engines and speed ----------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, UNLIKE], ids=["tiny-moe", "unlike"])
def test_every_engine_says_the_same(config: ModelConfig) -> None:
    loaded, params = tiny(config), SamplingParams(max_tokens=12)
    naive = load(loaded, "naive").generate(PROMPTS, params)
    for engine in ENGINES:
        done = load(loaded, engine).generate(PROMPTS, params)
        assert [one.token_ids for one in done] == [one.token_ids for one in naive], engine


def test_it_loads_by_name() -> None:
    loaded = load_model("random:tiny-moe", dtype="bfloat16")
    assert loaded.model.config == CONFIG and loaded.tokenizer is not None
    (done,) = load(loaded, "cached").generate("The sea is", SamplingParams(max_tokens=4))
    assert len(done.token_ids) == 4


@pytest.mark.parametrize("words", ["fuse", "pack", "fuse,pack"])
def test_fused_and_packed_experts_say_the_same(words: str) -> None:
    loaded, params = tiny(CONFIG), SamplingParams(max_tokens=12)
    plain = ContinuousEngine(loaded).generate(PROMPTS, params)
    quick = ContinuousEngine(loaded, speed=Optimizations.parse(words))
    kinds = {type(module).__name__ for module in layer(quick.model).experts.modules()}
    assert ("FusedMLP" in kinds) == ("fuse" in words) and ("PackedLinear" in kinds) == ("pack" in words)
    assert [one.token_ids for one in quick.generate(PROMPTS, params)] == [one.token_ids for one in plain]
    assert type(layer(loaded.model).experts[0]) is LlamaMLP  # the model itself is as it was


@pytest.mark.parametrize("words", ["kernel", "kernel,int8", "int8", "int4", "compiled", "graphs"])
def test_what_cannot_do_experts_says_so(words: str) -> None:
    for engine in (ContinuousEngine, SpeculativeEngine):
        if (engine, words) != (SpeculativeEngine, "graphs"):
            with pytest.raises(DeviceError, match="cannot do a mixture of experts: leave it off; fuse and pack can"):
                engine(tiny(CONFIG), speed=Optimizations.parse(words))


def test_so_does_each_by_itself() -> None:
    model = tiny(CONFIG).model
    for attempt in (
        lambda: DecodeKernel(model),
        lambda: DecodeGraphs(model, 4, 0, recorder=object()),  # type: ignore[arg-type]
        lambda: quantise(share_weights(model), "int8"),
        lambda: compile_layers(share_weights(model)),
    ):
        with pytest.raises(DeviceError, match="mixture of experts"):
            attempt()


def test_auto_tries_what_there_is() -> None:
    assert set(trial(tiny(replace(CONFIG, n_layers=1)))) == {"plain", "packed"}
