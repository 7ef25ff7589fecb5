"""What a load is sent to: a server, an engine in this process, anything that answers in chunks."""

from __future__ import annotations

from typing import Any, Protocol

from nanoinfer.measure.trace import Trace
from nanoinfer.workload.items import WorkItem


class Target(Protocol):
    """Answers requests and keeps their records.

    ``settings`` is what was asked of it, as JSON, without secrets. ``messages`` holds, for each kind of error that
    its traces name, the first words that came with it.
    """

    name: str
    messages: dict[str, str]

    @property
    def settings(self) -> dict[str, Any]:
        """What a stored run says of it."""

    async def send(self, work: WorkItem, trace: Trace) -> None:
        """Serve one request and fill its trace, all times as :func:`nanoinfer.measure.clock.now` gives them.

        What the server does wrong goes into the trace and is never raised. A cancelled one notes ``t_end`` and
        status ``cancelled`` before it lets CancelledError pass.

        Raises:
            RequestError: work that can never be sent there, a mistake of the user.
        """

    async def close(self) -> None:
        """Let go of connections."""
