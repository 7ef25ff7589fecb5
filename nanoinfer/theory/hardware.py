"""What the vendor says a device can do, looked up by name.

A prediction is only as good as the peak it divides by, and the commonest slip is to
divide by the wrong one: from Ada and Hopper on, vendors headline the rate with 2:4
structured sparsity, twice what a dense model can reach. So dense and sparse peaks are
kept apart and only dense ones are returned unless sparsity is asked for by name. A value
that is unpublished or contested is ``None`` and refused with the reason, never guessed.

The rows live in :mod:`nanoinfer.theory.datasheets` and
:mod:`nanoinfer.theory.datasheets_other`; ceilings measured on this machine come from
:mod:`nanoinfer.calibrate.machine`.
"""

from __future__ import annotations

import re
from typing import Final

from nanoinfer.errors import DeviceError, nearest
from nanoinfer.theory import datasheets, datasheets_other
from nanoinfer.theory.datasheets import DTYPES, LINKS, Device, Link, Source

__all__ = ["DEVICES", "DTYPES", "LINKS", "Device", "Link", "Source", "device", "link", "peak", "ridge"]

#: Every device known, by its name.
DEVICES: Final[dict[str, Device]] = {row.name: row for row in (*datasheets.DEVICES, *datasheets_other.DEVICES)}

#: torch's and people's names for the dtypes of a datasheet.
_DTYPE_ALIASES: Final = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8": "fp8",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "i8": "int8",
    "float4": "fp4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
}
_MAKERS: Final = r"\b(nvidia|geforce|tesla|amd|instinct|apple|google|cloud|intel|habana|chip)\b"


def _key(name: str) -> str:
    """``"NVIDIA A100-SXM4-80GB"`` -> ``"a100sxm480gb"``: case, maker and punctuation do not matter."""
    return re.sub(r"[^a-z0-9+]", "", re.sub(_MAKERS, "", name.lower().replace("_", " ")))


def _index() -> dict[str, Device]:
    found: dict[str, Device] = {}
    for row in DEVICES.values():
        for name in (row.name, *row.aliases):
            if found.setdefault(_key(name), row) is not row:
                raise ValueError(f"datasheets: '{name}' names both {found[_key(name)].name} and {row.name}")
    return found


_BY_KEY: Final = _index()
_LINKS_BY_KEY: Final = {_key(name): row for row in LINKS.values() for name in (row.name, *row.aliases)}


def device(name: str) -> Device:
    """The device of that name, in any case, with or without its maker; the driver's own names work too.

    A bare family name means its commonest board: ``h100`` is the SXM one, ``a100`` the 80 GB
    SXM one, ``b200`` the 180 GB HGX one. Raises :class:`DeviceError` with the nearest names.
    """
    found = _BY_KEY.get(_key(name))
    if found is None:
        names = {alias: row.name for row in DEVICES.values() for alias in (row.name.lower(), *row.aliases)}
        raise DeviceError(f"unknown device '{name}'; {nearest(name.lower(), names)}")
    return found


def link(name: str) -> Link:
    """The link of that name (``nvlink5``, ``ib-ndr``). Raises :class:`DeviceError` with the nearest names."""
    found = _LINKS_BY_KEY.get(_key(name))
    if found is None:
        names = [known.lower() for row in LINKS.values() for known in (row.name, *row.aliases)]
        raise DeviceError(f"unknown link '{name}'; {nearest(name.lower(), names)}")
    return found


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
        known = [name for name, tflops in row.dense_tflops.items() if tflops is not None]
        rate = "2:4-sparse" if sparse else "dense"
        way_out = "measure it there with nanoinfer.calibrate.machine"
        if known and not sparse:
            way_out = f"take one that has ({', '.join(known)}), or {way_out}"
        why = f" ({row.note})" if row.note else ""
        raise DeviceError(f"{row.name} has no published and agreed {rate} {wanted} peak{why}: {way_out}")
    return value * 1e12


def ridge(which: str | Device, dtype: str = "bf16") -> float:
    """FLOP per byte at which compute and memory take equally long: dense peak over memory bandwidth.

    Below it an operator waits for memory. Raises as :func:`peak` does.
    """
    row = device(which) if isinstance(which, str) else which
    return peak(row, dtype) / (row.bandwidth_gbs * 1e9)
