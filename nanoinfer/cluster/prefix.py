"""Which replica should answer? The one that has the prompt's beginning in its cache, unless it has too much to do.

A prefix cache saves work only where the request arrives that begins like one before. Sent in turns to N replicas, a
conversation finds its past in one case of N. So the beginnings are remembered, chunk by chunk, with the replicas
that they were sent to, and the longest one wins. Affinity alone would send everything that shares a system prompt to
one replica, so load is bounded as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA
2018): nobody gets more than ``1 + slack`` times the mean while others have less. What spills over is remembered too,
and a beginning that is much asked for comes to lie on several replicas.

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
MOST = 512  # chunks of one prompt that are looked at


def chunks_of(body: bytes) -> list[int]:
    """Numbers of the beginnings of a request's prompt, the shortest first: equal numbers, equal beginnings.

    They hold within one process. A body without a prompt, or that is no JSON, has none: it may go anywhere. Of
    several prompts the first counts.
    """
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(found, dict):
        return []
    prompt = found.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(found.get("messages"), list):
        prompt = "".join(f"{m.get('role')}\n{m.get('content')}\n" for m in found["messages"] if isinstance(m, dict))
    if not isinstance(prompt, str | list):
        return []
    size = CHARACTERS if isinstance(prompt, str) else IDS
    numbers, number = [], 0
    # A part of a chunk is none: the next request goes on behind it, and would not be seen to begin alike.
    for start in range(0, min(len(prompt) - size + 1, MOST * size), size):
        chunk = prompt[start : start + size]
        number = hash((number, chunk if isinstance(chunk, str) else repr(chunk)))
        numbers.append(number)
    return numbers


class PrefixPolicy(Generic[R]):
    """Ranks replicas for a prompt, and keeps count of what they have to do. For one thread.

    Args:
        slack: a replica may have ``1 + slack`` times the mean number of requests.
        floor: requests that a replica may have in any case: at low load a hit is worth more than balance.
        capacity: beginnings that are remembered; the least recently used goes first.
    """

    def __init__(self, slack: float = 0.25, floor: int = 4, capacity: int = 200_000) -> None:
        self.slack, self.floor, self.capacity = slack, floor, capacity
        self.load: dict[R, int] = {}
        self._under_way: dict[str, R] = {}
        self._turns: dict[R, int] = {}  # when each was last chosen: ties go to who has waited longest
        self._turn = 0
        self._known: OrderedDict[int, set[R]] = OrderedDict()  # the least recently used first

    def keep(self, replicas: Iterable[R]) -> None:
        """These are there now; what the others held is lost, and so is what they had to do."""
        there = set(replicas)
        for gone in self.load.keys() - there:
            self.drop(gone)
        for replica in there - self.load.keys():
            self.load[replica], self._turns[replica] = 0, 0

    def drop(self, replica: R) -> None:
        """It is gone."""
        self.load.pop(replica, None)
        self._turns.pop(replica, None)
        self._under_way = {request: at for request, at in self._under_way.items() if at != replica}

    def rank(self, chunks: Sequence[int]) -> list[R]:
        """All replicas, the best first: those below the bound, the longest beginning, the least load."""
        bound = self.bound
        depths = self._depths(chunks)

        def worth(replica: R) -> tuple[bool, int, int, int]:
            load = self.load[replica]
            return load >= bound, -depths.get(replica, 0), load, self._turns[replica]

        return sorted(self.load, key=worth)

    @property
    def bound(self) -> int:
        """Requests that a replica may have once the next one has come."""
        mean = (sum(self.load.values()) + 1) / max(1, len(self.load))
        return max(self.floor, math.ceil((1 + self.slack) * mean))

    def begin(self, request: str, replica: R, chunks: Sequence[int]) -> None:
        """A request is sent there (and, if it was sent elsewhere before, no longer there)."""
        self.end(request)
        if replica not in self.load:
            return
        self.load[replica] += 1
        self._under_way[request] = replica
        self._turn += 1
        self._turns[replica] = self._turn
        for number in reversed(chunks):  # so that a long beginning is forgotten before the short ones in it
            self._known.setdefault(number, set()).add(replica)
            self._known.move_to_end(number)
        while len(self._known) > self.capacity:
            self._known.popitem(last=False)

    def end(self, request: str) -> None:
        """A request has ended, one way or another; twice is once."""
        replica = self._under_way.pop(request, None)
        if replica is not None:
            self.load[replica] -= 1

    def _depths(self, chunks: Sequence[int]) -> dict[R, int]:
        """How many chunks of the prompt each replica has been sent before."""
        depths: dict[R, int] = {}
        for depth, number in enumerate(chunks, start=1):
            holders = self._known.get(number)
            if holders is None:
                break
            holders.intersection_update(self.load)  # those that are gone hold nothing any more
            depths.update(dict.fromkeys(holders, depth))
        return depths
