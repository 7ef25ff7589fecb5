"""Which optimizations a step uses, and those of them that replace a model's modules, applied.

Greedy float32 tokens stay the same with each but quantised weights.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import get_args

from nanoinfer.errors import RequestError, nearest
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.optimize.compile import compile_layers
from nanoinfer.optimize.linear import fuse, pack, share_weights
from nanoinfer.optimize.quantise import Quantised, quantise


@dataclass(frozen=True)
class Optimizations:
    """How steps are computed; all off is the reference. RequestError: a combination that does not exist."""

    kernel: bool = False  # rows of one new token go through one native call (CPU; float32, bfloat16); prompts do not
    #: What layers multiply in, the head excepted; None for the model's dtype. The kernel has int8, for one-token rows.
    weights: Quantised | None = None
    fuse: bool = False  # one product for queries, keys and values, one for gate and up
    pack: bool = False  # weights in the layout that oneDNN's products want (CPU; float32 and bfloat16)
    compiled: bool = False  # layers go through torch.compile, once for all of them and for any number of tokens
    graphs: bool = False  # decode steps are recorded once for each size and replayed (CUDA)

    def __post_init__(self) -> None:
        if self.weights is not None and self.weights not in get_args(Quantised):
            raise RequestError(f"weights must be None, 'int8', 'int4' or 'fp8', got {self.weights!r}")
        if self.kernel and self.weights not in (None, "int8"):
            raise RequestError(f"the kernel multiplies in the model's dtype or in int8, not in {self.weights}")
        if self.kernel and self.graphs:
            raise RequestError("kernel is for CPUs and graphs for GPUs: give one of them")

    @classmethod
    def parse(cls, text: str) -> Optimizations:
        """Read the option ``--speed``: names separated by commas (``kernel,int8``), or ``plain`` for none of them."""
        switches = [field.name for field in fields(cls) if field.name != "weights"]
        known = [*switches, *get_args(Quantised), "plain"]
        words = [word.strip() for word in text.split(",") if word.strip()]
        for word in words:
            if word not in known:
                raise RequestError(f"unknown speed '{word}'; {nearest(word, known)}")
        if "plain" in words and len(words) > 1:
            raise RequestError(f"plain means no optimization, and {text} has others: give one or the other")
        weights = [word for word in words if word in get_args(Quantised)]
        if len(set(weights)) > 1:
            raise RequestError(f"weights can be of one kind: give {' or '.join(weights)}")
        on = {name: name in words for name in switches}
        return cls(weights=weights[0] if weights else None, **on)  # type: ignore[arg-type]


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
