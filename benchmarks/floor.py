"""What the load generator itself adds, against a mock of known timing: at many streams, and at many new requests.

Run ``python -m benchmarks.floor`` on a quiet machine; the result is stored under ``results/``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.store import options, store
from nanoinfer.bench.mock import measure_floor
from nanoinfer.measure.environment import provenance

LOADS: dict[str, dict[str, Any]] = {
    "500 streams of 10 chunks/s": {"streams": 500, "chunks_s": 10.0},
    "200 requests/s": {"rate": 200.0},
}


def main() -> None:
    """Measure, print and store."""
    args = options(__doc__, "results/floor.json", rounds=5, seconds=10.0)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LOADS}
    for _ in range(args.rounds):  # in turns, so that what drifts meets both
        for name, load in LOADS.items():
            floor = asyncio.run(measure_floor(**load, seconds=args.seconds)).as_json()
            found[name].append(floor)
            shown = {key: f"{1000 * floor[key]:.2f} ms" for key in ("overhead_mean_s", "send_lag_p99_s") if floor[key]}
            print(f"{name}: {shown}", flush=True)
    store(args.out, {"provenance": provenance(), "seconds": args.seconds, "loads": found})
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
