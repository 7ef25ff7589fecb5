"""Load a model by name: ``random:SHAPE``, a name we know, a file or folder on this machine, a hub id ``owner/name``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from nanoinfer.configs.config import SHAPES, ModelConfig, check_runnable
from nanoinfer.configs.huggingface import from_hf
from nanoinfer.errors import DeviceError, ModelError, TokenizerError, nearest
from nanoinfer.models import fetch
from nanoinfer.models.gguf_file import inv_freq, load_gguf, read_gguf
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama
from nanoinfer.models.lookup import existing_path
from nanoinfer.models.weights import assemble, load_folder, random_state
from nanoinfer.sampling.params import check_seed
from nanoinfer.store import cache_dir, read_json
from nanoinfer.text import tokenizer_files
from nanoinfer.text.tokenizer import Tokenizer
from nanoinfer.text.tokenizer_files import UnsupportedTokenizer, eos_ids_of_folder, gguf_eos_ids
from nanoinfer.theory.arithmetic import parameters

DEFAULT = "smollm2-135m"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: The book's models on the hub, each at a commit, so that a run can be repeated.
HUB: Mapping[str, tuple[str, str]] = {
    "gpt2": ("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
    "gpt2-medium": ("openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da"),
    "gpt2-large": ("openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519"),
    "gpt2-xl": ("openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2"),
}
GPT2_END = 50_256  # <|endoftext|>, GPT-2's only special token


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device; ``model.config`` is its shape."""

    name: str
    model: GPT2 | Llama
    tokenizer: Tokenizer | None  # without one, prompts are token ids
    eos_ids: frozenset[int]  # all ids that end a sequence
    source: str  # what was loaded from where, for provenance


@dataclass(frozen=True)
class KnownModel:
    """One row of ``nanoinfer models``."""

    name: str
    family: str
    parameters: int
    on_disk: bool
    how: str


def known_models() -> list[KnownModel]:
    """Every name that can be loaded without a path, and whether its files are on this machine already."""
    rows = [(DEFAULT, fetch.SMOLLM2.present, f"out of the Python package {fetch.SMOLLM2.requirement}")]
    rows += [(name, fetch.hub_folder(*at) is not None, f"from the hub: {at[0]}") for name, at in HUB.items()]
    rows += [(f"random:{name}", True, "random weights from a seed, at true shape") for name in SHAPES]
    shapes = [SHAPES[name.removeprefix("random:")] for name, _, _ in rows]
    return [KnownModel(row[0], s.family, parameters(s), *row[1:]) for row, s in zip(rows, shapes, strict=True)]


def check_device(device: str | torch.device) -> torch.device:
    """The device, if this machine has it. Raises :class:`DeviceError`."""
    device = str(device)
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", device):
        raise DeviceError(f"unknown device '{device}'; {nearest(device, ['cpu', 'cuda', 'cuda:1', 'mps'])}")
    checked = torch.device(device)
    if checked.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise DeviceError("device 'cuda' is not there: no CUDA GPU, or a torch without CUDA; use device 'cpu'")
        if (checked.index or 0) >= count:
            raise DeviceError(f"device '{device}' is not there: this machine has cuda:0 to cuda:{count - 1}")
    if checked.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device 'mps' is not there: it needs a Mac with Apple silicon; use device 'cpu'")
    return checked


def check_dtype(device: str | torch.device, dtype: str | torch.dtype) -> torch.dtype:
    """The dtype, if the device can multiply in it. Raises :class:`DeviceError`."""
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise DeviceError(f"unknown dtype '{dtype}'; {nearest(dtype, DTYPES)}")
    try:
        probe = torch.ones(2, 2, dtype=DTYPES[dtype], device=check_device(device))
        (probe @ probe).sum().item()
    except RuntimeError as error:
        raise DeviceError(f"device '{device}' cannot compute in {dtype} ({str(error).splitlines()[0]})") from None
    return DTYPES[dtype]


#: Loads a model onto a device, in a dtype, with a seed.
Loader = Callable[[torch.device, torch.dtype, int], LoadedModel]


def load_model(
    name: str | Path, *, device: str | torch.device = "cpu", dtype: str | torch.dtype = "float32", seed: int = 0
) -> LoadedModel:
    """Load a model and its tokenizer.

    ``name`` is ``smollm2-135m``, ``gpt2`` to ``gpt2-xl``, ``random:SHAPE``, a folder with config.json and safetensors,
    a ``.gguf`` file, or a hub id ``owner/name``; ``seed`` is of the weights of ``random:`` models.
    Raises :class:`NanoinferError`: one line that names what is unknown, missing or damaged, and the way out.
    """
    return find_model(str(name))(check_device(device), check_dtype(device, dtype), check_seed(seed))


