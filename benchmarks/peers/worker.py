"""An engine in a process of its own, as the benchmark sees it; the other end of ``protocol.py``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from nanoinfer.errors import NanoinferError

LIMIT_S = 1800  # for one answer; compiling takes minutes


class WorkerError(NanoinferError):
    """An engine that ended, hung, or said what is no answer."""


@dataclass(frozen=True, eq=False)
class Program:
    """What to start.

    Args:
        names: of the engines it holds, over one model.
        script: speaks the protocol.
        settings: of the script; ``threads`` is for OpenMP too.
        python: of the environment that it needs.
    """

    names: tuple[str, ...]
    script: Path
    settings: dict[str, Any]
    python: Path = Path(sys.executable)


@dataclass(frozen=True)
class Answer:
    """What one job came to: token ids of each row, seconds to the first token of all and to the end."""

    tokens: list[list[int]]
    first_s: float
    total_s: float


class Worker:
    """A program that has been started and has its model loaded. Between jobs it is stopped, as by Ctrl-Z: whatever its
    threads would do while they wait (vLLM's wake up 1300 times a second, others spin), they do not do it to the others.

    Raises:
        WorkerError: it did not get that far.
    """

    def __init__(self, program: Program) -> None:
        self.program, self.name = program, " and ".join(program.names)
        # The same number of threads for all. nanoinfer sets its own spinning at import; others keep their defaults.
        env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        if threads := program.settings.get("threads"):
            env["OMP_NUM_THREADS"] = str(threads)
        command = [str(program.python), str(program.script), json.dumps(program.settings)]
        # A pipe that is not read would fill up and stop it.
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            env=env,
            start_new_session=True,  # so that it can be ended with all that it started
        )
        try:
            self.version = str(self._answer()["version"])
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - begin
        self._signal(signal.SIGSTOP)

    def run(self, engine: str, prompts: list[list[int]], new: int) -> Answer:
        """One job, to its end. Raises :class:`WorkerError`, also for another number of tokens than was asked for."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it is gone; reading says why
            self._process.stdin.write(json.dumps({"engine": engine, "prompts": prompts, "new": new}) + "\n")
            self._process.stdin.flush()
        said = self._answer()
        self._signal(signal.SIGSTOP)
        answer = Answer(said["tokens"], said["first_s"], said["total_s"])
        if [len(ids) for ids in answer.tokens] != [new] * len(prompts):
            raise WorkerError(f"{engine} did not generate {new} tokens for each of {len(prompts)} prompts")
        return answer

    def close(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        """Send it to the program and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        begin = time.perf_counter()
        timer = threading.Timer(LIMIT_S, self._signal, (signal.SIGKILL,))
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line and time.perf_counter() - begin > LIMIT_S:
            raise WorkerError(f"{self.name} gave no answer within {LIMIT_S:g} s")
        if not line:
            raise WorkerError(f"{self.name} ended without an answer; its last words: {self._last_words()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise WorkerError(f"{self.name} said what is no answer: {line[:200]!r}") from None
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - 800))
        return self._log.read().decode("utf-8", "replace").strip() or "none"
