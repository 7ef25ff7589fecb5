"""Apply :class:`~nanoinfer.optimize.options.Optimizations` to a model, without touching the model that was loaded."""

from __future__ import annotations

import copy
from itertools import chain
from typing import TypeVar

from torch import nn

from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.optimize.compile import compile_layers
from nanoinfer.optimize.linear import fuse, pack
from nanoinfer.optimize.options import Optimizations
from nanoinfer.optimize.quantise import quantise

Net = TypeVar("Net", bound=nn.Module)


def share_weights(model: Net) -> Net:
    """A second set of modules, to be changed in place, over the parameters and buffers of ``model``: none is copied."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


def apply_optimizations(model: GPT2 | Llama, speed: Optimizations) -> GPT2 | Llama:
    """The model itself if no module has to change, else a copy that shares every weight that stays as it is.

    Raises :class:`DeviceError` for an optimization that this device, dtype or family does not have.
    """
    weights = None if speed.kernel else speed.weights  # the kernel packs its own
    if not (speed.fuse or speed.pack or speed.compiled or weights):
        return model
    model = share_weights(model)
    if speed.fuse:
        fuse(model)
    if weights is not None:
        quantise(model, weights)
    if speed.pack:
        pack(model)
    if speed.compiled:
        compile_layers(model)
    return model
