"""Replicas on several machines. Needs the extra ``ray``; only the modules that say so import it.

A request goes down one line: :mod:`~nanoinfer.cluster.gateway` (HTTP, retries, errors) ->
:mod:`~nanoinfer.cluster.router` (which replica: :mod:`~nanoinfer.cluster.prefix`) ->
:mod:`~nanoinfer.cluster.replica` (the same app that ``nanoinfer serve`` runs). Offline batches have no such line:
:mod:`~nanoinfer.cluster.batch` deals out the shards of :mod:`~nanoinfer.cluster.shards`.
"""

import os as _os

# What Ray reads when it is imported, here and in all that it starts: nothing is sent anywhere, little is said, and a
# replica that does not answer its health check is killed, not asked to end: whoever waits for it is told so at once.
for _name, _value in {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
}.items():
    _os.environ.setdefault(_name, _value)
