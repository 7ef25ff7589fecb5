"""Messages between devices: what each kind of parallelism sends, call by call, and how long it takes.

:mod:`nanoinfer.parallel` runs these splits and counts what it sends; the counts here equal those exactly, so that a
split can be costed for machines that are not at hand. A message takes ``alpha + bytes / bandwidth``.

Symbols as in :class:`~nanoinfer.configs.config.ModelConfig`; ``b`` is bytes per element. Sources: Patarasuk and Yuan
(2009) for the bytes of a ring; Shoeybi et al., "Megatron-LM" (2019) for tensor parallel; Huang et al., "GPipe" (2019)
for the bubble; Liu et al., "Ring Attention" (2023); Lepikhin et al., "GShard" (2020) for experts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from nanoinfer.configs.config import ModelConfig
from nanoinfer.errors import RequestError
from nanoinfer.theory import capacity
from nanoinfer.theory.arithmetic import check_sizes, kv_width, pair_flops

#: Bytes of a token's id, and of a count.
INT64: Final = 8
#: Bytes of a number of a partial attention: those that are to be merged are kept exact.
FP32: Final = 4
#: Seconds of a call in one server and between two, assumed where nothing else is known.
ALPHA_S: Final = 8e-6
ACROSS_ALPHA_S: Final = 10e-6


def partition(count: int, parts: int) -> tuple[range, ...]:
    """``count`` items in ``parts`` contiguous ranges whose sizes differ by at most 1, the larger ones first."""
    size, larger = divmod(count, parts)
    starts = [i * size + min(i, larger) for i in range(parts + 1)]
    return tuple(range(start, end) for start, end in itertools.pairwise(starts))


@dataclass(frozen=True)
class Traffic:
    """Calls of one collective with messages of one size; bytes."""

    kind: str  # as nanoinfer.parallel.collectives.CommRecord names it
    calls: int
    message: float  # that one call hands over; of all parts, for all-to-all
    sent: float  # that leave one rank in all these calls together

    def scaled(self, share: float) -> Traffic:
        """As many calls with this share of the bytes."""
        return replace(self, message=self.message * share, sent=self.sent * share)


def all_reduce(calls: int, message: float, n: int) -> Traffic:
    """Each of ``n`` ranks ends with the sum; in a ring each sends ``2 (n-1)/n`` of a message."""
    return Traffic("all-reduce", calls, message, calls * 2 * (n - 1) / n * message)


def all_gather(calls: int, message: float, n: int) -> Traffic:
    """Each of ``n`` ranks ends with the messages of all; in a ring each sends ``n-1`` of them."""
    return Traffic("all-gather", calls, message, calls * (n - 1) * message)


def all_to_all(calls: int, message: float, n: int) -> Traffic:
    """Each of ``n`` ranks has a part for each other one, even shares taken: it keeps ``1/n`` of its message."""
    return Traffic("all-to-all", calls, message, calls * (n - 1) / n * message)


def broadcast(message: float) -> Traffic:
    """One rank's message for all: along a chain it leaves each rank once. The bytes are those of that rank."""
    return Traffic("broadcast", 1, message, message)


def sent_bytes(traffic: Iterable[Traffic]) -> float:
    """Bytes that leave one rank."""
    return sum(part.sent for part in traffic)


