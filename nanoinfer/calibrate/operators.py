"""Time a model's operators one by one, to predict steps of any batch, context and phase.

The real code is timed: each product, through all layers in order so that weights come from memory; attention over
caches of several sizes; a pass through the layers over a short context; steps of the continuous engine. What a pass or
a step takes beyond its parts is norms, rotation, activation, cache writes and Python.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoinfer import cache, engines, models
from nanoinfer.cache.contiguous import ContiguousCache
from nanoinfer.cache.ragged import Row, ragged_attention
from nanoinfer.calibrate.machine import KEEP_S, MAX_WAITED, queued
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
from nanoinfer.theory.arithmetic import head_matrix, layer_matrices
from nanoinfer.theory.curves import Curve, OperatorCurves
from nanoinfer.theory.roofline import Machine

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
MANY = 128  # a pass of more rows is long and varies little: it runs once, without warm-up
BATCHES = (1, 4, 16, 32)
BLOCK = 8  # tokens a block of the paged cache
CONTEXTS = (16, 256, 2048)
PREFILLS = (16, 64, 256, 1024)
SHORT = 16  # the context at which whole layers are timed
STEPS = 8  # of the engine, after a prompt
#: How many times as long a pass may take, or the kept timings, before these are taken again.
STILL = 1.2
#: Enough layers that keys and values come from memory and not from the processor's cache.
ATTENTION_BYTES = 2**28
#: Rows, a whole layer's seconds, and those of its attention.
Point = tuple[int, float, float]
#: What :func:`~nanoinfer.theory.arithmetic.layer_matrices` calls GPT-2's products.
GPT2_NAMES = {"attn.c_attn": "qkv", "attn.c_proj": "o_proj", "mlp.c_fc": "up_proj", "mlp.c_proj": "down_proj"}


def this_machine(loaded: LoadedModel, fresh: bool = False) -> Machine:
    """The machine at hand, as this model meets it: for :mod:`nanoinfer.theory.roofline`.

    Timings are kept in the user's cache for a day, unless other work slowed them down. They are taken again with
    ``fresh``, and where a pass through the layers now takes another time than they say.
    Peak and bandwidth are those of the fastest product: what this model's own operators reach, below what the
    machine could do.
    """
    config, weight = loaded.model.config, next(loaded.model.parameters())
    dtype, waited, is_new = str(weight.dtype).removeprefix("torch."), 0.0, False

    def measure() -> OperatorCurves:
        nonlocal waited, is_new
        is_new = True
        curves, share = queued(lambda: measure_operators(loaded))
        waited = share or 0.0
        return curves

    code = (Path(package.__path__[0]) for package in (cache, engines, models))
    path = cache_file("operators", [loaded.name, dtype, weight.device, *machine_key()], code)
    take = partial(cached, path, OperatorCurves, measure, max_age_s=KEEP_S, keep=lambda _: waited <= MAX_WAITED)
    curves = take(fresh=fresh)
    if not is_new and not _hold(curves, loaded):
        curves = take(fresh=True)
    matrices = [m for m in (*layer_matrices(config, 0), head_matrix(config)) if m.name in curves.products]
    sizes = [(m.rows * m.columns, curves.products[m.name]) for m in matrices]
    peak = max(2 * n * rows / curve.at(rows) for n, curve in sizes for rows in ROWS)
    bandwidth = max(n * weight.itemsize / curve.at(1) for n, curve in sizes)
    return Machine("this machine", dtype, peak, bandwidth, curves=curves)


def _hold(curves: OperatorCurves, loaded: LoadedModel) -> bool:
    """Whether a decode pass and a short prefill through the layers take about as long now as when they were timed."""
    with torch.inference_mode():
        timings = _Timings(loaded, repeats=3)
        prompt = timings.prompts[:2][-1]
        for n, context, rest in ((1, SHORT, curves.rest), (prompt, prompt, curves.rest_prefill)):
            products = sum(curve.at(n) for name, curve in curves.products.items() if name != "lm_head")
            then = products + curves.attention(1, n, context) + rest.at(n)
            if not 1 / STILL < timings.layer(1, n, context) / then < STILL:
                return False
    return True


def measure_operators(loaded: LoadedModel, repeats: int = 3) -> OperatorCurves:
    """Time the operators of a loaded model; some ten seconds for a small one on a laptop.

    The median counts of ``repeats`` timed calls a point; one more warms up.
    """
    with torch.inference_mode():
        return _Timings(loaded, repeats).curves()


class _Timings:
    """The timings of one model where it lies."""

    def __init__(self, loaded: LoadedModel, repeats: int) -> None:
        self.loaded, self.model, self.config, self.repeats = loaded, loaded.model, loaded.model.config, repeats
        weight = next(self.model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.prompts = [n for n in PREFILLS if n <= self.config.context]

    def curves(self) -> OperatorCurves:
        """Everything; what is left of a layer, or of an engine's step, once its parts are known comes last."""
        decode, paged = self.decode_attention()
        nothing = Curve((1,), (1.0,))
        parts = OperatorCurves(
            self.products(), decode, paged, self.prefill_attention(), nothing, nothing, nothing, nothing
        )

        def rest(points: Iterable[Point]) -> Curve:
            """A layer less its parts as they ran alone; above 0, whatever the noise."""
            found = {}
            for rows, layer, attention in points:
                products = sum(curve.at(rows) for name, curve in parts.products.items() if name != "lm_head")
                found[rows] = max(layer - products - attention, 1e-6)
            return Curve(tuple(found), tuple(found.values()))

        engine_decode, engine_prefill = self.engine_layers(parts)
        return replace(
            parts,
            rest=rest((n, self.layer(n, 1, SHORT), parts.attention(n, 1, SHORT)) for n in BATCHES),
            rest_prefill=rest((n, self.layer(1, n, n), parts.attention(1, n, n)) for n in self.prompts),
            paged_rest=rest(engine_decode),
            paged_rest_prefill=rest(engine_prefill),
        )

    def seconds(self, fn: Callable[[], object], repeats: int) -> float:
        """The median of the calls after a warm-up: what a step usually meets, not the best case."""
        return statistics.median([timed(fn, self.device)[1] for _ in range(repeats + 1)][1:])

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def products(self) -> dict[str, Curve]:
        """Seconds of each product against rows; every pass goes through all layers, as a step does."""
        model = self.model
        embedding = model.wte if isinstance(model, GPT2) else model.embed_tokens
        head = embedding.weight if model.lm_head is None else model.lm_head.weight
        weights: list[tuple[str, Tensor, Tensor | None]] = []
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear) and path != "lm_head":
                outer, name = path.split(".")[-2:]
                weights.append((GPT2_NAMES.get(f"{outer}.{name}", name), module.weight, module.bias))
        weights.append(("lm_head", head, None))
        medians: dict[str, list[float]] = defaultdict(list)
        for rows in ROWS:
            inputs = {n: self.random(rows, n) for n in {weight.shape[1] for _, weight, _ in weights}}
            n_passes = 1 if rows > MANY else self.repeats + 1
            times: dict[str, list[list[float]]] = {name: [[] for _ in range(n_passes)] for name, _, _ in weights}
            for i in range(n_passes):
                for name, weight, bias in weights:
                    product = partial(F.linear, inputs[weight.shape[1]], weight, bias)
                    times[name][i].append(timed(product, self.device)[1])
            for name, passes in times.items():
                medians[name].append(statistics.median(map(statistics.median, passes[1:] or passes)))
        if "qkv" in medians:  # GPT-2 computes q, k and v in one product
            thirds = [seconds / 3 for seconds in medians.pop("qkv")]
            medians |= {"q_proj": thirds, "k_proj": thirds, "v_proj": thirds}
        return {name: Curve(ROWS, tuple(seconds)) for name, seconds in medians.items()}

    def decode_attention(self) -> tuple[dict[int, Curve], dict[int, Curve]]:
        """Over a contiguous cache, and over the same memory taken as the blocks of a paged one."""
        contexts = tuple(sorted({min(n, self.config.context) for n in CONTEXTS}))
        contiguous, paged = {}, {}
        for batch in BATCHES:
            seconds, paged_seconds = [], []
            for context in contexts:
                q, k, v = self.random(batch, self.config.n_heads, 1, self.config.d_head), *self.cached(batch, context)
                blocks = _blocks(k, v)
                seconds.append(self.seconds(partial(_attend_layers, q, k, v), self.repeats) / len(k))
                paged_seconds.append(self.seconds(partial(_attend_paged, q, *blocks), self.repeats) / len(k))
            contiguous[batch], paged[batch] = Curve(contexts, tuple(seconds)), Curve(contexts, tuple(paged_seconds))
        return contiguous, paged

    def cached(self, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """``[L, B, n_kv, S, d_h]`` each, of enough layers to outgrow the processor's cache, two at least."""
        shape = (batch, self.config.n_kv_heads, context, self.config.d_head)
        layer_bytes = 2 * math.prod(shape) * self.dtype.itemsize
        n_layers = max(2, min(self.config.n_layers, ATTENTION_BYTES // layer_bytes))
        return self.random(n_layers, *shape), self.random(n_layers, *shape)

    def prefill_attention(self) -> Curve:
        """Of one prompt, over keys and values that were computed just now."""
        config, seconds = self.config, []
        for n in self.prompts:
            q, k, v = (self.random(1, heads, n, config.d_head) for heads in (config.n_heads, *[config.n_kv_heads] * 2))
            seconds.append(self.seconds(partial(attend, q, k, v), self.repeats + 2))
        return Curve(tuple(self.prompts), tuple(seconds))

    def layer(self, batch: int, new: int, context: int) -> float:
        """Seconds of one layer in a pass through all of them: ``new`` tokens a row at the end of the context."""
        model = self.model
        blocks = list(model.h if isinstance(model, GPT2) else model.layers)
        cache = ContiguousCache(self.config, batch, context, self.device, self.dtype)
        x = self.random(batch, new, self.config.d_model)
        positions = torch.arange(context - new, context, device=self.device).expand(batch, new)
        extra = (model.rope(positions, self.dtype),) if isinstance(model, Llama) else ()

        def run_layers() -> None:
            cache.length = cache.capacity - new  # the last slots, again and again
            for block in blocks:
                block(x, *extra, cache, None)

        return self.seconds(run_layers, 1 if new > MANY else self.repeats) / len(blocks)

    def engine_layers(self, parts: OperatorCurves) -> tuple[list[Point], list[Point]]:
        """A layer's share of the continuous engine's steps, without their head, and its attention as it ran alone.

        Against rows of one token each, of different lengths, and against the tokens of one prompt.
        """
        prompts = [n for n in self.prompts if n < self.config.context]
        budget = max(prompts[-1], SHORT * BATCHES[-1])
        engine = ContinuousEngine(self.loaded, token_budget=budget, block_size=BLOCK, share_prefixes=False)
        notes: list[StepNote] = []
        engine.on_step = notes.append

        def run(lengths: Sequence[int], steps: int) -> list[StepNote]:
            notes.clear()
            engine.generate([[0] * n for n in lengths], SamplingParams(max_tokens=steps, ignore_eos=True))
            return list(notes)

        def share(taken: Iterable[StepNote], ends: int) -> float:
            step = statistics.median(note.end - note.start for note in taken)
            return (step - parts.products["lm_head"].at(ends)) / self.config.n_layers

        decode = []
        for n in BATCHES:
            lengths = _spread(SHORT, n)
            taken = [note for note in run(lengths, STEPS) if not note.prefill_tokens and note.decode_rows == n]
            decode.append((n, share(taken, n), parts.paged(n, sum(lengths) / n + STEPS / 2)))
        return decode, [(n, share(run([n], 1), 1), parts.prefill_attention.at(n)) for n in prompts]


def _blocks(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Row]]:
    """Contiguous keys and values as blocks, shuffled among the rows, and rows of the same tokens in all.

    Lengths differ, which costs padding and calls.
    """
    n_layers, batch, n_kv, context, d_head = k.shape
    size = math.gcd(context, BLOCK)
    k, v = (x.view(n_layers, -1, size, n_kv, d_head) for x in (k, v))
    order = torch.randperm(k.shape[1], generator=torch.Generator().manual_seed(0)).tolist()
    rows: list[Row] = []
    for length in _spread(context, batch):
        needed = -(-length // size)
        rows.append(([order[i % len(order)] for i in range(needed)], length - 1, 1))
        order = order[needed % len(order) :] + order[: needed % len(order)]
    return k, v, rows


def _attend_layers(q: Tensor, k: Tensor, v: Tensor) -> None:
    for layer_k, layer_v in zip(k, v, strict=True):
        attend(q, layer_k, layer_v)


def _attend_paged(q: Tensor, k: Tensor, v: Tensor, rows: list[Row]) -> None:
    """One new token a row over the blocks of each layer."""
    ragged = ragged_attention(rows, k)
    packed = q[:, :, 0]  # [N, n_q, d_h]
    new = packed[:, : k.shape[3]]  # what the new keys are does not matter here: they are in the blocks
    for k_blocks, v_blocks in zip(k, v, strict=True):
        ragged(packed, new, new, k_blocks, v_blocks)


def _spread(mean: int, rows: int) -> list[int]:
    """Lengths from a quarter of the mean to seven quarters, the shortest first: a service's rows differ."""
    return [max(2, round(mean * (0.25 + 1.5 * (row + 0.5) / rows))) for row in range(rows)]
