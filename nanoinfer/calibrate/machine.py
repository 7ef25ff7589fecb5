"""This machine's own ceilings, measured: the denominators of MBU, MFU and every prediction.

A datasheet says what a device could do, not what torch gets out of this one. So copying, reading (in several ways,
since a slow one is a false ceiling), matrix products by number of rows and the start of an operator are timed with
torch itself: in rounds of one sample of each, so that a disturbance falls on a few samples of everything.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from nanoinfer.errors import DeviceError, NanoinferError, check, nearest
from nanoinfer.measure import clock
from nanoinfer.measure.environment import cpu_model, machine_key, provenance, usable_cores
from nanoinfer.measure.stats import sorted_percentile
from nanoinfer.store import cache_file, cached, read_cached
from nanoinfer.theory.curves import interpolate
from nanoinfer.theory.roofline import Machine

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: Raised when the method changes: older results are then not taken from the cache.
FORMAT: Final = 2
#: Beyond this share of queueing a measurement is disturbed, and not kept.
MAX_WAITED: Final = 0.1
#: Timings of operators and links are taken again after a day: machines drift.
KEEP_S: Final = 24 * 3600
DTYPES: Final = ("float32", "bfloat16", "float16")
#: Bytes streamed through: far beyond any cache share; with inputs and outputs it stays below 1 GB.
BUFFER_BYTES = 512 << 20
#: Side of the square weight, and the numbers of rows multiplied with it.
WIDTH = {"cpu": 2048, "mps": 2048, "cuda": 4096}
ROWS: dict[str, tuple[int, ...]] = dict.fromkeys(("cpu", "mps"), (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048))
ROWS["cuda"] = (1, 8, 32, 128, 512, 2048, 8192)
MAX_ROUNDS = 25
#: A sample lasts at least this long, so that neither the clock nor the call to wait shows in it.
MIN_SAMPLE_S: Final = {"cpu": 0.001, "mps": 0.004, "cuda": 0.004}


# --- the record ------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Median and extremes of ``n`` samples, in the unit of the field that holds it."""

    median: float
    low: float
    high: float
    n: int

    def __post_init__(self) -> None:
        if not (self.n >= 1 and 0 < self.low <= self.median <= self.high < math.inf):
            raise ValueError(f"not a reading: {self.median}, {self.low} to {self.high}, n={self.n}")


@dataclass(frozen=True)
class Product:
    """``F.linear`` of ``rows`` rows with a ``width`` x ``width`` weight: FLOP/s.

    ``streamed``: every call took another weight, so each came from memory, as in a decode step; otherwise one weight
    was used repeatedly and stayed in the cache where it fits.
    """

    dtype: str
    rows: int
    width: int
    streamed: bool
    rate: Reading


@dataclass(frozen=True)
class Calibration:
    """The ceilings of one device. Bytes/s, FLOP/s and seconds.

    ``waited`` is the share of its time for which this process queued for a core (``None`` where the system does not
    tell): other work took it, and every figure is too low.
    """

    device: str
    device_name: str
    threads: int
    dtypes: tuple[str, ...]
    copy: Reading  # bytes read plus bytes written
    reads: Mapping[str, Reading]
    products: tuple[Product, ...]
    launch: Reading  # one tiny elementwise operator, issued without waiting for it
    launch_synced: Reading  # the same, waited for each time; no different on a CPU
    launch_linear: Mapping[str, Reading]  # a tiny F.linear, by dtype
    skipped: tuple[str, ...]  # too slow for the budget, or unsupported
    rounds: int
    waited: float | None
    budget_s: float
    seconds: float
    provenance: Mapping[str, Any] = field(compare=False)

    @property
    def disturbed(self) -> bool:
        """Whether other work took so much of the time that the figures say little about the machine."""
        return self.waited is not None and self.waited > MAX_WAITED

    @property
    def read_bandwidth(self) -> float:
        """Bytes/s of the fastest way of reading, by its median: what to predict with."""
        return max(reading.median for reading in self.reads.values())

    @property
    def read_ceiling(self) -> float:
        """Bytes/s of the fastest single sample of any way of reading: what to divide by for MBU."""
        return max(reading.high for reading in self.reads.values())

    def peak(self, dtype: str) -> float:
        """FLOP/s of the fastest product in ``dtype``, by its median. Raises :class:`DeviceError`."""
        return max(point.rate.median for point in self._points(dtype, streamed=False))

    def flops_at(self, dtype: str, rows: int, *, streamed: bool = False) -> float:
        """FLOP/s of a product of ``rows`` rows: a straight line in log-log between the measured rows, flat beyond them.

        Raises :class:`DeviceError` for a dtype that was not measured, :class:`NanoinferError` for no rows.
        """
        check("rows", rows, at_least=1, error=NanoinferError)
        points = sorted((point.rows, point.rate.median) for point in self._points(dtype, streamed=streamed))
        return interpolate(rows, points)

    def machine(self, dtype: str = "float32") -> Machine:
        """These ceilings as rates to predict with. Raises :class:`DeviceError` for a dtype that was not measured."""
        rows = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
        linear = tuple((r, self.flops_at(dtype, r, streamed=True)) for r in rows)
        launches = self.launch.median, self.launch_linear[dtype].median
        return Machine(self.device_name, dtype, self.peak(dtype), self.read_bandwidth, *launches, linear)

    def _points(self, dtype: str, *, streamed: bool) -> list[Product]:
        points = [point for point in self.products if point.dtype == dtype and point.streamed == streamed]
        if not points:
            raise DeviceError(f"'{dtype}' was not calibrated on {self.device}; {nearest(dtype, self.dtypes)}")
        return points


