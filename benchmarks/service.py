"""What the server costs over the engine in this process: the same closed loop on both, in turns.

Server and client are processes of their own, as they are for users, and share this machine's cores with each other.
``python -m benchmarks.service`` takes some five minutes on two cores and stores its result under ``results/``.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from benchmarks.store import options, store
from nanoinfer.bench.client import HttpTarget
from nanoinfer.bench.loadgen import EngineTarget, Target, closed_loop
from nanoinfer.engines.load import load
from nanoinfer.measure.environment import provenance
from nanoinfer.measure.metrics import ttft_service
from nanoinfer.measure.stats import present, ratio_of_medians
from nanoinfer.optimize.options import Optimizations
from nanoinfer.workload.items import log_normal_work

USERS, REQUESTS, LENGTHS = 32, 96, (16, 128)


@contextmanager
def server(model: str, dtype: str, speed: str) -> Iterator[str]:
    """``nanoinfer serve`` on a free port; its address."""
    words = [sys.executable, "-m", "nanoinfer", "serve", model, "--port", "0", "--dtype", dtype, "--speed", speed]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = next((found[0] for line in process.stderr if (found := re.search(r"http://[\d.:]+", line))), None)
        if address is None:
            sys.exit("benchmarks.service: the server did not start")
        yield address
    finally:
        process.terminate()
        process.wait()


async def rate(target: Target, vocab: int, seed: int) -> tuple[float, float]:
    """Output tokens/s of 32 users, and the median seconds to the first token of one user alone."""
    work = log_normal_work(REQUESTS, vocab, LENGTHS, LENGTHS, seed)
    many = await closed_loop(target, work, users=USERS, seconds=None, requests=REQUESTS)
    assert all(trace.status == "ok" for trace in many.traces), target.messages
    seconds = max(t.t_end or 0.0 for t in many.traces) - min(t.t_sent for t in many.traces)
    alone = log_normal_work(12, vocab, (64, 64), (4, 4), seed + 1)
    one = await closed_loop(target, alone, users=1, seconds=None, requests=len(alone))
    first = statistics.median(present(ttft_service(trace) for trace in one.traces))
    return sum(trace.output_tokens for trace in many.traces) / seconds, first


async def compare(model: str, dtype: str, speed: str, rounds: int) -> dict[str, Any]:
    """Both, in turns; the first round warms up."""
    found: dict[str, list[tuple[float, float]]] = {"in process": [], "server": []}
    engine: Any = load(model, "continuous", dtype=dtype, speed=Optimizations.parse(speed))
    vocab = engine.config.vocab_size
    with server(model, dtype, speed) as address:
        targets: dict[str, Target] = {"in process": EngineTarget(engine), "server": await HttpTarget.connect(address)}
        for round_ in range(rounds + 1):
            for name, target in targets.items():
                sample = await rate(target, vocab, 2 * round_)
                print(f"round {round_}: {name} {sample[0]:.1f} tok/s, TTFT {1000 * sample[1]:.1f} ms", flush=True)
                if round_:
                    found[name].append(sample)
        for target in targets.values():
            await target.close()
    engine.close()
    tokens, first = ({name: [s[i] for s in samples] for name, samples in found.items()} for i in (0, 1))
    return {
        "tokens_per_second": tokens,
        "first_token_s": first,
        "server / in process": asdict(ratio_of_medians(tokens["server"], tokens["in process"])),
        "added_first_token_s": statistics.median(first["server"]) - statistics.median(first["in process"]),
    }


def main() -> None:
    """Measure, print and store."""
    args = options(
        __doc__, "results/service.json", model="smollm2-135m", dtype="bfloat16", speeds=["plain", "kernel"], rounds=5
    )
    record: dict[str, Any] = {"provenance": provenance(), "model": args.model, "dtype": args.dtype, "users": USERS}
    for speed in args.speeds:
        record[speed] = found = asyncio.run(compare(args.model, args.dtype, speed, args.rounds))
        ratio = found["server / in process"]
        print(f"{speed}: server / in process {ratio['value']:.3f}, TTFT {1000 * found['added_first_token_s']:+.1f} ms")
    store(args.out, record)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
