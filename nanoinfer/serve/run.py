"""From options to a server that answers, and ends without dropping a request."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

import uvicorn
from fastapi import FastAPI
from starlette.middleware.trustedhost import TrustedHostMiddleware

from nanoinfer.engines.continuous import ContinuousEngine
from nanoinfer.engines.load import load
from nanoinfer.errors import NanoinferError, RequestError
from nanoinfer.log import say
from nanoinfer.optimize.options import Optimizations
from nanoinfer.serve.app import make_app
from nanoinfer.serve.options import ServeOptions
from nanoinfer.serve.service import ServerLimits, Service

LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]", "::1"]


def serve(options: ServeOptions) -> None:
    """Load and serve a model. Raises :class:`NanoinferError` where the model or the port cannot be had."""
    with listen(options.host, options.port) as listener:  # before the model is loaded: a taken port is known at once
        service = open_service(options)
        run_app(make_app(service, options.api_key), service.name, listener, options.host, options.drain)


def open_service(options: ServeOptions) -> Service:
    """A model, loaded and ready to serve. Raises :class:`NanoinferError` where it cannot be had."""
    speed = {} if options.speed is None else {"speed": Optimizations.parse(options.speed)}
    engine = load(
        options.model,
        "continuous" if speed else "auto",
        device=options.device,
        dtype=options.dtype,
        seed=options.seed,
        max_running=options.max_running,
        token_budget=max(256, 2 * options.max_running),
        cache_tokens=options.cache_tokens,
        **speed,
    )
    assert isinstance(engine, ContinuousEngine)
    limits = ServerLimits(outstanding=options.queue, seconds=options.timeout)
    return Service(engine, options.name or options.model, limits)


def run_app(app: FastAPI, name: str, listener: socket.socket, host: str, drain_s: float) -> None:
    """Run until SIGTERM or Ctrl-C, then answer what is under way, for ``drain_s`` seconds at most."""
    if _is_local(host):
        # A page of the open web may not reach this server under a name that it has made point to this machine.
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL_NAMES)
    address = listener.getsockname()
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    say(f"nanoinfer: serving {name} at http://{shown}:{address[1]}/v1 (Ctrl-C ends)")
    drain = max(1, round(drain_s))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=drain, server_header=False
    )
    with suppress(KeyboardInterrupt):  # all requests have been answered by then, and it only passes the signal on
        uvicorn.Server(config).run(sockets=[listener])


def _is_local(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises :class:`NanoinferError` for an address that is none, or taken."""
    if not 0 <= port < 2**16:
        raise RequestError(f"port {port} does not exist: give one from 0 (any that is free) to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise NanoinferError(f"host '{host}' is not an address of this machine ({error.strerror})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise NanoinferError(
            f"cannot listen on {host}:{port} ({error.strerror}): give another --port, or end the process that uses it"
        ) from None
    return listener
