"""Continuous batching: who runs is decided anew at every step.

The scheduler says which tokens of which sequences come next; the paged cache holds what they have; one
forward pass computes them all, packed in a row; those that have reached their end get a token. That is
a step, and all there is to it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import psutil
import torch
from torch import Tensor

from nanoinfer.cache.blocks import BlockPool
from nanoinfer.cache.paged import NewTokens, PagedCache, PagedStep
from nanoinfer.engines import scheduler
from nanoinfer.engines.async_engine import Front, Stream
from nanoinfer.engines.choose import choose, not_finite
from nanoinfer.engines.engine import Engine, Prompt
from nanoinfer.engines.request import Deliver, Event, Request, by_prompt, checked
from nanoinfer.engines.scheduler import Chunk, Scheduler
from nanoinfer.errors import RequestError
from nanoinfer.measure.clock import now
from nanoinfer.measure.stalls import StepNote
from nanoinfer.models.registry import LoadedModel
from nanoinfer.optimize.apply import apply_optimizations
from nanoinfer.optimize.cpu_kernel import DecodeKernel
from nanoinfer.optimize.cuda_graphs import DecodeGraphs
from nanoinfer.optimize.options import Optimizations
from nanoinfer.sampling.params import SamplingParams

PLAIN = Optimizations()


class ContinuousEngine(Engine):
    """Iteration-level scheduling over a paged cache.

    Args:
        loaded: the model.
        max_running: sequences in a step at most.
        token_budget: tokens in a step at most, prompts in chunks among them; it bounds how long a step can take.
        block_size: tokens a block of the cache.
        cache_tokens: tokens the cache holds. None: what 1 GiB holds on a CPU, half of the free memory on a
            GPU; never more than a quarter of a CPU's free memory nor than ``max_running`` full contexts.
        share_prefixes: texts that begin alike share the blocks of their beginning, from call to call.
        speed: what steps may use beside the plain model.

    Raises:
        RequestError: sizes that make no engine.
        DeviceError: a speed that this machine or dtype does not have.
    """

    name = "continuous"

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_running: int = 32,
        token_budget: int = 256,
        block_size: int = 8,
        cache_tokens: int | None = None,
        share_prefixes: bool = True,
        speed: Optimizations = PLAIN,
    ) -> None:
        super().__init__(loaded)
        sizes = {"max_running": max_running, "token_budget": token_budget, "block_size": block_size}
        for name, size in (sizes if cache_tokens is None else {**sizes, "cache_tokens": cache_tokens}).items():
            given: Any = size
            if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
                raise RequestError(f"{name} must be a whole number of at least 1, got {given!r}")
        tokens = self._affordable_tokens(max_running, block_size) if cache_tokens is None else cache_tokens
        self.pool = BlockPool(tokens // block_size, block_size, share_prefixes)
        self.scheduler = Scheduler(self.pool, max_running, token_budget)
        self.model = apply_optimizations(loaded.model, speed)
        self.kernel: DecodeKernel | DecodeGraphs | None = None
        if speed.kernel:
            self.kernel = DecodeKernel(loaded.model, "int8" if speed.weights else None)
        if speed.graphs:
            self.kernel = DecodeGraphs(self.model, max_running, self.pool.n_blocks)
        # One block more than the pool knows of: for the graphs' rows of padding.
        self.cache = PagedCache(self.config, self.pool.n_blocks + speed.graphs, block_size, self.device, self.dtype)
        self.front: Front | None = None
        self.on_step: Callable[[StepNote], None] | None = None  # told of every step, in the thread that ran it
        self._owners: dict[scheduler.Sequence, list[tuple[Request, Deliver]]] = {}
        self._cancelled: deque[Request] = deque()  # and not yet taken out
        self._lock = threading.Lock()  # of all of the above

    # --- requests in and out --------------------------------------------------------------

    def refuse(self, request: Request) -> None:
        """Refuse what can never fit, and cropping: blocks hold tokens at their own positions."""
        if request.params.on_full == "crop":
            raise RequestError("the continuous engine does not crop; use on_full='stop', or the cached engine")
        self.scheduler.refuse(_most_held(request), request.params.n)

    def add(self, samples: Sequence[Request], deliver: Deliver) -> None:
        """Queue the samples of one prompt; ``deliver`` is called with their events as steps are run."""
        sequence = scheduler.Sequence(list(samples[0].prompt_ids), _most_held(samples[0]), len(samples))
        with self._one_at_a_time():
            self.scheduler.add(sequence)
            self._owners[sequence] = [(request, deliver) for request in samples]

    def cancel(self, request: Request) -> None:
        """Drop a request, at any moment and from any thread; ended ones are left alone.

        Its blocks are free at once, or behind the step that is being run.
        """
        if request.trace.t_end is None:
            request.trace.t_end, request.trace.status = now(), "cancelled"
        self._cancelled.append(request)
        self._drop_cancelled()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self._owners)

    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        """Step until these requests have ended. Others that are under way get on too, and their events are theirs."""
        if (front := self.front) is not None:
            yield from front.run(requests)
            return
        arrived: deque[Event | RequestError] = deque()
        try:
            for samples in by_prompt(requests):
                self.add(samples, arrived.append)
            while self._under_way(requests) or arrived:  # another thread's step may have ended them
                if not arrived:
                    self.step()
                while arrived:
                    yield checked(arrived.popleft())
        finally:
            for request in requests:
                if request.finish_reason is None:
                    self.cancel(request)

    # --- the step -------------------------------------------------------------------------

    def step(self) -> None:
        """Run one step, whichever thread's turn it is. If it raises, every request has been given the error."""
        with self._one_at_a_time():
            try:
                self._step()
            except BaseException as error:  # what is half done cannot be gone on with
                for sequence in list(self._owners):
                    self._break_off(sequence, RequestError(f"the engine failed: {type(error).__name__}: {error}"))
                raise

    @torch.inference_mode()
    def _step(self) -> None:
        """Compute what the scheduler says; one token for every sequence whose text is then in the cache."""
        start, preempted = now(), self.scheduler.preemptions
        plan = self.scheduler.schedule()
        if not plan.chunks:  # all have ended since somebody wanted this step
            return
        self._note_starts(plan.chunks)
        chunks = sorted(plan.chunks, key=lambda c: (c.n > 1, c.start))  # neighbours of similar length
        logits = self._forward(chunks, plan.copies)
        self.scheduler.commit(plan)
        ready = [c.sequence for c in chunks if c.reaches_end]
        rows = [row for row, sequence in enumerate(ready) for _ in range(sequence.width)]
        texts = [text for sequence in ready for text in self._split(sequence)]
        if texts:
            self._accept(texts, logits[rows] if len(rows) > len(ready) else logits)
        if self.on_step is not None:
            single = sum(c.n == 1 for c in chunks)
            lost = self.scheduler.preemptions - preempted
            self.on_step(StepNote(start, now(), single, plan.n_tokens - single, lost))

    def _forward(self, chunks: Sequence[Chunk], copies: Sequence[tuple[int, int]]) -> Tensor:
        """Run the chunks, those of one token first; logits ``[R, V]`` of those that reach their text's end."""
        rows = [NewTokens(c.sequence.table, c.n) for c in chunks if c.sequence.table is not None]
        self.cache.prepare(rows, copies)
        single = sum(c.n == 1 for c in chunks) if self.kernel is not None else 0
        parts = []
        if self.kernel is not None and single:
            ids = [c.sequence.tokens[c.start] for c in chunks[:single]]
            logits = self.kernel(self.cache, rows[:single], ids)
            ends = [row for row, c in enumerate(chunks[:single]) if c.reaches_end]
            parts.append(logits if len(ends) == single else logits[ends])
        if single < len(chunks):
            parts.append(self._by_model(chunks[single:], PagedStep(self.cache, rows[single:])).float())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _by_model(self, chunks: Sequence[Chunk], step: PagedStep) -> Tensor:
        ids = [i for c in chunks for i in c.sequence.tokens[c.start : c.start + c.n]]
        packed = self.model.hidden(torch.tensor([ids], device=self.device), step.positions, step)[0]  # [N, d]
        ends, at = [], -1
        for chunk in chunks:
            at += chunk.n
            if chunk.reaches_end:
                ends.append(at)
        return self.model.head(packed[ends])

    def _split(self, sequence: scheduler.Sequence) -> list[scheduler.Sequence]:
        """The sequence; where several samples go on from its prompt, now that it is computed, one for each."""
        if sequence.width == 1:
            return [sequence]
        twins = self.scheduler.fork(sequence)
        owners = self._owners[sequence]
        for twin, owner in zip((sequence, *twins), owners, strict=True):
            self._owners[twin] = [owner]
        return [sequence, *twins]

    def _accept(self, texts: Sequence[scheduler.Sequence], logits: Tensor) -> None:
        """One token for each text, and its event to whoever asked."""
        owners = [self._owners[text][0] for text in texts]
        bad = not_finite(logits)
        good = [row for row in range(len(texts)) if row not in bad]
        tokens = choose(logits[good] if bad else logits, [owners[row][0] for row in good])
        t = now()
        for row, error in bad.items():
            self._break_off(texts[row], error)
        for row, token in zip(good, tokens, strict=True):
            request, deliver = owners[row]
            event = request.accept(token, t)
            if event.finish_reason is None:
                texts[row].tokens.append(token)
            else:
                self._end(texts[row])
            deliver(event)

    def _break_off(self, sequence: scheduler.Sequence, error: RequestError) -> None:
        owners = self._owners[sequence]
        self._end(sequence)
        for request, deliver in owners:
            request.trace.t_end, request.trace.status = now(), "error"
            deliver(error)

    def _end(self, sequence: scheduler.Sequence) -> None:
        for request, _ in self._owners.pop(sequence):
            request.trace.preemptions = sequence.preemptions
        self.scheduler.remove(sequence)

    def _note_starts(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            for request, _ in self._owners[chunk.sequence]:
                if request.trace.t_start is None:
                    request.trace.t_start = now()
                    request.trace.cached_tokens = chunk.sequence.found_tokens

    # --- for many callers -----------------------------------------------------------------

    @contextmanager
    def _one_at_a_time(self) -> Generator[None, None, None]:
        """For one thread at a time; whoever was cancelled meanwhile goes when it ends."""
        try:
            with self._lock:
                yield
        finally:
            self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        """Take out who was cancelled, unless a step is being run: whoever runs it comes here after it.

        It can be this very thread: a stream that nobody holds any more is closed in the middle of anything.
        """
        while self._cancelled and self._lock.acquire(blocking=False):
            try:
                while self._cancelled:
                    self._drop(self._cancelled.popleft())
            finally:
                self._lock.release()

    def _drop(self, request: Request) -> None:
        for sequence, owners in self._owners.items():
            if any(owner is request for owner, _ in owners):
                if len(owners) == 1:
                    self._end(sequence)
                else:  # its prompt is not computed yet, and others want it too
                    self._owners[sequence] = [pair for pair in owners if pair[0] is not request]
                    sequence.width -= 1
                return

    def _under_way(self, requests: Sequence[Request]) -> bool:
        with self._one_at_a_time():  # not between the end of one and the event that says so
            return any(request.trace.t_end is None for request in requests)

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Queue a prompt from an event loop; see :class:`nanoinfer.engines.async_engine.Front`, which this starts."""
        if (front := self.front) is None:
            with self._one_at_a_time():
                front = self.front = self.front or Front(self)
        return await front.submit(prompt, params)

    def close(self) -> None:
        """Stop the thread that :meth:`submit` started, if any; what is under way ends as cancelled."""
        front, self.front = self.front, None
        if front is not None:
            front.close()

    def _affordable_tokens(self, max_running: int, block_size: int) -> int:
        a_token = 2 * self.config.n_layers * self.config.n_kv_heads * self.config.d_head * self.dtype.itemsize
        if self.device.type == "cuda":
            most = torch.cuda.mem_get_info(self.device)[0] // 2
        else:
            most = min(psutil.virtual_memory().available // 4, 2**30)
        return min(most // a_token, max_running * -(-self.config.context // block_size) * block_size)


def _most_held(request: Request) -> int:
    """Tokens that the cache holds for a request at its end: the last token is never fed."""
    return len(request.prompt_ids) + max(request.limit, 1) - 1
