"""Few bits where they count: scales chosen for the inputs that a weight really meets.

What a product loses to rounding is the sum over input channels of (error of the weight * input). Taking channels
as independent, its mean square is ``sum_k (w_k - ŵ_k)^2 * mean(x_k^2)``: an error costs as much as its channel has
energy. A few channels have most of it, so a grid that fits them better at the expense of all others is the better grid.
To measure the inputs on a text and to search how far a span is cut is from AWQ (Lin et al. 2024, "AWQ:
Activation-aware Weight Quantization", https://arxiv.org/abs/2306.00978). In int4 the search here goes on from each cut
by turns of nearest codes and least squares (Lloyd 1982, "Least squares quantization in PCM"); no channel is rescaled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from nanoinfer.errors import RequestError
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.optimize.formats import (
    TINY,
    Int4Groups,
    from_int4_groups,
    from_int8_rows,
    in_groups,
    int4_codes,
    int8_codes,
    to_int4_groups,
    to_int8_rows,
)

#: The mean square of each input channel ``[K]``, by the name of the ``nn.Linear`` it goes into.
Calibration = Mapping[str, Tensor]

WINDOW = 512  # tokens that see each other
SCALES = tuple(1 - i / 50 for i in range(1, 11))  # of int8: shares of a row's scale that are tried
SPANS = (1.0, 0.8)  # of int4: shares of a group's span from which the search sets out,
TURNS = 4  # and turns that it takes


def layer_linears(model: GPT2 | Llama) -> Iterator[tuple[str, nn.Linear]]:
    """Every ``nn.Linear`` of the layers, and its name in the model: not the head."""
    layers = "h" if isinstance(model, GPT2) else "layers"
    for name, module in model.get_submodule(layers).named_modules(prefix=layers):
        if isinstance(module, nn.Linear):
            yield name, module


@torch.no_grad()
def channel_energy(model: GPT2 | Llama, ids: Sequence[int]) -> dict[str, Tensor]:
    """What goes into each product of the layers while the model reads a text.

    Args:
        model: the very twin that is to be quantised, with the names that its modules have by then.
        ids: the text, read in windows of ``WINDOW`` tokens; some hundreds are enough.

    Returns:
        By name the mean over tokens of each channel's square, ``[K]`` float32.

    Raises:
        RequestError: no ids.
    """
    if not ids:
        raise RequestError("calibration needs a text: give at least one token id")
    sums: dict[str, Tensor] = {}

    def add(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        del module
        sums[name] = sums.get(name, 0) + args[0].float().square().flatten(0, -2).sum(0)

    hooks = [module.register_forward_pre_hook(partial(add, name)) for name, module in layer_linears(model)]
    device, width = next(model.parameters()).device, min(WINDOW, model.config.context)
    try:
        for start in range(0, len(ids), width):
            window = torch.tensor([ids[start : start + width]], device=device)
            model.hidden(window, torch.arange(window.shape[1], device=device)[None])
    finally:
        for hook in hooks:
            hook.remove()
    return {name: total / len(ids) for name, total in sums.items()}


def fit_int8_rows(weight: Tensor, energy: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """As :func:`nanoinfer.optimize.formats.to_int8_rows`, with the least error that the search finds.

    Args:
        weight: ``[N, K]``.
        energy: ``[K]``, of the inputs' channels.
        dtype: of the scales.
    """
    x, e = weight.float(), _no_channel_silent(energy)
    best, scales = to_int8_rows(weight, dtype)
    full, least = scales.float(), ((from_int8_rows(best, scales) - x).square() * e).sum(1)
    for share in SCALES:
        whole, tried = int8_codes(x, (share * full).to(dtype))
        found = ((from_int8_rows(whole, tried) - x).square() * e).sum(1)
        better = found < least
        least, scales = torch.where(better, found, least), torch.where(better, tried, scales)
        best = torch.where(better[:, None], whole, best)
    return best, scales


def fit_int4_groups(weight: Tensor, energy: Tensor, group: int) -> Int4Groups:
    """As :func:`nanoinfer.optimize.formats.to_int4_groups`, with the least error that the search finds.

    Args:
        weight: ``[N, K]``.
        energy: ``[K]``, of the inputs' channels.
        group: numbers that share a step and a middle.

    Raises:
        RequestError: K is no multiple of the group.
    """
    x = in_groups(weight, group)  # [N, G, group]
    e = _no_channel_silent(energy).view(1, -1, group)
    share = e / e.sum(-1, keepdim=True)
    low, high, mean = x.amin(-1), x.amax(-1), (share * x).sum(-1)

    def error(fit: Int4Groups) -> Tensor:
        return ((from_int4_groups(*fit).view_as(x) - x).square() * e).sum(-1)  # [N, G]

    best = to_int4_groups(weight, group)
    least = error(best)
    for span in SPANS:
        step = span * (high - low) / 15
        middle = span * low + 8 * step
        for _ in range(TURNS):
            codes = int4_codes(x, step, middle).codes.view_as(x).float() - 8
            center = (share * codes).sum(-1)
            off = share * (codes - center[..., None])
            step = (off * x).sum(-1) / (off * codes).sum(-1).clamp(min=TINY)
            middle = mean - center * step
        fit = int4_codes(x, step, middle)
        found = error(fit)
        better = found < least
        least = torch.where(better, found, least)
        wide = better.repeat_interleave(group, 1)
        best = Int4Groups(
            torch.where(wide, fit.codes, best.codes),
            torch.where(better, fit.steps, best.steps),
            torch.where(better, fit.middles, best.middles),
        )
    return best


def _no_channel_silent(energy: Tensor) -> Tensor:
    """The energies, none of them nothing: a channel that was silent in this text may speak in the next."""
    return (energy.float() + 0.01 * energy.float().mean()).clamp(min=TINY)
