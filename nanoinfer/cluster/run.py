"""Replicas of a model on a Ray cluster, and the gateway in front of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoinfer.cluster.asgi import Asked
from nanoinfer.cluster.figures import together
from nanoinfer.cluster.gateway import Ask, Bunches, Gateway, Lost, make_app
from nanoinfer.cluster.replica import Replica
from nanoinfer.cluster.start import check_room, connected, require
from nanoinfer.engines.async_engine import Busy
from nanoinfer.errors import NanoinferError
from nanoinfer.models.registry import find_model
from nanoinfer.serve.errors import Problem
from nanoinfer.serve.run import answer, listen
from nanoinfer.serve.service import Limits

APP = "nanoinfer"
ROUTER = "nanoinfer.cluster.router.PrefixRouter"  # Serve wants its path
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 1.0, 5.0  # three failures on end, and Serve replaces a replica
FIGURES_S = 5.0  # in which the replicas must tell theirs


def serve_cluster(
    model: str,
    *,
    replicas: int = 2,
    address: str | None = None,
    cpus: int = 1,
    gpus: float = 0,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_key: str | None = None,
    limits: Limits | None = None,
    drain_s: float = 30.0,
    by_prefix: bool = True,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Serve a model from several replicas until SIGTERM or Ctrl-C; then answer what is under way.

    Args:
        model: as for :func:`nanoinfer.load`; every machine must be able to load it.
        replicas: how many, spread over the machines.
        address: of a Ray cluster, as for :func:`nanoinfer.cluster.start.connected`; None is this machine alone.
        cpus: cores of a replica.
        gpus: of a replica.
        host: where the gateway listens, which runs in this process.
        port: 0 takes one that is free.
        name: that clients call the model by; None is ``model``.
        api_key: that clients must give.
        limits: of each client; ``outstanding`` is each replica's.
        drain_s: seconds for what is under way, at the end or when a replica is taken away.
        by_prefix: send a prompt where its beginning is cached; else where the least is to do (the lesser of two
            replicas taken at random, Serve's own way).
        options: more of :func:`nanoinfer.serve.run.open_service`.

    Raises:
        NanoinferError: no such model, no cluster, too little room in it, or the port.
    """
    find_model(model)
    limits = limits or Limits()
    options = {**(options or {}), "name": name or model, "limits": limits}
    with listen(host, port) as listener, connected(address, replicas * cpus) as ray:
        actor = {"num_cpus": cpus, "num_gpus": gpus}
        handle = deploy(model, replicas, actor, limits=limits, drain_s=drain_s, by_prefix=by_prefix, options=options)
        gateway = Gateway(asking(handle), limits)

        async def metrics() -> bytes:
            try:
                told = await handle.broadcast("figures").results_async(timeout_s=FIGURES_S, return_exceptions=True)
            except TimeoutError:
                raise Problem(504, "the replicas did not tell their figures in time") from None
            return together(dict(pair for pair in told if isinstance(pair, tuple)), gateway.counts)

        try:
            answer(make_app(gateway, metrics, api_key), name or model, listener, host, drain_s)
        finally:
            if address is not None:  # a Ray of our own goes as a whole
                ray.serve.delete(APP)


def deploy(
    model: str,
    replicas: int,
    actor: Mapping[str, float],
    *,
    limits: Limits,
    drain_s: float,
    by_prefix: bool,
    options: Mapping[str, Any],
) -> Any:
    """Have Ray Serve start the replicas, or change what runs to this; its handle, once all of them are there.

    ``actor`` is what a replica takes of a machine. The rest is as for :func:`serve_cluster`.

    Raises:
        NanoinferError: too little room in the cluster, or the replicas cannot start.
    """
    check_room(replicas, actor["num_cpus"], actor["num_gpus"])
    serve = require().serve
    deployment = serve.deployment(
        Replica,
        name="replicas",
        num_replicas=replicas,
        ray_actor_options=dict(actor),
        max_ongoing_requests=limits.outstanding,
        max_queued_requests=limits.outstanding,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=3,
        request_router_config={"request_router_class": ROUTER} if by_prefix else {},
    )
    serve.start(proxy_location="Disabled")  # the gateway is ours
    try:
        return serve.run(deployment.bind(model, dict(options)), name=APP, route_prefix=None)
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise NanoinferError(f"the replicas do not start: {lines[-1].strip()}") from None


def asking(handle: Any) -> Ask:
    """Has one of the replicas behind a handle of Ray Serve answer."""
    ray, stream = require(), handle.options(method_name="answer", stream=True)
    full, gone = ray.serve.exceptions.BackPressureError, ray.serve.exceptions.DeploymentUnavailableError

    async def ask(asked: Asked, chunks: list[int]) -> Bunches:
        reply = stream.remote(asked, chunks)
        try:
            async for bunch in reply:
                yield bunch
        except full:
            raise Busy("every replica has as many requests as it takes; try again later") from None
        except ray.exceptions.RayTaskError:  # a mistake of ours, and not one that another replica would not make
            raise
        except (ray.exceptions.RayError, gone) as error:
            raise Lost(type(error).__name__) from None
        finally:
            reply.cancel()

    return ask
