"""nanoinfer against what a reader would otherwise install, on the same weights and the same work, in one run.

Each engine is a process in an environment of its own; runs are taken in turns while the others sleep, token counts
must agree, and so must greedy tokens in float32. ``python -m benchmarks.compare`` prints ratios of medians with their
intervals and stores everything under ``results/``. Peers that are not installed are named and left out; ``--install``
puts llama.cpp and vLLM into environments under the user's cache (minutes, and some gigabytes).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.peers import environment
from benchmarks.peers.worker import Answer, Program, Worker, WorkerError
from benchmarks.store import store
from nanoinfer.errors import ModelError, NanoinferError
from nanoinfer.measure.environment import provenance
from nanoinfer.measure.reference import to_transformers
from nanoinfer.measure.stats import ratio_of_medians
from nanoinfer.models import fetch
from nanoinfer.models.registry import DEFAULT, load_model
from nanoinfer.store import cache_dir

SCRIPTS = Path(__file__).parent / "peers"
PROMPT, NEW = 64, 64
LARGE = 2e9  # bytes of weights from which only ours and the reference are run
SPARE = 1.2  # memory for each byte of weights: caches and activations too
BUSY = 0.5  # load average before the start, of a machine that is not quiet
REFERENCE = "transformers"
#: Ours by name; all of them share one process and one model.
OURS: dict[str, dict[str, Any]] = {
    "nanoinfer, plain": {},
    "nanoinfer, kernel": {"kernel": True},
    "nanoinfer, kernel, int8": {"kernel": True, "weights": "int8"},
}


class Disagreement(NanoinferError):
    """Our tokens are not the reference's."""


# --- who takes part ---------------------------------------------------------------------------------------------------


def folder(model: str, dtype: str) -> Path:
    """The model's weights as transformers' own files, made once."""
    path = cache_dir() / "peers" / "weights" / f"{model.replace(':', '-')}-{dtype}"
    if not path.exists():
        theirs = to_transformers(load_model(model, dtype=dtype)).to(getattr(torch, dtype))
        part = path.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        theirs.save_pretrained(part)
        part.replace(path)
    return path


def programs(model: str, dtype: str, rows: int, quick: bool) -> tuple[list[Program], dict[str, str]]:
    """Ours, the reference and those peers that are installed; and why others are left out, by name.

    Raises:
        ModelError: they do not fit into the memory together.
    """
    files = folder(model, dtype)
    size = sum(path.stat().st_size for path in files.glob("*.safetensors"))
    shape = {"dtype": dtype, "rows": rows, "length": PROMPT + NEW, "threads": torch.get_num_threads()}
    ours = {name: speed for name, speed in OURS.items() if dtype == "bfloat16" or "weights" not in speed}
    hf = {**shape, "folder": str(files)}
    found = [
        Program(tuple(ours), SCRIPTS / "ours.py", {**shape, "model": model, "engines": ours}),
        Program((REFERENCE,), SCRIPTS / "hf.py", hf),
    ]
    left_out: dict[str, str] = {}
    others = [Program(("transformers, static cache, compiled",), SCRIPTS / "hf.py", {**hf, "compiled": True})]
    others.append(Program(("vLLM",), SCRIPTS / "vllm_cpu.py", hf, environment.python("vllm")))
    for kind in {"bfloat16": ("bf16", "q8_0"), "float32": ("f32",)}[dtype]:
        gguf = {**shape, "source": str(fetch.SMOLLM2.path), "kind": kind}
        others.append(Program((f"llama.cpp, {kind}",), SCRIPTS / "llamacpp.py", gguf, environment.python("llamacpp")))
    for program in others:
        peer = {"vllm_cpu": "vllm", "llamacpp": "llamacpp"}.get(program.script.stem)
        name = program.names[0]
        if size > LARGE:
            left_out[name] = "the model is large"
        elif quick and peer != "llamacpp":
            left_out[name] = "it takes minutes to start (--quick)"
        elif peer == "llamacpp" and model != DEFAULT:
            left_out[name] = f"it gets {DEFAULT} only, whose file is its own format"
        elif peer is not None and not environment.installed(peer):
            left_out[name] = f"not installed: python -m benchmarks.compare --install {peer}"
        else:
            found.append(program)
    copies = len(found) + sum(speed.get("kernel", False) for speed in ours.values())  # the kernel packs its own
    if (needed := SPARE * copies * size) > (free := psutil.virtual_memory().available):
        raise ModelError(
            f"{copies} copies of {model} in {dtype} at work take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of "
            "memory are free: take a smaller model, or end other programs"
        )
    return found, left_out


