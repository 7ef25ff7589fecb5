"""``predict``, ``fit`` and ``gpus`` against figures worked out by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.configs.catalog import MODELS
from nanoinfer.configs.config import SHAPES
from nanoinfer.errors import ModelError
from nanoinfer.models.lookup import config_of
from nanoinfer.predict import latency, memory, target
from nanoinfer.predict.options import FitOptions, PredictOptions
from nanoinfer.show.text import si
from nanoinfer.theory import arithmetic
from nanoinfer.theory.arithmetic import parameters
from nanoinfer.theory.roofline import Machine, cached_seconds
from tests.predict.commands import lines, one_line, record, run

LLAMA = SHAPES["llama-3.1-8b"]
PREDICT = ("predict", "llama-3.1-8b", "--gpu", "H100", "--batch", "32", "--context", "2048")


def predict(model: str, gpu: str, **options: Any) -> Any:
    return latency.predict(PredictOptions(model, gpu, **options))


# --- predict ------------------------------------------------------------------------


def test_llama_on_an_h100_by_hand() -> None:
    found = record(*PREDICT, "--usd-per-hour", "3")
    assert found["model"]["parameters"] == 8_030_261_248
    assert found["weights_bytes"] == 2 * 8_030_261_248
    assert found["kv_bytes_per_token"] == 131_072
    assert found["kv_bytes"] == 32 * 2048 * 131_072
    assert found["machine"]["ridge_flops_per_byte"] == pytest.approx(989 / 3.35)
    decode, prefill = found["decode"], found["prefill"]
    # P' less its norms, which are no products, and the cache, read once each; activations add a little.
    read = 2 * (7_504_924_672 - 65 * 4096) + 32 * 2048 * 131_072
    assert read / 3.35e12 < decode["seconds"] < 1.05 * read / 3.35e12
    assert decode["bound"] == "memory" and prefill["bound"] == "compute"
    assert decode["tokens_per_s_per_request"] == pytest.approx(1 / decode["seconds"])
    assert decode["tokens_per_s"] == pytest.approx(32 / decode["seconds"])
    # Products: 2 per parameter and token but for the head, which sees the last one alone; causal attention.
    head = 128_256 * 4096
    products = 2 * 65_536 * (7_504_924_672 - 65 * 4096 - head) + 2 * 32 * head
    attention = 32 * 2 * 32 * 32 * 128 * 2048**2
    assert prefill["flops_per_device"] == pytest.approx(products + attention, rel=1e-3)
    assert prefill["seconds"] > (products + attention) / 989e12
    assert found["price"]["output_usd_per_mtok"] == pytest.approx(3e6 / 3600 / decode["tokens_per_s"])
    assert found["price"]["input_usd_per_mtok"] == pytest.approx(3e6 / 3600 * prefill["seconds"] / 65_536)
    assert found["energy"]["joules_per_output_token"] == pytest.approx(700 / decode["tokens_per_s"])
    assert found["generation"] is None


def test_one_row_takes_at_least_the_reading_of_the_weights() -> None:
    seconds = predict("llama-3.1-8b", "H100", batch=1, context=1)["decode"]["seconds"]
    assert 2 * 7.504e9 / 3.35e12 < seconds < 4.6e-3  # 4.48 ms


def test_the_table_says_what_the_json_says() -> None:
    found, shown = record(*PREDICT, "--usd-per-hour", "3"), lines(*PREDICT, "--usd-per-hour", "3")
    assert shown["parameters"] == "8,030,261,248"
    assert shown["weights"] == "16.06 GB"
    assert shown["KV cache per token"] == "131,072 B"
    assert shown["KV cache in all"] == "8.59 GB"
    assert shown["ridge"] == "295 FLOP/B"
    assert shown["decode step = TPOT"] == si(found["decode"]["seconds"], "s")
    assert shown["prefill = TTFT (32 prompts at once)"] == si(found["prefill"]["seconds"], "s")
    assert f"${found['price']['output_usd_per_mtok']:.4g} out" in " ".join(shown.values())
    text = run(*PREDICT).stdout
    for phase in ("prefill", "decode"):
        for op in found[phase]["operators"]:
            times = re.escape(si(op["seconds"], "s"))
            assert re.search(rf"^{re.escape(op['name'])} .*{times} +{op['bound']}$", text, re.M), op
    assert all(change["change"] in text for change in found["changes"])


def test_the_reason_names_the_larger_part() -> None:
    few = predict("llama-3.1-8b", "H100", batch=8, context=1024)["decode"]
    assert "memory-bound" in few["why"] and "15.01 GB of weights" in few["why"] and "The weights are" in few["why"]
    assert "about 295 rows" in few["why"] and f"{few['another_row_s'] / few['seconds']:.1%}" in few["why"]
    assert "The cache is the larger part" in predict("llama-3.1-8b", "H100", batch=50, context=8192)["decode"]["why"]
    tiny = predict("tiny-gpt2", "H100", context=64, launch_us=4)
    assert tiny["decode"]["bound"] == "launch" and "starting its" in tiny["decode"]["why"]
    assert "starting its" in tiny["prefill"]["why"]
    assert "all-reduces" in predict("smollm2-135m", "H100", tp=3, context=64)["decode"]["why"]
    assert predict("llama-3.1-8b", "H100", batch=32, context=2048, tp=4)["prefill"]["bound"] == "compute"
    unfused = predict("llama-3.1-8b", "H100", batch=32, context=2048, tp=4, launch_us=0.001)["prefill"]
    assert unfused["bound"] == "memory" and "one by one" in unfused["why"]
    assert "too few" in predict("llama-3.1-8b", "H100", context=16)["prefill"]["why"]
    mla = predict_config(n_layers=1, d_ff=64, n_kv_heads=1, n_heads=2048, d_head=64, vocab_size=8)
    assert mla["decode"]["bound"] == "compute" and "do not come free" in mla["decode"]["why"]


def predict_config(**shape: int) -> Any:
    """A multi-query shape with so many heads that decode's attention is bound by arithmetic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "config_of", lambda _: replace(SHAPES["tiny-llama"], context=100_000, **shape))
        return predict("wide", "H100", batch=64, context=100_000)


