"""Replicas of a model on a Ray cluster, started by Ray Serve, and the gateway in front of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nanoinfer.cluster import ClusterServeOptions
from nanoinfer.cluster.gateway import (
    Forward,
    ForwardedRequest,
    Gateway,
    MessageBatches,
    ReplicaLost,
    make_app,
    merge_metrics,
    run_app,
)
from nanoinfer.cluster.ray_runtime import check_room, connected, require
from nanoinfer.engines.async_engine import QueueFull
from nanoinfer.errors import NanoinferError
from nanoinfer.models.registry import find_model
from nanoinfer.serve.app import make_app as make_replica_app
from nanoinfer.serve.errors import APIError
from nanoinfer.serve.options import ServeOptions
from nanoinfer.serve.run import listen, open_service
from nanoinfer.serve.run import run_app as run_server
from nanoinfer.serve.service import ServerLimits

APP = "nanoinfer"
ROUTER = "nanoinfer.cluster.router.PrefixRouter"  # Serve takes its path
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 5.0  # after three failures in a row Serve replaces a replica
METRICS_S = 5.0  # in which the replicas must give theirs


class Replica:
    """One engine, answering through the app that ``nanoinfer serve`` runs. Ray Serve starts and restarts it."""

    def __init__(self, options: ServeOptions) -> None:
        self.service = open_service(options)
        self.app = make_replica_app(self.service)

    async def answer(self, request: ForwardedRequest, chunks: Sequence[int]) -> MessageBatches:
        """A request's answer, in batches of messages. The router has read ``chunks``."""
        del chunks
        async for batch in run_app(self.app, request):
            yield batch

    async def metrics(self) -> tuple[str, bytes]:
        """Its name, and its metrics in Prometheus' format."""
        from ray import serve

        return serve.get_replica_context().replica_id.unique_id, self.service.metrics.render()

    def check_health(self) -> None:
        """Called by Serve every few seconds: it replaces a replica that raises here, or does not answer."""
        if problem := self.service.async_engine.problem(self.service.limits.step_s):
            raise RuntimeError(f"{problem}: nothing would be answered any more")

    def __del__(self) -> None:
        """Called by Serve after the last request."""
        if (service := getattr(self, "service", None)) is not None:
            service.close()


def serve_cluster(options: ClusterServeOptions) -> None:
    """Serve a model from several replicas until SIGTERM or Ctrl-C; then answer the requests in progress.

    The gateway runs in this process, and every machine must be able to load the model. Without ``by_prefix`` Serve
    takes the less loaded of two random replicas.

    Raises:
        NanoinferError: no such model, no cluster, too little room in it, or the port.
    """
    find_model(options.model)
    name = options.name or options.model
    with (
        listen(options.host, options.port) as listener,
        connected(options.address, options.replicas * options.cpus) as ray,
    ):
        handle = deploy(options)
        gateway = Gateway(make_forwarder(handle), limits_of(options))

        async def metrics() -> bytes:
            try:
                pairs = await handle.broadcast("metrics").results_async(timeout_s=METRICS_S, return_exceptions=True)
            except TimeoutError:
                raise APIError(504, "the replicas did not give their metrics in time") from None
            return merge_metrics(dict(pair for pair in pairs if isinstance(pair, tuple)), gateway.counts)

        try:
            run_server(make_app(gateway, metrics, options.api_key), name, listener, options.host, options.drain)
        finally:
            if options.address is not None:  # a Ray of our own goes as a whole
                ray.serve.delete(APP)


def limits_of(options: ClusterServeOptions) -> ServerLimits:
    """Of each client; ``outstanding`` is each replica's."""
    return ServerLimits(outstanding=options.queue, seconds=options.timeout)


def deploy(options: ClusterServeOptions) -> Any:
    """Have Ray Serve start the replicas, or change what runs to this; its handle, once all of them are there.

    Raises:
        NanoinferError: too little room in the cluster, or the replicas cannot start.
    """
    check_room(options.replicas, options.cpus, options.gpus)
    limits = limits_of(options)
    serve = require().serve
    deployment = serve.deployment(
        Replica,
        name="replicas",
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        max_ongoing_requests=limits.outstanding,
        max_queued_requests=limits.outstanding,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=options.drain,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=3,
        request_router_config={"request_router_class": ROUTER} if options.by_prefix else {},
    )
    # The gateway asks for the key: it is of no use to the replicas.
    of_each = replace(options, speed=None if options.speed == "auto" else options.speed, api_key=None)
    serve.start(proxy_location="Disabled")  # the gateway is ours
    try:
        return serve.run(deployment.bind(of_each), name=APP, route_prefix=None)
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise NanoinferError(f"the replicas do not start: {lines[-1].strip()}") from None


def make_forwarder(handle: Any) -> Forward:
    """Has one of the replicas of a handle of Ray Serve answer."""
    ray, stream = require(), handle.options(method_name="answer", stream=True)
    full, gone = ray.serve.exceptions.BackPressureError, ray.serve.exceptions.DeploymentUnavailableError

    async def forward(request: ForwardedRequest, chunks: list[int]) -> MessageBatches:
        reply = stream.remote(request, chunks)
        try:
            async for batch in reply:
                yield batch
        except full:
            raise QueueFull("every replica has as many requests as it takes; try again later") from None
        except ray.exceptions.RayTaskError:  # a mistake of ours, which another replica would make too
            raise
        except (ray.exceptions.RayError, gone) as error:
            raise ReplicaLost(type(error).__name__) from None
        finally:
            reply.cancel()

    return forward
