"""A second model over the same weights, to be changed without touching the first."""

from __future__ import annotations

import copy
from itertools import chain
from typing import TypeVar

from torch import nn

Net = TypeVar("Net", bound=nn.Module)


def twin(model: Net) -> Net:
    """A copy of the modules that shares every parameter and buffer with ``model``: no weight is copied."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)
