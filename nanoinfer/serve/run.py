"""From a model's name to a server that answers, and ends without dropping anybody."""

from __future__ import annotations

import ipaddress
import socket
import sys
from contextlib import suppress

import uvicorn
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.load import load
from nanoinfer.errors import NanoinferError, RequestError
from nanoinfer.optimize.options import Optimizations
from nanoinfer.serve.app import make_app
from nanoinfer.serve.service import Limits, Service

LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]", "::1"]


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_key: str | None = None,
    device: str = "cpu",
    dtype: str = "bfloat16",
    speed: str | None = None,
    max_running: int = 32,
    cache_tokens: int | None = None,
    limits: Limits | None = None,
    drain_s: float = 30.0,
    seed: int = 0,
) -> None:
    """Serve a model until SIGTERM or Ctrl-C; then answer what is under way, for ``drain_s`` seconds at most.

    Args:
        model: as for :func:`nanoinfer.load`.
        host: where to listen; anything but a loopback address lets other machines in.
        port: 0 takes one that is free.
        name: that clients call the model by; None is ``model``.
        api_key: that clients must give.
        device: of the model.
        dtype: of the model.
        speed: as :meth:`nanoinfer.optimize.options.Optimizations.parse` reads it; None for what a trial finds best.
        max_running: sequences in a step.
        cache_tokens: that the KV cache holds; None as much as is reasonable.
        limits: of each client; None for the defaults.
        drain_s: seconds.
        seed: of the weights of ``random:`` models.

    Raises:
        NanoinferError: the model cannot be had, or the port.
    """
    with listen(host, port) as listener:  # before the model is loaded: a port that is taken is known at once
        service = open_service(
            model,
            name=name,
            device=device,
            dtype=dtype,
            speed=speed,
            max_running=max_running,
            cache_tokens=cache_tokens,
            limits=limits,
            seed=seed,
        )
        answer(make_app(service, api_key), service.name, listener, host, drain_s)


def open_service(
    model: str,
    *,
    name: str | None = None,
    device: str = "cpu",
    dtype: str = "bfloat16",
    speed: str | None = None,
    max_running: int = 32,
    cache_tokens: int | None = None,
    limits: Limits | None = None,
    seed: int = 0,
) -> Service:
    """A model, loaded and ready to serve. Arguments and errors as in :func:`serve`."""
    options = {} if speed is None else {"speed": Optimizations.parse(speed)}
    engine = load(
        model,
        "auto" if speed is None else "continuous",
        device=device,
        dtype=dtype,
        seed=seed,
        max_running=max_running,
        token_budget=max(256, 2 * max_running),
        cache_tokens=cache_tokens,
        **options,
    )
    assert isinstance(engine, ContinuousEngine)
    return Service(engine, name or model, limits or Limits())


def answer(app: FastAPI, name: str, listener: socket.socket, host: str, drain_s: float) -> None:
    """Answer until SIGTERM or Ctrl-C, then what is under way, for ``drain_s`` seconds at most."""
    if _is_local(host):
        # A page of the open web may not reach this server under a name that it has made point to this machine.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES)
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    print(f"nanoinfer: serving {name} at http://{shown}:{address[1]}/v1 (Ctrl-C ends)", file=sys.stderr, flush=True)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        server_header=False,
    )
    with suppress(KeyboardInterrupt):  # it has drained by then, and only passes the signal on
        uvicorn.Server(config).run(sockets=[listener])


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises :class:`NanoinferError` for an address that is none, or taken."""
    if not 0 <= port < 2**16:
        raise RequestError(f"port {port} is none: give one from 0 (any that is free) to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise NanoinferError(f"host '{host}' is no address of this machine ({error.strerror})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise NanoinferError(
            f"cannot listen on {host}:{port} ({error.strerror}): give another --port, or end who uses it"
        ) from None
    return listener
