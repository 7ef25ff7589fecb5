"""What is lost when a part of a cluster is killed under load, and how soon it is whole again.

Two Ray nodes on this machine, a replica on each, a gateway in front, and a steady stream of requests. In the middle a
replica is killed, or stopped, or a whole node is killed. Then an offline batch, of which driver, worker and node are
killed one after another. And what sending prompts where their beginning is cached brings. All processes share this
machine's cores, so the seconds are an upper bound. ``python -m benchmarks.cluster`` takes some five minutes on two
cores and stores its result under ``results/``. Needs the extras ``ray`` and ``bench``.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.nodes import Nodes, batch, gateway, nodes
from benchmarks.service import rate, server
from benchmarks.store import options, store
from nanoinfer.bench.client import HttpTarget
from nanoinfer.bench.loadgen import closed_loop, open_loop
from nanoinfer.measure.clock import now
from nanoinfer.measure.environment import provenance, usable_cores
from nanoinfer.measure.trace import Trace
from nanoinfer.workload.arrivals import constant
from nanoinfer.workload.items import WorkItem, schedule_at

MODEL, WORDS = "random:tiny-llama", ("--dtype", "float32")
PROMPT, OUTPUT = 64, 180  # tokens
WINDOW_S, BACK = 3.0, 0.8  # the rate is back when each window from then on has this share of what is sent


# --- a service ------------------------------------------------------------------------


def kill_replica(cluster: Nodes) -> None:
    """The last node's."""
    cluster.workers("ServeReplica")[-1].kill()


def stop_replica(cluster: Nodes) -> None:
    """It is there, and does nothing any more: a hung driver, a network that swallows packets."""
    cluster.workers("ServeReplica")[-1].send_signal(signal.SIGSTOP)


KILLS: dict[str, Callable[[Nodes], None]] = {
    "replica killed": kill_replica,
    "replica stopped": stop_replica,
    "node killed": Nodes.kill_last_node,
}


async def under_load(
    url: str, rate_s: float, seconds: float, kill_at: float, kill: Callable[[], None], vocab: int = 256
) -> dict[str, Any]:
    """A steady load, in the middle of which something is killed; what became of every request."""
    rng = random.Random(0)
    works = [WorkItem([rng.randrange(vocab) for _ in range(PROMPT)], OUTPUT) for _ in range(round(rate_s * seconds))]
    target = await HttpTarget.connect(url, model=MODEL)
    ended: list[tuple[float, Trace]] = []
    before = replicas(url)

    async def strike() -> tuple[float, float | None]:
        await asyncio.sleep(kill_at)
        at = now()
        await asyncio.to_thread(kill)
        while now() < at + 2 * seconds:
            there = await asyncio.to_thread(replicas, url)
            if len(there) == len(before) and there != before:
                return at, now() - at
            await asyncio.sleep(0.25)
        return at, None

    run, (struck, whole_s) = await asyncio.gather(
        open_loop(
            target,
            schedule_at(works, constant(rate_s)),
            on_done=lambda trace: ended.append((now(), trace)),
            timeout_s=120,
        ),
        strike(),
    )
    await target.close()
    good = [t for t, trace in ended if trace.status == "ok" and trace.output_tokens == OUTPUT]
    bad = [(t, trace) for t, trace in ended if trace.status != "ok"]
    errors = Counter(f"{trace.error or trace.status}" for _, trace in bad)
    return {
        "sent": len(run.traces),
        "finished": len(good),
        "errors": dict(errors),
        "said": dict(target.messages),
        "lost_without_an_error": len(run.traces) - len(good) - len(bad),
        "asked_again_elsewhere": gateway_counts(url)["retries"],
        "last_error_s": max((t - struck for t, _ in bad), default=None),
        "rate_is_back_s": back_s(good, struck, rate_s, max(t for t, _ in ended)),
        "replicas_are_back_s": whole_s,
        "good_each_second": [sum(n <= t - struck < n + 1 for t in good) for n in range(-5, round(seconds - kill_at))],
    }


