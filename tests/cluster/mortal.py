"""A replica that says who it is, and whose engine can be made to die."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence

from nanoinfer.cluster.asgi import Asked, Message
from nanoinfer.cluster.replica import Replica


class Mortal(Replica):
    async def answer(self, asked: Asked, chunks: Sequence[int]) -> AsyncIterator[list[Message]]:
        if asked.path == "/die":
            self.service.front.close()  # its thread ends; whoever asks now would wait for ever
        yield [{"type": "http.response.body", "body": str(os.getpid()).encode()}]
