"""A quantised copy computes what its rounded weights say, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.static import NaiveEngine
from nanoinfer.errors import DeviceError, RequestError
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.registry import load_model
from nanoinfer.models.weights import build
from nanoinfer.optimize.formats import (
    fit_int4_groups,
    fit_int8_rows,
    from_fp8_rows,
    from_int4_groups,
    from_int8_rows,
    to_fp8_rows,
    to_int4_groups,
    to_int8_rows,
    to_nibbles,
)
from nanoinfer.optimize.linear import fuse, share_weights
from nanoinfer.optimize.quantise import (
    FEW_ROWS,
    Fp8Linear,
    Int4Linear,
    Int8Linear,
    Quantised,
    QuantisedLinear,
    bits_per_weight,
    channel_energy,
    check_fp8,
    dequantise_int4,
    layer_linears,
    quantise,
)
from nanoinfer.sampling.params import SamplingParams

TINY = ("random:tiny-llama", "random:tiny-gpt2")
# Sizes that fill nothing: neither groups of 32 nor the operators' 16 outputs.
ODD_GPT2 = ModelConfig("gpt2", 2, 72, 3, 3, 24, 200, 307, 64)
ODD_LLAMA = ModelConfig("llama", 2, 78, 3, 1, 26, 100, 301, 64, tied=False)
IDS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(3))


def logits(model: GPT2 | Llama, ids: Tensor = IDS) -> Tensor:
    with torch.inference_mode():
        out: Tensor = model(ids, torch.arange(ids.shape[1]).expand_as(ids))
    return out.float()


def odd(config: ModelConfig, dtype: torch.dtype) -> GPT2 | Llama:
    model = build(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * 0.1 + (1.0 if p.dim() == 1 else 0.0))
    return model.to(dtype)


def rounded(weight: Tensor, weights: Quantised) -> Tensor:
    """What the weight is read back as, by the formats' own definitions."""
    if weights == "int8":
        return from_int8_rows(*to_int8_rows(weight, weight.dtype))
    k = weight.shape[1]
    return from_int4_groups(*to_int4_groups(nn.functional.pad(weight, (0, -k % 32)), 32))[:, :k]


