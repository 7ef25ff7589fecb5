"""Time a model's operators one by one, to predict steps of any batch, context and phase.

The real code is timed: each product, through all layers in order so that weights come from memory; attention over
caches of several sizes; a pass through the layers over a short context; steps of the continuous engine. What a pass or
a step takes beyond its parts is norms, rotation, activation, cache writes and Python.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer import cache, engines, models
from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.cache.ragged import RaggedFlash, RaggedSdpa, Row
from nanoinfer.calibrate.machine import KEEP_S, MAX_WAITED, run_queue_wait, schedstat
from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.measure.clock import timed
from nanoinfer.measure.environment import machine_key
from nanoinfer.measure.stalls import StepNote
from nanoinfer.models.attention import attend
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.registry import LoadedModel
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.store import cache_file, cached
from nanoinfer.theory.curves import Curve, OperatorCurves
from nanoinfer.theory.parameters import head_matrix, layer_matrices
from nanoinfer.theory.roofline import Machine

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
MANY = 128  # a pass of more rows is long and varies little: it runs once, without warm-up
BATCHES = (1, 4, 16, 32)
BLOCK = 8  # tokens a block of the paged cache
CONTEXTS = (16, 256, 2048)
PREFILLS = (16, 64, 256, 1024)
REST_BATCHES = (1, 4, 16, 32)
REST_PREFILLS = (16, 64, 256, 1024)
SHORT = 16  # the context at which whole layers are timed
STEPS = 8  # of the engine, after a prompt
#: Enough layers that keys and values come from memory and not from the processor's cache.
ATTENTION_BYTES = 2**28


def measure_operators(loaded: LoadedModel, repeats: int = 3) -> OperatorCurves:
    """Time the operators of a loaded model; some ten seconds for a small one on a laptop.

    The median counts of ``repeats`` timed calls a point; one more warms up.
    """
    device = next(loaded.model.parameters()).device
    with torch.inference_mode():
        products = _products(loaded.model, device, repeats)
        decode, paged = _decode_attention(loaded, device, repeats)
        prefill = _prefill_attention(loaded, device, repeats)
        nothing = Curve((1,), (1.0,))
        parts = OperatorCurves(products, decode, paged, prefill, nothing, nothing, nothing, nothing)
        rest, rest_prefill = _rest(loaded, device, repeats, parts)
        paged_rest, paged_rest_prefill = _paged_rest(loaded, parts)
    return replace(
        parts, rest=rest, rest_prefill=rest_prefill, paged_rest=paged_rest, paged_rest_prefill=paged_rest_prefill
    )


def this_machine(loaded: LoadedModel, fresh: bool = False) -> Machine:
    """The machine at hand, as this model meets it: for :mod:`nanoinfer.theory.roofline`.

    Timings are kept in the user's cache for a day, unless other work slowed them down; ``fresh`` takes them again.
    Peak and bandwidth are those of the fastest product: what this model's own operators reach, below what the
    machine could do.
    """
    config, weight = loaded.model.config, next(loaded.model.parameters())
    dtype, waited = str(weight.dtype).removeprefix("torch."), 0.0

    def measure() -> OperatorCurves:
        nonlocal waited
        before = schedstat()
        curves = measure_operators(loaded)
        waited = run_queue_wait(before, schedstat()) or 0.0
        return curves

    code = (Path(package.__path__[0]) for package in (cache, engines, models))
    path = cache_file("operators", [loaded.name, dtype, weight.device, *machine_key()], code)
    curves = cached(
        path,
        measure,
        OperatorCurves.from_json,
        OperatorCurves.to_json,
        max_age_s=KEEP_S,
        fresh=fresh,
        keep=lambda _: waited <= MAX_WAITED,
    )
    matrices = [m for m in (*layer_matrices(config, 0), head_matrix(config)) if m.name in curves.products]
    sizes = [(m.rows * m.columns, curves.products[m.name]) for m in matrices]
    peak = max(2 * n * rows / curve.at(rows) for n, curve in sizes for rows in ROWS)
    bandwidth = max(n * weight.itemsize / curve.at(1) for n, curve in sizes)
    return Machine("this machine", dtype, peak, bandwidth, curves=curves)


def _seconds(fn: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median of the calls after a warm-up: what a step usually meets, not the best case."""
    return statistics.median([timed(fn, device)[1] for _ in range(repeats + 1)][1:])


#: What :func:`~nanoinfer.theory.parameters.layer_matrices` calls GPT-2's products.
GPT2_NAMES = {"attn.c_attn": "qkv", "attn.c_proj": "o_proj", "mlp.c_fc": "up_proj", "mlp.c_proj": "down_proj"}


def _linears(model: GPT2 | Llama) -> list[tuple[str, nn.Linear]]:
    """All products of all layers, in a step's order, by the table's names."""
    linears = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            name = ".".join(path.split(".")[-2:])
            linears.append((GPT2_NAMES.get(name, path.rpartition(".")[2]), module))
    return linears


