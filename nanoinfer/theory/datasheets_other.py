"""Datasheet rows of other makers: AMD, Google, Intel, Apple, and CPUs.

Same rules as :mod:`nanoinfer.theory.datasheets`. Apple states memory bandwidth but hardly a
rate, and nobody states one for a CPU (it depends on the clock under vector load), so those
are ``None``: :mod:`nanoinfer.calibrate.machine` measures them on the machine itself.
"""

from __future__ import annotations

from typing import Final

from nanoinfer.theory.datasheets import (
    ICI_V5E,
    ICI_V5P,
    ICI_V6E,
    ROCE_GAUDI3,
    XGMI_MI300X,
    XGMI_MI355X,
    Device,
    Rates,
    Source,
    rates,
)

_AMD = "https://www.amd.com/en/products/"
_MI300X = Source("AMD Instinct MI300X", _AMD + "accelerators/instinct/mi300/mi300x.html")
_MI325X = Source("AMD Instinct MI325X", _AMD + "accelerators/instinct/mi300/mi325x.html")
_MI355X = Source("AMD Instinct MI355X", _AMD + "accelerators/instinct/mi350/mi355x.html")
_EPYC_9654 = Source(
    "AMD EPYC 9654", _AMD + "processors/server/epyc/4th-generation-9004-and-8004-series/amd-epyc-9654.html"
)
_RYZEN_7950X = Source("AMD Ryzen 9 7950X", _AMD + "processors/desktops/ryzen/7000-series/amd-ryzen-9-7950x.html")

_TPU = "https://docs.cloud.google.com/tpu/docs/"
_V5E, _V5P, _V6E = (Source(f"Cloud TPU {name} documentation", _TPU + name) for name in ("v5e", "v5p", "v6e"))

_GAUDI3 = Source(
    "Intel Gaudi 3 AI Accelerator White Paper",
    "https://www.intel.com/content/www/us/en/content-details/817486/intel-gaudi-3-ai-accelerator-white-paper.html",
)
_XEON_8480 = Source(
    "Intel Xeon Platinum 8480+",
    "https://www.intel.com/content/www/us/en/products/sku/231746/intel-xeon-platinum-8480-processor-105m-cache-2-00-ghz/"
    "specifications.html",
)
_I9_14900K = Source(
    "Intel Core i9-14900K",
    "https://www.intel.com/content/www/us/en/products/sku/236773/intel-core-i9-processor-14900k-36m-cache-up-to-6-00-ghz/"
    "specifications.html",
)

_NEWS = "https://www.apple.com/newsroom/"
_M1 = Source("Apple unleashes M1", _NEWS + "2020/11/apple-unleashes-m1/")
_M1_PRO = Source(
    "Introducing M1 Pro and M1 Max",
    _NEWS + "2021/10/introducing-m1-pro-and-m1-max-the-most-powerful-chips-apple-has-ever-built/",
)
_M1_ULTRA = Source(
    "Apple unveils M1 Ultra",
    _NEWS + "2022/03/apple-unveils-m1-ultra-the-worlds-most-powerful-chip-for-a-personal-computer/",
)
_M2 = Source(
    "Apple unveils M2", _NEWS + "2022/06/apple-unveils-m2-with-breakthrough-performance-and-capabilities/"
)  # fmt: skip
_M2_PRO = Source(
    "Apple unveils M2 Pro and M2 Max",
    _NEWS + "2023/01/apple-unveils-m2-pro-and-m2-max-next-generation-chips-for-next-level-workflows/",
)
_M2_ULTRA = Source("Apple introduces M2 Ultra", _NEWS + "2023/06/apple-introduces-m2-ultra/")
_M3 = Source(
    "Apple unveils M3, M3 Pro, and M3 Max",
    _NEWS + "2023/10/apple-unveils-m3-m3-pro-and-m3-max-the-most-advanced-chips-for-a-personal-computer/",
)
_M3_ULTRA = Source("Mac Studio technical specifications", "https://www.apple.com/mac-studio/specs/")
_M4 = Source("Apple introduces M4 chip", _NEWS + "2024/05/apple-introduces-m4-chip/")
_M4_PRO = Source("Apple introduces M4 Pro and M4 Max", _NEWS + "2024/10/apple-introduces-m4-pro-and-m4-max/")

_CDNA3_DENSE = rates(163.4, 653.7, 1307.4, 2614.9, 2614.9)
_CDNA3_SPARSE = rates(None, 1307.4, 2614.9, 5229.8, 5229.8)


def _apple(
    name: str, memory: float, bandwidth: float, source: Source, fp32: float | None = None, note: str = ""
) -> Device:
    """A chip whose CPU and GPU share one memory; the GPU computes in fp32, fp16 and bf16."""
    row: Rates = {"fp32": fp32, "fp16": None, "bf16": None}
    return Device(name, "Apple", "gpu", memory, bandwidth, row, source, note=note)


