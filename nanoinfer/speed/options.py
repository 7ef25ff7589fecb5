"""What a step may use beside the plain model. Every field can be taken away again, and the tokens stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanoinfer.errors import RequestError


@dataclass(frozen=True)
class Speed:
    """How steps are computed. All off is the reference.

    Args:
        kernel: rows of one new token go through one native call (CPU; float32 and bfloat16); prompts do not.
        weights: what that call multiplies in: None for the model's own dtype, ``int8`` for integers that share a
            scale in groups of 32, the head left in bfloat16. Prompts are computed in the model's dtype.
    """

    kernel: bool = False
    weights: Literal["int8"] | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and not self.kernel:
            raise RequestError(f"weights {self.weights!r} are the kernel's: give kernel=True too")
        if self.weights not in (None, "int8"):
            raise RequestError(f"weights must be None or 'int8', got {self.weights!r}")