def _products(model: GPT2 | Llama, device: torch.device, repeats: int) -> dict[str, Curve]:
    """Seconds of each product against rows; every pass goes through all layers, as a step does."""
    layers, embedding = _linears(model), model.wte if isinstance(model, GPT2) else model.embed_tokens
    head = embedding.weight if model.lm_head is None else model.lm_head.weight
    medians: dict[str, list[float]] = defaultdict(list)
    for rows in ROWS:
        widths = {module.in_features for _, module in layers} | {head.shape[1]}
        inputs = {n: torch.randn(rows, n, device=device).to(head.dtype) for n in widths}
        passes: list[dict[str, list[float]]] = []
        for _ in range(1 if rows > MANY else repeats + 1):
            times: dict[str, list[float]] = defaultdict(list)
            for name, weight, bias in [*((n, m.weight, m.bias) for n, m in layers), ("lm_head", head, None)]:
                product = partial(F.linear, inputs[weight.shape[1]], weight, bias)
                times[name].append(timed(product, device)[1])
            passes.append(times)
        for name in passes[0]:
            medians[name].append(statistics.median(statistics.median(p[name]) for p in passes[1:] or passes))
    if "qkv" in medians:  # GPT-2 computes q, k and v in one product
        thirds = [seconds / 3 for seconds in medians.pop("qkv")]
        medians |= {"q_proj": thirds, "k_proj": thirds, "v_proj": thirds}
    return {name: Curve(ROWS, tuple(seconds)) for name, seconds in medians.items()}


