"""Ray Serve's side of the routing: Serve knows the live replicas, :class:`PrefixPolicy` ranks them.

Named by path in the deployment's settings, and made by Serve inside the gateway's process, in one thread. The policy
has its own module because this one imports Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanoinfer.cluster.prefix import PrefixPolicy


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is not there when this is checked
    """The replica that has the prompt's prefix cached, within a bound on its load.

    A request's second argument are the hashes of its prefixes. Serve asks the next choice where the first one does not
    answer.
    """

    def initialize_state(self, **options: Any) -> None:
        """Called by Serve, with ``request_router_kwargs``."""
        self._policy: PrefixPolicy[ReplicaID] = PrefixPolicy(**options)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve with the replicas that run now."""
        super().update_replicas(replicas)
        self._policy.keep(replica.replica_id for replica in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Called before Serve's controller knows it."""
        super().on_replica_actor_died(replica_id)
        self._policy.drop(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One rank for each replica, the best first."""
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        chunks = _chunks(pending_request)
        ranked = [candidates[name] for name in self._policy.rank(chunks) if name in candidates]
        if pending_request is not None and ranked:
            # Counted at once, so that the next of many simultaneous requests sees this one.
            request = pending_request.metadata.internal_request_id
            self._policy.begin(request, ranked[0].replica_id, chunks)
            pending_request.future.add_done_callback(
                lambda future: self._policy.end(request) if future.cancelled() else None
            )
        return [[replica] for replica in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called when it was accepted, not always by the first choice."""
        self._policy.begin(pending_request.metadata.internal_request_id, replica_id, _chunks(pending_request))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called when it has ended."""
        self._policy.end(internal_request_id)


def _chunks(pending_request: PendingRequest | None) -> Sequence[int]:
    return [] if pending_request is None or len(pending_request.args) < 2 else pending_request.args[1]
