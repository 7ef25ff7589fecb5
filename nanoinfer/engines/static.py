"""The step loop of engines whose rows start together and leave together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator

import torch
from torch import Tensor

from nanoinfer.engines.choose import choose, not_finite
from nanoinfer.engines.engine import Engine
from nanoinfer.engines.request import Event, Request
from nanoinfer.measure.clock import now

#: Logits ``[R, V]`` for the next token of each of R running requests, in their order.
Forward = Callable[[list[Request]], Tensor]


class StaticEngine(Engine):
    """One batch at a time: nobody joins it, and it lasts as long as its longest row."""

    @abstractmethod
    def start(self, requests: list[Request]) -> Forward:
        """Prepare for one batch; return the function that each step calls with the running requests."""

    def run(self, requests: list[Request]) -> Generator[Event, None, None]:
        """Logits of the running rows, one token each, their events; until all have ended."""
        forward: Forward | None = None
        while running := [r for r in requests if r.finish_reason is None]:
            with torch.inference_mode():
                forward = forward or self.start(running)
                token_ids = self.choose(forward(running), running)
            t = now()
            for request, token_id in zip(running, token_ids, strict=True):
                yield request.accept(token_id, t)

    def choose(self, logits: Tensor, running: list[Request]) -> list[int]:
        """One token for each request, from its row of logits ``[R, V]``; raises where they are not finite."""
        for error in not_finite(logits).values():
            raise error
        return choose(logits, running)
