"""Continuous batching: which requests run is decided anew at every step.

The scheduler says which tokens of which sequences come next; the paged cache holds what they have; one forward pass
computes them all, packed in a row; sequences that have reached their end get a token. That is a step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import psutil
import torch
from torch import Tensor

from nanoinfer.cache.blocks import BlockPool
from nanoinfer.cache.paged import NewTokens, PagedCache, PagedStep
from nanoinfer.engines.async_engine import AsyncEngine, Stream
from nanoinfer.engines.engine import Engine, NonFiniteLogits, Prompt
from nanoinfer.engines.request import Deliver, Event, Request, RequestCancelled, is_last, unwrap
from nanoinfer.engines.scheduler import Chunk, Scheduler, SequenceState
from nanoinfer.errors import EngineError, RequestError, check
from nanoinfer.measure.clock import now
from nanoinfer.measure.stalls import StepNote
from nanoinfer.models.registry import LoadedModel
from nanoinfer.optimize.cpu_kernel import DecodeKernel
from nanoinfer.optimize.cuda_graphs import DecodeGraphs
from nanoinfer.optimize.options import Optimizations, apply_optimizations
from nanoinfer.sampling.params import SamplingParams
from nanoinfer.theory.arithmetic import kv_bytes_per_token


class Sample(NamedTuple):
    """A request in the engine, and where its events go."""

    request: Request
    deliver: Deliver


class ContinuousEngine(Engine):
    """Iteration-level scheduling over a paged cache.

    A request stands in the scheduler's sequences, and nowhere else; each is delivered exactly one last item.
    :meth:`add` and :meth:`cancel` may be called at any moment and from any thread. What they ask for is done at once,
    or right after the step that is being run.
    """

    name = "continuous"
    crops = False

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_running: int = 32,  # sequences in a step at most
        token_budget: int = 256,  # tokens in a step at most, prompts in chunks among them: bounds how long it can take
        block_size: int = 8,  # tokens a block of the cache
        cache_tokens: int | None = None,  # that the cache holds; None: by the free memory
        share_prefixes: bool = True,  # texts that begin alike share the blocks of their beginning, from call to call
        speed: Optimizations | None = None,  # what steps may use besides the plain model
    ) -> None:
        super().__init__(loaded)
        speed = speed or Optimizations()
        sizes = {"max_running": max_running, "token_budget": token_budget, "block_size": block_size}
        for name, size in (sizes if cache_tokens is None else {**sizes, "cache_tokens": cache_tokens}).items():
            check(name, size, at_least=1, whole=True)
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
        self.on_step: Callable[[StepNote], None] | None = None  # called after every step, in the thread that ran it
        self._inbox: deque[Callable[[], None]] = deque()  # what was added and cancelled, and is not yet done
        self._lock = threading.Lock()  # of the scheduler and all below it: a step, or the inbox
        self._async: AsyncEngine | None = None

    # --- requests in and out --------------------------------------------------------------

    def refuse(self, request: Request) -> None:
        """Refuse what can never fit."""
        self.scheduler.refuse(request.kv_limit, request.params.n)

    def add(self, samples: Sequence[Request], deliver: Deliver) -> None:
        """Queue the samples of one prompt; ``deliver`` is called with their events as steps are run."""
        first = samples[0]
        self.scheduler.refuse(first.kv_limit, len(samples))
        sequence = SequenceState(list(first.prompt_ids), first.kv_limit, [Sample(r, deliver) for r in samples])
        self._do(partial(self.scheduler.add, sequence))

    def cancel(self, request: Request) -> None:
        """Drop a request, and its blocks with it; one that has ended is left alone."""
        self._do(partial(self._drop, lambda sample: sample.request is request))

    def cancel_all(self) -> None:
        self._do(partial(self._drop, lambda sample: True))

    @property
    def busy(self) -> bool:
        return bool(self._inbox or self.scheduler.running or self.scheduler.waiting)

    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        """Step until these requests have ended. Others that are under way advance too, and get their own events."""
        arrived: deque[Event | RequestError] = deque()
        unfinished = len(requests)
        try:
            for _, samples in groupby(requests, lambda request: request.index - request.sample):  # by prompt
                self.add(list(samples), arrived.append)
            while unfinished:
                if not arrived:  # nor has a step of another thread brought anything
                    self.step()
                while arrived:
                    item = arrived.popleft()
                    unfinished -= is_last(item)
                    yield unwrap(item)
        finally:
            if unfinished:
                for request in requests:
                    self.cancel(request)

    # --- the step -------------------------------------------------------------------------

    def step(self) -> None:
        """Run one step; several threads take turns. If it raises, every request has been delivered the error."""
        try:
            with self._lock:
                self._empty_inbox()
                self._step()
        finally:
            self._do()

    @torch.inference_mode()
    def _step(self) -> None:
        """Compute what the scheduler says; one token for every sequence whose text is then in the cache."""
        try:
            start, preempted = now(), self.scheduler.preemptions
            plan = self.scheduler.schedule()
            if not plan.chunks:  # all have ended since this step was wanted
                return
            for sequence in [chunk.sequence for chunk in plan.chunks]:
                for trace in [sample.request.trace for sample in sequence.samples]:
                    if trace.t_start is None:
                        trace.t_start, trace.cached_tokens = now(), sequence.cached_tokens
            chunks = sorted(plan.chunks, key=lambda c: (c.n > 1, c.start))  # neighbours of similar length
            logits = self._forward(chunks, plan.copies)
            self.scheduler.commit(plan)
            self._sample([c.sequence for c in chunks if c.reaches_end], logits)
            if self.on_step is not None:
                single = sum(c.n == 1 for c in chunks)
                lost = self.scheduler.preemptions - preempted
                self.on_step(StepNote(start, now(), single, plan.n_tokens - single, lost))
        except BaseException as error:  # what is half done cannot be continued
            for sequence in list(self._sequences()):
                self._fail(sequence, EngineError(f"the engine failed: {type(error).__name__}: {error}"))
            raise

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
        if rest := chunks[single:]:
            step = PagedStep(self.cache, rows[single:])
            ids = [i for c in rest for i in c.sequence.tokens[c.start : c.start + c.n]]
            packed = self.model.hidden(torch.tensor([ids], device=self.device), step.positions, step)[0]  # [N, d]
            ends = [end - 1 for end, c in zip(accumulate(c.n for c in rest), rest, strict=True) if c.reaches_end]
            parts.append(self.model.head(packed[ends]).float())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _sample(self, sequences: Sequence[SequenceState], logits: Tensor) -> None:
        """A token for each sample of these sequences, from their rows of logits ``[R, V]``, and its event delivered."""
        if any(sequence.n_samples > 1 for sequence in sequences):
            logits = logits[[row for row, sequence in enumerate(sequences) for _ in sequence.samples]]
            sequences = [fork for sequence in sequences for fork in self.scheduler.fork(sequence)]
        try:
            tokens = self.choose(logits, [sequence.samples[0].request for sequence in sequences]) if sequences else []
        except NonFiniteLogits as error:  # these requests end, and the others go on
            good = [row for row in range(len(sequences)) if row not in error.rows]
            finite = logits[good]
            for row in error.rows:
                self._fail(sequences[row], RequestError(str(error)))
            self._sample([sequences[row] for row in good], finite)
            return
        t = now()
        for sequence, token in zip(sequences, tokens, strict=True):
            ((request, deliver),) = sequence.samples
            event = request.accept(token, t)
            if event.finish_reason is None:
                sequence.tokens.append(token)
            else:
                self._remove(sequence)
            deliver(event)

    # --- endings --------------------------------------------------------------------------

    def _fail(self, sequence: SequenceState, error: RequestError) -> None:
        self._remove(sequence)
        for request, deliver in sequence.samples:
            request.abandon("error", now())
            deliver(error)

    def _drop(self, is_meant: Callable[[Sample], bool]) -> None:
        for sequence in list(self._sequences()):
            dropped = [sample for sample in sequence.samples if is_meant(sample)]
            if len(dropped) == sequence.n_samples:
                self._remove(sequence)
            else:  # its prompt is not computed yet, and other samples want it too
                sequence.samples = [sample for sample in sequence.samples if not is_meant(sample)]
            for request, deliver in dropped:
                request.abandon("cancelled", now())
                deliver(RequestCancelled())

    def _remove(self, sequence: SequenceState) -> None:
        self.scheduler.remove(sequence)
        for sample in sequence.samples:
            sample.request.trace.preemptions = sequence.preemptions

    def _sequences(self) -> Iterator[SequenceState]:
        yield from self.scheduler.running
        yield from self.scheduler.waiting

    def _do(self, *jobs: Callable[[], None]) -> None:
        """Do these jobs at once, or leave them to the thread that is running a step.

        It can be this very thread: a generator that nothing refers to any more is closed in the middle of anything.
        """
        self._inbox.extend(jobs)
        while self._inbox and self._lock.acquire(blocking=False):
            try:
                self._empty_inbox()
            finally:
                self._lock.release()

    def _empty_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    # --- for many callers -----------------------------------------------------------------

    async def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Queue a prompt from an event loop; see :meth:`AsyncEngine.submit`. Begins with a thread that steps."""
        if self._async is None:
            self._async = AsyncEngine(self)
        return await self._async.submit(prompt, params)

    def close(self) -> None:
        """Stop the thread that :meth:`submit` started, if any; what is under way ends as cancelled."""
        running, self._async = self._async, None
        if running is not None:
            running.close()

    def _affordable_tokens(self, max_running: int, block_size: int) -> int:
        """What 1 GiB or a quarter of the free memory of a CPU holds, or half of a GPU's; at most the full contexts."""
        most = min(psutil.virtual_memory().available // 4, 2**30)
        if self.device.type == "cuda":
            most = torch.cuda.mem_get_info(self.device)[0] // 2
        per_token = kv_bytes_per_token(self.config, str(self.dtype).removeprefix("torch."))
        return min(most // per_token, max_running * -(-self.config.context // block_size) * block_size)