def _cpu(name: str, vendor: str, memory: float, bandwidth: float, watts: float, dtypes: str, source: Source, note: str,
         *aliases: str) -> Device:  # fmt: skip
    row: Rates = dict.fromkeys(dtypes.split())
    return Device(name, vendor, "cpu", memory, bandwidth, row, source, watts=watts, note=note, aliases=aliases)


DEVICES: Final[tuple[Device, ...]] = (
    Device(
        "MI300X", "AMD", "gpu", 192, 5300, _CDNA3_DENSE, _MI300X, _CDNA3_SPARSE, link=XGMI_MI300X, watts=750,
        aliases=("MI300X OAM",), note="best matmul measured by others 668",
    ),
    Device(
        "MI325X", "AMD", "gpu", 256, 6000, _CDNA3_DENSE, _MI325X, _CDNA3_SPARSE, link=XGMI_MI300X, watts=1000,
        note="MI300X's compute; best matmul measured by others 785",
    ),
    Device(
        "MI355X", "AMD", "gpu", 288, 8000,
        {"fp32": 157.3, "tf32": None, "bf16": 2500, "fp16": 2500, "fp8": 5000, "int8": 5000, "fp4": 10100}, _MI355X,
        rates(None, None, 5000, 10100, 10100), link=XGMI_MI355X, watts=1400,
        note="AMD states no tf32 rate; best matmul measured by others 1565",
    ),
    Device(
        "TPU v5e", "Google", "tpu", 16, 819, {"bf16": 197, "int8": 393}, _V5E, link=ICI_V5E,
        aliases=("v5e", "v5litepod"),
    ),
    Device(
        "TPU v5p", "Google", "tpu", 95, 2765, {"bf16": 459, "int8": 918}, _V5P, link=ICI_V5P, aliases=("v5p",),
    ),
    Device(
        "TPU v6e", "Google", "tpu", 32, 1600, {"bf16": 918, "int8": 1836}, _V6E, link=ICI_V6E,
        aliases=("v6e", "trillium", "TPU v6e Trillium"),
    ),
    Device(
        "Gaudi 3", "Intel", "gpu", 128, 3670,
        {"fp32": None, "tf32": None, "bf16": None, "fp16": None, "fp8": None}, _GAUDI3, link=ROCE_GAUDI3, watts=900,
        aliases=("gaudi3", "HL-325L"), note="contested: bf16 and fp8 1835 in the white paper (1.75 GHz), "
        "1677 at the 1.6 GHz that boards run; best bf16 matmul measured by others 1243",
    ),
    _apple("M1", 16, 68, _M1, 2.6, "LPDDR4X-4266 on 128 bits: 68 GB/s"),
    _apple("M1 Pro", 32, 200, _M1_PRO),
    _apple("M1 Max", 64, 400, _M1_PRO),
    _apple("M1 Ultra", 128, 800, _M1_ULTRA),
    _apple("M2", 24, 100, _M2),
    _apple("M2 Pro", 32, 200, _M2_PRO),
    _apple("M2 Max", 96, 400, _M2_PRO),
    _apple("M2 Ultra", 192, 800, _M2_ULTRA),
    _apple("M3", 24, 100, _M3),
    _apple("M3 Pro", 36, 150, _M3),
    _apple("M3 Max", 128, 400, _M3, note="400 with 40 GPU cores; 300 with 30"),
    _apple("M3 Ultra", 512, 819, _M3_ULTRA),
    _apple("M4", 32, 120, _M4),
    _apple("M4 Pro", 64, 273, _M4_PRO),
    _apple("M4 Max", 128, 546, _M4_PRO, note="546 with 40 GPU cores; 410 with 32"),
    _cpu("EPYC 9654", "AMD", 6144, 460.8, 360, "fp32 bf16 int8", _EPYC_9654,
         "96 Zen 4 cores; 12 channels of DDR5-4800, one socket", "epyc-9654", "epyc genoa"),
    _cpu("Xeon 8480+", "Intel", 4096, 307.2, 350, "fp32 bf16 fp16 int8", _XEON_8480,
         "56 Sapphire Rapids cores with AMX; 8 channels of DDR5-4800, one socket", "Xeon Platinum 8480+", "xeon 8480"),
    _cpu("Ryzen 9 7950X", "AMD", 128, 83.2, 170, "fp32 bf16 int8", _RYZEN_7950X,
         "16 Zen 4 cores; 2 channels of DDR5-5200", "7950x", "ryzen 7950x"),
    _cpu("Core i9-14900K", "Intel", 192, 89.6, 125, "fp32 int8", _I9_14900K,
         "8 + 16 cores; 2 channels of DDR5-5600; 253 W under turbo", "14900k", "i9-14900k"),
)  # fmt: skip
