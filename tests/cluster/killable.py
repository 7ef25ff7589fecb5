"""A replica that says who it is, and whose engine can be made to die."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nanoinfer.cluster.gateway import ForwardedRequest, MessageBatches
from nanoinfer.cluster.replicas import Replica


class KillableReplica(Replica):
    async def answer(self, request: ForwardedRequest, chunks: Sequence[int]) -> MessageBatches:
        if request.path == "/die":
            self.service.async_engine.close()  # its thread ends; requests would wait for ever
        yield [{"type": "http.response.body", "body": str(os.getpid()).encode()}]
