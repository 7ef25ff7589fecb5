"""This machine's own ceilings, measured: the denominators of MBU, MFU and every prediction.

A datasheet says what a device could do, not what torch gets out of this one, and a laptop's
or a virtual machine's has none. So the ceilings are measured with torch itself: copying,
reading (in several ways, since a slow way of reading is a false ceiling), matrix products by
number of rows, and the cost of starting an operator.

Other work comes and goes on a shared machine. Everything is therefore measured in rounds,
one sample of each thing a round, so that a disturbance falls on a few samples of everything
and not on all samples of one thing; medians are reported with their extremes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nanoinfer.errors import DeviceError, NanoinferError
from nanoinfer.measure import clock
from nanoinfer.measure.calibration import AllReduce, Calibration, Product, Reading
from nanoinfer.measure.environment import cpu_model, provenance, usable_cores
from nanoinfer.measure.stats import percentile
from nanoinfer.store import write_whole

if TYPE_CHECKING:
    import torch

#: Raised when the way of measuring changes: older results are then not taken from the cache.
FORMAT: Final = 1
DTYPES: Final = ("float32", "bfloat16", "float16")
#: Bytes streamed through: far beyond any cache share; with inputs and outputs it stays below 1 GB.
BUFFER_BYTES = 512 << 20
#: Side of the square weight, and the numbers of rows multiplied with it.
WIDTH: dict[str, int] = {"cpu": 2048, "mps": 2048, "cuda": 4096}
ROWS: dict[str, tuple[int, ...]] = {
    "cpu": (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048),
    "mps": (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048),
    "cuda": (1, 8, 32, 128, 512, 2048, 8192),
}
MOST_ROUNDS = 25
#: A sample lasts at least this long, so that neither the clock nor the call to wait shows in it.
LEAST_SECONDS: Final = {"cpu": 0.001, "mps": 0.004, "cuda": 0.004}
REDUCE_BYTES: Final = 8192
REDUCE_CALLS: Final = 50


# --- measuring -------------------------------------------------------------------


@dataclass
class _Item:
    """One thing to time: a ``call`` does ``work`` bytes, FLOPs or operators; ``calls`` of them make a sample."""

    call: Callable[[], object]
    work: float
    calls: int = 1
    wait: bool = True
    samples: list[float] = field(default_factory=list)

    def time(self, device: str) -> float:
        """Seconds per call. What is short starts warm: what ran before it left its own data in the caches."""
        if self.calls > 1:
            self.call()
        clock.synchronize(device)
        start = clock.now()
        for _ in range(self.calls):
            self.call()
        if self.wait:
            clock.synchronize(device)
        return (clock.now() - start) / self.calls

    def rate(self) -> Reading:
        return _reading([self.work / seconds for seconds in self.samples])

    def seconds(self) -> Reading:
        return _reading(self.samples)


def _reading(samples: list[float]) -> Reading:
    median = percentile(samples, 50)
    assert median is not None
    return Reading(median, min(samples), max(samples), len(samples))


class _Bench:
    """The items for one device, their tensors, and what was left out."""

    def __init__(self, device: str, budget_s: float) -> None:
        import torch

        self.device, self.kind, self.budget_s = device, device.partition(":")[0], budget_s
        self.items: dict[tuple[Any, ...], _Item] = {}
        self.skipped: list[str] = []
        # Normal random numbers: a GPU runs faster on constant ones. Pairs of bf16 read as one fp32 are normal too.
        tile = torch.randn(min(1 << 20, BUFFER_BYTES // 2), generator=torch.Generator().manual_seed(0))
        self.buffer = tile.bfloat16().to(device).repeat(BUFFER_BYTES // 2 // len(tile))

    def add(self, key: tuple[Any, ...], item: _Item) -> float:
        """Warm it up, choose how many calls make a sample, and keep it. Returns its seconds per call."""
        item.time(self.device)
        once = item.time(self.device)
        if item.calls == 1:
            item.calls = max(1, math.ceil(LEAST_SECONDS[self.kind] / once * 0.999)) if once > 0 else 1000
        self.items[key] = item
        return once

    def memory(self) -> None:
        import torch

        whole = self.buffer.view(torch.float32)
        target, source = whole.chunk(2)
        self.add(("copy",), _Item(lambda: target.copy_(source), 2 * source.nbytes))
        self.add(("read", "torch.dot float32"), _Item(lambda: torch.dot(whole, whole), whole.nbytes))
        self.add(("read", "torch.sum float32"), _Item(lambda: whole.sum(), whole.nbytes))
        self.add(("read", "torch.sum bfloat16"), _Item(lambda: self.buffer.sum(), whole.nbytes))

    def supports(self, dtype: str) -> bool:
        from nanoinfer.models.registry import check_dtype

        try:
            check_dtype(self.device, dtype)
        except DeviceError as error:
            self.skipped.append(str(error))
            return False
        return True

    def products(self, dtype: str) -> None:
        import torch
        from torch.nn.functional import linear

        width, kind = WIDTH[self.kind], getattr(torch, dtype)
        flat = self.buffer.view(kind)
        weights = flat.view(-1, width, width).unbind()
        vector = torch.ones(1, width, dtype=kind, device=self.device)
        tall = flat.view(-1, width)  # one weight as large as the whole buffer
        self.add(("read", f"matrix-vector product {dtype}"), _Item(lambda: linear(vector, tall), flat.nbytes))
        tiny, tiny_weight = torch.ones(1, 64, dtype=kind, device=self.device), weights[0][:64, :64].contiguous()
        self.add(("launch_linear", dtype), _Item(lambda: linear(tiny, tiny_weight), 1, calls=100, wait=False))
        for streamed in (True, False):
            rows_before, seconds_before = 0, 0.0
            for rows in ROWS[self.kind]:
                expected = seconds_before * rows / max(1, rows_before)
                if expected > self.budget_s / 50:
                    how = "streamed" if streamed else "cached"
                    self.skipped.append(f"{dtype} product of {rows} rows, {how}: too slow for the budget")
                    continue
                item = self._product(weights if streamed else weights[:1], rows, width)
                rows_before, seconds_before = rows, self.add(("product", dtype, rows, width, streamed), item)

    @staticmethod
    def _product(weights: tuple[torch.Tensor, ...], rows: int, width: int) -> _Item:
        from torch.nn.functional import linear

        x, turn = weights[0][:1].repeat(rows, 1), itertools.cycle(weights)
        return _Item(lambda: linear(x, next(turn)), 2 * rows * width * width)

    def launches(self) -> None:
        import torch

        one = torch.ones(1, device=self.device)
        self.add(("launch",), _Item(lambda: one.add_(1), 1, calls=200, wait=False))

        def launch_and_wait() -> None:
            one.add_(1)
            clock.synchronize(self.device)

        self.add(("launch_synced",), _Item(launch_and_wait, 1, calls=200))

    def run(self, until: float) -> int:
        """Rounds of one sample each, at least one, until the time given. Returns how many."""
        rounds, longest = 0, 0.0
        while rounds < MOST_ROUNDS:
            start = clock.now()
            if rounds and start + longest > until:
                break
            for item in self.items.values():
                item.samples.append(item.time(self.device))
            rounds, longest = rounds + 1, max(longest, clock.now() - start)
        return rounds

    def named(self, kind: str) -> dict[str, _Item]:
        return {key[1]: item for key, item in self.items.items() if key[0] == kind}

    def points(self) -> Iterator[Product]:
        for key, item in self.items.items():
            if key[0] == "product":
                _, dtype, rows, width, streamed = key
                yield Product(dtype, rows, width, streamed, item.rate())


def _ranks() -> int:
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _all_reduce(device: str) -> AllReduce | None:
    import torch

    ranks = _ranks()
    if ranks == 1:
        return None
    tensor = torch.zeros(REDUCE_BYTES // 4, device=device)
    item = _Item(lambda: torch.distributed.all_reduce(tensor), 1)
    # The same number of calls on every rank, or they would wait for each other for ever.
    item.samples = [item.time(device) for _ in range(2 * REDUCE_CALLS)][REDUCE_CALLS:]
    return AllReduce(ranks, tensor.nbytes, item.seconds())


def scheduled() -> tuple[int, int] | None:
    """Nanoseconds that this process's threads ran, and that they were ready but queued for a core; Linux tells."""
    try:
        rows = [path.read_text().split() for path in Path("/proc/self/task").glob("*/schedstat")]
        return sum(int(row[0]) for row in rows), sum(int(row[1]) for row in rows)
    except (OSError, ValueError, IndexError):
        return None


