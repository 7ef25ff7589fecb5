"""One idea on top of the other: a model as :class:`~nanoinfer.optimize.options.Speed` wants it."""

from __future__ import annotations

from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.optimize.compiled import compile_layers
from nanoinfer.optimize.fuse import fuse
from nanoinfer.optimize.options import Speed
from nanoinfer.optimize.pack import pack
from nanoinfer.optimize.quantise import quantise
from nanoinfer.optimize.twin import twin


def quicken(model: GPT2 | Llama, speed: Speed) -> GPT2 | Llama:
    """The model, or where something in it has to be different, a twin that shares what it does not replace.

    Raises:
        DeviceError: an idea that this device or dtype does not have.
    """
    weights = None if speed.kernel else speed.weights  # the kernel's are its own
    if not (speed.fuse or speed.pack or speed.compiled or weights):
        return model
    quick = twin(model)
    if speed.fuse:
        fuse(quick)
    if weights is not None:
        quantise(quick, weights)
    if speed.pack:
        pack(quick)
    if speed.compiled:
        compile_layers(quick)
    return quick
