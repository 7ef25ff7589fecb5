"""Which optimizations a step uses. Greedy float32 tokens stay the same with each but quantised weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import DeviceError, RequestError, nearest

Quantised = Literal["int8", "int4", "fp8"]


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


def check_dense(config: ModelConfig, what: str) -> None:
    """Raise :class:`DeviceError` for a mixture of experts, where ``what`` needs a step that is alike for all tokens."""
    if config.moe is not None:
        raise DeviceError(f"{what} cannot do a mixture of experts: leave it off; fuse and pack can")
