"""Which replica should answer? The one that has the prompt's prefix in its cache, unless its load is too high.

A prefix cache saves work only for requests that reach the replica of an earlier one with the same prefix: round robin
over N replicas finds it in one case of N. So prefixes are remembered, chunk by chunk, with the replicas that they were
sent to, and the longest match wins. Affinity alone would send everything that shares a system prompt to one replica,
so load is bounded as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018): at most
``1 + slack`` times the mean while other replicas have less. Requests beyond the bound are remembered too, so that a
popular prefix comes to be cached on several replicas.

No Ray here, no tokens and no tensors: a replica is any hashable value.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

R = TypeVar("R", bound=Hashable)

CHARACTERS = 64  # a chunk of a text: some 16 tokens
IDS = 16  # a chunk of a list of token ids
MAX_CHUNKS = 512  # of one prompt that are looked at


def chunks_of(body: bytes) -> list[int]:
    """Hashes of the prefixes of a request's prompt, the shortest first, valid within one process.

    A body without a prompt, or that is no JSON, has none: it may go anywhere. Of several prompts the first counts.
    """
    try:
        fields: Any = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(fields, dict):
        return []
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(fields.get("messages"), list):
        prompt = "".join(f"{m.get('role')}\n{m.get('content')}\n" for m in fields["messages"] if isinstance(m, dict))
    if not isinstance(prompt, str | list):
        return []
    size = CHARACTERS if isinstance(prompt, str) else IDS
    prefixes, prefix = [], 0
    # Whole chunks only: the next request continues a partial one, and its hash would differ.
    for start in range(0, min(len(prompt) - size + 1, MAX_CHUNKS * size), size):
        chunk = prompt[start : start + size]
        prefix = hash((prefix, chunk if isinstance(chunk, str) else repr(chunk)))
        prefixes.append(prefix)
    return prefixes


class PrefixPolicy(Generic[R]):
    """Ranks replicas for a prompt, and counts their requests. For one thread.

    Args:
        slack: a replica may have ``1 + slack`` times the mean number of requests.
        floor: requests that a replica may have in any case: at low load a hit is worth more than balance.
        capacity: prefixes that are remembered; the least recently used is forgotten first.
    """

    def __init__(self, slack: float = 0.25, floor: int = 4, capacity: int = 200_000) -> None:
        self.slack, self.floor, self.capacity = slack, floor, capacity
        self.load: dict[R, int] = {}
        self._replica_of: dict[str, R] = {}
        self._turns: dict[R, int] = {}  # when each was last chosen: ties go to the one that has waited longest
        self._turn = 0
        #: Replicas that were sent each prefix, the least recently used first.
        self.known: OrderedDict[int, set[R]] = OrderedDict()

    def keep(self, replicas: Iterable[R]) -> None:
        """These run now; the caches and the requests of others are lost."""
        running = set(replicas)
        for gone in self.load.keys() - running:
            self.drop(gone)
        for replica in running - self.load.keys():
            self.load[replica], self._turns[replica] = 0, 0

    def drop(self, replica: R) -> None:
        """This one is gone."""
        self.load.pop(replica, None)
        self._turns.pop(replica, None)
        self._replica_of = {request: at for request, at in self._replica_of.items() if at != replica}

    def rank(self, chunks: Sequence[int]) -> list[R]:
        """All replicas, the best first: those below the bound, then by the longest prefix, then by the least load."""
        bound = self.bound
        depths = self.depths(chunks)

        def rank_key(replica: R) -> tuple[bool, int, int, int]:
            load = self.load[replica]
            return load >= bound, -depths.get(replica, 0), load, self._turns[replica]

        return sorted(self.load, key=rank_key)

    @property
    def bound(self) -> int:
        """Requests that a replica may have once the next one has come."""
        mean = (sum(self.load.values()) + 1) / max(1, len(self.load))
        return max(self.floor, math.ceil((1 + self.slack) * mean))

    def begin(self, request: str, replica: R, chunks: Sequence[int]) -> None:
        """A request is sent there, and no longer where it was sent before."""
        self.end(request)
        if replica not in self.load:
            return
        self.load[replica] += 1
        self._replica_of[request] = replica
        self._turn += 1
        self._turns[replica] = self._turn
        for prefix in reversed(chunks):  # so that a long prefix is forgotten before the short ones in it
            self.known.setdefault(prefix, set()).add(replica)
            self.known.move_to_end(prefix)
        while len(self.known) > self.capacity:
            self.known.popitem(last=False)

    def end(self, request: str) -> None:
        """A request has ended; calling it again does nothing."""
        replica = self._replica_of.pop(request, None)
        if replica is not None:
            self.load[replica] -= 1

    def depths(self, chunks: Sequence[int]) -> dict[R, int]:
        """How many chunks of the prompt each replica has been sent before."""
        depths: dict[R, int] = {}
        for depth, prefix in enumerate(chunks, start=1):
            holders = self.known.get(prefix)
            if holders is None:
                break
            holders.intersection_update(self.load)  # without replicas that are gone
            depths.update(dict.fromkeys(holders, depth))
        return depths