# --- in turns ---------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """One engine at one batch size.

    Attributes:
        decode: output tokens/s of all rows from the first tokens to the end, a sample a round.
        first: seconds to the first tokens of all rows.
        same_rows: how many rows have the reference's tokens to the end.
        same_tokens: the share of tokens before each row's first difference.
    """

    decode: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    same_rows: int = 0
    same_tokens: float = 0.0

    def note(self, answer: Answer) -> None:
        """Take a sample."""
        self.decode.append(len(answer.tokens) * (NEW - 1) / (answer.total_s - answer.first_s))
        self.first.append(answer.first_s)

    def agree(self, tokens: list[list[int]], reference: list[list[int]]) -> None:
        """Hold the tokens to the reference's."""
        alike = [_alike(a, b) for a, b in zip(tokens, reference, strict=True)]
        self.same_rows = alike.count(NEW)
        self.same_tokens = sum(alike) / (NEW * len(alike))


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens come before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


@dataclass
class Found:
    """What a comparison found, by engine; samples also by batch size."""

    samples: dict[str, dict[int, Measured]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class Peers:
    """All workers of a comparison. One of ours that fails, or the reference, ends it; another peer is left out."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.found = Found()

    def start(self, program: Program) -> None:
        """Start one, whatever becomes of it."""
        try:
            worker = Worker(program)
        except WorkerError as error:
            self._fail(program.names, error)
            return
        print(f"{worker.name}: {worker.version}, started in {worker.start_s:.0f} s", flush=True)
        for name in program.names:
            self.workers[name] = worker
            self.found.versions[name], self.found.start_s[name] = worker.version, worker.start_s

    def run(self, name: str, prompts: list[list[int]]) -> Answer | None:
        """One job, the others asleep; None if it failed, and is out."""
        worker = self.workers[name]
        try:
            return worker.run(name, prompts, NEW)
        except WorkerError as error:
            worker.close()
            for lost in worker.program.names:
                del self.workers[lost]
            self._fail(worker.program.names, error)
            return None

    def close(self) -> None:
        """End all of them."""
        for worker in set(self.workers.values()):
            worker.close()

    def _fail(self, names: Iterable[str], error: WorkerError) -> None:
        for name in names:
            if name in OURS or name == REFERENCE:
                raise error
            self.found.failed[name] = str(error)
            print(f"left out: {error}", flush=True)


def compare(
    chosen: Sequence[Program], vocab_size: int, batches: Sequence[int], rounds: int, seed: int, exact: bool
) -> Found:
    """Start them, and have them run in turns, in shuffled order.

    Args:
        chosen: the programs; one of them holds the reference.
        vocab_size: prompts are random ids below it.
        batches: how many prompts at a time.
        rounds: samples of each engine at each batch size, after one run to warm up.
        seed: of prompts and order.
        exact: whether ours must write the reference's tokens.

    Raises:
        WorkerError: one of ours failed, or the reference.
        Disagreement: ours wrote other tokens.
    """
    rng = random.Random(seed)
    peers = Peers()
    try:
        for program in chosen:
            peers.start(program)
        for batch in batches:
            prompts = [[rng.randrange(vocab_size) for _ in range(PROMPT)] for _ in range(batch)]
            measured = {name: Measured() for name in peers.workers}
            said: dict[str, list[list[int]]] = {}
            for round_ in range(rounds + 1):  # the first one warms up
                order = list(peers.workers)
                rng.shuffle(order)
                for name in order:
                    if name in peers.workers and (answer := peers.run(name, prompts)) is not None:
                        said[name] = answer.tokens
                        if round_:
                            measured[name].note(answer)
            for name in peers.workers:
                measured[name].agree(said[name], said[REFERENCE])
                if exact and name in OURS and measured[name].same_rows < batch:
                    wrong = batch - measured[name].same_rows
                    raise Disagreement(f"{name}: {wrong} of {batch} rows differ from {REFERENCE}'s in float32")
                peers.found.samples.setdefault(name, {})[batch] = measured[name]
            print(f"{batch} rows: done", flush=True)
    finally:
        peers.close()
    return peers.found


# --- the report -------------------------------------------------------------------------------------------------------


def ratios(samples: Mapping[str, Mapping[int, Measured]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Ours over each peer's output tokens/s, by batch size, where both have been measured."""
    return {
        f"{ours} / {peer}": {
            batch: asdict(ratio_of_medians(samples[ours][batch].decode, samples[peer][batch].decode))
            for batch in samples[ours]
            if batch in samples[peer]
        }
        for ours in samples
        if ours in OURS
        for peer in samples
        if peer not in OURS
    }


def tell(record: Mapping[str, Any], dtype: str) -> str:
    """The record of one dtype as lines of text."""
    part = record[dtype]
    lines = [
        f"{record['model']}, {dtype}, {PROMPT} + {NEW} tokens: tokens/s while decoding, ms to the first, rows alike"
    ]
    for name, by_batch in part["samples"].items():
        cells = (
            f"{statistics.median(m['decode']):8.1f} {1000 * statistics.median(m['first']):6.0f} ms "
            f"{m['same_rows']:2}/{batch:<2}"
            for batch, m in by_batch.items()
        )
        lines.append(f"  {name:38}" + " |".join(cells))
    for name, ratio in part["ratios"].items():
        cells = (
            f"{batch} rows {r['value']:.2f}" + ("" if r["low"] is None else f" ({r['low']:.2f} to {r['high']:.2f})")
            for batch, r in ratio.items()
        )
        lines.append(f"  {name}: {', '.join(cells)}")
    lines += [f"  left out: {name}: {why}" for name, why in (part["left_out"] | part["failed"]).items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=DEFAULT, help="also random:gpt2, random:gpt2-xl")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], help="prompts at a time")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="minutes: fewer rounds, none that takes long to start")
    parser.add_argument(
        "--install", nargs="*", choices=list(environment.RECIPES), help="install these peers, or all, and end"
    )
    parser.add_argument("--out", type=Path, help="results/compare-MODEL.json if not given")
    args = parser.parse_args()
    if args.rounds < 1 or min(args.batches) < 1:
        parser.error("--rounds and --batches start at 1")
    try:
        if args.install is not None:
            for peer in args.install or environment.RECIPES:
                environment.install(peer)
            return
        out = args.out or Path(f"results/compare-{args.model.replace(':', '-')}.json")
        run(args.model, args.dtypes, args.batches, 3 if args.quick else args.rounds, args.seed, args.quick, out)
    except NanoinferError as error:
        sys.exit(f"benchmarks.compare: {error}")


def run(
    model: str, dtypes: Sequence[str], batches: Sequence[int], rounds: int, seed: int, quick: bool, out: Path
) -> None:
    """A comparison in each dtype, stored together and printed at the end."""
    load = os.getloadavg()[0]
    if load > BUSY:
        print(f"other programs are running (load {load:.1f}): what is measured now says little", flush=True)
    record: dict[str, Any] = {
        "provenance": provenance(),
        "load_before": load,
        "model": model,
        "prompt": PROMPT,
        "new": NEW,
        "rounds": rounds,
        "seed": seed,
    }
    for dtype in dtypes:
        chosen, left_out = programs(model, dtype, max(batches), quick)
        config = json.loads((folder(model, dtype) / "config.json").read_text("utf-8"))
        found = compare(chosen, config["vocab_size"], batches, rounds, seed, exact=dtype == "float32")
        record[dtype] = {**asdict(found), "left_out": left_out, "ratios": ratios(found.samples)}
        store(out, record)  # what is measured stays, should the next dtype fail
        print(tell(record, dtype), flush=True)
    print(f"written to {out}")


if __name__ == "__main__":
    main()
