"""CUDA graphs: the hundreds of kernels of a decode step, launched as one.

A step of one token a row keeps a GPU so short a time that Python and the launches take longer than the work. A
graph is recorded once for each size of step and replayed from then on. Sizes are rounded up, so that there are few.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from nanoinfer.cache.paged import NewTokens, PagedCache
from nanoinfer.errors import DeviceError
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.optimize.options import check_dense
from nanoinfer.optimize.static_step import StaticStep

Work = Callable[[], None]
FEWEST_TOKENS = 64  # of a row, in the smallest graph: below it attention takes no time anyway
WARM_UPS = 3  # as many as in PyTorch's own examples: libraries choose their kernels and take their workspaces


class Recorder(Protocol):
    """Makes work repeatable."""

    def record(self, work: Work) -> Work:
        """What does the work again, over whatever is in the same memory then. The work may be done meanwhile."""


class Eager:
    """No recording: the same function over the same memory, called anew. For machines without CUDA."""

    def record(self, work: Work) -> Work:
        """The work itself."""
        return work


class CudaRecorder:
    """CUDA graphs on one device. They share a pool of memory: no two run at once, and none leaves anything in it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def record(self, work: Work) -> Work:
        """Warm up on a side stream, then capture there. Other threads may go on using the device."""
        with torch.cuda.device(self.device):
            here = torch.cuda.current_stream()
            self.stream.wait_stream(here)
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UPS):
                    work()
            here.wait_stream(self.stream)
            graph = torch.cuda.CUDAGraph()
            alive = next(iter(self._graphs), None)  # a pool dies with the last of its graphs
            pool = None if alive is None else alive.pool()
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                work()
        self._graphs.add(graph)
        return graph.replay


class DecodeGraphs:
    """The decode steps of one model, each size recorded when it first comes.

    A graph knows addresses and nothing else. When the cache or the weights are found elsewhere, all are recorded anew.

    Args:
        model: it must stay alive; its parameters and buffers may move, but not be replaced.
        most_rows: in a step at most.
        scratch: a block of the cache that no sequence ever holds, for rows of padding.
        recorder: None for CUDA graphs.

    Raises:
        DeviceError: CUDA graphs for a model that is not on a CUDA device, or that has experts.
    """

    def __init__(self, model: GPT2 | Llama, most_rows: int, scratch: int, recorder: Recorder | None = None) -> None:
        check_dense(model.config, "a CUDA graph")
        self._tensors = [*chain(model.parameters(), model.buffers())]
        device = self._tensors[0].device
        if recorder is None and device.type != "cuda":
            raise DeviceError(f"CUDA graphs need a CUDA device, and the model is on {device}: do without graphs")
        self.model, self.most_rows, self.scratch = model, most_rows, scratch
        self.recorder = CudaRecorder(device) if recorder is None else recorder
        # Outside of the graphs' pool: the next replay may overwrite whatever is in there.
        self._logits = torch.empty(most_rows, model.config.vocab_size, device=device)
        self._recorded: dict[tuple[int, int], tuple[StaticStep, Work]] = {}
        self._addresses: list[int] = []

    @torch.inference_mode()
    def __call__(self, cache: PagedCache, rows: Sequence[NewTokens], ids: Sequence[int]) -> Tensor:
        """Run one step: write each row's newest token into its blocks, and return its logits ``[R, V]`` fp32.

        Args:
            cache: on the model's device; blocks are taken and ready.
            rows: of one new token each, ``most_rows`` at most.
            ids: their tokens.
        """
        assert 0 < len(rows) <= self.most_rows
        addresses = [tensor.data_ptr() for tensor in (cache.k, cache.v, *self._tensors)]
        if addresses != self._addresses:
            self._recorded.clear()
            self._addresses = addresses
        size = self._size(cache, rows)
        step, replay = self._recorded.get(size) or (StaticStep(cache, *size, self.scratch), None)
        step.fill(rows, ids)
        if replay is None:  # filled by now: recording computes too, and writes what the replay will write again
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
        print(
            f"nanoinfer: recording a decode step of {rows}, up to {step.n_visible} tokens each",
            file=sys.stderr,
            flush=True,
        )
        return self.recorder.record(work)


def _power(n: int) -> int:
    """The first power of two that is not smaller."""
    return 1 << (n - 1).bit_length()
