"""What users of a service would see, before there is one: the record behind ``nanoinfer simulate``.

Requests come at random; the engine's own scheduler plans every step over as many KV blocks as the device has room for;
the roofline says how long each step takes; and the traces are scored as those of a real server are. Nothing of this
needs weights or the device.

What is left out makes a real service slower: the network, the tokenizer, the host's work between steps, kernels below
the roofline. A simulation with a datasheet's rates is a bound, not a promise; with ``--gpu here`` rates are measured.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from nanoinfer.bench.collect import Collector
from nanoinfer.cache.blocks import BlockPool
from nanoinfer.configs.config import ModelConfig
from nanoinfer.engines.scheduler import Scheduler
from nanoinfer.errors import RequestError
from nanoinfer.measure.metrics import metric_named
from nanoinfer.models.lookup import config_of
from nanoinfer.predict.target import Target, dtype_named, machine_of, model_row, target_named
from nanoinfer.simulate.virtual import simulated
from nanoinfer.theory import capacity
from nanoinfer.theory.parameters import check_sizes
from nanoinfer.theory.ragged import StepTimes
from nanoinfer.theory.roofline import Machine
from nanoinfer.workload.arrivals import gamma
from nanoinfer.workload.items import Lengths, WorkItem, parse_lengths

#: Share of the run that warms up and is not measured.
WARMUP: Final = 0.1
#: The search for the highest rate ends where two rates this close to each other differ in their verdict.
CLOSE: Final = 0.02
#: Doublings or halvings before the search gives up.
FAR: Final = 12


@dataclass(frozen=True)
class Load:
    """The requests of one run; the same seed gives the same ones at every rate, only closer together."""

    requests: int
    prompts: Lengths
    outputs: Lengths
    burstiness: float
    seed: int

    def works(self, rate: float) -> Iterator[WorkItem]:
        """The requests at so many a second. Without prefix sharing no id matters, and bytes are the cheapest ids."""
        rng = random.Random(f"{self.seed}/lengths")
        for at in islice(gamma(rate, self.burstiness, self.seed), self.requests):
            yield WorkItem(bytes(self.prompts.draw(rng)), self.outputs.draw(rng), at)


@dataclass(frozen=True)
class Service:
    """Replicas that take turns with the requests, each with a scheduler and blocks of its own."""

    times: StepTimes
    blocks: int
    block: int
    max_running: int
    token_budget: int
    replicas: int

    def scheduler(self) -> Scheduler:
        """A replica's, its house empty."""
        return Scheduler(BlockPool(self.blocks, self.block, share_prefixes=False), self.max_running, self.token_budget)

    def run(self, load: Load, rate: float, slo: Mapping[str, float] | None) -> Collector:
        """Serve the load; figures are of the time from the end of the warm-up until the last request is expected."""
        expected = load.requests / rate
        found = Collector(WARMUP * expected, expected, self.blocks, slo, self.replicas)
        for replica in range(self.replicas):
            turn = islice(load.works(rate), replica, None, self.replicas)
            for trace in simulated(turn, self.scheduler(), self.times, found.span):
                found.trace(trace)
        return found


def simulate_serving(
    model: str,
    gpu: str,
    *,
    rate: float,
    requests: int = 2000,
    seed: int = 0,
    slo: Mapping[str, float] | None = None,
    find: bool = False,
    needed: float = 0.99,
    prompts: str = "lognormal:64-1024",
    outputs: str = "lognormal:16-512",
    burstiness: float = 1.0,
    dtype: str = "bfloat16",
    tp: int = 1,
    replicas: int = 1,
    max_running: int = 256,
    token_budget: int = 2048,
    block: int = 16,
    utilisation: float = 0.9,
    launch_us: float = 0.0,
) -> dict[str, Any]:
    """Latencies, goodput, rates and use of ``replicas`` services of ``tp`` devices each.

    Args:
        model: as for :func:`nanoinfer.predict.latency.predict`, like ``gpu``, ``dtype``, ``tp`` and ``launch_us``.
        gpu: a datasheet's name or ``here``.
        rate: requests a second in all; replicas take turns.
        requests: how many come; the first tenth of their time warms up.
        seed: of arrivals and lengths.
        slo: limits in seconds by metric, for goodput.
        find: search for the highest rate at which the share ``needed`` of the requests meets ``slo``.
        needed: that share.
        prompts: lengths in tokens, as :func:`nanoinfer.workload.items.parse_lengths` reads them.
        outputs: lengths of the answers.
        burstiness: shape of the gamma distribution of gaps between arrivals: 1 is Poisson, below 1 is burstier.
        max_running: sequences in a step at most.
        token_budget: tokens in a step at most.
        block: tokens a block of the KV cache.
        utilisation: share of the device's memory that weights and KV cache may use.

    Raises:
        NanoinferError: what cannot be predicted, what no engine could serve, a search without limits.
    """
    config, dtype = config_of(model), dtype_named(dtype)
    check_sizes(requests=requests, replicas=replicas)
    load = Load(requests, parse_lengths(prompts), parse_lengths(outputs), burstiness, seed)
    _check(config, load, rate, slo, find, needed)
    notes: list[str] = []
    target = target_named(gpu, dtype)
    fit = capacity.fit(config, target.memory_bytes, 1, dtype, tp=tp, utilisation=utilisation, block=block)
    machine = machine_of(target, dtype, launch_us, notes)
    service = Service(StepTimes(config, machine, tp), fit.blocks, block, max_running, token_budget, replicas)
    service.scheduler().refuse(load.prompts.high + load.outputs.high - 1)
    found = service.run(load, rate, slo)
    record = {
        "model": model_row(model, config),
        "machine": _machine_row(target, machine, dtype, tp, replicas, utilisation),
        "engine_settings": {
            "max_running": max_running,
            "token_budget": token_budget,
            "block_tokens": block,
            "kv_blocks": fit.blocks,
            "kv_tokens": fit.blocks * block,
            "replicas": replicas,
        },
        "load": {
            "rate_per_s": rate,
            "requests": requests,
            "arrivals": "poisson" if burstiness == 1 else f"gamma:{burstiness:g}",
            "prompt_tokens": str(load.prompts),
            "output_tokens": str(load.outputs),
            "seed": seed,
        },
        **found.record(),
        "highest_rate": highest_rate(lambda r: service.run(load, r, slo), rate, needed) if find else None,
    }
    return {**record, "notes": [*notes, *_notes(record)]}