def test_what_would_change_it() -> None:
    found = record(*PREDICT)
    before = found["decode"]["seconds"]
    by = {change["change"]: change for change in found["changes"]}
    # Half of 15 GB, and half of 8.6 GB, less to read.
    assert before - by["weights in 8 bits"]["decode_seconds"] == pytest.approx(7.505e9 / 3.35e12, rel=1e-3)
    kv = 32 * 2048 * 131_072
    assert before - by["KV cache in 8 bits"]["decode_seconds"] == pytest.approx(kv / 2 / 3.35e12)
    assert before - by["half the context (1024)"]["decode_seconds"] == pytest.approx(kv / 2 / 3.35e12)
    assert by["twice the batch (64)"]["tokens_per_s"] == pytest.approx(
        64 / by["twice the batch (64)"]["decode_seconds"]
    )
    assert by["twice the devices (--tp 2)"]["decode_seconds"] < before
    assert not any("twice the batch" in row["change"] for row in predict("llama-3.1-8b", "L4", batch=50)["changes"])


@pytest.mark.parametrize("new", [1, 2, 3, 40, 300])
def test_a_generation_adds_up(new: int) -> None:
    found = predict("smollm2-135m", "L4", batch=2, context=100, new=new)
    exact = cached_seconds(SHAPES["smollm2-135m"], Machine.datasheet("L4"), 2, 100, new)
    assert found["generation"]["seconds"] == pytest.approx(sum(exact), rel=1e-6)
    assert found["generation"]["tokens_per_s"] == pytest.approx(2 * new / sum(exact), rel=1e-6)
    assert found["kv_bytes"] == arithmetic.kv_bytes(SHAPES["smollm2-135m"], 2, 99 + new, "bfloat16")


