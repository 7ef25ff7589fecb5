"""Checkpoints in safetensors, and weights drawn from a seed, into our modules.

Everything is checked against the names and shapes that the model expects before
a single weight is read, so that a file that is damaged or of another model gives
one line instead of wrong tokens. Pickle files, which run code when they are opened, are never loaded.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoinfer.configs.config import ModelConfig, check_runnable
from nanoinfer.errors import ModelError
from nanoinfer.models.gpt2 import GPT2
from nanoinfer.models.llama import Llama, LlamaMLP
from nanoinfer.models.moe import MixtureOfExperts
from nanoinfer.store import read_json

State = dict[str, Tensor]

#: The types a checkpoint may hold; whatever is quantised in another way is refused by name.
FLOATS = ("F64", "F32", "F16", "BF16")
#: Stored with the weights by older checkpoints: masks and tables that our modules compute.
IGNORED = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
#: GPT-2's Conv1D keeps its matrices as ``[in, out]``; ours are ``[out, in]``.
CONV1D = re.compile(r"h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
#: Mixtral's checkpoints number the matrices of an expert.
EXPERT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
HEAD = "lm_head.weight"


# --- models -------------------------------------------------------------------


def build(config: ModelConfig) -> GPT2 | Llama:
    """An uninitialised model of this shape. Under ``torch.device("meta")`` it costs no memory.

    Raises :class:`ModelError` for a shape that can be counted but not run.
    """
    check_runnable(config)
    if config.family == "gpt2":
        return GPT2(config)
    return Llama(config, LlamaMLP if config.moe is None else MixtureOfExperts)


@lru_cache(maxsize=8)
def expected_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Every parameter of a model of this shape: name to shape. Raises :class:`ModelError` if there can be none."""
    try:
        with torch.device("meta"):
            return MappingProxyType({name: tuple(p.shape) for name, p in build(config).state_dict().items()})
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:  # torch has all of these for it
        reason = str(error).splitlines()[0]
        raise ModelError(f"no model can have this shape ({reason}); is its config or header damaged?") from None


def assemble(config: ModelConfig, state: State, device: torch.device) -> GPT2 | Llama:
    """A model in eval mode, without gradients, around these tensors (no copy on the CPU)."""
    with torch.device("meta"):
        model = build(config)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval().to(device)


