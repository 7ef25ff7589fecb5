"""The memory of a paged cache: zeros to begin with, and again in blocks that are begun."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor


def zeros(shape: Sequence[int], device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Zeros; on Linux's CPUs in pages of 2 MiB where the system gives them.

    A step reads a little of every layer, all over the cache. In pages of 4 KiB each piece has its own entry in the
    processor's table of pages, and the first touch of each stops the step.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE") or not nbytes:
        return torch.zeros(shape, device=device, dtype=dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)  # holds on to the memory


def clear(store: Tensor, blocks: Sequence[int]) -> None:
    """Put zeros into some blocks of every layer of ``store``, ``[L, n_blocks, block_size, n_kv, d_h]``."""
    if store.device.type == "cpu":
        # By NumPy, in this thread: PyTorch wakes its team for it, which then spins on a core that the next step needs.
        store.flatten(2).view(torch.uint8).numpy()[:, list(blocks)] = 0
    else:
        store.index_fill_(1, torch.tensor(blocks, device=store.device), 0.0)