def back_s(good: Sequence[float], struck: float, rate_s: float, end: float) -> float | None:
    """Seconds from the blow to the first moment from which on every window has its share of good answers."""
    step, back = 0.1, None
    for n in range(int((end - WINDOW_S - struck) / step) + 1):
        start = struck + n * step
        if sum(start <= t < start + WINDOW_S for t in good) < BACK * rate_s * WINDOW_S:
            back = None
        elif back is None:
            back = n * step
    return back


def replicas(url: str) -> set[str]:
    """Names of those that answer the gateway."""
    try:
        return set(re.findall(r'nanoinfer_requests_running\{replica="(\w+)"\}', metrics(url)))
    except OSError:
        return set()


def gateway_counts(url: str) -> dict[str, float]:
    """``requests``, ``retries`` and ``lost``."""
    found = re.findall(r"^nanoinfer_gateway_(\w+)_total (\S+)", metrics(url), re.MULTILINE)
    return {name: float(value) for name, value in found}


def metrics(url: str) -> str:
    """What ``/metrics`` says."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        return str(response.read().decode())


def service(what: str, rate_s: float, seconds: float, kill_at: float) -> dict[str, Any]:
    """One trial on nodes of its own."""
    with nodes() as cluster, gateway(cluster.address, MODEL, *WORDS) as (url, _):
        return asyncio.run(under_load(url, rate_s, seconds, kill_at, lambda: KILLS[what](cluster)))


# --- an offline batch -----------------------------------------------------------------


def offline(cluster: Nodes, n: int, new: int = 16) -> dict[str, Any]:
    """A batch whose driver, then a worker, then a node is killed; and the same one left in peace."""
    rng = random.Random(0)
    lines = [{"prompt": [rng.randrange(256) for _ in range(rng.randrange(4, 24))], "id": f"p{i}"} for i in range(n)]
    words = ("--max-tokens", str(new), *WORDS)
    record: dict[str, Any] = {"prompts": n, "tokens_each": new}
    with tempfile.TemporaryDirectory() as folder:
        prompts, out, peaceful = (Path(folder) / name for name in ("prompts.jsonl", "out.jsonl", "peaceful.jsonl"))
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
        begun = time.perf_counter()
        finish(batch(cluster.address, MODEL, prompts, peaceful, *words))
        record["in_peace_s"] = time.perf_counter() - begun
        begun = time.perf_counter()
        driver = batch(cluster.address, MODEL, prompts, out, *words)
        wait_for(out, driver, n, 0.25)
        driver.kill()
        driver.communicate()
        record["shards_at_the_drivers_death"] = len(parts(out))
        driver = batch(cluster.address, MODEL, prompts, out, *words)
        wait_for(out, driver, n, 0.5)
        cluster.workers("Worker")[0].kill()
        wait_for(out, driver, n, 0.7)
        cluster.kill_last_node()
        record["said"] = finish(driver).replace(f"{folder}/", "")
        record["with_three_kills_s"] = time.perf_counter() - begun
        record |= counted(out, lines) | {"as_in_peace": same(out, peaceful)}
    return record


def parts(out: Path) -> list[Path]:
    """Shards that are done."""
    return list(out.with_name(f"{out.name}.parts").glob("*.jsonl"))


def wait_for(out: Path, driver: subprocess.Popen[str], n: int, share: float) -> None:
    """Until that much of the batch is done."""
    while driver.poll() is None and len(parts(out)) < share * n / 64:
        time.sleep(0.05)


def finish(driver: subprocess.Popen[str]) -> str:
    """Wait for its end; the last thing that it said."""
    said = driver.communicate()[1]
    if driver.returncode:
        raise RuntimeError(f"the batch failed: {said[-2000:]}")
    return said.splitlines()[-1]


def counted(out: Path, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """None twice, none lost, each under its own name."""
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    times = Counter(row["index"] for row in rows)
    return {
        "rows": len(rows),
        "lost": sum(index not in times for index in range(len(lines))),
        "twice": sum(count > 1 for count in times.values()),
        "misnamed": sum(row["id"] != lines[row["index"]]["id"] for row in rows),
        "in_order": [row["index"] for row in rows] == list(range(len(lines))),
        "errors": sum("error" in row for row in rows),
    }


def same(one: Path, other: Path) -> int:
    """Rows that are equal."""
    pairs = zip(one.read_text().splitlines(), other.read_text().splitlines(), strict=True)
    return sum(a == b for a, b in pairs)


# --- what it costs --------------------------------------------------------------------


def hop(model: str = "random:smollm2-135m", rounds: int = 2) -> dict[str, Any]:
    """``nanoinfer serve`` and one replica of the gateway, in turns: both with all cores."""
    found: dict[str, list[tuple[float, float]]] = {"server": [], "gateway": []}
    words = ("--replicas", "1", "--cpus", str(usable_cores()), "--dtype", "bfloat16")
    for round_ in range(rounds):  # not at the same time, since their models would not sleep
        with server(model, "bfloat16", "plain") as url:
            found["server"].append(asyncio.run(alone(url, model, round_)))
        with nodes(1) as cluster, gateway(cluster.address, model, *words) as (url, _):
            found["gateway"].append(asyncio.run(alone(url, model, round_)))
    record: dict[str, Any] = {"model": model}
    for i, name in enumerate(("tokens_per_second", "first_token_s")):
        record[name] = {which: [sample[i] for sample in samples] for which, samples in found.items()}
    return record


async def alone(url: str, model: str, seed: int) -> tuple[float, float]:
    """As :mod:`benchmarks.service` has it."""
    target = await HttpTarget.connect(url, model=model)
    sample = await rate(target, 256, 2 * seed)
    await target.close()
    return sample


# --- routing --------------------------------------------------------------------------


def conversations(talks: int, turns: int, seed: int = 0) -> list[WorkItem]:
    """Prompts of growing conversations, a turn of each at a time; every one goes on from its last."""
    rng = random.Random(seed)
    pasts = [[rng.randrange(256) for _ in range(64)] for _ in range(talks)]
    works = []
    for _ in range(turns):
        for past in rng.sample(pasts, talks):
            past += [rng.randrange(256) for _ in range(32)]
            works.append(WorkItem(list(past), 8))
    return works


async def found_share(url: str, works: Sequence[WorkItem], users: int) -> float:
    """Of all prompt tokens, those that were in the cache of the replica that answered."""
    target = await HttpTarget.connect(url, model=MODEL)
    run = await closed_loop(target, works, users=users, requests=len(works))
    await target.close()
    assert all(trace.status == "ok" for trace in run.traces), target.messages
    return sum(t.cached_tokens for t in run.traces) / sum(t.prompt_tokens for t in run.traces)


def routing(talks: int = 48, turns: int = 4, users: int = 8) -> dict[str, Any]:
    """The same conversations by either way of routing, and what one cache for all would find at best."""
    works = conversations(talks, turns)
    record: dict[str, Any] = {"conversations": talks, "turns": turns, "users": users}
    for way in ("--by-prefix", "--by-load"):
        with nodes() as cluster, gateway(cluster.address, MODEL, *WORDS, way) as (url, _):
            record[way.removeprefix("--")] = asyncio.run(found_share(url, works, users))
    lengths = [len(work.prompt) for work in works]
    record["at_best"] = sum(length - 32 for length in lengths if length > 96) / sum(lengths)
    return record


def main() -> None:
    """Run, print and store."""
    args = options(
        __doc__,
        "results/cluster.json",
        rate=(5.0, "requests a second; two replicas on two cores manage 8"),
        seconds=40.0,
        prompts=10_000,
    )
    record: dict[str, Any] = {
        "provenance": provenance(),
        "ray": version("ray"),
        "model": MODEL,
        "load": {"requests_s": args.rate, "seconds": args.seconds, "prompt_tokens": PROMPT, "output_tokens": OUTPUT},
    }
    for what in KILLS:
        record[what] = service(what, args.rate, args.seconds, args.seconds / 4)
        print(what, json.dumps(record[what]), flush=True)
    with nodes() as cluster:
        record["offline batch"] = offline(cluster, args.prompts)
    record["routing"], record["what the gateway costs"] = routing(), hop()
    for name in ("offline batch", "routing", "what the gateway costs"):
        print(name, json.dumps(record[name]), flush=True)
    store(args.out, record)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
