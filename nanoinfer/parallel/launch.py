"""Start ranks on this machine, a process each, by torchrun: each calls one function, and results return as JSON."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from nanoinfer import errors
from nanoinfer.errors import DeviceError, RequestError
from nanoinfer.store import write_whole

if TYPE_CHECKING:
    from nanoinfer.parallel.collectives import Communicator

MOST_RANKS: Final = 64
POLL_S: Final = 0.05


def launch(
    task: str, ranks: int, options: dict[str, Any] | None = None, *, timeout_s: float = 600.0, device: str = "cpu"
) -> list[Any]:
    """Call a function in each of ``ranks`` processes and return the results by rank.

    ``task`` is ``module:function``, called as ``function(comm, **options)``; options and result must fit in JSON. Ranks
    share this process's standard output, and rank 0's ``sys.stderr`` appears on this process's. On CPUs (gloo over the
    loopback interface) they share the cores evenly; on ``cuda`` (NCCL) each has a GPU.

    Raises:
        RequestError: other than 1 to 64 ranks.
        DeviceError: more ranks than GPUs; ranks that timed out or died, with the last line they wrote.
        NanoinferError: what a rank raised.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise RequestError(f"ranks must be 1 to {MOST_RANKS}, got {ranks}")
    if device == "cuda":
        import torch

        if (here := torch.cuda.device_count()) < ranks:
            raise DeviceError(f"{ranks} ranks need {ranks} GPUs and this machine has {here}; take fewer, or device cpu")
    elif device != "cpu":
        raise DeviceError(f"ranks run on cpu or cuda, not on '{device}'")
    with tempfile.TemporaryDirectory(prefix="nanoinfer-ranks-") as name:
        folder = Path(name)
        order = {"task": task, "options": options or {}, "timeout_s": timeout_s, "device": device}
        write_whole(folder / "order.json", json.dumps(order))
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        command += ["-m", "nanoinfer.parallel.launch", name]
        with (folder / "torchrun.log").open("w", encoding="utf-8") as log:
            # Nothing is written to their standard input: it closes when this process ends, and ranks end with it.
            process = subprocess.Popen(
                command, env=_environment(ranks), stdin=subprocess.PIPE, stderr=log, start_new_session=True
            )
        try:
            code = _wait(process, folder / "rank-0.log", timeout_s)
        finally:
            _stop(process)
        return collect_results(folder, ranks, code, timeout_s)


def _environment(ranks: int) -> dict[str, str]:
    """Of the ranks: loopback only, and the cores divided evenly among them."""
    interfaces = psutil.net_if_addrs().items()
    loopback = next(name for name, addresses in interfaces if any(a.address == "127.0.0.1" for a in addresses))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // ranks))
    ours = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": threads}
    return {**os.environ, **ours, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _wait(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> int | None:
    """Torchrun's exit code, or None on time-out. Copies rank 0's standard error to this process's meanwhile."""
    deadline = time.monotonic() + timeout_s
    log.touch()
    with log.open(encoding="utf-8", errors="replace") as lines:
        while True:
            code = process.poll()
            if text := lines.read():
                print(text, end="", file=sys.stderr, flush=True)
            if code is not None or time.monotonic() > deadline:
                return code
            time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and the ranks, which end when their standard input closes."""
    assert process.stdin is not None
    process.stdin.close()
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


def collect_results(folder: Path, ranks: int, code: int | None, timeout_s: float) -> list[Any]:
    """What the ranks left in ``folder``: their results, or the first error; ``code`` is None after a time-out."""
    log = (folder / "torchrun.log").read_text(encoding="utf-8", errors="replace")
    if code and (killed := re.search(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)", log)):
        raise DeviceError(f"rank {killed[2]} was killed (signal {killed[1]}); was it out of memory?")
    failures = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("error-*.json")]
    if failures:
        first = min(failures, key=lambda failure: failure["at"])
        if first["kind"] == "BrokenPipeError":  # the reader of our output has left
            raise BrokenPipeError
        text = f"rank {first['rank']} died: {first['kind']}: {first['text']}"
        kind = getattr(errors, first["kind"], None)
        raise kind(first["text"]) if kind else DeviceError(text)
    if code is None:
        raise DeviceError(f"the {ranks} ranks were stopped: they had not ended after {timeout_s:.0f} s")
    if code:
        lines = log.splitlines() or ["without a word"]
        raise DeviceError(f"the ranks died: torchrun ended with {code}: {lines[-1].strip()}")
    return [json.loads((folder / f"result-{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def run_tasks(comm: Communicator, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A task made of several, each with an empty log: ``tasks`` has the options of each by ``module:function``."""
    results = {}
    for task, options in tasks.items():
        comm.log.clear()
        results[task] = _call(task, comm, options)
    return results


def _call(task: str, comm: Communicator, options: Mapping[str, Any]) -> Any:
    module, _, function = task.partition(":")
    return getattr(importlib.import_module(module), function)(comm, **options)


def _run_rank(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from nanoinfer.parallel.collectives import Communicator

    threading.Thread(target=_end_with_caller, daemon=True).start()
    order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    if order["device"] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if order["device"] == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=order["timeout_s"]))
    rank = dist.get_rank()
    try:
        with contextlib.ExitStack() as stack:
            if rank == 0:  # a file that the caller copies: the process's own stderr has torchrun's messages too
                log = stack.enter_context((folder / "rank-0.log").open("a", buffering=1, encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stderr(log))
            result = _call(order["task"], Communicator(), order["options"])
        write_whole(folder / f"result-{rank}.json", json.dumps(result))
        dist.barrier()  # no rank closes its connections before all are done
    except Exception as error:
        failure = {"rank": rank, "kind": type(error).__name__, "text": str(error), "at": time.time()}
        write_whole(folder / f"error-{rank}.json", json.dumps(failure))
        raise
    finally:
        dist.destroy_process_group()


def _end_with_caller() -> None:
    """Exit as soon as the process that called :func:`launch` has ended, whatever this rank waits for."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    _run_rank(Path(sys.argv[1]))
