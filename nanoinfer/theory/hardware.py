"""What the vendor says a device can do, looked up by name; the figures stand in ``nanoinfer/data/devices.toml``.

From Ada and Hopper on, vendors headline the rate with 2:4 structured sparsity, twice what a dense model can reach. So
dense and sparse peaks are kept apart, and only dense ones are returned unless sparsity is asked for by name. A value
that is unpublished or contested is ``None`` and refused with the reason, never guessed. Ceilings measured on this
machine come from :mod:`nanoinfer.calibrate.machine`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

from nanoinfer.data import read_toml
from nanoinfer.errors import DeviceError, check, nearest

DTYPES: Final = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
Rates = Mapping[str, float | None]

Row = TypeVar("Row", bound="Device | Link")

#: Microseconds of a call where a link's row names none: the order of magnitude for ranks of one server, an assumption.
ALPHA_US: Final = 8.0


@dataclass(frozen=True)
class Source:
    """Where a row's figures stand."""

    title: str
    url: str


@dataclass(frozen=True)
class Link:
    """A link between devices."""

    name: str
    gbs_one_way: float  # GB/s per device and direction
    source: Source
    #: Alpha: microseconds per ALL-REDUCE of a small message, one whole collective call with its launch (Chen counts
    #: four messages a layer, here it is two calls). No vendor publishes it: measure it where there are several ranks.
    latency_us: float = ALPHA_US
    note: str = ""
    aliases: tuple[str, ...] = ()
    between_servers: bool = False  # alpha is then that of two servers


@dataclass(frozen=True)
class Device:
    """One device as its vendor describes it; units and meanings as ``devices.toml`` states them.

    A dtype that is missing from the rates has no unit on the device, a ``None`` no published figure.
    """

    name: str
    vendor: str
    kind: Literal["gpu", "tpu", "cpu"]  # gpu: any accelerator driven like one
    memory_gb: float
    bandwidth_gbs: float
    dense_tflops: Rates = field(hash=False)
    source: Source
    sparse_tflops: Rates = field(default_factory=dict, hash=False)
    link: Link | None = None  # to devices of the same kind; None: only through the host
    watts: float | None = None
    note: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> float:
        """Bytes that surely exist: ``memory_gb`` x 1e9. Vendors' GB are often GiB: a driver may show 7% more."""
        return self.memory_gb * 1e9


def read_links(data: Mapping[str, Any]) -> dict[str, Link]:
    """The links of a file such as ``devices.toml``, by name. Raises as :func:`read_devices` does."""
    links = {}
    for name, row in data["links"].items():
        link = Link(**row | _common(name, row, data["sources"]))
        check(f"gbs_one_way of {name}", link.gbs_one_way, above=0, error=DeviceError)
        check(f"latency_us of {name}", link.latency_us, at_least=0, error=DeviceError)
        links[name] = link
    return links


def read_devices(data: Mapping[str, Any], links: Mapping[str, Link]) -> dict[str, Device]:
    """The devices of a file such as ``devices.toml``, by name.

    Raises :class:`DeviceError` for a figure that is not a number above 0 and for an unknown dtype, KeyError and
    TypeError for a source or link that is not in the file and for a field that is unknown or missing.
    """
    devices = {}
    for name, row in data["devices"].items():
        given = {"kind": "gpu"} | row["board"] | {key: value for key, value in row.items() if key != "board"}
        given |= {rates: _rates(name, row.get(rates, {})) for rates in ("dense_tflops", "sparse_tflops")}
        given["link"] = links[given["link"]] if "link" in given else None
        device = devices[name] = Device(**given | _common(name, given, data["sources"]))
        for figure in ("memory_gb", "bandwidth_gbs", "watts"):
            if figure in given:
                check(f"{figure} of {name}", getattr(device, figure), above=0, error=DeviceError)
    return devices


