"""A replica: one engine, answering through the very app that ``nanoinfer serve`` runs. No route is written twice."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from nanoinfer.cluster.asgi import Asked, Message, answered
from nanoinfer.serve.app import make_app
from nanoinfer.serve.run import open_service


class Replica:
    """What Ray Serve starts, watches, and starts anew when it is gone.

    Args:
        model: as for :func:`nanoinfer.load`.
        options: of :func:`nanoinfer.serve.run.open_service`.
    """

    def __init__(self, model: str, options: Mapping[str, Any]) -> None:
        self.service = open_service(model, **options)
        self.app = make_app(self.service)

    async def answer(self, asked: Asked, chunks: Sequence[int]) -> AsyncIterator[list[Message]]:
        """A request's answer, in bunches. ``chunks`` is what the router went by."""
        del chunks
        async for bunch in answered(self.app, asked):
            yield bunch

    async def figures(self) -> tuple[str, bytes]:
        """Its name, and what it has for Prometheus."""
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id, self.service.figures.text()

    def check_health(self) -> None:
        """Called by Serve every few seconds: it replaces a replica that raises here, or does not answer."""
        if not self.service.front.is_alive:
            raise RuntimeError("the engine's thread has ended: nothing would be answered any more")

    def __del__(self) -> None:
        """Called by Serve once nothing is under way here any more."""
        if (service := getattr(self, "service", None)) is not None:
            service.close()
