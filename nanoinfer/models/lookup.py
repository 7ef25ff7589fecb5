"""The shape of any model, by name or from a file, without a weight being read."""

from __future__ import annotations

import math
from pathlib import Path

from nanoinfer.configs.catalog import MODELS
from nanoinfer.configs.config import SHAPES, ModelConfig
from nanoinfer.configs.huggingface import from_hf
from nanoinfer.errors import ModelError, nearest
from nanoinfer.store import read_json
from nanoinfer.theory.arithmetic import parameters

#: Models that are counted but not loaded, by their names in small letters.
_COUNTED = {name.lower(): name for name in MODELS if name.lower() not in SHAPES}


def config_of(name: str) -> ModelConfig:
    """The shape of a model by name (``gpt2``, ``llama-3-70b``) or of a file or folder; else :class:`ModelError`."""
    if (shape := name.removeprefix("random:")) in SHAPES:
        return SHAPES[shape]
    if (counted := _COUNTED.get(shape.lower())) is not None:
        return from_hf(MODELS[counted][0], counted)
    if (path := existing_path(name)) is not None:
        return config_of_file(path)
    if (path := Path(name)).suffix in (".gguf", ".json") or len(path.parts) > 2:
        raise ModelError(f"{path}: no such file or folder")
    known = [*SHAPES, *_COUNTED]
    raise ModelError(f"unknown model '{name}' (nor is it a config.json, a folder or a .gguf); {nearest(shape, known)}")


def existing_path(name: str) -> Path | None:
    """The file or folder of this name on this machine, or None."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError):  # a name too long for a file, or an unknown user's home
        return None


def config_of_file(path: Path) -> ModelConfig:
    """The shape that a config.json, a folder with one, or a GGUF's header describes; no weight is read.

    A GGUF's own tensors must add up to the count, so a variant that its header does not describe is refused.
    """
    if path.suffix != ".gguf":
        path = path / "config.json" if path.is_dir() else path
        return from_hf(read_json(path, ModelError), str(path))
    from nanoinfer.models.gguf_file import read_gguf  # brings torch, which a config.json does without

    gguf = read_gguf(path)
    stored = sum(math.prod(t.shape) for name, t in gguf.tensors.items() if not name.startswith("rope_f"))
    if stored != (counted := parameters(gguf.config)):
        counts = f"its tensors hold {stored:,} parameters, its header describes {counted:,}"
        raise ModelError(f"{path}: {counts}; this variant of the architecture is not supported")
    return gguf.config