def test_a_config_file_and_the_short_names_of_dtypes(tmp_path: Path) -> None:
    shape = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    (tmp_path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    for where in (tmp_path, tmp_path / "config.json"):
        found = record("predict", str(where), "--gpu", "t4", "--dtype", "fp16")
        assert found["model"]["parameters"] == 124_439_808 and found["machine"]["dtype"] == "float16"
    assert record("fit", "random:gpt2", "--gpu", "H100", "--dtype", "fp8")["weights_bytes"] == 124_439_808


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = target.TargetDevice("a desk", 16e9, None, None, "cpu")
    rates = Machine("a desk", "float32", 1e11, 1e10, 1e-6, 2e-6, ((1, 5e9), (64, 8e10)))
    monkeypatch.setattr(target, "local_target", lambda: here)
    monkeypatch.setattr(latency, "machine_of", lambda *_: rates)
    found = record("predict", "smollm2-135m", "--gpu", "here", "--dtype", "float32")
    assert found["machine"]["rates_from"] == "measured on this machine" and found["energy"] is None
    assert "about" not in found["decode"]["why"]  # where the rates turn is measured, not worked out from the ridge
    assert not any("bits" in change["change"] for change in found["changes"])
    monkeypatch.undo()
    assert memory.fit(FitOptions("smollm2-135m", "here"))["max_batch_rows"] > 0
    assert "has measured it" in run("predict", "gpt2", "--gpu", "here", "--launch-us", "2").stderr


# --- gpus, mistakes, speed ------------------------------------------------------------


def test_gpus() -> None:
    rows = {row["name"]: row for row in record("gpus")}
    assert rows["H100 SXM"]["dense_tflops"]["bf16"] == 989 and rows["H100 SXM"]["bandwidth_gb_per_s"] == 3350
    shown = lines("gpus")
    assert set(rows) <= set(shown) and shown["H100 SXM"].split()[:2] == ["80", "3350"]


@pytest.mark.parametrize("command", ["predict", "fit"])
@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("llama-3.1-8b --gpu H1000", "unknown device 'H1000'; did you mean 'h100'"),
        ("llama-3.1-8b --gpu H100 --context 0", "context must be at least 1, got 0"),
        ("llama-3.1-8b --gpu H100 --context -5", "context must be at least 1, got -5"),
        ("llama-3.1-8b --gpu H100 --context 200000", "is beyond the"),
        ("llama-3.1-8b --gpu H100 --tp 0", "tp must be at least 1"),
        ("llama-3.1-8b --gpu H100 --tp 3", "tp 3 does not divide 32 query heads and 8 KV heads"),
        ("gpt2 --gpu T4 --dtype fp8", "T4 has no fp8; it has fp32, fp16, int8"),
        ("gpt2 --gpu H100 --dtype fp5", "dtype 'fp5' is not counted; did you mean"),
        ("llama-3.1-8b --gpu T4 --dtype fp16", "take at least 2 devices"),
        ("lama-3.1-8b --gpu H100", "did you mean 'llama-3.1-8b'"),
        ("nowhere/config.json --gpu H100", "no such file"),
    ],
)
def test_mistakes_are_one_line(command: str, args: str, says: str) -> None:
    one_line(run(command, *args.split()), says)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("predict gpt2 --gpu H100 --batch 0", "batch must be at least 1, got 0"),
        ("predict gpt2 --gpu H100 --new 0", "new must be at least 1, got 0"),
        ("predict gpt2 --gpu H100 --new 2", "context 1024 and 2 new tokens need 1025"),
        ("predict gpt2 --gpu H100 --launch-us -1", "--launch-us must be at least 0, got -1.0"),
        ("predict gpt2 --gpu H100 --usd-per-hour 0", "--usd-per-hour must be above 0, got 0.0"),
        ("predict gpt2 --gpu H100 --usd-per-hour nan", "--usd-per-hour must be above 0, got nan"),
        ("predict llama-3.1-8b --gpu L4 --batch 512", "512 rows of 1024 tokens do not fit L4 (24 GB a device)"),
        ("predict smollm2-135m --gpu M4", "no published and agreed dense bf16 peak"),
        ("fit gpt2 --gpu H100 --utilisation 1.5", "utilisation must be above 0 and at most 1"),
        ("fit gpt2 --gpu H100 --block 0", "block must be at least 1"),
    ],
)
def test_mistakes_of_one_command(args: str, says: str) -> None:
    one_line(run(*args.split()), says)


def test_a_family_that_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "rwkv"}', encoding="utf-8")
    one_line(run("fit", str(tmp_path), "--gpu", "H100"), "model_type 'rwkv' is not supported")


def test_a_model_is_known_by_its_published_name_with_its_published_context() -> None:
    for name, (_, count) in MODELS.items():
        assert parameters(config_of(name.lower())) == count
    for name, context in {"gpt2-xl": 1024, "Llama-3-70B": 8192, "Qwen3-8B": 32_768, "DeepSeek-V3": 131_072}.items():
        assert config_of(name).context == context
    with pytest.raises(ModelError, match=r"unknown model 'llama-3-71b'.*did you mean 'llama-3-70b'"):
        config_of("llama-3-71b")