def off(ours: Tensor, right: Tensor) -> float:
    return float((ours.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("weights", "most"), [("int8", 0.01), ("int4", 0.1)])
@pytest.mark.parametrize("name", TINY)
def test_logits_come_close_to_float32(name: str, weights: Quantised, most: float, dtype: str) -> None:
    model = load_model(name, dtype=dtype).model
    quick = share_weights(model)
    quantise(quick, weights)
    found = off(logits(quick), logits(load_model(name).model))
    assert 0 < found < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", [*TINY, "odd gpt2", "odd llama"])
def test_logits_are_those_of_the_rounded_weights(name: str, weights: Quantised, dtype: torch.dtype) -> None:
    odds = {"odd gpt2": ODD_GPT2, "odd llama": ODD_LLAMA}
    model = odd(odds[name], dtype) if name in odds else load_model(name, dtype=dtype).model
    quick, slow = share_weights(model), share_weights(model).float()
    for (_, linear), (_, plain) in zip(layer_linears(model), layer_linears(slow), strict=True):
        plain.weight = nn.Parameter(rounded(linear.weight, weights), requires_grad=False)
    quantise(quick, weights)
    most = 1e-5 if (weights, dtype) == ("int8", torch.float32) else 0.01  # the others compute in bfloat16
    assert off(logits(quick), logits(slow)) < most


def linear(n_in: int, n_out: int, dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    generator = torch.Generator().manual_seed(n_in)
    made = nn.Linear(n_in, n_out, bias=bias).requires_grad_(False)
    made.weight.copy_(torch.randn(n_out, n_in, generator=generator) * 0.05)
    return made.to(dtype)


@pytest.mark.parametrize("shape", [(64,), (1, 1, 64), (FEW_ROWS, 64), (1, FEW_ROWS + 1, 64), (3, 20, 64)])
@pytest.mark.parametrize(
    ("weights", "dtype", "most"),
    [
        ("int8", torch.float32, 1e-6),
        ("int8", torch.bfloat16, 0.006),
        ("int8", torch.float16, 0.001),
        ("int4", torch.float32, 0.006),
        ("int4", torch.bfloat16, 0.006),
        ("int4", torch.float16, 0.006),
    ],
)
def test_one_product(weights: Quantised, dtype: torch.dtype, most: float, shape: tuple[int, ...]) -> None:
    plain = linear(64, 48, dtype)
    quick = Int8Linear(plain) if weights == "int8" else Int4Linear(plain, 32)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    out = quick(x)
    assert out.dtype == dtype and out.shape == (*shape[:-1], 48)
    scales = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    back = from_int8_rows(*to_int8_rows(plain.weight, scales)) if weights == "int8" else rounded(plain.weight, weights)
    assert off(out, x.double() @ back.double().T + plain.bias.double()) < most


@pytest.mark.parametrize("make", [Int8Linear, lambda plain: Int4Linear(plain, 32)], ids=["int8", "int4"])
def test_a_row_does_not_depend_on_its_neighbours(make: Callable[[nn.Linear], QuantisedLinear]) -> None:
    quick = make(linear(576, 192, torch.bfloat16))
    x = torch.randn(FEW_ROWS, 576, generator=torch.Generator().manual_seed(6)).bfloat16()
    together = quick(x)
    for row, out in zip(x, together, strict=True):
        assert torch.equal(quick(row[None])[0], out)


@pytest.mark.parametrize("make", [Int8Linear, lambda plain: Int4Linear(plain, 32)], ids=["int8", "int4"])
@pytest.mark.parametrize("n_in", [33, 40, 48, 78])
def test_few_rows_of_an_odd_size(n_in: int, make: Callable[[nn.Linear], QuantisedLinear]) -> None:
    plain = linear(n_in, 7, torch.bfloat16)
    quick = make(plain)
    x = torch.randn(3, n_in, generator=torch.Generator().manual_seed(5)).bfloat16()
    back = rounded(plain.weight, "int8" if isinstance(quick, Int8Linear) else "int4")
    assert off(quick(x), x.double() @ back.double().T + plain.bias.double()) < 0.006


def test_float16_does_not_overflow() -> None:
    plain = linear(512, 16, torch.float16, bias=False)
    x = torch.full((1, 512), 1000.0, dtype=torch.float16)
    assert Int8Linear(plain)(x).isfinite().all()


def test_head_embeddings_and_the_first_model_stay_as_they_are() -> None:
    model = odd(ODD_LLAMA, torch.float32)
    assert isinstance(model, Llama) and model.lm_head is not None
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    kinds = [type(m) for m in model.modules()]
    quick = share_weights(model)
    quantise(quick, "int8")
    assert [type(m) for m in model.modules()] == kinds
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == {n: at for n, (at, _) in before.items()}
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name][1])
    assert type(quick.lm_head) is nn.Linear and quick.lm_head.weight is model.lm_head.weight
    assert quick.embed_tokens.weight is model.embed_tokens.weight
    assert not list(layer_linears(quick))
    assert sum(isinstance(m, Int8Linear) for m in quick.modules()) == 7 * 2


def test_a_bias_is_shared_and_added() -> None:
    model = odd(ODD_GPT2, torch.float32)
    quick = share_weights(model)
    quantise(quick, "int4")
    assert quick.get_parameter("h.0.mlp.c_fc.bias") is model.get_parameter("h.0.mlp.c_fc.bias")


def test_bits_are_the_formula() -> None:
    model = load_model("random:tiny-llama", dtype="bfloat16").model
    assert bits_per_weight(model) == 16
    c = model.config
    shapes = [(c.d_model, c.d_model), (16, c.d_model), (16, c.d_model), (c.d_model, c.d_model)]
    shapes += [(c.d_ff, c.d_model), (c.d_ff, c.d_model), (c.d_model, c.d_ff)]
    numbers, rows = sum(n * k for n, k in shapes), sum(n for n, _ in shapes)
    for weights, group, bits in (("int8", 32, 8 + 16 * rows / numbers), ("int4", 32, 5.0)):
        quick = share_weights(model)
        quantise(quick, weights, group=group)  # type: ignore[arg-type]
        assert bits_per_weight(quick) == pytest.approx(bits)


