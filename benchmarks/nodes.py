"""Two Ray nodes on this machine, and what is needed to kill parts of them."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from nanoinfer.cluster.ray_runtime import require

#: As a Ray of our own has it (:mod:`nanoinfer.cluster.ray_runtime`); Ray reads it when it is imported.
os.environ |= {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

NANOINFER = (sys.executable, "-m", "nanoinfer", "cluster")
#: Room in each for what all the others have.
NODE: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 80_000_000, "node_ip_address": "127.0.0.1"}
STARTS = 3  # Ray gives a process of its own 15 s to come up, whatever is set; on a busy machine that is too little
#: After how long a node that says nothing is taken for dead. Ray's own 3 s, 10 s and 5 are for larger clusters.
HEARTBEAT = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class Nodes:
    """Ray nodes that were started here, the head first. ``folder`` is for their logs and sockets."""

    def __init__(self, cluster: Any, folder: str) -> None:
        self.cluster, self.folder = cluster, folder

    @property
    def address(self) -> str:
        """Of the head."""
        return str(self.cluster.address)

    def raylets(self) -> list[psutil.Process]:
        """The process of each node that all its workers are children of."""
        known = [each for node in self.cluster.list_all_nodes() for each in node.all_processes.get("raylet", ())]
        return [psutil.Process(each.process.pid) for each in known if each.process.poll() is None]

    def workers(self, kind: str) -> list[psutil.Process]:
        """Those that run actors of a class, the head's first: ``ServeReplica``, ``Worker``."""
        found = [child for raylet in self.raylets() for child in _children(raylet)]
        return [child for child in found if _title(child).startswith(f"ray::{kind}")]

    def kill_last_node(self) -> None:
        """All at once and without a word, as in a power cut."""
        raylet = self.raylets()[-1]
        victims = [raylet, *_children(raylet)]
        for victim in victims:
            _signal(victim, signal.SIGSTOP)  # none has time to notice that another one is gone
        for victim in victims:
            _signal(victim, signal.SIGKILL)

    def add(self) -> None:
        """Another node."""
        self._start(**NODE)

    def add_head(self) -> None:
        """The first one."""
        self._start(**NODE, include_dashboard=False, _system_config=HEARTBEAT)

    def _start(self, **options: Any) -> None:
        for left in reversed(range(STARTS)):
            before = _children(psutil.Process())
            try:
                self.cluster.add_node(**options, temp_dir=self.folder)
                return
            except Exception:  # of no kind of its own: the node has not come up in time
                if not left:
                    raise
                for process in _children(psutil.Process()):
                    if process not in before:
                        _signal(process, signal.SIGKILL)


@contextmanager
def nodes(n: int = 2) -> Iterator[Nodes]:
    """So many nodes, which end with this process."""
    require()
    from ray.cluster_utils import Cluster

    cluster, folder = Cluster(), tempfile.mkdtemp(prefix="ray-")
    found = Nodes(cluster, folder)
    try:
        found.add_head()
        for _ in range(n - 1):
            found.add()
        yield found
    finally:
        left = [process for raylet in found.raylets() for process in (raylet, *_children(raylet))]
        cluster.shutdown()
        for process in psutil.wait_procs(left, timeout=10)[1]:
            _signal(process, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def gateway(address: str, model: str, *words: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """``nanoinfer cluster serve`` as a process of its own, two replicas; its address, and that process."""
    command = [*NANOINFER, "serve", model, "--address", address, "--port", "0", *words]
    with tempfile.NamedTemporaryFile("w+") as log:  # a pipe that is not read would block it one day
        process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            yield _address(process, Path(log.name)), process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        if found := re.search(r"http://[\d.:]+", log.read_text()):
            return found[0]
        time.sleep(0.2)
    raise RuntimeError(f"the gateway did not start: {log.read_text()[-2000:]}")


def batch(address: str, model: str, prompts: Path, out: Path, *words: str) -> subprocess.Popen[str]:
    """``nanoinfer cluster batch``, started."""
    command = [*NANOINFER, "batch", model, str(prompts), str(out), "--address", address, *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _signal(process: psutil.Process, what: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(what)