def _check(
    config: ModelConfig, load: Load, rate: float, slo: Mapping[str, float] | None, find: bool, needed: float
) -> None:
    for name, value in {"rate": rate, "burstiness": load.burstiness}.items():
        if not 0 < value < math.inf:
            raise RequestError(f"--{name} must be a number above 0, got {value:g}")
    if find and not slo:
        raise RequestError("--find searches for the highest rate that meets an SLO: give one (--slo ttft=200ms)")
    for name in slo or {}:
        metric_named(name)
    if not 0 < needed <= 1:
        raise RequestError(f"the needed share of good requests lies above 0 and up to 1, got {needed:g}")
    longest = load.prompts.high + load.outputs.high
    if longest > config.context:
        raise RequestError(
            f"prompts of up to {load.prompts.high} and answers of up to {load.outputs.high} tokens are beyond the "
            f"model's context of {config.context}: take shorter ones"
        )


def _machine_row(
    target: Target, machine: Machine, dtype: str, tp: int, replicas: int, utilisation: float
) -> dict[str, Any]:
    return {
        "name": target.name,
        "rates_from": target.source,
        "datasheet": target.page,
        "devices": tp * replicas,
        "tp": tp,
        "dtype": dtype,
        "peak_flops_per_s": machine.peak,
        "bandwidth_bytes_per_s": machine.bandwidth,
        "launch_s": machine.launch_s,
        "memory_bytes": target.memory_bytes,
        "utilisation": utilisation,
    }


# --- the highest rate that meets the limits ---------------------------------------------


def highest_rate(run: Callable[[float], Collector], rate: float, needed: float) -> dict[str, Any]:
    """Double or halve from ``rate`` until the verdict changes, then halve the interval until its ends are close.

    ``rate_per_s`` is ``None`` where no rate that
    was tried is good, ``fails_at_per_s`` where all are.
    """
    tried: dict[float, float | None] = {}

    def is_good(at: float) -> bool:
        tried[at] = run(at).share
        share = tried[at]
        return share is not None and share >= needed

    good, bad = (rate, None) if is_good(rate) else (None, rate)
    for _ in range(FAR):
        if good is not None and bad is not None:
            break
        if good is not None:
            good, bad = (2 * good, None) if is_good(2 * good) else (good, 2 * good)
        elif bad is not None:
            good, bad = (bad / 2, bad) if is_good(bad / 2) else (None, bad / 2)
    while good is not None and bad is not None and bad > good * (1 + CLOSE):
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if is_good(middle) else (good, middle)
    return {
        "definition": f"highest rate found at which {needed:.0%} of the requests meet every limit, to {CLOSE:.0%}",
        "needed_share": needed,
        "rate_per_s": good,
        "fails_at_per_s": bad,
        "tried": [{"rate_per_s": at, "share": tried[at]} for at in sorted(tried)],
    }


# --- what must be known before it is believed --------------------------------------------


def _notes(record: Mapping[str, Any]) -> Iterator[str]:
    window, requests, rates = record["window"], record["requests"], record["rates"]
    arrived, ended = requests["measured"], rates["requests_s"]["value"] * window["seconds"]
    there = record["concurrency"]["mean"]
    if not arrived:
        yield "No request was due in the measured window: take more requests."
        return
    if arrived - ended > 0.05 * arrived + 3 * math.sqrt(there):
        yield (
            f"More requests come than end ({arrived} against {ended:.0f} in the window): the queue grows, and waits "
            "say how long the run was and not what the service does."
        )
    stay = record["latency"]["e2e"]["mean"]
    if stay is not None and stay > window["start_s"]:
        yield (
            f"Requests stay for {stay:.3g} s and the warm-up lasts {window['start_s']:.3g} s: the run begins emptier "
            "than it goes on; take more requests."
        )
    small = record["latency"]["ttft"]["too_small"]
    if small:
        yield f"n too small for {', '.join(small)}: take more requests."
    if (found := record["highest_rate"]) is not None:
        if found["rate_per_s"] is None:
            yield f"No rate down to {found['fails_at_per_s']:.3g}/s meets the limits."
        elif found["fails_at_per_s"] is None:
            yield f"Every rate up to {found['rate_per_s']:.3g}/s meets the limits."
        else:
            seconds = record["load"]["requests"] / found["rate_per_s"]
            yield (
                f"The highest rate is that of a run of {seconds:.3g} s: just beyond what a service can do, its queue "
                "takes longer than that to show. More requests find it more exactly."
            )
