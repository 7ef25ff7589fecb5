"""Where a measurement of a model on this machine is kept, so that it need not be taken again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from nanoinfer.measure.machine import describe_machine


def place(root: Path, kind: str, about: Iterable[object], folders: Iterable[Path]) -> Path:
    """A file under ``root/kind`` for what was measured ``about``; another one as soon as it may have changed.

    Args:
        root: the user's cache.
        kind: of measurement.
        about: the model, its dtype and device, settings.
        folders: of the code that was measured.
    """
    import torch

    told, code = describe_machine(), hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.iterdir()):
            if file.suffix in (".py", ".cpp", ".h"):
                code.update(file.read_bytes())
    machine = [torch.__version__, torch.get_num_threads(), told["cpu"], told["gpus"]]
    key = json.dumps([[str(x) for x in about], machine, code.hexdigest()], default=str)
    return root / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