def _cache(loaded: LoadedModel, batch: int, context: int, device: torch.device) -> ContiguousCache:
    """A filled cache of enough layers to outgrow the processor's cache, two at least."""
    config = loaded.model.config
    dtype = next(loaded.model.parameters()).dtype
    layer_bytes = 2 * batch * config.n_kv_heads * context * config.d_head * dtype.itemsize
    n_layers = max(2, min(config.n_layers, ATTENTION_BYTES // layer_bytes))
    cache = ContiguousCache(replace(config, n_layers=n_layers), batch, context, device, dtype)
    cache.k.normal_()
    cache.v.normal_()
    return cache


def _decode_attention(
    loaded: LoadedModel, device: torch.device, repeats: int
) -> tuple[dict[int, Curve], dict[int, Curve]]:
    """Over a contiguous cache, and over the same memory taken as the blocks of a paged one."""
    config = loaded.model.config
    last = (config.context,) if config.context < CONTEXTS[-1] else ()
    contexts = tuple(c for c in CONTEXTS if c < config.context) + last

    def attend_all() -> None:
        for k, v in zip(cache.k, cache.v, strict=True):
            attend(q, k, v)

    curves, paged_curves = {}, {}
    for batch in BATCHES:
        seconds, paged_seconds = [], []
        for context in contexts:
            cache = _cache(loaded, batch, context, device)
            q = torch.randn(batch, config.n_heads, 1, config.d_head, device=device).to(cache.k.dtype)
            seconds.append(_seconds(attend_all, device, repeats) / len(cache.k))
            paged_seconds.append(_seconds(partial(_attend_paged, q, *_blocks(cache)), device, repeats) / len(cache.k))
        curves[batch], paged_curves[batch] = Curve(contexts, tuple(seconds)), Curve(contexts, tuple(paged_seconds))
    return curves, paged_curves


def _blocks(cache: ContiguousCache) -> tuple[Tensor, Tensor, list[Row]]:
    """A contiguous cache's content as blocks, shuffled among the rows, and rows of the same tokens in all.

    Lengths differ, which costs padding and calls.
    """
    n_layers, batch, n_kv, context, d_head = cache.k.shape
    size = math.gcd(context, BLOCK)
    k, v = (x.view(n_layers, -1, size, n_kv, d_head) for x in (cache.k, cache.v))
    order = torch.randperm(k.shape[1], generator=torch.Generator().manual_seed(0)).tolist()
    rows: list[Row] = []
    for length in _spread(context, batch):
        needed = -(-length // size)
        rows.append(([order[i % len(order)] for i in range(needed)], length - 1, 1))
        order = order[needed % len(order) :] + order[: needed % len(order)]
    return k, v, rows


def _attend_paged(q: Tensor, k: Tensor, v: Tensor, rows: list[Row]) -> None:
    ragged = RaggedFlash(rows, k) if RaggedFlash.fits(k) else RaggedSdpa(rows, k)
    packed = q[:, :, 0]  # [N, n_q, d_h]
    new = packed[:, : k.shape[3]]  # what the new keys are does not matter here: they are in the blocks
    for k_blocks, v_blocks in zip(k, v, strict=True):
        ragged(packed, new, new, k_blocks, v_blocks)


def _prefill_attention(loaded: LoadedModel, device: torch.device, repeats: int) -> Curve:
    config, dtype = loaded.model.config, next(loaded.model.parameters()).dtype
    sizes = tuple(n for n in PREFILLS if n <= config.context)
    seconds = []
    for tokens in sizes:
        q = torch.randn(1, config.n_heads, tokens, config.d_head, device=device).to(dtype)
        k, v = (torch.randn(1, config.n_kv_heads, tokens, config.d_head, device=device).to(dtype) for _ in range(2))
        seconds.append(_seconds(partial(attend, q, k, v), device, repeats + 2))
    return Curve(sizes, tuple(seconds))


def _rest(loaded: LoadedModel, device: torch.device, repeats: int, parts: OperatorCurves) -> tuple[Curve, Curve]:
    """A layer as it runs among others, less its products and its attention as they ran alone.

    Against rows of one token each, as in a decode step, and against the tokens of one prompt.
    """
    decode = [(n, 1, SHORT) for n in REST_BATCHES]
    prefill = [(1, n, n) for n in REST_PREFILLS if n <= loaded.model.config.context]
    curves = []
    for shapes in (decode, prefill):
        seconds = []
        for batch, new, context in shapes:
            whole = _layer(loaded, device, 1 if new > MANY else repeats, batch, new, context)
            seconds.append(_remainder(parts, whole, batch * new, parts.attention(batch, new, context)))
        curves.append(Curve(tuple(batch * new for batch, new, _ in shapes), tuple(seconds)))
    return curves[0], curves[1]


def _remainder(parts: OperatorCurves, layer: float, rows: int, attention: float) -> float:
    """A layer's seconds less those of its products and attention alone; above 0, whatever the noise."""
    products = sum(curve.at(rows) for name, curve in parts.products.items() if name != "lm_head")
    return max(layer - products - attention, 1e-6)


def _layer(loaded: LoadedModel, device: torch.device, repeats: int, batch: int, new: int, context: int) -> float:
    """Seconds of one layer in a pass through all of them: ``new`` tokens a row after those that fill the context."""
    model, config = loaded.model, loaded.model.config
    dtype = next(model.parameters()).dtype
    blocks = list(model.h if isinstance(model, GPT2) else model.layers)
    cache = ContiguousCache(config, batch, context, device, dtype)
    x = torch.randn(batch, new, config.d_model, device=device).to(dtype)
    positions = torch.arange(context - new, context, device=device).expand(batch, new)
    extra = (model.rope(positions, dtype),) if isinstance(model, Llama) else ()

    def run_layers() -> None:
        cache.length = cache.capacity - new  # the last slots, again and again
        for block in blocks:
            block(x, *extra, cache, None)

    return _seconds(run_layers, device, repeats) / len(blocks)


def _paged_rest(loaded: LoadedModel, parts: OperatorCurves) -> tuple[Curve, Curve]:
    """Steps of the continuous engine, less their products and attention as they ran alone; a layer's share of that.

    Against rows of one token each, of different lengths, and against the tokens of one prompt.
    """
    n_layers, head = loaded.model.config.n_layers, parts.products["lm_head"]
    prompts = [n for n in REST_PREFILLS if n < loaded.model.config.context]
    engine = ContinuousEngine(
        loaded, token_budget=max(prompts[-1], SHORT * REST_BATCHES[-1]), block_size=BLOCK, share_prefixes=False
    )
    notes: list[StepNote] = []
    engine.on_step = notes.append

    def rest(rows: int, ends: int, attention: float, seconds: list[float]) -> float:
        return _remainder(parts, (statistics.median(seconds) - head.at(ends)) / n_layers, rows, attention)

    decode, prefill = [], []
    for n in REST_BATCHES:
        notes.clear()
        lengths = _spread(SHORT, n)
        engine.generate([[0] * length for length in lengths], SamplingParams(max_tokens=STEPS, ignore_eos=True))
        taken = [note.end - note.start for note in notes if not note.prefill_tokens and note.decode_rows == n]
        context = sum(lengths) / n + STEPS / 2
        decode.append(rest(n, n, parts.paged(n, context), taken))
    for n in prompts:
        notes.clear()
        engine.generate([[0] * n], SamplingParams(max_tokens=1, ignore_eos=True))
        prefill.append(rest(n, 1, parts.prefill_attention.at(n), [note.end - note.start for note in notes]))
    return Curve(REST_BATCHES, tuple(decode)), Curve(tuple(prompts), tuple(prefill))


def _spread(mean: int, rows: int) -> list[int]:
    """Lengths from a quarter of the mean to seven quarters, the shortest first: a service's rows differ."""
    return [max(2, round(mean * (0.25 + 1.5 * (row + 0.5) / rows))) for row in range(rows)]
