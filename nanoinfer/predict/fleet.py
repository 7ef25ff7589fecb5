"""How many replicas so many users need, what they cost and what they draw: the record behind ``nanoinfer plan``.

One replica is simulated (:mod:`nanoinfer.predict.serving`) to find the highest rate at which it still keeps its
promises. So many of them take the load that each has some headroom, and one more stands by for the one that fails. A
load that is dealt out in turn comes to each replica more evenly than it is simulated here, which errs on the safe side;
that a short run does not show how a queue grows errs on the other, for which the headroom is there too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Console

from nanoinfer.errors import RequestError
from nanoinfer.predict.serving import simulate_serving
from nanoinfer.predict.target import Target, dtype_named, target_named
from nanoinfer.show.text import as_table, format_number, ms
from nanoinfer.theory import cost
from nanoinfer.theory.parameters import check_sizes

#: Requests a second with which the search for a replica's highest rate begins.
FIRST_RATE: Final = 16.0


def plan(
    model: str,
    gpu: str,
    *,
    users: Sequence[int],
    per_user_hour: float,
    slo: Mapping[str, float],
    needed: float = 0.99,
    prompts: str = "lognormal:64-1024",
    outputs: str = "lognormal:16-512",
    dtype: str = "bfloat16",
    tp: int = 1,
    headroom: float = 0.2,
    spares: int = 1,
    usd_per_hour: float | None = None,
    requests: int = 2000,
    seed: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Replicas, latencies, price and power for each number of users.

    Args:
        model: as for :func:`nanoinfer.predict.serving.simulate_serving`, like ``gpu``, ``prompts``, ``outputs``,
            ``dtype``, ``tp``, ``seed`` and ``settings``.
        gpu: a datasheet's name or ``here``.
        users: how many, several plans if several.
        per_user_hour: requests that each makes in an hour, at the busiest time.
        slo: limits in seconds by metric.
        needed: share of the requests that must meet them all.
        prompts: lengths in tokens.
        outputs: lengths of the answers.
        dtype: of weights, cache and arithmetic.
        tp: devices of a replica.
        headroom: share of each replica's highest rate that is left free.
        spares: replicas beyond those that the load needs.
        usd_per_hour: the price of one device.
        requests: of each simulated run.
        seed: of arrivals and lengths.

    Raises:
        NanoinferError: what cannot be simulated, users below 1, or limits that a replica breaks at any rate.
    """
    check_sizes(users=min(users, default=0))
    if spares < 0:
        raise RequestError(f"--spares must not be negative, got {spares}")
    if not 0 <= headroom < 1:
        raise RequestError(f"--headroom must be at least 0 and below 1, got {headroom:g}")
    if not 0 < per_user_hour < math.inf:
        raise RequestError(f"--per-user must be a number above 0, got {per_user_hour:g}")
    target = target_named(gpu, dtype_named(dtype))

    def run(rate: float, find: bool) -> dict[str, Any]:
        load: dict[str, Any] = {"prompts": prompts, "outputs": outputs, "requests": requests, "seed": seed}
        limits: dict[str, Any] = {"slo": slo, "needed": needed, "find": find}
        return simulate_serving(model, gpu, rate=rate, dtype=dtype, tp=tp, **load, **limits, **settings)

    searched = run(FIRST_RATE, True)
    highest = searched["highest_rate"]["rate_per_s"]
    if highest is None:
        raise RequestError(
            f"no rate meets these limits on {tp} x {target.name}: even a lone request is too slow for {needed:.0%} of "
            "them; take looser limits, a faster device or --tp"
        )

    def planned(n: int) -> dict[str, Any]:
        load = n * per_user_hour / 3600
        active = math.ceil(load / highest / (1 - headroom))
        figures = _figures(run(load / active, False), load, (active + spares) * tp, target, usd_per_hour)
        counts = {"users": n, "load_per_s": load, "replicas": active, "spares": spares}
        return {**counts, "load_share": load / (active * highest), **figures}

    plans = [planned(n) for n in users]
    return {
        "model": searched["model"],
        "machine": searched["machine"],
        "load": {**searched["load"], "per_user_per_hour": per_user_hour, "rate_per_s": None},
        "slo_s": dict(slo),
        "needed_share": needed,
        "replica_rate_per_s": highest,
        "headroom": headroom,
        "replica_rate_definition": searched["highest_rate"]["definition"],
        "plans": plans,
        "notes": list(_notes(target, spares, plans)),
    }


def _figures(
    found: Mapping[str, Any], load: float, devices: int, target: Target, usd_per_hour: float | None
) -> dict[str, Any]:
    """What users feel on one replica, and what all devices cost and draw."""
    tokens_s = load * found["tokens"]["output"] / max(1, found["requests"]["measured"])
    watts = None if target.watts is None else target.watts * devices
    usd = None if usd_per_hour is None else usd_per_hour * devices
    return {
        "devices": devices,
        "busy_share": found["engine"]["busy"]["share"],
        "ttft_p99_s": found["latency"]["ttft"]["p99"],
        "tpot_p99_s": found["latency"]["tpot"]["p99"],
        "good_share": found["goodput"]["share"],
        "output_tokens_per_s": tokens_s,
        "usd_per_hour": usd,
        "output_usd_per_mtok": None if usd is None else cost.usd_per_mtok(usd, tokens_s),
        "watts": watts,
        "tokens_per_joule": None if watts is None else tokens_s / watts,
    }


def _notes(target: Target, spares: int, plans: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "Simulated with rates that leave out the network, the tokenizer and the host: a real replica takes less load."
    if target.watts is not None:
        yield f"Watts are the boards' limit ({target.watts:g} W each), spares included: an upper bound."
    if spares and (largest := max(plans, key=lambda p: p["replicas"]))["replicas"] > 20 * spares:
        yield (
            f"{spares} spare{'s' if spares > 1 else ''} for {largest['replicas']:,} replicas cover one failure at a "
            "time: of so many, several are down at once (--spares)."
        )


def show_plan(console: Console, record: dict[str, Any]) -> None:
    """A row for each number of users."""
    machine = record["machine"]
    header = ("users", "requests/s", "replicas", "devices", "load", "TTFT p99", "TPOT p99")
    rows = []
    for one in record["plans"]:
        rows.append(
            (
                f"{one['users']:,}",
                format_number(one["load_per_s"]),
                f"{one['replicas']:,} + {one['spares']}",
                f"{one['devices']:,}",
                f"{one['load_share']:.0%}",
                f"{ms(one['ttft_p99_s'])} ms",
                f"{ms(one['tpot_p99_s'])} ms",
                *(format_number(one[key]) for key in ("output_tokens_per_s", "usd_per_hour", "output_usd_per_mtok")),
                *(format_number(one[key]) for key in ("watts", "tokens_per_joule")),
            )
        )
    limits = ", ".join(f"{name} {ms(limit)} ms" for name, limit in record["slo_s"].items())
    console.print(
        f"{record['model']['name']} on {machine['tp']} x {machine['name']} a replica, {machine['dtype']}: "
        f"{format_number(record['replica_rate_per_s'])} requests/s with {record['needed_share']:.0%} within {limits}",
        markup=False,
        highlight=False,
    )
    console.print(as_table(((*header, "tokens/s", "$/h", "$/Mtok out", "W", "tokens/J"), rows)))
    for note in record["notes"]:
        console.print(note, markup=False, highlight=False)