def test_what_is_quantised_runs_in_the_engine() -> None:
    loaded = load_model("random:tiny-llama")
    quick = share_weights(loaded.model)
    fuse(quick)
    quantise(quick, "int8")
    loaded = replace(loaded, model=quick)
    prompts, greedy = [[1, 2, 3], [9], list(range(20))], SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [done.token_ids for done in NaiveEngine(loaded).generate(prompts, greedy)]
    assert [done.token_ids for done in ContinuousEngine(loaded).generate(prompts, greedy)] == expected


# --- calibration --------------------------------------------------------------------------


def test_energy_is_the_mean_square_of_what_goes_in() -> None:
    model = load_model("random:tiny-gpt2").model
    assert isinstance(model, GPT2)
    context = model.config.context
    ids = torch.randint(256, (context + 5,), generator=torch.Generator().manual_seed(4)).tolist()
    found = channel_energy(model, ids)
    assert list(found) == [name for name, _ in layer_linears(model)]
    inputs = []
    for window in (ids[:context], ids[context:]):  # a text longer than the context is read in windows
        first = model.wte(torch.tensor(window)) + model.wpe(torch.arange(len(window)))
        inputs.append(model.get_submodule("h.0.ln_1")(first))
    torch.testing.assert_close(found["h.0.attn.c_attn"], torch.cat(inputs).square().mean(0))
    assert not any(m._forward_pre_hooks for m in model.modules())


