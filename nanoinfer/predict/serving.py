"""What users of a service that is not there would see, and how many replicas a load needs: ``simulate`` and ``plan``.

The engine's own scheduler plans every step and the roofline times it. Left out, which makes a real service slower: the
network, the tokenizer, the host's work between steps, kernels below the roofline. ``--gpu here`` measures the rates.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, Final

from nanoinfer.bench.options import parse_slo
from nanoinfer.bench.summary import GROWTH, SimulationScores
from nanoinfer.cache.blocks import BlockPool
from nanoinfer.engines.scheduler import Scheduler
from nanoinfer.errors import RequestError, check
from nanoinfer.models.lookup import config_of
from nanoinfer.predict.options import PlanOptions, SimulateOptions
from nanoinfer.predict.target import TargetDevice, dtype_named, machine_of, machine_row, model_row, target_named
from nanoinfer.simulate import simulate
from nanoinfer.theory import capacity, cost
from nanoinfer.theory.roofline import StepTimes
from nanoinfer.workload.arrivals import gamma
from nanoinfer.workload.items import Lengths, WorkItem, parse_lengths

#: Share of the run that warms up and is not measured.
WARMUP: Final = 0.1
#: The search for the highest rate ends where two rates this close to each other differ in their verdict.
CLOSE: Final = 0.02
#: Requests that are enough to see a queue grow, in a shorter window than asked for.
MOST_REQUESTS: Final = 20_000
#: Doublings or halvings before the search gives up.
FAR: Final = 12
#: Requests a second with which ``plan`` begins to search for a replica's highest rate.
FIRST_RATE: Final = 16.0


@dataclass(frozen=True)
class SimulatedLoad:
    """The requests of one run; the same seed gives the same ones at every rate, only closer together."""

    requests: int
    prompts: Lengths
    outputs: Lengths
    burstiness: float
    seed: int

    def works(self, rate: float) -> Iterator[WorkItem]:
        """The requests at ``rate`` a second. Without prefix sharing no id matters, and bytes are the cheapest ids."""
        rng = random.Random(f"{self.seed}/lengths")
        for at in islice(gamma(rate, self.burstiness, self.seed), self.requests):
            yield WorkItem(bytes(self.prompts.draw(rng)), self.outputs.draw(rng), at)


def simulate_serving(options: SimulateOptions) -> dict[str, Any]:
    """Latencies, goodput, rates and use of a service under a load, on a computed clock."""
    config, dtype = config_of(options.model), dtype_named(options.dtype)
    for name in ("requests", "replicas"):
        check(f"--{name}", getattr(options, name), at_least=1)
    for name in ("rate", "burstiness", "window"):
        check(f"--{name}", getattr(options, name), above=0)
    for name in ("share", "mfu", "mbu"):
        check(f"--{name}", getattr(options, name), above=0, at_most=1)
    slo = None if options.slo is None else parse_slo(options.slo)
    if options.find and not slo:
        raise RequestError("--find searches for the highest rate that meets an SLO: give one (--slo ttft=200ms)")
    prompts, outputs = parse_lengths(options.prompt_tokens), parse_lengths(options.output_tokens)
    if prompts.high + outputs.high > config.context:
        raise RequestError(
            f"prompts of up to {prompts.high} and answers of up to {outputs.high} tokens are beyond the model's "
            f"context of {config.context}: take shorter ones"
        )
    load = SimulatedLoad(options.requests, prompts, outputs, options.burstiness, options.seed)
    notes: list[str] = []
    target = target_named(options.gpu, dtype)
    fit = capacity.fit(
        config, target.memory_bytes, 1, dtype, tp=options.tp, utilisation=options.utilisation, block=options.block
    )
    machine = machine_of(target, dtype, options.launch_us, notes)
    machine = replace(machine, peak=options.mfu * machine.peak, bandwidth=options.mbu * machine.bandwidth)
    times = StepTimes(config, machine, options.tp)

    def scheduler() -> Scheduler:
        pool = BlockPool(fit.blocks, options.block, share_prefixes=False)
        return Scheduler(pool, options.max_running, options.token_budget)

    def serve(rate: float, requests: int, most_bad: float = math.inf) -> SimulationScores:
        """Replicas take turns; figures are of the time from the end of the warm-up until the last is expected."""
        expected = requests / rate
        scores = SimulationScores(WARMUP * expected, expected, fit.blocks, slo, options.replicas)
        for replica in range(options.replicas):
            turn = islice(replace(load, requests=requests).works(rate), replica, None, options.replicas)
            scores.add_all(simulate(turn, scheduler(), times, scores.add_span), most_bad)
        return scores

    def share_at(rate: float) -> float | None:
        """The good share of a run that is long enough for a queue to show; 0 where the queue grows."""
        requests = max(options.requests, min(MOST_REQUESTS, math.ceil(rate * options.window)))
        scores = serve(rate, requests, (1 - options.share) * requests)
        return scores.good_share if scores.is_stable else 0.0

    scheduler().refuse(prompts.high + outputs.high - 1)
    scores = serve(options.rate, options.requests)
    record = {
        "model": model_row(options.model, config),
        "machine": machine_row(target, machine, options.tp * options.replicas, dtype)
        | {"tp": options.tp, "utilisation": options.utilisation, "mfu": options.mfu, "mbu": options.mbu},
        "engine_settings": {
            "max_running": options.max_running,
            "token_budget": options.token_budget,
            "block_tokens": options.block,
            "kv_blocks": fit.blocks,
            "kv_tokens": fit.blocks * options.block,
            "replicas": options.replicas,
        },
        "load": {
            "rate_per_s": options.rate,
            "requests": options.requests,
            "arrivals": "poisson" if options.burstiness == 1 else f"gamma:{options.burstiness:g}",
            "prompt_tokens": str(prompts),
            "output_tokens": str(outputs),
            "seed": options.seed,
        },
        **scores.record(),
        "highest_rate": {**highest_rate(share_at, options.rate, options.share), "window_s": options.window}
        if options.find
        else None,
    }
    return {**record, "notes": [*notes, *_notes(record)]}


# --- the highest rate that meets the limits ---------------------------------------------


def highest_rate(share_at: Callable[[float], float | None], rate: float, needed: float) -> dict[str, Any]:
    """Double or halve from ``rate`` until the verdict changes, then halve the interval until its ends are close.

    ``share_at`` gives the share of good requests at a rate. ``rate_per_s`` is ``None`` where no rate that was tried
    is good, ``fails_at_per_s`` where all are.
    """
    tried: dict[float, float | None] = {}

    def is_good(at: float) -> bool:
        share = tried[at] = share_at(at)
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
    in_system = record["concurrency"]["mean"]
    if not arrived:
        yield "No request was due in the measured window: take more requests."
        return
    if arrived - ended > GROWTH * arrived + 3 * math.sqrt(in_system):
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
    if (highest := record["highest_rate"]) is not None:
        if highest["rate_per_s"] is None:
            yield f"No rate down to {highest['fails_at_per_s']:.3g}/s meets the limits."
        elif highest["fails_at_per_s"] is None:
            yield f"Every rate up to {highest['rate_per_s']:.3g}/s meets the limits."
        else:
            yield (
                f"Each rate was tried for {highest['window_s']:g} s or {MOST_REQUESTS:,} requests, and is good only if "
                "the queue does not grow meanwhile. A longer --window finds the highest rate more exactly."
            )


# --- replicas for a number of users -------------------------------------------------------


def plan(options: PlanOptions) -> dict[str, Any]:
    """Replicas, latencies, price and power for each number of users.

    One replica is simulated to find the highest rate at which it meets the SLO. The load is divided over enough of
    them that each has some headroom, and spares stand by for those that fail. Round-robin reaches each replica more
    evenly than it is simulated here, which errs on the safe side.
    """
    check("--users", min(options.users, default=0), at_least=1)
    check("--spares", options.spares, at_least=0)
    check("--headroom", options.headroom, at_least=0, below=1)
    check("--per-user", options.per_user, above=0)
    slo, target = parse_slo(options.slo or ""), target_named(options.gpu, dtype_named(options.dtype))
    shared = {field.name for field in fields(PlanOptions)} & {field.name for field in fields(SimulateOptions)}
    base = SimulateOptions(rate=FIRST_RATE, **{name: getattr(options, name) for name in shared})
    searched = simulate_serving(replace(base, find=True))
    highest = searched["highest_rate"]["rate_per_s"]
    if highest is None:
        raise RequestError(
            f"no rate meets these limits on {options.tp} x {target.name}: even a lone request is too slow for "
            f"{options.share:.0%} of them; take looser limits, a faster device or --tp"
        )

    def planned(users: int) -> dict[str, Any]:
        load = users * options.per_user / 3600
        active = math.ceil(load / highest / (1 - options.headroom))
        devices = (active + options.spares) * options.tp
        simulation = simulate_serving(replace(base, rate=load / active))
        tokens_s = load * simulation["tokens"]["output"] / max(1, simulation["requests"]["measured"])
        watts = None if target.watts is None else target.watts * devices
        usd = None if options.usd_per_hour is None else options.usd_per_hour * devices
        return {
            "users": users,
            "load_per_s": load,
            "replicas": active,
            "spares": options.spares,
            "load_share": load / (active * highest),
            "devices": devices,
            "busy_share": simulation["engine"]["busy"]["share"],
            "ttft_p99_s": simulation["latency"]["ttft"]["p99"],
            "tpot_p99_s": simulation["latency"]["tpot"]["p99"],
            "good_share": simulation["goodput"]["share"],
            "output_tokens_per_s": tokens_s,
            "usd_per_hour": usd,
            "output_usd_per_mtok": None if usd is None else cost.usd_per_mtok(usd, tokens_s),
            "watts": watts,
            "tokens_per_joule": None if watts is None else tokens_s / watts,
        }

    plans = [planned(users) for users in options.users]
    return {
        "model": searched["model"],
        "machine": searched["machine"],
        "load": {**searched["load"], "per_user_per_hour": options.per_user, "rate_per_s": None},
        "slo_s": slo,
        "needed_share": options.share,
        "replica_rate_per_s": highest,
        "headroom": options.headroom,
        "replica_rate_definition": searched["highest_rate"]["definition"],
        "plans": plans,
        "notes": list(_plan_notes(target, options.spares, plans)),
    }


def _plan_notes(target: TargetDevice, spares: int, plans: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "Simulated with rates that leave out the network, the tokenizer and the host: a real replica takes less load."
    if target.watts is not None:
        yield f"Watts are the boards' limit ({target.watts:g} W each), spares included: an upper bound."
    if spares and (largest := max(plans, key=lambda p: p["replicas"]))["replicas"] > 20 * spares:
        yield (
            f"{spares} spare{'s' if spares > 1 else ''} for {largest['replicas']:,} replicas cover one failure at a "
            "time: of that many, several are down at once (--spares)."
        )