def find_model(name: str) -> Loader:
    """The function that loads the model of this name; nothing is read or fetched yet. Raises :class:`ModelError`."""
    if name.startswith("random:"):
        if (shape := name.removeprefix("random:")) not in SHAPES:
            raise ModelError(f"unknown shape '{shape}' in '{name}'; {nearest(shape, SHAPES)}")
        return lambda device, dtype, seed: _random(shape, device, dtype, seed)
    if name == DEFAULT:
        source = f"{fetch.SMOLLM2.requirement}, sha256 {fetch.SMOLLM2.sha256}"
        return lambda device, dtype, _: _gguf(name, fetch.fetch(fetch.SMOLLM2), device, dtype, source)
    if name in HUB:
        repo, revision = HUB[name]
        return lambda device, dtype, _: _hub(name, repo, revision, device, dtype)
    if (path := existing_path(name)) is not None:
        load, kind = (_folder, "folder") if path.is_dir() else (_gguf, "file")
        return lambda device, dtype, _: load(name, path, device, dtype, f"{kind} {path}")
    if name.endswith(".gguf"):
        raise ModelError(f"{name}: no such file")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return lambda device, dtype, _: _hub(name, name, "main", device, dtype)
    known = [DEFAULT, *HUB, *(f"random:{shape}" for shape in SHAPES)]
    raise ModelError(f"unknown model '{name}' (nor is it a folder, a .gguf file or a hub id); {nearest(name, known)}")


def _hub(name: str, repo: str, revision: str, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    folder = fetch.fetch_hub(repo, revision)
    return _folder(name, folder, device, dtype, f"hub {repo} at {folder.name}")


def _folder(name: str, folder: Path, device: torch.device, dtype: torch.dtype, source: str) -> LoadedModel:
    file = folder / "config.json"
    config = from_hf(read_json(file, ModelError), str(file))
    check_runnable(config, str(folder))
    tokenizer = _if_supported(folder, lambda: tokenizer_files.from_folder(folder))
    model = assemble(config, load_folder(folder, config, dtype), device)
    eos_ids = eos_ids_of_folder(folder) if tokenizer is None else tokenizer.eos_ids
    return LoadedModel(name, model, tokenizer, eos_ids, source)


def _gguf(name: str, path: Path, device: torch.device, dtype: torch.dtype, source: str) -> LoadedModel:
    gguf = read_gguf(path)
    check_runnable(gguf.config, str(path))
    if gguf.config.moe is not None:
        raise ModelError(f"{path}: experts in GGUF files can be counted, not run; take a folder with safetensors")
    tokenizer = _if_supported(path, lambda: tokenizer_files.from_gguf(gguf.meta, path.name))
    model = assemble(gguf.config, load_gguf(gguf, dtype, cache_dir()), device)
    if (frequencies := inv_freq(gguf)) is not None and isinstance(model, Llama):
        model.set_inv_freq(frequencies.to(device))
    eos_ids = gguf_eos_ids(gguf.meta) if tokenizer is None else tokenizer.eos_ids
    return LoadedModel(name, model, tokenizer, eos_ids, source)


def _if_supported(where: Path, read: Callable[[], Tokenizer | None]) -> Tokenizer | None:
    """The tokenizer, or None with a warning if it cannot be run exactly. Damage stays an error."""
    try:
        return read()
    except UnsupportedTokenizer as error:
        warnings.warn(f"no tokenizer: {error}", stacklevel=4)
        return None
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise TokenizerError(f"{where}: its tokenizer is damaged ({what}); fetch or copy the files again") from None


def _random(shape: str, device: torch.device, dtype: torch.dtype, seed: int) -> LoadedModel:
    name, config = f"random:{shape}", SHAPES[shape]
    needed, free = parameters(config) * dtype.itemsize, psutil.virtual_memory().available
    if device.type == "cpu" and needed > free:  # the kernel would kill the process without a message
        sizes = (
            f"{needed / 1e9:.1f} GB in {str(dtype).removeprefix('torch.')} and {free / 1e9:.1f} GB of memory are free"
        )
        raise ModelError(f"'{name}' takes {sizes}; take a smaller model, or dtype bfloat16")
    model = assemble(config, random_state(config, dtype, seed, device), device)
    tokenizer = _random_tokenizer(shape, config)
    eos_ids = frozenset[int]() if tokenizer is None else tokenizer.eos_ids
    return LoadedModel(name, model, tokenizer, eos_ids, f"random weights, seed {seed}")


def _random_tokenizer(shape: str, config: ModelConfig) -> Tokenizer | None:
    """The vocabulary of the shape's published model, if it can be had; token ids do without."""
    if config.vocab_size == 256:
        return tokenizer_files.byte_level()
    if shape == DEFAULT and fetch.SMOLLM2.present:
        return tokenizer_files.from_gguf(read_gguf(fetch.SMOLLM2.path).meta, fetch.SMOLLM2.path.name)
    if shape in HUB:
        try:
            ranks = fetch.fetch(fetch.GPT2_RANKS, attempts=1)
            end = {"<|endoftext|>": GPT2_END}
            return tokenizer_files.from_tiktoken(ranks, specials=end, bos_id=GPT2_END, eos_ids=[GPT2_END], name="gpt2")
        except (ModelError, TokenizerError) as error:
            warnings.warn(f"no GPT-2 tokenizer, prompts are token ids only: {error}", stacklevel=4)
    return None