def waited_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """The share of its time for which this process queued for a core between two calls of :func:`scheduled`."""
    if before is None or after is None or sum(after) <= sum(before):
        return None
    return (after[1] - before[1]) / (sum(after) - sum(before))


def _measure(device: str, name: str, budget_s: float) -> Calibration:
    import torch

    start = clock.now()
    with torch.inference_mode():
        bench = _Bench(device, budget_s)
        bench.launches()
        bench.memory()
        dtypes = tuple(dtype for dtype in DTYPES if bench.supports(dtype))
        for dtype in dtypes:
            bench.products(dtype)
        all_reduce = _all_reduce(device)
        before = scheduled()
        rounds = bench.run(start + 0.8 * budget_s)
        waited = waited_share(before, scheduled())
    return Calibration(
        device=device,
        device_name=name,
        threads=torch.get_num_threads(),
        dtypes=dtypes,
        copy=bench.items["copy",].rate(),
        reads={name: item.rate() for name, item in bench.named("read").items()},
        products=tuple(bench.points()),
        launch=bench.items["launch",].seconds(),
        launch_synced=bench.items["launch_synced",].seconds(),
        launch_linear={name: item.seconds() for name, item in bench.named("launch_linear").items()},
        all_reduce=all_reduce,
        skipped=tuple(bench.skipped),
        rounds=rounds,
        waited=waited,
        budget_s=budget_s,
        seconds=clock.now() - start,
        provenance=provenance(),
    )


