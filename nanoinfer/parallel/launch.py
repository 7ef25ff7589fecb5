"""Starts ranks: one process each, by torchrun, on this machine.

A notebook cannot become several processes, so what the ranks do lives in the library: :func:`launch` names a function
there, every rank calls it with its :class:`~.collectives.Wire`, and what they return comes back as data.
"""

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
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import psutil

from nanoinfer import errors
from nanoinfer.errors import DeviceError, RequestError
from nanoinfer.store import write_whole

#: Ranks of one machine; more is a slip of the keyboard.
MOST_RANKS: Final = 64
POLL_S: Final = 0.05


def launch(
    task: str, ranks: int, options: dict[str, Any] | None = None, *, timeout_s: float = 600.0, device: str = "cpu"
) -> list[Any]:
    """Call a function in every one of ``ranks`` processes; what they return, in the order of ranks.

    They share this process's standard output. What rank 0 writes to ``sys.stderr`` comes out at this process's.

    Args:
        task: ``module:function`` of this library, called as ``function(wire, **options)``; it returns plain data.
        ranks: 1 to 64. On CPUs they share the cores evenly; on GPUs each has its own.
        options: plain data.
        timeout_s: then every rank is stopped.
        device: ``cpu`` (gloo over the loopback interface) or ``cuda`` (NCCL).

    Raises:
        RequestError: a number of ranks outside those limits.
        DeviceError: more ranks than GPUs, or ranks that took too long or died, with the last line they wrote.
        NanoinferError: what a rank raised, as it raised it.
    """
    if not 1 <= ranks <= MOST_RANKS:
        raise RequestError(f"ranks must be 1 to {MOST_RANKS}, got {ranks}")
    if device == "cuda":
        _check_gpus(ranks)
    elif device != "cpu":
        raise DeviceError(f"ranks run on cpu or cuda, not on '{device}'")
    with tempfile.TemporaryDirectory(prefix="nanoinfer-ranks-") as name:
        folder = Path(name)
        order = {"task": task, "options": options or {}, "timeout_s": timeout_s, "device": device}
        write_whole(folder / "order.json", json.dumps(order))
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        command += ["-m", "nanoinfer.parallel.launch", name]
        with (folder / "stderr").open("w", encoding="utf-8") as log:
            # Nothing is ever written to their standard input. It ends with this process, however that ends.
            process = subprocess.Popen(
                command, env=_environment(ranks), stdin=subprocess.PIPE, stderr=log, start_new_session=True
            )
        try:
            code = _wait(process, folder / "words", timeout_s)
        finally:
            _stop(process)
        return _answers(folder, ranks, code, timeout_s)


def _check_gpus(ranks: int) -> None:
    import torch

    if (here := torch.cuda.device_count()) < ranks:
        raise DeviceError(f"{ranks} ranks need {ranks} GPUs and this machine has {here}; take fewer, or device cpu")


def _environment(ranks: int) -> dict[str, str]:
    """Of the ranks: loopback only, and as many threads each as there are cores for."""
    loopback = next(
        name for name, found in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in found)
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // ranks))
    ours = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": threads}
    return {**os.environ, **ours, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _wait(process: subprocess.Popen[bytes], words: Path, timeout_s: float) -> int | None:
    """Torchrun's exit code, or None when time is up. What rank 0 says meanwhile on standard error is said here."""
    until = time.monotonic() + timeout_s
    words.touch()
    with words.open(encoding="utf-8", errors="replace") as said:
        while True:
            code = process.poll()
            if text := said.read():
                print(text, end="", file=sys.stderr, flush=True)
            if code is not None or time.monotonic() > until:
                return code
            time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the ranks, which watch their standard input, and torchrun with them."""
    assert process.stdin is not None
    process.stdin.close()
    for way in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, way)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


def _answers(folder: Path, ranks: int, code: int | None, timeout_s: float) -> list[Any]:
    """What the ranks returned, or what went wrong first: whoever fails later does so because of that."""
    log = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
    if code and (killed := re.search(r"failed \(exitcode: -(\d+)\) local_rank: (\d+)", log)):
        raise DeviceError(f"rank {killed[2]} was killed (signal {killed[1]}); was it out of memory?")
    failed = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("error-*.json")]
    for said in sorted(failed, key=lambda said: said["at"]):
        if said["kind"] == "BrokenPipeError":  # whoever read our output has left
            raise BrokenPipeError
        kind = getattr(errors, said["kind"], None)
        raise kind(said["text"]) if kind else DeviceError(f"rank {said['rank']} died: {said['kind']}: {said['text']}")
    if code is None:
        raise DeviceError(f"the {ranks} ranks were stopped: they had not ended after {timeout_s:.0f} s")
    if code:
        lines = log.splitlines() or ["without a word"]
        raise DeviceError(f"the ranks died: torchrun ended with {code}: {lines[-1].strip()}")
    return [json.loads((folder / f"answer-{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def _rank(folder: Path) -> None:
    """What each process does."""
    import torch
    import torch.distributed as dist

    from nanoinfer.parallel.collectives import Wire

    threading.Thread(target=_end_with_caller, daemon=True).start()
    order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    if order["device"] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if order["device"] == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=order["timeout_s"]))
    rank = dist.get_rank()
    try:
        module, _, function = order["task"].partition(":")
        with _words(folder / "words") if rank == 0 else contextlib.nullcontext():
            answer = getattr(importlib.import_module(module), function)(Wire(), **order["options"])
        write_whole(folder / f"answer-{rank}.json", json.dumps(answer))
        dist.barrier()  # nobody hangs up while another still listens
    except Exception as error:
        said = {"rank": rank, "kind": type(error).__name__, "text": str(error), "at": time.time()}
        write_whole(folder / f"error-{rank}.json", json.dumps(said))
        raise
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _words(path: Path) -> Iterator[None]:
    """Python's standard error to a file that the caller reads along; torchrun's own has more than it wants to know."""
    with path.open("a", buffering=1, encoding="utf-8") as words, contextlib.redirect_stderr(words):
        yield


def _end_with_caller() -> None:
    """Leave as soon as whoever called :func:`launch` has left, and whatever this rank waits for."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    _rank(Path(sys.argv[1]))