def uneven() -> tuple[Tensor, Tensor]:
    """A weight ``[64, 128]`` and inputs ``[500, 128]``, a few channels of which have most of the energy."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(500, 128, generator=generator) * (2 * torch.randn(128, generator=generator)).exp()
    return torch.randn(64, 128, generator=generator), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calibrated_int8_has_less_of_the_error_that_counts(dtype: torch.dtype) -> None:
    weight, x = uneven()
    energy, exact = x.square().mean(0), x @ weight.T
    plain, fitted = (from_int8_rows(*f) for f in (to_int8_rows(weight, dtype), fit_int8_rows(weight, energy, dtype)))
    assert off(x @ fitted.T, exact) < 0.95 * off(x @ plain.T, exact)
    errors = [((w - weight).square() * energy).sum(1) for w in (plain, fitted)]
    assert (errors[1] <= errors[0] * 1.02).all()
    assert torch.equal(from_int8_rows(*fit_int8_rows(weight * 0, energy)), weight * 0)


def test_calibrated_int4_has_less_of_the_error_that_counts() -> None:
    weight, x = uneven()
    energy, exact = x.square().mean(0), x @ weight.T
    plain, fitted = (from_int4_groups(*f) for f in (to_int4_groups(weight, 32), fit_int4_groups(weight, energy, 32)))
    assert off(x @ fitted.T, exact) < 0.8 * off(x @ plain.T, exact)
    # Of each group alone it is never worse.
    errors = [((w - weight).square() * energy).view(64, 4, 32).sum(-1) for w in (plain, fitted)]
    assert (errors[1] <= errors[0] * 1.02).all()  # not by more than the share that silent channels are given
    assert torch.equal(from_int4_groups(*fit_int4_groups(fitted * 0, energy, 32)), fitted * 0)


def test_a_grid_that_the_weights_lie_on_is_kept() -> None:
    weight = (torch.arange(16).repeat(3, 4) - 8) * 0.25
    energy = torch.rand(64, generator=torch.Generator().manual_seed(8))
    assert torch.equal(from_int4_groups(*fit_int4_groups(weight, energy, 32)), weight)
    silent = torch.zeros(64)
    assert torch.equal(from_int4_groups(*fit_int4_groups(weight, silent, 32)), weight)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("config", [ODD_LLAMA, ODD_GPT2], ids=["llama", "gpt2"])
def test_a_copy_is_calibrated_and_quantised(config: ModelConfig, fused: bool, weights: Quantised) -> None:
    model = odd(config, torch.float32)
    plain, fitted = share_weights(model), share_weights(model)
    if fused:
        fuse(plain)
        fuse(fitted)
    ids = torch.randint(256, (300,), generator=torch.Generator().manual_seed(9)).tolist()
    quantise(plain, weights)
    quantise(fitted, weights, channel_energy(fitted, ids))
    right, (one, two) = logits(model), (logits(m) for m in (plain, fitted))
    assert off(two, right) < off(one, right)


def test_a_calibration_of_something_else_is_refused() -> None:
    model = load_model("random:tiny-llama").model
    energies = channel_energy(model, [1, 2, 3])
    quick = share_weights(model)
    with pytest.raises(RequestError, match="a calibration is for int8 and int4, not for fp8"):
        quantise(quick, "fp8", energies)
    fuse(quick)
    with pytest.raises(
        RequestError, match=r"no 32 energies for layers\.0\.self_attn\.qkv_proj: calibrate the copy that is quantised"
    ):
        quantise(quick, "int4", energies)
    with pytest.raises(RequestError, match="at least one token"):
        channel_energy(model, [])
    with pytest.raises(RequestError, match="groups of 32, 64, 128, 256, not of 48"):
        quantise(quick, "int4", group=48)
    assert len(list(layer_linears(quick))) == 4 * 2  # nothing was replaced


# --- what only GPUs run -------------------------------------------------------------------


def test_the_widened_weight_is_the_rounded_one() -> None:
    weight = linear(96, 32, torch.float32).weight
    codes, steps, middles = to_int4_groups(weight, 32)
    grid = torch.stack((steps, middles), -1).transpose(0, 1).contiguous()
    assert torch.equal(dequantise_int4(to_nibbles(codes), grid), rounded(weight, "int4"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_in_fp8_is_that_of_rounded_weights_and_inputs(dtype: torch.dtype) -> None:
    plain = linear(64, 48, dtype)
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(5)).to(dtype)
    x[0, 1] = 0  # a row without a scale
    out = Fp8Linear(plain)(x)
    assert out.dtype == dtype and out.shape == (2, 5, 48)
    rows, weight = from_fp8_rows(*to_fp8_rows(x.flatten(0, 1))), from_fp8_rows(*to_fp8_rows(plain.weight))
    right = (rows.double() @ weight.double().T + plain.bias.double()).view(2, 5, 48)
    assert off(out, right) < 0.006
    assert off(out, nn.functional.linear(x, plain.weight, plain.bias)) < 0.06


def test_fp8_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = share_weights(load_model("random:tiny-llama").model)
    with pytest.raises(DeviceError, match=r"fp8 products need a GPU of compute capability 8\.9 or higher.*on cpu"):
        quantise(quick, "fp8")
    assert len(list(layer_linears(quick))) == 7 * 2
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(DeviceError, match="NVIDIA A100"):
        check_fp8(gpu, dict(layer_linears(quick)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_fp8(gpu, dict(layer_linears(quick)))
    with pytest.raises(DeviceError, match=r"h\.0\.attn\.c_attn goes from 72 to 216"):
        check_fp8(gpu, dict(layer_linears(odd(ODD_GPT2, torch.float32))))


@pytest.mark.gpu
@pytest.mark.parametrize(("weights", "most"), [("int8", 0.01), ("int4", 0.1), ("fp8", 0.1)])
@pytest.mark.parametrize("name", TINY)
def test_on_a_gpu(name: str, weights: Quantised, most: float) -> None:
    model = load_model(name, device="cuda", dtype="bfloat16").model
    quick = share_weights(model)
    quantise(quick, weights)
    ids = IDS.cuda()
    with torch.inference_mode():
        found = quick(ids, torch.arange(ids.shape[1], device="cuda").expand_as(ids)).float().cpu()
    assert 0 < off(found, logits(load_model(name).model)) < most


# --- for the compiler ---------------------------------------------------------------------


def test_the_operators_say_the_shapes_that_they_give() -> None:
    eight, four = Int8Linear(linear(64, 48, torch.bfloat16)), Int4Linear(linear(64, 48, torch.float32), 32)
    tests = ("test_schema", "test_faketensor")
    for rows in (1, 20):
        x = torch.randn(1, rows, 64)
        args = (x.bfloat16(), eight.whole, eight.scales)
        torch.library.opcheck(torch.ops.nanoinfer.int8_linear.default, args, test_utils=tests)
        torch.library.opcheck(
            torch.ops.nanoinfer.int4_linear.default, (x, four.packed, four.grid, 32), test_utils=tests
        )
