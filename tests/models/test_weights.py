"""Checkpoints in every dress they come in, and what is said about those that are not whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanoinfer.configs.config import SHAPES, ModelConfig
from nanoinfer.errors import ModelError
from nanoinfer.models.weights import (
    CONV1D,
    assemble,
    expected_shapes,
    find_files,
    load_folder,
    random_state,
)

CPU = torch.device("cpu")
GPT2 = replace(SHAPES["tiny-gpt2"], d_model=8, n_heads=2, n_kv_heads=2, d_head=4, d_ff=32, vocab_size=11, context=8)
LLAMA = replace(
    SHAPES["tiny-llama"], n_layers=1, d_model=4, n_heads=2, n_kv_heads=1, d_head=2, d_ff=8, vocab_size=6, tied=True
)
E = torch.arange(24, dtype=torch.float32).reshape(6, 4) / 10
H = -E

State = dict[str, torch.Tensor]


def stored(config: ModelConfig, prefix: str = "") -> State:
    """Seeded weights as a Hugging Face checkpoint holds them."""
    state = random_state(config, torch.float32, 0, CPU)
    return {prefix + n: (t.t().contiguous() if CONV1D.fullmatch(n) else t) for n, t in state.items()}


def save(folder: Path, tensors: State, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    return folder


def logits(config: ModelConfig, state: State) -> torch.Tensor:
    ids = torch.tensor([[1, 2, 3]])
    out: torch.Tensor = assemble(config, state, CPU)(ids, torch.arange(3)[None])
    return out


# --- GPT-2 in the wild --------------------------------------------------------


def test_gpt2_saved_four_ways_gives_the_same_logits(tmp_path: Path) -> None:
    plain, prefixed = stored(GPT2), stored(GPT2, "transformer.")
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(8, 8).tril()[None, None] for i in range(2)}
    masks |= {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    head = {"lm_head.weight": plain["wte.weight"].clone()}
    ways = [plain, prefixed, prefixed | masks, prefixed | masks | head]
    expected = logits(GPT2, random_state(GPT2, torch.float32, 0, CPU))
    for number, way in enumerate(ways):
        state = load_folder(save(tmp_path / str(number), way), GPT2, torch.float32)
        assert torch.equal(logits(GPT2, state), expected)


def test_conv1d_is_turned_even_where_it_is_square(tmp_path: Path) -> None:
    config = replace(GPT2, d_model=2, n_heads=1, n_kv_heads=1, d_head=2, d_ff=8)
    tensors = stored(config)
    tensors["h.0.attn.c_proj.weight"] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensors["h.0.attn.c_proj.bias"] = torch.tensor([10.0, 20.0])
    model = assemble(config, load_folder(save(tmp_path, tensors), config, torch.float32), CPU)
    assert model.get_submodule("h.0.attn.c_proj")(torch.ones(2)).tolist() == [14.0, 26.0]


def test_embedding_kept_under_the_heads_name(tmp_path: Path) -> None:
    tensors = stored(GPT2)
    tensors["lm_head.weight"] = tensors.pop("wte.weight")
    state = load_folder(save(tmp_path, tensors), GPT2, torch.float32)
    assert torch.equal(state["wte.weight"], tensors["lm_head.weight"]) and "lm_head.weight" not in state


# --- the head: tied, missing, stale -------------------------------------------


def llama_tensors(head: torch.Tensor | None) -> State:
    tensors = stored(LLAMA, "model.") | {"model.embed_tokens.weight": E.clone()}
    return tensors if head is None else tensors | {"lm_head.weight": head.clone()}


def head_logits(config: ModelConfig, state: State) -> list[float]:
    weight = state["embed_tokens.weight" if config.tied else "lm_head.weight"]
    return [round(x, 4) for x in (weight @ torch.tensor([1.0, 0.0, 0.0, 0.0])).tolist()]


COLUMN = [0.0, 0.4, 0.8, 1.2, 1.6, 2.0]


@pytest.mark.parametrize("head", [None, E])
def test_tied_head_is_the_embedding(
    tmp_path: Path, head: torch.Tensor | None, recwarn: pytest.WarningsRecorder
) -> None:
    state = load_folder(save(tmp_path, llama_tensors(head)), LLAMA, torch.float32)
    assert head_logits(LLAMA, state) == COLUMN and not recwarn.list
    assert expected_shapes(LLAMA)["embed_tokens.weight"] == (6, 4) and "lm_head.weight" not in expected_shapes(LLAMA)


@pytest.mark.parametrize("head", [H, torch.zeros(7, 4)])
def test_tied_with_another_head_in_the_file(tmp_path: Path, head: torch.Tensor) -> None:
    folder = save(tmp_path, llama_tensors(head))
    with pytest.warns(UserWarning, match="'lm_head.weight' differs from the embedding"):
        state = load_folder(folder, LLAMA, torch.float32)
    assert head_logits(LLAMA, state) == COLUMN
    assemble(LLAMA, state, CPU)


def test_untied_head(tmp_path: Path) -> None:
    untied = replace(LLAMA, tied=False)
    state = load_folder(save(tmp_path / "both", llama_tensors(H)), untied, torch.float32)
    assert head_logits(untied, state) == [-x for x in COLUMN]
    with pytest.raises(ModelError, match=r"'lm_head\.weight' is missing \(config\.json says tie_word_embeddings"):
        load_folder(save(tmp_path / "only", llama_tensors(None)), untied, torch.float32)


# --- files --------------------------------------------------------------------


def sharded(folder: Path) -> Path:
    tensors = llama_tensors(None)
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for shard, part in shards.items():
        save(folder, {name: tensors[name] for name in part}, shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def test_shards_equal_one_file(tmp_path: Path) -> None:
    one = load_folder(save(tmp_path / "one", llama_tensors(None)), LLAMA, torch.float32)
    many = load_folder(sharded(tmp_path / "many"), LLAMA, torch.float32)
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def test_shards_that_are_not_whole(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    second, index = folder / "model-00002-of-00002.safetensors", folder / "model.safetensors.index.json"
    save(folder, {"model.norm.weight": torch.ones(4)}, second.name)
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: tensor '.+' is missing, the index says"):
        load_folder(folder, LLAMA, torch.float32)
    second.unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: missing \(tensor 'model\..+' is in it\)"):
        load_folder(folder, LLAMA, torch.float32)
    index.write_text('{"weight_map": {"a": "../../elsewhere.safetensors"}}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"index\.json: damaged"):
        load_folder(folder, LLAMA, torch.float32)
    index.unlink()
    with pytest.raises(ModelError, match=r"no 'model\.safetensors\.index\.json'"):
        load_folder(folder, LLAMA, torch.float32)


def test_dtype_and_memory_mapping(tmp_path: Path) -> None:
    folder = save(tmp_path, llama_tensors(None))
    state = load_folder(folder, LLAMA, torch.bfloat16)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    mapped = load_folder(folder, LLAMA, torch.float32)
    assert assemble(LLAMA, mapped, CPU).state_dict()["norm.weight"].data_ptr() == mapped["norm.weight"].data_ptr()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, llama_tensors(None)) / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (
        whole[:-1],
        b"",
        whole[:4],
        whole[:40],
        b"\xff" * 64,
        b"\x02" + b"\0" * 7 + b"[]",
        b"\x08" + b"\0" * 7 + b'{"a": 1}',
    ):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model\.safetensors: damaged, cut short .*again"):
            load_folder(tmp_path, LLAMA, torch.float32)


def test_tensors_that_do_not_fit(tmp_path: Path) -> None:
    good = llama_tensors(None)
    cases = [
        ({"model.norm.weight": torch.ones(5)}, r"'model\.norm\.weight' has shape \[5\], config\.json asks for \[4\]"),
        ({"model.norm.weight": torch.ones(4, dtype=torch.int8)}, r"'model\.norm\.weight' has type I8"),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(4)}, r"unexpected tensor 'model\.layers\.0\.self_attn"),
        ({"norm.weight": torch.ones(4)}, "are the same weight"),
    ]
    for number, (change, says) in enumerate(cases):
        with pytest.raises(ModelError, match=says):
            load_folder(save(tmp_path / str(number), good | change), LLAMA, torch.float32)
    del good["model.norm.weight"]
    with pytest.raises(ModelError, match=r"tensor 'norm\.weight' is missing"):
        load_folder(save(tmp_path / "missing", good), LLAMA, torch.float32)
    rotary = llama_tensors(None) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1)}
    load_folder(save(tmp_path / "rotary", rotary), LLAMA, torch.float32)


def test_an_absurd_number_of_layers_is_not_built(tmp_path: Path) -> None:
    save(tmp_path, stored(GPT2))
    with pytest.raises(ModelError, match=r"config\.json has 1000000000 layers, the weights"):
        load_folder(tmp_path, replace(GPT2, n_layers=10**9), torch.float32)


@pytest.mark.parametrize("change", [{"d_head": 3}, {"vocab_size": 10**20}, {"d_ff": 10**20}])
def test_a_shape_that_no_model_can_have(change: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="no model can have this shape"):
        expected_shapes(replace(LLAMA, **change))


def test_nested_without_end(tmp_path: Path) -> None:
    header = b'{"a":' + b"[" * 200_000
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"model\.safetensors: damaged"):
        find_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[" * 200_000)
    with pytest.raises(ModelError, match=r"index\.json: damaged"):
        find_files(tmp_path)


def test_pickle_is_never_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no 'model\.safetensors'"):
        load_folder(tmp_path, LLAMA, torch.float32)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match=r"'pytorch_model\.bin' is a pickle.*save_pretrained"):
        load_folder(tmp_path, LLAMA, torch.float32)


# --- random weights -----------------------------------------------------------


def test_random_weights_are_seeded() -> None:
    config = SHAPES["tiny-gpt2"]
    one, same, other = (random_state(config, torch.float32, seed, CPU) for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["wte.weight"], other["wte.weight"])
    assert abs(one["wte.weight"].std().item() - 0.02) < 1e-3 and abs(one["wte.weight"].mean().item()) < 1e-3
    assert one["h.0.ln_1.weight"].eq(1).all() and one["h.0.attn.c_attn.bias"].eq(0).all()
    assert {t.dtype for t in random_state(config, torch.bfloat16, 0, CPU).values()} == {torch.bfloat16}
    model = assemble(config, one, CPU)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