def _common(name: str, row: Mapping[str, Any], sources: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    return {"name": name, "source": Source(*sources[row["source"]]), "aliases": tuple(row.get("aliases", ()))}


def _rates(name: str, row: Mapping[str, float | str]) -> Rates:
    """A row's rates: ``"unpublished"`` becomes ``None``."""
    for dtype, value in row.items():
        if dtype not in DTYPES:
            raise DeviceError(f"unknown dtype '{dtype}' of {name}; {nearest(dtype, DTYPES)}")
        if value != "unpublished":
            check(f"{dtype} of {name}", value, above=0, error=DeviceError)
    return {dtype: None if isinstance(value, str) else value for dtype, value in row.items()}


def _key(name: str) -> str:
    """``"NVIDIA A100-SXM4-80GB"`` -> ``"a100sxm480gb"``: case, maker and punctuation do not matter."""
    makers = r"\b(nvidia|geforce|tesla|amd|instinct|apple|google|cloud|intel|habana|chip)\b"
    return re.sub(r"[^a-z0-9+]", "", re.sub(makers, "", name.lower().replace("_", " ")))


def _by_key(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Rows by every name and alias. Raises ValueError where one names two rows."""
    found: dict[str, Row] = {}
    for row in rows.values():
        for name in (row.name, *row.aliases):
            if found.setdefault(_key(name), row) is not row:
                raise ValueError(f"devices.toml: '{name}' names both {found[_key(name)].name} and {row.name}")
    return found


_DATA: Final = read_toml("devices")
#: Every link and device known, by its name.
LINKS: Final = read_links(_DATA)
DEVICES: Final = read_devices(_DATA, LINKS)
_LINKS_BY_KEY: Final = _by_key(LINKS)
_DEVICES_BY_KEY: Final = _by_key(DEVICES)
#: torch's and colloquial names of a datasheet's dtypes.
_DTYPE_ALIASES: Final = {
    **dict.fromkeys(("float32", "float"), "fp32"),
    "bfloat16": "bf16",
    **dict.fromkeys(("float16", "half"), "fp16"),
    **dict.fromkeys(("float8", "float8_e4m3fn", "float8_e5m2"), "fp8"),
    "i8": "int8",
    **dict.fromkeys(("float4", "nvfp4", "mxfp4"), "fp4"),
}


def device(name: str) -> Device:
    """The device of that name, in any case, with or without its maker; the driver's own names work too.

    A bare family name (``h100``) means the board whose aliases in ``devices.toml`` have it, its commonest one: the
    80 GB SXM board for ``a100``, the 180 GB HGX one for ``b200``. Raises :class:`DeviceError` with the nearest names.
    """
    return _find("device", name, _DEVICES_BY_KEY)


def link(name: str) -> Link:
    """The link of that name (``nvlink5``, ``ib-ndr``). Raises :class:`DeviceError` with the nearest names."""
    return _find("link", name, _LINKS_BY_KEY)


def _find(what: str, name: str, rows: Mapping[str, Row]) -> Row:
    if (found := rows.get(_key(name))) is not None:
        return found
    names = {known.lower() for row in rows.values() for known in (row.name, *row.aliases)}
    raise DeviceError(f"unknown {what} '{name}'; {nearest(name.lower(), names)}")


def peak(which: str | Device, dtype: str = "bf16", *, sparse: bool = False) -> float:
    """FLOP/s (integer operations/s for int8) of dense matrix products, as the vendor states it.

    ``fp32`` is the plain rate; tensor cores reach ``tf32`` on fp32 data at reduced precision.
    ``sparse=True`` gives the 2:4-sparse rate, which no dense model reaches. Raises
    :class:`DeviceError` where the device lacks the dtype, or where no agreed figure exists.
    """
    row = device(which) if isinstance(which, str) else which
    wanted = _DTYPE_ALIASES.get(dtype.lower(), dtype.lower())
    if wanted not in DTYPES:
        raise DeviceError(f"unknown dtype '{dtype}'; {nearest(dtype, (*DTYPES, *_DTYPE_ALIASES))}")
    if wanted not in row.dense_tflops:
        raise DeviceError(f"{row.name} has no {wanted}; it has {', '.join(row.dense_tflops)}")
    value = row.sparse_tflops.get(wanted) if sparse else row.dense_tflops[wanted]
    if value is None:
        known = ", ".join(name for name, tflops in row.dense_tflops.items() if tflops is not None)
        another = f"take one that has ({known}), or " if known and not sparse else ""
        rate, why = "2:4-sparse" if sparse else "dense", f" ({row.note})" if row.note else ""
        raise DeviceError(
            f"{row.name} has no published and agreed {rate} {wanted} peak{why}: {another}measure it there with "
            "nanoinfer.calibrate.machine"
        )
    return value * 1e12


def ridge(which: str | Device, dtype: str = "bf16") -> float:
    """FLOP per byte below which an operator waits for memory: dense peak over bandwidth. Raises as :func:`peak`."""
    row = device(which) if isinstance(which, str) else which
    return peak(row, dtype) / (row.bandwidth_gbs * 1e9)
