"""What a calibration found: the record, its lookups and its JSON form.

Apart from :mod:`nanoinfer.calibrate.machine`, which fills it, so that a stored result can be
read and predicted with where there is no torch.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nanoinfer.errors import DeviceError, NanoinferError, nearest
from nanoinfer.theory.curves import between

#: Beyond this share of queueing a calibration is disturbed.
MOST_WAITED: Final = 0.1


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

    ``streamed``: every call took another weight, so each came from memory, as in a decode
    step; otherwise one weight was used over and over and stayed in the cache where it fits.
    """

    dtype: str
    rows: int
    width: int
    streamed: bool
    rate: Reading


@dataclass(frozen=True)
class AllReduce:
    """Seconds of one all-reduce call of ``nbytes`` among ``ranks``, waiting included: alpha, in effect."""

    ranks: int
    nbytes: int
    seconds: Reading


@dataclass(frozen=True)
class Calibration:
    """The ceilings of one device. Bytes/s, FLOP/s and seconds.

    ``copy`` counts bytes read plus bytes written. ``reads`` names each way of reading.
    ``launch`` is one tiny elementwise operator issued without waiting for it, ``launch_synced``
    the same waited for each time (on a CPU there is nothing to wait for), ``launch_linear`` a
    tiny ``F.linear`` by dtype. ``skipped`` says what was too slow for the budget, or unsupported.
    ``waited`` is the share of its time on the CPU for which this process had to queue for a core
    (``None`` where the system does not tell): other work took it, and every figure is too low.
    """

    device: str
    device_name: str
    threads: int
    dtypes: tuple[str, ...]
    copy: Reading
    reads: Mapping[str, Reading]
    products: tuple[Product, ...]
    launch: Reading
    launch_synced: Reading
    launch_linear: Mapping[str, Reading]
    all_reduce: AllReduce | None
    skipped: tuple[str, ...]
    rounds: int
    waited: float | None
    budget_s: float
    seconds: float
    provenance: Mapping[str, Any] = field(compare=False)

    @property
    def disturbed(self) -> bool:
        """Whether other work held this up so much that the figures say little about the machine."""
        return self.waited is not None and self.waited > MOST_WAITED

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

    def peak_ceiling(self, dtype: str) -> float:
        """FLOP/s of the fastest single sample in ``dtype``: what to divide by for MFU."""
        return max(point.rate.high for point in self._points(dtype, streamed=False))

    def flops_at(self, dtype: str, rows: int, *, streamed: bool = False) -> float:
        """FLOP/s of a product of ``rows`` rows: on a line in log-log between the measured rows, flat beyond them.

        Raises :class:`DeviceError` for a dtype that was not measured, :class:`NanoinferError` for no rows.
        """
        if rows < 1:
            raise NanoinferError(f"rows must be at least 1, got {rows}")
        points = sorted(self._points(dtype, streamed=streamed), key=lambda point: point.rows)
        at = bisect.bisect_left(points, rows, key=lambda point: point.rows)
        if at == len(points) or points[at].rows == rows or at == 0:
            return points[min(at, len(points) - 1)].rate.median
        below, above = points[at - 1], points[at]
        return between(rows, (below.rows, below.rate.median), (above.rows, above.rate.median))

    def launch_seconds(self, dtype: str) -> tuple[float, float]:
        """Seconds to start one small operator, and one small ``F.linear`` in ``dtype``. Raises :class:`DeviceError`."""
        self._points(dtype, streamed=True)
        return self.launch.median, self.launch_linear[dtype].median

    def _points(self, dtype: str, *, streamed: bool) -> list[Product]:
        found = [point for point in self.products if point.dtype == dtype and point.streamed == streamed]
        if not found:
            raise DeviceError(f"'{dtype}' was not calibrated on {self.device}; {nearest(dtype, self.dtypes)}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data; :meth:`from_json` reads it back to an equal object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """Raises ``ValueError``, ``KeyError`` or ``TypeError`` for anything :meth:`to_json` did not write."""
        reduce: dict[str, Any] | None = data["all_reduce"]
        return cls(
            **{
                **data,
                "dtypes": tuple(data["dtypes"]),
                "skipped": tuple(data["skipped"]),
                **{name: Reading(**data[name]) for name in ("copy", "launch", "launch_synced")},
                **{
                    name: {key: Reading(**value) for key, value in data[name].items()}
                    for name in ("reads", "launch_linear")
                },
                "products": tuple(Product(**{**row, "rate": Reading(**row["rate"])}) for row in data["products"]),
                "all_reduce": reduce and AllReduce(**{**reduce, "seconds": Reading(**reduce["seconds"])}),
            }
        )