@dataclass(frozen=True)
class Network:
    """The links of one kind of server: a fast one between its devices, a slow one to other servers.

    Every device has a port of its own to the other servers, and a group's ranks fill one server after the other. An
    all-reduce over several servers has three parts: the ranks of a server each sum up a share, ranks of the same place
    in all servers sum up those, and the servers spread them out again. Between ``k`` servers a tree is climbed, and
    ``across_alpha`` is paid for each doubling. Source: the cost model in NCCL (src/graph/tuning.cc,
    https://github.com/NVIDIA/nccl). Bandwidths are bytes/s one way, ``alpha`` seconds of one call.
    """

    link: float  # between the devices of a server
    alpha: float = ALPHA_S
    across: float | None = None  # of each device to other servers; None where all devices share ``link``
    across_alpha: float = ACROSS_ALPHA_S
    per_node: int = 8  # devices of a server

    def nodes(self, n: int, stride: int = 1) -> int:
        """Servers that ``n`` ranks reach into, each ``stride`` devices from the next."""
        check_sizes(n=n, stride=stride)
        return 1 if self.across is None else math.ceil(n / self._together(n, stride))

    def seconds(self, traffic: Iterable[Traffic], n: int, stride: int = 1) -> float:
        """Of all calls among ``n`` ranks, one after the other."""
        return sum(self._seconds(part, n, stride) for part in traffic)

    def hop(self, part: Traffic, crosses: bool) -> float:
        """Seconds of messages from one device to another, which may be in another server."""
        if crosses and self.across is not None:
            return part.calls * self.across_alpha + part.sent / self.across
        return part.calls * self.alpha + part.sent / self.link

    def _together(self, n: int, stride: int) -> int:
        """Ranks of a group that are in one server."""
        return min(n, max(1, self.per_node // stride))

    def _seconds(self, part: Traffic, n: int, stride: int) -> float:
        k, g = self.nodes(n, stride), self._together(n, stride)
        if k == 1 or self.across is None:
            return self.hop(part, crosses=False)
        if part.kind in ("send", "exchange"):  # of a ring all wait for the pair that is furthest apart
            return self.hop(part, crosses=True)
        if part.kind == "all-to-all":  # both links at once
            inside = part.sent * (g - 1) / (n - 1) / self.link
            return part.calls * self.across_alpha + max(inside, part.sent * (n - g) / (n - 1) / self.across)
        crossing = part.sent * (k - 1) / (n - 1)
        alpha = self.across_alpha * math.ceil(math.log2(k)) + (self.alpha if g > 1 else 0.0)
        return part.calls * alpha + (part.sent - crossing) / self.link + crossing / self.across


# --- kinds of parallelism ---------------------------------------------------------------------


def tensor_parallel(
    config: ModelConfig, tokens: int, n: int, itemsize: int, ends: int, *, embeds: bool = True
) -> tuple[Traffic, ...]:
    """Messages of one pass over ``tokens`` tokens (of all rows), each layer shared by ``n`` devices.

    Two all-reduces a layer, of attention's output and of the feed-forward part's; one more after the embedding, whose
    vocabulary is split (``embeds``); one all-gather of logits, of which each device has ``[ends, ceil(V / n)]``.
    Raises :class:`RequestError` for heads that ``n`` does not divide.
    """
    check_sizes(tokens=tokens, itemsize=itemsize)
    capacity.check_tp(config, n)
    if n == 1:
        return ()
    reduces = all_reduce(2 * config.n_layers + embeds, tokens * config.d_model * itemsize, n)
    logits = all_gather(1, ends * math.ceil(config.vocab_size / n) * itemsize, n)
    return (reduces, logits) if ends else (reduces,)


def micro_batch_rows(rows: int, micro_batches: int) -> tuple[int, ...]:
    """Rows of each micro-batch, the larger ones first. Raises :class:`RequestError` for more of them than rows."""
    check_sizes(rows=rows, micro_batches=micro_batches)
    if micro_batches > rows:
        raise RequestError(f"{rows} rows do not fill {micro_batches} micro-batches; take at most {rows}")
    return tuple(map(len, partition(rows, micro_batches)))


def pipeline_parallel(
    config: ModelConfig, rows: int, tokens: int, p: int, itemsize: int, micro_batches: int
) -> tuple[Traffic, ...]:
    """Messages of one pass over ``rows`` rows of ``tokens`` new tokens each, through ``p`` stages.

    Every stage but the last sends the next one each micro-batch's hidden states; then the last one broadcasts the ids
    of all rows. The sends here are those across ONE of the ``p - 1`` boundaries. Raises :class:`RequestError` for more
    stages than layers.
    """
    check_sizes(tokens=tokens, p=p, itemsize=itemsize)
    parts = Counter(micro_batch_rows(rows, micro_batches))
    if p > config.n_layers:
        raise RequestError(f"{config.n_layers} layers do not fill {p} stages; take at most {config.n_layers}")
    if p == 1:
        return ()
    per_row = tokens * config.d_model * itemsize
    hops = (Traffic("send", n, size * per_row, n * size * per_row) for size, n in parts.items())
    return *hops, broadcast(rows * INT64)


def bubble(p: int, m: int) -> float:
    """Share of time in which a stage waits when ``m`` micro-batches pass ``p`` stages: ``(p-1) / (m+p-1)``."""
    check_sizes(p=p, m=m)
    return (p - 1) / (m + p - 1)


def context_parallel(config: ModelConfig, rows: int, tokens: int, n: int, itemsize: int) -> tuple[Traffic, ...]:
    """Messages of a prefill of ``rows`` prompts of ``tokens`` each, ``c = ceil(tokens / n)`` on each of ``n`` devices.

    In each layer keys and values go round the ring in ``n - 1`` exchanges; then the rank of the last token broadcasts
    its hidden state, and the rank that samples the ids. Raises :class:`RequestError` for more devices than tokens.
    """
    check_sizes(rows=rows, tokens=tokens, n=n, itemsize=itemsize)
    if n > tokens:
        raise RequestError(f"{tokens} tokens cannot be spread over {n} devices; take at most {tokens}")
    if n == 1:
        return ()
    message = rows * math.ceil(tokens / n) * kv_width(config) * itemsize
    calls = config.n_layers * (n - 1)
    ring = Traffic("exchange", calls, message, calls * message)
    return ring, broadcast(rows * config.d_model * itemsize), broadcast(rows * INT64)


def context_parallel_decode(config: ModelConfig, rows: int, n: int) -> tuple[Traffic, ...]:
    """Messages of one decode step over a cache that is spread over ``n`` devices.

    In each layer every device attends to its part, and one all-gather brings the partial outputs together with the
    log-sum-exp of each, in fp32. Then the rank that samples broadcasts the ids.
    """
    check_sizes(rows=rows, n=n)
    if n == 1:
        return ()
    width = config.d_head if config.mla is None else config.mla.kv_lora_rank
    return all_gather(config.n_layers, rows * config.n_heads * (width + 1) * FP32, n), broadcast(rows * INT64)


def ring_hidden_tokens(config: ModelConfig, flops_per_s: float, link: float, itemsize: int) -> float:
    """Tokens a device from which a ring's exchange takes no longer than the arithmetic that it overlaps with.

    ``c`` tokens send ``2 c n_kv d_h b`` bytes while ``4 c^2 n_q d_h`` FLOPs are done, half of them where causal work is
    balanced over the devices; so ``c >= C b n_kv / (W n_q)``, with ``C`` FLOP/s of one device and ``W`` bytes/s one
    way to the next (``link``).
    """
    return flops_per_s * kv_width(config) * itemsize / (link * pair_flops(config) / 2)


def expert_parallel(config: ModelConfig, tokens_local: int, n: int, itemsize: int) -> tuple[Traffic, ...]:
    """Expected messages of a pass in which each of ``n`` devices has ``tokens_local`` tokens and ``E / n`` experts.

    An all-reduce of one number tells whether any rank has work. In each layer with experts an all-to-all of ``E``
    counts says what will come, one brings each token to its ``k`` experts and one brings the answers back, tokens
    choosing evenly. The busiest device's bytes are that times its load over the mean one. Raises as :func:`check_ep`.
    """
    check_sizes(tokens_local=tokens_local, n=n, itemsize=itemsize)
    check_ep(config, n)
    if n == 1 or config.moe is None:
        return ()
    layers = sum(config.has_experts(i) for i in range(config.n_layers))
    tokens = all_to_all(2 * layers, tokens_local * config.moe.top_k * config.d_model * itemsize, n)
    return all_reduce(1, INT64, n), all_to_all(layers, config.moe.n_experts * INT64, n), tokens


def check_ep(config: ModelConfig, n: int) -> None:
    """Raise :class:`RequestError` where ``n`` devices cannot share a model's experts evenly."""
    check_sizes(ep=n)
    if n == 1:
        return
    if config.moe is None:
        raise RequestError(f"ep {n} spreads experts and this model has none: take --tp, --pp or --replicas")
    if config.moe.n_experts % n:
        even = [str(i) for i in range(1, config.moe.n_experts + 1) if config.moe.n_experts % i == 0]
        raise RequestError(f"ep {n} does not divide {config.moe.n_experts} experts; take one of {', '.join(even)}")