# --- the cache -------------------------------------------------------------------


def _key(device: str) -> dict[str, Any]:
    """What a result holds for: another of any of these is measured anew."""
    import torch

    cuda = device.startswith("cuda")
    return {
        "format": FORMAT,
        "device": device,
        "name": torch.cuda.get_device_name(device) if cuda else cpu_model(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ranks": _ranks(),
    }


def cache_path(device: str = "cpu") -> Path:
    """The file that holds the result for this machine, its number of threads, its torch and ``device``."""
    from nanoinfer.store import cache_dir

    digest = hashlib.sha256(json.dumps(_key(device), sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "calibration" / f"{digest}.json"


def _load(path: Path, key: Mapping[str, Any], budget_s: float) -> Calibration | None:
    """The stored result; ``None`` where it is missing, damaged, of another machine or of a smaller budget."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = Calibration.from_json(data["calibration"])
        return found if data["key"] == key and found.budget_s >= budget_s else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _store(path: Path, key: Mapping[str, Any], result: Calibration) -> None:
    write_whole(path, json.dumps({"key": key, "calibration": result.to_json()}, indent=1) + "\n")


def _everywhere(found: bool, device: str) -> bool:
    """Whether all ranks found it: measuring takes part in a collective, so all must measure or none."""
    import torch

    if _ranks() == 1:
        return found
    votes = torch.tensor([int(found)], device=device)
    torch.distributed.all_reduce(votes, op=torch.distributed.ReduceOp.MIN)
    return bool(votes.item())


def calibrate(device: str = "cpu", budget_s: float = 15.0, fresh: bool = False) -> Calibration:
    """The ceilings of ``device``, from the user's cache or measured within about ``budget_s`` seconds.

    Measured again where the machine, its threads, torch or the device changed, where the stored
    result is damaged or had a smaller budget, and with ``fresh=True``: do that beside a run on a
    shared machine, whose ceilings move. A result that other work disturbed is returned and says so
    (:attr:`Calibration.disturbed`), but is not kept. Needs less than 1 GB of the device's memory. With several
    ranks every rank must call it. Raises :class:`DeviceError`, and :class:`NanoinferError` for no budget.
    """
    from nanoinfer.models.registry import check_device

    check_device(device)
    if not 0 < budget_s < math.inf:
        raise NanoinferError(f"calibrate: the budget must be a positive number of seconds, got {budget_s}")
    key, path = _key(device), cache_path(device)
    found = None if fresh else _load(path, key, budget_s)
    if not _everywhere(found is not None, device) or found is None:
        found = _measure(device, str(key["name"]), budget_s)
        if not found.disturbed:
            _store(path, key, found)
    return found
