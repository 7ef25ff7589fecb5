"""Names in, models out; and one clear line for every name, device and dtype that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from nanoinfer.configs.config import SHAPES
from nanoinfer.errors import DeviceError, ModelError, RequestError, TokenizerError
from nanoinfer.models import fetch, registry
from nanoinfer.models.registry import check_device, check_dtype, known_models, load_model
from nanoinfer.models.weights import CONV1D

GPT2_JSON = {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 256, "n_positions": 128}


def folder_of_tiny_gpt2(folder: Path) -> Path:
    state = load_model("random:tiny-gpt2", seed=5).model.state_dict()
    tensors = {name: (t.t() if CONV1D.fullmatch(name) else t).contiguous() for name, t in state.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GPT2_JSON | {"eos_token_id": 50256}))
    return folder


def test_random_models() -> None:
    one, same = load_model("random:tiny-llama", seed=1), load_model("random:tiny-llama", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), same.model.parameters(), strict=True))
    assert one.tokenizer is not None and one.tokenizer.n_vocab == 256 and one.eos_ids == frozenset()
    assert one.name == "random:tiny-llama" and one.source == "random weights, seed 1"
    assert one.model.config == SHAPES["tiny-llama"] and not one.model.training
    half = load_model("random:tiny-gpt2", dtype="bfloat16").model
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_random_gpt2_without_a_way_to_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Path:
        raise ModelError("no network")

    monkeypatch.setattr(fetch, "fetch", refuse)
    with pytest.warns(UserWarning, match="token ids only: no network"):
        assert registry._random_tokenizer("gpt2", SHAPES["gpt2"]) is None
    assert registry._random_tokenizer("llama-3.1-8b", SHAPES["llama-3.1-8b"]) is None


def test_folder(tmp_path: Path) -> None:
    loaded = load_model(str(folder_of_tiny_gpt2(tmp_path)))
    ids = torch.tensor([[1, 2, 3]])
    expected = load_model("random:tiny-gpt2", seed=5).model(ids, torch.arange(3)[None])
    assert torch.equal(loaded.model(ids, torch.arange(3)[None]), expected)
    assert loaded.tokenizer is None and loaded.eos_ids == {50256} and str(tmp_path) in loaded.source
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert load_model(str(tmp_path)).eos_ids == {3, 4}


def test_folder_whose_config_is_not_whole(tmp_path: Path) -> None:
    folder = folder_of_tiny_gpt2(tmp_path)
    for text, says in [
        ("{", r"config\.json: damaged"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, r"config\.json: damaged"),
        ('{"model_type": ["gpt2"]}', "is not supported"),
        ("{}", "'model_type' is missing"),
    ]:
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match=says):
            load_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: missing"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gtp2", "unknown model 'gtp2' .*did you mean 'gpt2'"),
        ("smollm2", "did you mean 'smollm2-135m'"),
        ("random:gpt3", "unknown shape 'gpt3' .*did you mean 'gpt2'"),
        ("", "unknown model ''"),
        ("./nowhere", r"unknown model '\./nowhere'"),
        ("nowhere.gguf", r"nowhere\.gguf: no such file"),
        ("~nobody-at-all/x", "unknown model '~nobody"),
        ("x" * 5000, "unknown model 'xxx"),
    ],
)
def test_unknown_names(name: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        load_model(name)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="not a GGUF file; give a"):
        load_model(str(tmp_path / "model.safetensors"))


def test_hub_ids_go_to_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def fake(repo: str, revision: str = "main") -> Path:
        asked.append((repo, revision))
        return folder_of_tiny_gpt2(tmp_path)

    monkeypatch.setattr(fetch, "fetch_hub", fake)
    assert "hub me/tiny at" in load_model("me/tiny").source
    load_model("gpt2")
    assert asked == [("me/tiny", "main"), ("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e")]


def test_known_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOINFER_CACHE", str(tmp_path))
    rows = {row.name: row for row in known_models()}
    assert rows["gpt2"].parameters == 124_439_808 and rows["gpt2-xl"].parameters == 1_557_611_200
    assert rows["smollm2-135m"].parameters == 134_515_008 and rows["smollm2-135m"].family == "llama"
    assert not rows["smollm2-135m"].on_disk and rows["random:gpt2-xl"].on_disk


def test_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_device("cpu") == torch.device("cpu") and check_dtype("cpu", "bfloat16") == torch.bfloat16
    assert check_dtype("cpu", "float32") == torch.float32 and check_dtype("cpu", "float16") == torch.float16
    for device, says in [("gpu", "unknown device 'gpu'; did you mean"), ("cuda:x", "unknown device"), ("", "unknown")]:
        with pytest.raises(DeviceError, match=says):
            check_device(device)
    for dtype, says in [("bfloat", "did you mean 'bfloat16'"), ("int8", "unknown dtype 'int8'"), ("fp32", "unknown")]:
        with pytest.raises(DeviceError, match=says):
            check_dtype("cpu", dtype)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no CUDA GPU"):
        load_model("random:tiny-gpt2", device="cuda")
    with pytest.raises(DeviceError, match="'mps' is not there"):
        check_device("mps")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="'cuda:1' is not there: this machine has cuda:0 to cuda:0"):
        check_device("cuda:1")


def test_paths_devices_and_dtypes_may_be_objects(tmp_path: Path) -> None:
    loaded = load_model(folder_of_tiny_gpt2(tmp_path), device=torch.device("cpu"), dtype=torch.bfloat16)
    assert next(loaded.model.parameters()).dtype == torch.bfloat16
    for odd in ({"device": None}, {"dtype": None}, {"device": 0}):
        with pytest.raises(DeviceError, match="unknown"):
            load_model("random:tiny-gpt2", **odd)  # type: ignore[arg-type]
    for seed in (2**63, "a", None, 1.0):
        with pytest.raises(RequestError, match="seed must be a 64-bit whole number"):
            load_model("random:tiny-gpt2", seed=seed)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="unknown model 'None'"):
        load_model(None)  # type: ignore[arg-type]


def test_a_random_model_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20_000_000_000))
    with pytest.raises(ModelError, match=r"'random:llama-3.1-8b' takes 32.1 GB in float32 and 20.0 GB of memory are"):
        load_model("random:llama-3.1-8b")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("generation_config.json", '{"eos_token_id": ["</s>"]}'),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}'),
        ("tokenizer_config.json", '{"bos_token": ["a"]}'),
        ("tokenizer_config.json", '{"chat_template": [1]}'),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", '{"model": {"vocab": 5, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"}}'),
    ],
)
def test_damaged_tokenizer_files_are_named(tmp_path: Path, file: str, text: str) -> None:
    folder = folder_of_tiny_gpt2(tmp_path)
    (folder / "vocab.json").write_text(json.dumps({chr(i): i - 33 for i in range(33, 127)} | {"ab": 94}))
    (folder / "merges.txt").write_text("a b\n")
    (folder / file).write_text(text)
    with pytest.raises(TokenizerError, match=str(tmp_path)) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_we_cannot_run_leaves_token_ids(tmp_path: Path) -> None:
    folder = folder_of_tiny_gpt2(tmp_path)
    unigram = {"model": {"type": "Unigram", "vocab": []}}
    (folder / "tokenizer.json").write_text(json.dumps(unigram))
    with pytest.warns(UserWarning, match="only byte-level BPE is supported; give prompts as token ids"):
        loaded = load_model(str(folder))
    assert loaded.tokenizer is None and loaded.eos_ids == {50256}
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="damaged"):
        load_model(str(folder))