# --- measuring -------------------------------------------------------------------


@dataclass
class _Item:
    """One thing to time: a call does ``work`` bytes or FLOPs (None: its seconds count); ``calls`` make a sample."""

    call: Callable[[], object]
    work: float | None = None
    calls: int = 1
    wait: bool = True
    samples: list[float] = field(default_factory=list)

    def time(self, device: str) -> float:
        """Seconds per call. A short item starts warm: the one before left its own data in the caches."""
        if self.calls > 1:
            self.call()
        clock.synchronize(device)
        start = clock.now()
        for _ in range(self.calls):
            self.call()
        if self.wait:
            clock.synchronize(device)
        return (clock.now() - start) / self.calls

    def reading(self) -> Reading:
        ordered = sorted(s if self.work is None else self.work / s for s in self.samples)
        return Reading(sorted_percentile(ordered, 50), ordered[0], ordered[-1], len(ordered))


class _Bench:
    """What is timed on one device, by the field of :class:`Calibration` it belongs to; what was left out."""

    def __init__(self, device: str, budget_s: float) -> None:
        import torch

        self.device, self.kind, self.budget_s = device, device.partition(":")[0], budget_s
        self.items: dict[str, dict[Any, _Item]] = defaultdict(dict)
        self.skipped: list[str] = []
        # Normal random numbers: a GPU runs faster on constant ones. Pairs of bf16 read as one fp32 are normal too.
        tile = torch.randn(min(1 << 20, BUFFER_BYTES // 2), generator=torch.Generator().manual_seed(0))
        self.buffer = tile.bfloat16().to(device).repeat(BUFFER_BYTES // 2 // len(tile))

    def add(self, field: str, key: object, item: _Item) -> float:
        """Warm up, choose how many calls make a sample, and keep the item. Returns its seconds per call."""
        self.items[field][key] = item
        item.time(self.device)
        once = item.time(self.device)
        if item.calls == 1:
            item.calls = max(1, math.ceil(MIN_SAMPLE_S[self.kind] / once * 0.999)) if once > 0 else 1000
        return once

    def readings(self, field: str) -> dict[Any, Reading]:
        return {key: item.reading() for key, item in self.items[field].items()}

    def launches_and_memory(self) -> None:
        import torch

        scalar = torch.ones(1, device=self.device)

        def launch_and_wait() -> None:
            scalar.add_(1)
            clock.synchronize(self.device)

        self.add("launch", None, _Item(lambda: scalar.add_(1), calls=200, wait=False))
        self.add("launch_synced", None, _Item(launch_and_wait, calls=200))
        whole = self.buffer.view(torch.float32)
        target, source = whole.chunk(2)
        self.add("copy", None, _Item(lambda: target.copy_(source), 2 * source.nbytes))
        self.add("reads", "torch.dot float32", _Item(lambda: torch.dot(whole, whole), whole.nbytes))
        self.add("reads", "torch.sum float32", _Item(lambda: whole.sum(), whole.nbytes))
        self.add("reads", "torch.sum bfloat16", _Item(lambda: self.buffer.sum(), whole.nbytes))

    def products(self, dtype: str) -> None:
        import torch
        from torch.nn.functional import linear

        width, kind = WIDTH[self.kind], getattr(torch, dtype)
        flat = self.buffer.view(kind)
        weights = flat.view(-1, width, width).unbind()
        vector = torch.ones(1, width, dtype=kind, device=self.device)
        tall = flat.view(-1, width)  # one weight as large as the whole buffer
        self.add("reads", f"matrix-vector product {dtype}", _Item(lambda: linear(vector, tall), flat.nbytes))
        tiny, tiny_weight = torch.ones(1, 64, dtype=kind, device=self.device), weights[0][:64, :64].contiguous()
        self.add("launch_linear", dtype, _Item(lambda: linear(tiny, tiny_weight), calls=100, wait=False))

        def product(weights: tuple[torch.Tensor, ...], rows: int) -> Callable[[], object]:
            x, turn = weights[0][:1].repeat(rows, 1), itertools.cycle(weights)
            return lambda: linear(x, next(turn))

        for streamed in (True, False):
            per_row = 0.0
            for rows in ROWS[self.kind]:
                if per_row * rows > self.budget_s / 50:
                    how = "streamed" if streamed else "cached"
                    self.skipped.append(f"{dtype} product of {rows} rows, {how}: too slow for the budget")
                    continue
                item = _Item(product(weights if streamed else weights[:1], rows), 2 * rows * width * width)
                per_row = self.add("products", (dtype, rows, width, streamed), item) / rows

    def run(self, until: float) -> int:
        """Rounds of one sample each, at least one, until a time on the clock. Returns how many."""
        rounds, longest = 0, 0.0
        while rounds < MAX_ROUNDS:
            start = clock.now()
            if rounds and start + longest > until:
                break
            for items in self.items.values():
                for item in items.values():
                    item.samples.append(item.time(self.device))
            rounds, longest = rounds + 1, max(longest, clock.now() - start)
        return rounds


def schedstat() -> tuple[int, int] | None:
    """Nanoseconds that this process's threads ran, and that they were ready but queued for a core; Linux tells."""
    try:
        rows = [path.read_text().split() for path in Path("/proc/self/task").glob("*/schedstat")]
        return sum(int(row[0]) for row in rows), sum(int(row[1]) for row in rows)
    except (OSError, ValueError, IndexError):
        return None


def queued(fn: Callable[[], T]) -> tuple[T, float | None]:
    """What ``fn`` returns, and the share of its time for which this process was queued for a core; None: not known."""
    before, result, after = schedstat(), fn(), schedstat()
    if before is None or after is None or sum(after) <= sum(before):
        return result, None
    return result, (after[1] - before[1]) / (sum(after) - sum(before))


def _measure(device: str, budget_s: float) -> Calibration:
    import torch

    from nanoinfer.models.registry import check_dtype

    start = clock.now()
    with torch.inference_mode():
        bench = _Bench(device, budget_s)
        bench.launches_and_memory()
        for dtype in DTYPES:
            try:
                check_dtype(device, dtype)
            except DeviceError as error:
                bench.skipped.append(str(error))
            else:
                bench.products(dtype)
        rounds, waited = queued(lambda: bench.run(start + 0.8 * budget_s))
    return Calibration(
        device=device,
        device_name=torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_model(),
        threads=torch.get_num_threads(),
        dtypes=tuple(bench.items["launch_linear"]),
        copy=bench.readings("copy")[None],
        reads=bench.readings("reads"),
        products=tuple(Product(*(*key, rate)) for key, rate in bench.readings("products").items()),
        launch=bench.readings("launch")[None],
        launch_synced=bench.readings("launch_synced")[None],
        launch_linear=bench.readings("launch_linear"),
        skipped=tuple(bench.skipped),
        rounds=rounds,
        waited=waited,
        budget_s=budget_s,
        seconds=clock.now() - start,
        provenance=provenance(),
    )


# --- the cache -------------------------------------------------------------------


def cache_path(device: str = "cpu") -> Path:
    """The file that holds the result for this machine, its number of threads, its torch and ``device``."""
    return cache_file("calibration", [FORMAT, device, usable_cores(), *machine_key()])


def calibrate(device: str = "cpu", budget_s: float = 15.0, fresh: bool = False) -> Calibration:
    """The ceilings of ``device``, from the user's cache or measured within about ``budget_s`` seconds.

    Measured again where the machine, its threads, torch or the device changed, where the stored result is damaged or
    had a smaller budget, and with ``fresh=True``: use that next to a run on a shared machine, whose ceilings move. A
    disturbed result is returned but not kept. Needs less than 1 GB of the device's memory.
    Raises :class:`DeviceError`, and :class:`NanoinferError` for a budget that is not above 0.
    """
    from nanoinfer.models.registry import check_device

    check_device(device)
    check("calibrate: budget_s", budget_s, above=0, error=NanoinferError)
    path = cache_path(device)
    stored = read_cached(path, Calibration)
    return cached(
        path,
        Calibration,
        lambda: _measure(device, budget_s),
        fresh=fresh or stored is None or stored.budget_s < budget_s,
        keep=lambda found: not found.disturbed,
    )
