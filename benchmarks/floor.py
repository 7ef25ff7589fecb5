"""What the load generator itself adds, against a mock of known timing: at many streams, and at many new requests.

Run ``python -m benchmarks.floor`` on a quiet machine; the result is stored under ``results/``.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from benchmarks.store import store
from nanoinfer.bench.overhead import measure_floor
from nanoinfer.measure.environment import provenance

LOADS: dict[str, dict[str, Any]] = {
    "500 streams of 10 chunks/s": {"streams": 500, "chunks_s": 10.0},
    "200 requests/s": {"rate": 200.0},
}


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("results/floor.json"))
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LOADS}
    for _ in range(args.rounds):  # turn about, so that what drifts meets both
        for name, load in LOADS.items():
            floor = asyncio.run(measure_floor(**load, seconds=args.seconds)).as_json()
            found[name].append(floor)
            shown = {key: f"{1000 * floor[key]:.2f} ms" for key in ("overhead_mean_s", "send_lag_p99_s") if floor[key]}
            print(f"{name}: {shown}", flush=True)
    store(args.out, {"provenance": provenance(), "seconds": args.seconds, "loads": found})
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
