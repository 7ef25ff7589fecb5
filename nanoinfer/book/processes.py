"""Nothing that a chapter starts outlives it.

A kernel that is killed leaves its children to another parent, and a runner that is killed leaves its kernel. So all of
them carry a mark in their environment, and a watchdog ends what carries it once the runner is gone, however it went.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

#: The environment variable that processes of one run inherit.
MARK = "NANOINFER_CHAPTER_RUN"
#: Seconds between asking a process to end and killing it.
GRACE_S = 1.0


def marked(mark: str) -> list[psutil.Process]:
    """All processes of this user that carry the mark."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def end(mark: str) -> None:
    """End all processes that carry the mark, and those that they start meanwhile."""
    while processes := marked(mark):
        for process in processes:
            with suppress(psutil.Error):
                process.terminate()
        for process in psutil.wait_procs(processes, GRACE_S)[1]:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, GRACE_S)


@contextmanager
def guarded() -> Iterator[str]:
    """A mark for the environment of a kernel; whatever carries it is gone after the block, or after this process."""
    mark = uuid.uuid4().hex
    # A session of its own: Ctrl-C in the terminal must not reach it.
    watchdog = subprocess.Popen(
        [sys.executable, "-m", "nanoinfer.book.processes", mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield mark
    finally:
        end(mark)
        with suppress(OSError):
            watchdog.communicate()  # it sees the end of its input, finds nothing and ends


if __name__ == "__main__":
    sys.stdin.buffer.read()  # until the runner closes it, or is gone
    end(sys.argv[1])
