"""What ranks are made to do by the tests of the launcher."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from nanoinfer.parallel.collectives import Communicator


def killed(comm: Communicator) -> None:
    """Rank 1 dies while rank 0 waits for it."""
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(torch.zeros(1))


def wait(comm: Communicator, folder: str) -> None:
    """For longer than anybody has; the process id is left in a file."""
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(600)
