"""CUDA graphs: the hundreds of kernels of a decode step in one launch.

A graph repeats kernels with the arguments they were recorded with, so what differs from step to step is read from one
tensor. Rows and blocks are padded to powers of two, and each size is recorded once.
"""

from __future__ import annotations

import math
import weakref
from array import array
from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from nanoinfer.cache.paged import NewTokens, PagedCache
from nanoinfer.cache.ragged import RaggedFlash, flash
from nanoinfer.errors import DeviceError
from nanoinfer.log import say
from nanoinfer.models.attention import attend
from nanoinfer.models.model import Decoder
from nanoinfer.optimize.linear import check_dense

Work = Callable[[], None]
#: Gives a function that repeats the work over the current contents of the same memory; may do the work meanwhile.
Recorder = Callable[[Work], Work]
FEWEST_TOKENS = 64  # of a row, in the smallest graph: attention over fewer takes no measurable time
WARM_UPS = 3  # as in PyTorch's examples: libraries choose kernels and allocate workspaces


class CudaRecorder:
    """A :data:`Recorder` of CUDA graphs on one device; they share a memory pool: no two run at once."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def __call__(self, work: Work) -> Work:
        """Warm up on a side stream, then capture there. Other threads may use the device meanwhile."""
        with torch.cuda.device(self.device):
            here = torch.cuda.current_stream()
            self.stream.wait_stream(here)
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UPS):
                    work()
            here.wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            alive = next(iter(self._graphs), None)  # the pool is freed with the last of its graphs
            pool = None if alive is None else alive.pool()
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                work()
        self._graphs.add(graph)
        return graph.replay


class StaticStep:
    """One new token of each row, with shapes and addresses that never change; a ``KVCache`` of ``[1, R]`` tokens.

    Blocks are gathered before attention: PyTorch's flash attention reads blocks in place only if they have 256 tokens.
    Missing rows, and blocks of a row, are padding; padding rows read and write ``scratch``, which no sequence holds.
    """

    def __init__(self, cache: PagedCache, n_rows: int, n_blocks: int, scratch: int) -> None:
        self.cache, self.n_rows, self.n_blocks, self.scratch = cache, n_rows, n_blocks, scratch
        self.n_visible = n_blocks * cache.block_size  # S
        device, dtype = cache.k.device, cache.k.dtype
        self.inputs = torch.zeros(n_rows * (3 + n_blocks), dtype=torch.int64, device=device)
        ids, positions, self.slots, self.blocks = torch.split(self.inputs, [n_rows, n_rows, n_rows, n_rows * n_blocks])
        self.ids, self.positions = ids[None], positions[None]  # [1, R]
        # Derived from the positions on the device, at the beginning of every step.
        self.lengths = torch.ones(n_rows, dtype=torch.int32, device=device)
        self.mask = torch.zeros(n_rows, 1, 1, self.n_visible, dtype=dtype, device=device)
        # Constants.
        self.indices = torch.arange(self.n_visible, device=device)
        ends = torch.arange(n_rows + 1, dtype=torch.int32, device=device)
        self.spans = (ends, ends * self.n_visible, 1, self.n_visible)
        self.is_flash = RaggedFlash.fits(cache.k)

    def fill(self, rows: Sequence[NewTokens], ids: Sequence[int]) -> None:
        """Copy a step's numbers to where the recorded kernels read them: at most R rows of one new token each."""
        assert 0 < len(rows) == len(ids) <= self.n_rows and all(row.n == 1 for row in rows)
        size, padding = self.cache.block_size, self.n_rows - len(rows)
        zeros = [0] * padding
        positions = [row.table.length for row in rows]
        slots = [row.table.blocks[at // size] * size + at % size for row, at in zip(rows, positions, strict=True)]
        numbers = array("q", [*ids, *zeros, *positions, *zeros, *slots, *[self.scratch * size] * padding])
        for row in rows:
            # Padded with the row's own first block: a mask does not hide NaN, which other blocks may hold.
            blocks = row.table.blocks[: -(-row.end // size)]
            numbers.fromlist(blocks + blocks[:1] * (self.n_blocks - len(blocks)))
        numbers.fromlist([self.scratch] * (padding * self.n_blocks))
        source = torch.frombuffer(numbers, dtype=torch.int64)
        # Newly pinned memory for each copy: PyTorch reuses it once the copy is done, and the host does not wait.
        self.inputs.copy_(source.pin_memory() if self.inputs.is_cuda else source, non_blocking=True)

    def begin(self) -> None:
        """The step's first work on the device, recorded before the model's."""
        self.lengths.copy_(self.positions[0] + 1)
        if not self.is_flash:
            hidden = self.indices >= self.lengths[:, None]
            self.mask.zero_().masked_fill_(hidden[:, None, None], -math.inf)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is None, "the rows of a decode step need no mask"
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # [R, n, d_h]
        n_kv, d_head = k.shape[1:]
        gathered = []
        for store, new in ((self.cache.k[layer], k), (self.cache.v[layer], v)):
            store.flatten(0, 1).index_copy_(0, self.slots, new)
            gathered.append(store.index_select(0, self.blocks).view(self.n_rows, self.n_visible, n_kv, d_head))
        if self.is_flash:  # not causal, since a row's only query sees all of its text
            keys, values = (x.flatten(0, 1) for x in gathered)
            out = flash(q, keys, values, self.spans, seqused_k=self.lengths)
        else:
            keys, values = (x.transpose(1, 2) for x in gathered)
            out = attend(q[:, :, None], keys, values, self.mask)
        return out.reshape(1, self.n_rows, -1)

    def advance(self, n_tokens: int) -> None:
        """Nothing to do: the tables know their lengths."""


class DecodeGraphs:
    """The decode steps of one model, each size recorded on its first use.

    If the cache or the weights have moved, all are recorded again: a graph holds their addresses. The model must stay
    alive, and its parameters and buffers not be replaced; ``scratch`` is a block that no sequence ever holds. Raises
    :class:`DeviceError` for a model that has experts, or, without a ``recorder``, that is not on a CUDA device.
    """

    def __init__(self, model: Decoder, most_rows: int, scratch: int, recorder: Recorder | None = None) -> None:
        check_dense(model.config, "a CUDA graph")
        self._tensors = [*chain(model.parameters(), model.buffers())]
        device = self._tensors[0].device
        if recorder is None and device.type != "cuda":
            raise DeviceError(f"CUDA graphs need a CUDA device, and the model is on {device}: do without graphs")
        self.model, self.most_rows, self.scratch = model, most_rows, scratch
        self.recorder: Recorder = CudaRecorder(device) if recorder is None else recorder
        # Not in the graphs' pool, which the next replay may overwrite.
        self._logits = torch.empty(most_rows, model.config.vocab_size, device=device)
        self._recorded: dict[tuple[int, int], tuple[StaticStep, Work]] = {}
        self._addresses: list[int] = []

    @torch.inference_mode()
    def __call__(self, cache: PagedCache, rows: Sequence[NewTokens], ids: Sequence[int]) -> Tensor:
        """Run one step: write each row's one new token into its prepared blocks; return its logits ``[R, V]`` fp32."""
        assert 0 < len(rows) <= self.most_rows
        addresses = [tensor.data_ptr() for tensor in (cache.k, cache.v, *self._tensors)]
        if addresses != self._addresses:
            self._recorded.clear()
            self._addresses = addresses
        size = self._size(cache, rows)
        step, replay = self._recorded.get(size) or (StaticStep(cache, *size, self.scratch), None)
        step.fill(rows, ids)
        if replay is None:  # after fill: recording computes too, and writes what the replay will write again
            replay = self._record(step)
            self._recorded[size] = step, replay
        replay()
        return self._logits[: len(rows)].clone()

    def _size(self, cache: PagedCache, rows: Sequence[NewTokens]) -> tuple[int, int]:
        """Rows and blocks of a row that the step is padded to."""
        blocks, most_blocks, fewest = (
            -(-tokens // cache.block_size)
            for tokens in (max(row.end for row in rows), self.model.config.context, FEWEST_TOKENS)
        )
        assert blocks <= most_blocks
        return min(_power(len(rows)), self.most_rows), min(_power(max(blocks, fewest)), most_blocks)

    def _record(self, step: StaticStep) -> Work:
        model, logits = self.model, self._logits[: step.n_rows]

        def work() -> None:
            step.begin()
            logits.copy_(model.head(model.hidden(step.ids, step.positions, step)[0]))

        rows = f"{step.n_rows} row{'s' if step.n_rows > 1 else ''}"
        say(f"nanoinfer: recording a decode step of {rows}, up to {step.n_visible} tokens each")
        return self.recorder(work)


def _power(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()
