"""Checkpoints in safetensors, and weights drawn from a seed, into our modules.

Names and shapes are checked before a weight is read, so that a damaged file gives one line and not wrong tokens.
Pickle files, which run code when they are opened, are never loaded.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

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
    """An uninitialised model; on ``torch.device("meta")`` it costs no memory. Refuses a shape that cannot be run."""
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
    """Weights at true shape: matrices N(0, 0.02), norms 1, biases 0; a seed repeats on one dtype and kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    state: State = {}
    for name, shape in expected_shapes(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)  # drawn in place, so that nothing is held twice
        if len(shape) == 1:
            tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            tensor.normal_(0.0, 0.02, generator=generator)
        state[name] = tensor
    return state


# --- safetensors --------------------------------------------------------------


class StoredTensor(NamedTuple):
    """One tensor of a file, as its header describes it."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """An open safetensors file; whatever goes wrong with it is a :class:`ModelError` that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: damaged, cut short or not readable ({error}); fetch or copy it again") from None


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor that a safetensors file describes, by name."""
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
        return {name: StoredTensor(path, name, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}


def read_tensors(stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors themselves, file by file, as views of the memory-mapped files."""
    for path in dict.fromkeys(entry.file for entry in stored.values()):
        with _opened(path) as file:
            for name, entry in stored.items():
                if entry.file == path:
                    yield name, file.get_tensor(entry.key)


def check_tensors(
    stored: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], where: Path, source: str
) -> None:
    """Refuse a tensor that is missing, of another shape or unexpected; ``source`` is what asks for the shapes."""
    for name, shape in expected.items():
        if name not in stored:
            hint = " (config.json says tie_word_embeddings is false)" if name == HEAD else ""
            raise ModelError(f"{where}: tensor '{name}' is missing{hint}; is {source} that of these weights?")
        if (entry := stored[name]).shape != shape:
            wrong = f"tensor '{entry.key}' has shape {list(entry.shape)}, {source} asks for {list(shape)}"
            raise ModelError(f"{entry.file}: {wrong}; fetch both again, from the same model")
    if extra := [entry for name, entry in stored.items() if name not in expected]:
        raise ModelError(f"{where}: unexpected tensor '{extra[0].key}'; {source} describes another architecture")


def find_files(folder: Path) -> dict[str, StoredTensor]:
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
    if pickles := sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in folder.glob(kind)):
        raise ModelError(
            f"{folder}: '{pickles[0]}' is a pickle, which can run code and is never loaded; convert it where you "
            "trust it: transformers.AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    raise ModelError(f"{folder}: no 'model.safetensors' (nor '{index.name}') in it; copy the weights there")


def _sharded(folder: Path, index: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index, ModelError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and Path(shard).name == shard for shard in weight_map.values()
    ):
        raise ModelError(f"{index}: damaged, or with a shard outside of the folder; fetch or copy the file again")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name, shard in weight_map.items():
        path = folder / shard
        if not path.is_file():
            raise ModelError(f"{path}: missing (tensor '{name}' is in it); fetch or copy the file")
        if shard not in headers:
            headers[shard] = read_header(path)
        if name not in headers[shard]:
            raise ModelError(f"{path}: tensor '{name}' is missing, the index says it is here; fetch it again")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def load_folder(folder: Path, config: ModelConfig, dtype: torch.dtype) -> State:
    """Weights of a Hugging Face folder under our names, ``[out, in]``, in ``dtype``; views of the file where they can.

    The head follows ``config.tied``: tied, a stored head is dropped, with a warning if it differs from the embedding;
    untied, a missing one is an error. Raises :class:`ModelError`, which names the file and the tensor.
    """
    stored: dict[str, StoredTensor] = {}
    for key, entry in find_files(folder).items():
        name = re.sub(r"^(transformer|model)\.", "", key).replace(".block_sparse_moe.", ".mlp.")
        name = re.sub(r"(?<=\.)w[123](?=\.weight$)", lambda match: EXPERT[match[0]], name)
        if IGNORED.fullmatch(name):
            continue
        if name in stored:
            raise ModelError(f"{entry.file}: tensors '{stored[name].key}' and '{key}' are the same weight; keep one")
        if entry.dtype not in FLOATS:
            wrong = f"tensor '{key}' has type {entry.dtype}, not one of {', '.join(FLOATS)}"
            raise ModelError(f"{entry.file}: {wrong}; use the unquantised checkpoint")
        stored[name] = entry
    if config.n_layers > len(stored):  # before that many are built
        raise ModelError(f"{folder}: config.json has {config.n_layers} layers, the weights {len(stored)} tensors")
    embedding = "wte.weight" if config.family == "gpt2" else "embed_tokens.weight"
    head = stored.pop(HEAD, None) if config.tied else None
    if head is not None and embedding not in stored:  # a saver may keep a shared matrix under its second name
        stored[embedding], head = head, None
    expected = expected_shapes(config).items()
    turned = {name: shape[::-1] if CONV1D.fullmatch(name) else shape for name, shape in expected}
    check_tensors(stored, turned, folder, "config.json")
    state: State = {}
    for name, tensor in read_tensors(stored):
        state[name] = tensor.to(dtype).t().contiguous() if CONV1D.fullmatch(name) else tensor.to(dtype)
    if head is not None:
        tied = dict(read_tensors({"head": head, "embedding": stored[embedding]}))
        if not torch.equal(tied["head"].to(dtype), tied["embedding"].to(dtype)):
            differs = f"{head.file}: '{head.key}' differs from the embedding"
            warnings.warn(f"{differs}, but config.json ties them: the embedding is used", stacklevel=2)
    return state
