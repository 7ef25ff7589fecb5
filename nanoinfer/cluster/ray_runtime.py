"""Ray itself: imported and started in one place, quiet, without telemetry, and stopped when this process ends.

Any client that reaches Ray's ports may run code as its user. A Ray of our own listens on loopback, and what does not
obey that (the replicas of Ray Serve) asks for a token. A Ray of several machines belongs on a network of its own, with
``RAY_AUTH_MODE=token``.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanoinfer.errors import NanoinferError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
REACH_S = 5.0
STORE_BYTES = 100_000_000  # of a Ray of our own: requests and answers are small
#: Ray reads these when it is imported, and hands them on to the processes that it starts. Nothing is sent anywhere,
#: little is printed, and a replica that fails its health check is killed, so that its clients get an error at once.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}


def require() -> Any:
    """The module ``ray``, with Serve, imported with :data:`ENVIRONMENT` set unless the user has set it otherwise.

    Raises:
        NanoinferError: Ray is not installed.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.serve.exceptions
    except ModuleNotFoundError:
        raise NanoinferError("replicas and batches on a cluster need Ray: pip install 'nanoinfer[ray]'") from None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return ray


@contextmanager
def connected(address: str | None, cpus: int) -> Iterator[Any]:
    """Within a Ray cluster: the module ``ray``, which must not have been imported earlier.

    Args:
        address: ``host:port`` of a cluster's head, or ``auto`` for the one that this machine is a part of. None starts
            one on this machine alone, which ends with this process, however that ends.
        cpus: of the one that is started.

    Raises:
        NanoinferError: no cluster there, or no Ray.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    host = None if address in (None, "auto") else _reach(str(address))
    if "ray" not in sys.modules and (address is None or host in LOOPBACK):
        # Ray replaces a loopback address by the machine's own, and then listens to other machines. Not where it takes
        # clusters for impossible, as on Windows and macOS, and with this setting here.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if address is None:
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    if address is None:
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        options["_node_ip_address"] = "127.0.0.1"
    ray = require()
    try:
        ray.init(address or "local", **options)
    except ConnectionError as error:
        what = str(error).splitlines()[0]
        raise NanoinferError(f"no Ray cluster ({what}): start one with `ray start --head`") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _reach(address: str) -> str:
    """The host of an address that accepts connections: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise NanoinferError(
            f"no Ray cluster at {address} ({error}): give HOST:PORT of one, as `ray start --head` prints it, or auto"
        ) from None
    return host


def check_room(n: int, cpus: float, gpus: float) -> None:
    """Raises :class:`NanoinferError` where the cluster is too small for ``n`` of these: they would wait for ever."""
    resources = require().cluster_resources()
    for kind, each in (("CPU", cpus), ("GPU", gpus)):
        if n * each > (total := resources.get(kind, 0)):
            raise NanoinferError(
                f"{n} x {each:g} {kind}s are wanted and the cluster has {total:g}: ask for fewer, or add a machine "
                "(`ray start --address HEAD:PORT`)"
            )