def random_state(config: ModelConfig, dtype: torch.dtype, seed: int, device: torch.device) -> State:
    """Weights at true shape: matrices N(0, 0.02), norms 1, biases 0.

    Drawn in the target dtype on the target device, so that nothing is held twice.
    The same seed gives the same weights for the same dtype and kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    state: State = {}
    for name, shape in expected_shapes(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith(".bias"):
            tensor.zero_()
        elif len(shape) == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
        state[name] = tensor
    return state


# --- safetensors --------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, as its header describes it."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Entry]:
    """Name to entry of every tensor in a safetensors file. Raises :class:`ModelError` naming a file that is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            return {name: Entry(path, name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path}: damaged, cut short or not readable ({error}); fetch or copy the file again")


def read_tensors(entries: Mapping[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    """The tensors themselves, file by file, as views of the memory-mapped files."""
    for path in dict.fromkeys(entry.file for entry in entries.values()):
        try:
            with safe_open(path, framework="pt") as file:
                for name, entry in entries.items():
                    if entry.file == path:
                        yield name, file.get_tensor(entry.key)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from None


def find_files(folder: Path) -> dict[str, Entry]:
    """Every tensor of a model folder: one safetensors file, or shards with an index."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _sharded(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if (single := folder / "model.safetensors") in files:
        return read_header(single)
    if len(files) == 1 and not re.search(r"-\d+-of-\d+$", files[0].stem):
        return read_header(files[0])
    if files:
        raise ModelError(f"{folder}: safetensors in several files but no '{index.name}'; copy the index too")
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind))
    if pickles:
        raise ModelError(
            f"{folder}: '{pickles[0]}' is a pickle, which can run code and is never loaded; convert it where you "
            "trust it: transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    raise ModelError(f"{folder}: no 'model.safetensors' (nor '{index.name}') in it; copy the weights there")


def _sharded(folder: Path, index: Path) -> dict[str, Entry]:
    weight_map = read_json(index, ModelError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in weight_map.values()
    ):
        raise ModelError(f"{index}: damaged, or with a shard outside of the folder; fetch or copy the file again")
    entries: dict[str, Entry] = {}
    for shard in dict.fromkeys(weight_map.values()):
        names = [name for name, file in weight_map.items() if file == shard]
        if not (folder / shard).is_file():
            raise ModelError(f"{folder / shard}: missing (tensor '{names[0]}' is in it); fetch or copy the file")
        header = read_header(folder / shard)
        if lost := [name for name in names if name not in header]:
            raise ModelError(
                f"{folder / shard}: tensor '{lost[0]}' is missing, the index says it is here; fetch it again"
            )
        entries |= {name: header[name] for name in names}
    return entries


def load_folder(folder: Path, config: ModelConfig, dtype: torch.dtype) -> State:
    """Weights of a Hugging Face folder under our names, ``[out, in]``, in ``dtype``.

    Tensors that have the right type and orientation already stay views of the
    memory-mapped file. The head follows ``config.tied``: tied, a stored head is
    dropped (with a warning if it differs); untied, a missing one is an error.
    Raises :class:`ModelError`, which names the file, the tensor and what to do.
    """
    entries: dict[str, Entry] = {}
    for key, entry in find_files(folder).items():
        name = re.sub(r"^(transformer|model)\.", "", key).replace(".block_sparse_moe.", ".mlp.")
        name = re.sub(r"(?<=\.)w[123](?=\.weight$)", lambda match: EXPERT[match[0]], name)
        if IGNORED.fullmatch(name):
            continue
        if name in entries:
            raise ModelError(f"{entry.file}: tensors '{entries[name].key}' and '{key}' are the same weight; keep one")
        entries[name] = entry
    if config.n_layers > len(entries):  # before that many are built
        raise ModelError(f"{folder}: config.json has {config.n_layers} layers, the weights {len(entries)} tensors")
    embedding = "wte.weight" if config.family == "gpt2" else "embed_tokens.weight"
    head = entries.pop(HEAD, None) if config.tied else None
    if head is not None and embedding not in entries:  # a saver may keep a shared matrix under its second name
        entries[embedding], head = head, None
    shapes = expected_shapes(config)
    _check(entries, shapes, folder)
    state: State = {}
    for name, tensor in read_tensors(entries):
        state[name] = tensor.to(dtype).t().contiguous() if CONV1D.fullmatch(name) else tensor.to(dtype)
    if head is not None:
        _warn_stale_head(head, entries[embedding])
    return state


def _check(entries: Mapping[str, Entry], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    for name, shape in shapes.items():
        if name not in entries:
            hint = " (config.json says tie_word_embeddings is false)" if name == HEAD else ""
            raise ModelError(f"{folder}: tensor '{name}' is missing{hint}; is config.json that of these weights?")
        entry = entries[name]
        stored = shape[::-1] if CONV1D.fullmatch(name) else shape
        if entry.shape != stored:
            raise ModelError(
                f"{entry.file}: tensor '{entry.key}' has shape {list(entry.shape)}, config.json asks for "
                f"{list(stored)}; take both from the same model"
            )
        if entry.dtype not in FLOATS:
            raise ModelError(
                f"{entry.file}: tensor '{entry.key}' has type {entry.dtype}, which is not supported "
                f"(known: {', '.join(FLOATS)}); use the unquantised checkpoint"
            )
    if extra := [entry for name, entry in entries.items() if name not in shapes]:
        raise ModelError(
            f"{extra[0].file}: unexpected tensor '{extra[0].key}'; this is another architecture than config.json says"
        )


def _warn_stale_head(head: Entry, embedding: Entry) -> None:
    if head.shape == embedding.shape:
        stored = dict(read_tensors({"head": head, "embedding": embedding}))
        if torch.equal(stored["head"], stored["embedding"]):
            return
    warnings.warn(
        f"{head.file}: '{head.key}' differs from the embedding, but config.json ties them: the embedding is used",
        stacklevel=2,
    )
