"""Datasheet rows: what a row is, the links, and NVIDIA's devices.

Pure data. Rates are DENSE peaks in TFLOP/s (TOP/s for int8); 2:4-sparse ones stand apart.
A dtype that is missing from a row is one the device has no unit for; a dtype that is
``None`` has a unit but no published, or no agreed, figure. GeForce rows carry the rate with
fp32 accumulation, which is what a framework uses; it is half the one with fp16 accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

DTYPES: Final = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")

Rates = Mapping[str, float | None]

#: An assumption, not a datasheet figure: the order of magnitude for ranks of one server.
ALPHA_US: Final = 8.0
#: Between servers: NCCL's own cost model takes a message up and down a tree at 5.0 us a network step
#: (src/graph/tuning.cc, https://github.com/NVIDIA/nccl), so each doubling of the servers costs this much.
NETWORK_ALPHA_US: Final = 10.0
#: An assumption: the same through the kernel's TCP stack. RDMA over Ethernet (RoCE) comes near InfiniBand.
TCP_ALPHA_US: Final = 50.0


@dataclass(frozen=True)
class Source:
    """Where a row's figures stand."""

    title: str
    url: str


@dataclass(frozen=True)
class Link:
    """A link between devices; ``gbs_one_way`` in GB/s per device and direction.

    ``latency_us`` is alpha in microseconds per ALL-REDUCE of a small message: one whole
    collective call, launch included, neither per hop nor per message. (Chen counts four
    messages a layer at 8 us each, a V100-era guess; counted per all-reduce it is two a layer.)
    Of a link ``between_servers`` it is that of two servers. No vendor publishes it: measure it where
    there are several ranks.
    """

    name: str
    gbs_one_way: float
    source: Source
    latency_us: float = ALPHA_US
    note: str = ""
    aliases: tuple[str, ...] = ()
    between_servers: bool = False


@dataclass(frozen=True)
class Device:
    """One device as its vendor describes it.

    ``kind`` ``gpu`` is any accelerator driven like one. ``memory_gb`` is the vendor's figure (of
    a CPU: the most it takes); ``bandwidth_gbs`` GB/s = 1e9 bytes/s of its main memory; ``watts``
    the board's limit (a CPU's TDP). ``link`` joins it to its like (``None``: only through its host).
    """

    name: str
    vendor: str
    kind: Literal["gpu", "tpu", "cpu"]
    memory_gb: float
    bandwidth_gbs: float
    dense_tflops: Rates = field(hash=False)
    source: Source
    sparse_tflops: Rates = field(default_factory=dict, hash=False)
    link: Link | None = None
    watts: float | None = None
    note: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> float:
        """Bytes that surely exist: ``memory_gb`` x 1e9. Vendors' GB are often GiB: a driver may show 7% more."""
        return self.memory_gb * 1e9


def rates(
    fp32: float | None = None,
    tf32: float | None = None,
    half: float | None = None,
    fp8: float | None = None,
    int8: float | None = None,
    fp4: float | None = None,
) -> Rates:
    """The dtypes given; ``half`` stands for bf16 and fp16, which run at one rate on every tensor core since Ampere."""
    row = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half, "fp8": fp8, "int8": int8, "fp4": fp4}
    return {name: value for name, value in row.items() if value is not None}


# --- links -----------------------------------------------------------------------

_NVLINK = Source("NVIDIA NVLink and NVLink Switch", "https://www.nvidia.com/en-us/data-center/nvlink/")
_PCIE = Source("PCI-SIG specifications", "https://pcisig.com/specifications")
_INFINIBAND = Source("NVIDIA Quantum-2 InfiniBand platform", "https://www.nvidia.com/en-us/networking/quantum2/")
_ETHERNET = Source("IEEE 802.3 Ethernet", "https://www.ieee802.org/3/")
_MI300X = Source("AMD Instinct MI300X", "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html")
_MI355X = Source("AMD Instinct MI355X", "https://www.amd.com/en/products/accelerators/instinct/mi350/mi355x.html")
_TPU = Source("Cloud TPU documentation", "https://docs.cloud.google.com/tpu/docs/system-architecture-tpu-vm")
_GAUDI3 = Source(
    "Intel Gaudi 3 AI Accelerator White Paper",
    "https://www.intel.com/content/www/us/en/content-details/817486/intel-gaudi-3-ai-accelerator-white-paper.html",
)

NVLINK2 = Link("NVLink 2", 150, _NVLINK, note="V100: 6 links, 300 GB/s both ways together")
NVLINK3 = Link("NVLink 3", 300, _NVLINK, note="A100: 600 GB/s both ways together")
NVLINK4 = Link(
    "NVLink 4", 450, _NVLINK,
    note="H100: 900 GB/s both ways together; an all-reduce tops out near 370 without in-network reduction, "
    "about 150 at 58 MB, and near 480 with it",
)  # fmt: skip
NVLINK5 = Link("NVLink 5", 900, _NVLINK, note="B200: 1800 GB/s both ways together")
PCIE3 = Link("PCIe 3 x16", 15.75, _PCIE, note="8 GT/s x 16 lanes x 128/130", aliases=("pcie3",))
PCIE4 = Link("PCIe 4 x16", 31.5, _PCIE, note="16 GT/s x 16 lanes x 128/130", aliases=("pcie4",))
PCIE5 = Link("PCIe 5 x16", 63.0, _PCIE, note="32 GT/s x 16 lanes x 128/130", aliases=("pcie5",))
NDR400 = Link(
    "InfiniBand NDR-400", 50, _INFINIBAND, NETWORK_ALPHA_US, "400 Gbit/s a port",
    ("ib-ndr", "InfiniBand NDR", "ndr400"), between_servers=True,
)  # fmt: skip
ETHERNET100, ETHERNET400 = (
    Link(f"Ethernet {g}G", g / 8, _ETHERNET, TCP_ALPHA_US, f"{g} Gbit/s a port; alpha of TCP", (f"{g}GbE",), True)
    for g in (100, 400)
)
XGMI_MI300X = Link(
    "xGMI MI300X", 448, _MI300X, note="7 links of 64 GB/s; a pair of GPUs has one link, 64 GB/s", aliases=("xgmi",)
)
XGMI_MI355X = Link("xGMI MI355X", 537.6, _MI355X, note="7 links of 76.8 GB/s; a pair of GPUs has one link")
ICI_V5E = Link("ICI v5e", 200, _TPU, note="all ports of a chip; 400 GB/s both ways together")
ICI_V5P = Link("ICI v5p", 600, _TPU, note="all ports of a chip; 1200 GB/s both ways together")
ICI_V6E = Link("ICI v6e", 400, _TPU, note="all ports of a chip; 800 GB/s both ways together")
ROCE_GAUDI3 = Link("Gaudi 3 Ethernet", 600, _GAUDI3, note="24 ports of 200 Gbit/s; of 8 in a server 21 face inwards")

LINKS: Final = {
    row.name: row
    for row in (
        NVLINK2, NVLINK3, NVLINK4, NVLINK5, PCIE3, PCIE4, PCIE5, NDR400, ETHERNET100, ETHERNET400,
        XGMI_MI300X, XGMI_MI355X, ICI_V5E, ICI_V5P, ICI_V6E, ROCE_GAUDI3,
    )
}  # fmt: skip

# --- NVIDIA ----------------------------------------------------------------------

_T4 = Source("NVIDIA T4", "https://www.nvidia.com/en-us/data-center/tesla-t4/")
_V100 = Source("NVIDIA V100", "https://www.nvidia.com/en-us/data-center/v100/")
_L4 = Source("NVIDIA L4", "https://www.nvidia.com/en-us/data-center/l4/")
_L40S = Source("NVIDIA L40S", "https://www.nvidia.com/en-us/data-center/l40s/")
_A10G = Source(
    "NVIDIA A10G data sheet (Amazon EC2 G5)",
    "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf",
)
_A100 = Source("NVIDIA A100", "https://www.nvidia.com/en-us/data-center/a100/")
_H100 = Source("NVIDIA H100", "https://www.nvidia.com/en-us/data-center/h100/")
_H200 = Source("NVIDIA H200", "https://www.nvidia.com/en-us/data-center/h200/")
_GH200 = Source("NVIDIA GH200", "https://www.nvidia.com/en-us/data-center/grace-hopper-superchip/")
_HGX = Source("NVIDIA HGX platform", "https://www.nvidia.com/en-us/data-center/hgx/")
_BLACKWELL = Source(
    "NVIDIA Blackwell Architecture Technical Brief", "https://resources.nvidia.com/en-us-blackwell-architecture"
)
_GB200 = Source("NVIDIA GB200 NVL72", "https://www.nvidia.com/en-us/data-center/gb200-nvl72/")
_GA102 = Source(
    "NVIDIA Ampere GA102 white paper",
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
)
_ADA = Source(
    "NVIDIA Ada GPU architecture white paper",
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
)
_RTX_BLACKWELL = Source(
    "NVIDIA RTX Blackwell GPU architecture white paper",
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
)
_RTX_PRO = Source(
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
    "https://www.nvidia.com/en-us/products/workstations/professional-desktop-gpus/rtx-pro-6000/",
)

_A100_DENSE, _A100_SPARSE = rates(19.5, 156, 312, None, 624), rates(None, 312, 624, None, 1248)
_HOPPER_DENSE, _HOPPER_SPARSE = rates(67, 494.5, 989, 1979, 1979), rates(None, 989, 1979, 3958, 3958)
# fp32 of B200: the technical brief says 80, the HGX page 75; so None.
_B200_DENSE: Rates = {"fp32": None, **rates(None, 1125, 2250, 4500, 4500, 9000)}
_B200_SPARSE = rates(None, 2250, 4500, 9000, 9000, 18000)

DEVICES: Final[tuple[Device, ...]] = (
    Device(
        "T4", "NVIDIA", "gpu", 16, 320, {"fp32": 8.1, "fp16": 65.0, "int8": 130.0}, _T4,
        link=PCIE3, watts=70, note="Turing tensor cores: no bf16, no tf32, no sparsity",
    ),
    Device(
        "V100 SXM2 16GB", "NVIDIA", "gpu", 16, 900, {"fp32": 15.7, "fp16": 125.0}, _V100,
        link=NVLINK2, watts=300, aliases=("V100-SXM2-16GB",), note="first tensor cores: fp16 only",
    ),
    Device(
        "V100 SXM2 32GB", "NVIDIA", "gpu", 32, 900, {"fp32": 15.7, "fp16": 125.0}, _V100,
        link=NVLINK2, watts=300, aliases=("v100", "V100 SXM2", "V100-SXM2-32GB"), note="first tensor cores: fp16 only",
    ),
    Device(
        "L4", "NVIDIA", "gpu", 24, 300, rates(30.3, 60, 121, 242, 242), _L4, rates(None, 120, 242, 485, 485),
        link=PCIE4, watts=72,
    ),
    Device(
        "A10G", "NVIDIA", "gpu", 24, 600, rates(35, 35, 70, None, 140), _A10G, rates(None, 70, 140, None, 280),
        link=PCIE4, watts=300, note="Amazon's own board; the A10 is another, with 125 TFLOP/s",
    ),
    Device(
        "L40S", "NVIDIA", "gpu", 48, 864, rates(91.6, 183, 362, 733, 733), _L40S, rates(None, 366, 733, 1466, 1466),
        link=PCIE4, watts=350, note="362 as published; half of the sparse 733 and the clock both give 366",
    ),
    Device(
        "A100 SXM 40GB", "NVIDIA", "gpu", 40, 1555, _A100_DENSE, _A100, _A100_SPARSE, link=NVLINK3, watts=400,
        aliases=("a100-40gb", "A100 40", "A100-SXM4-40GB"),
    ),
    Device(
        "A100 SXM 80GB", "NVIDIA", "gpu", 80, 2039, _A100_DENSE, _A100, _A100_SPARSE, link=NVLINK3, watts=400,
        aliases=("a100", "a100-80gb", "A100 80", "A100 SXM", "A100-SXM4-80GB"),
        note="best matmul measured by others 271",
    ),
    Device(
        "A100 PCIe 80GB", "NVIDIA", "gpu", 80, 1935, _A100_DENSE, _A100, _A100_SPARSE, link=PCIE4, watts=300,
        aliases=("A100 PCIe", "A100 80GB PCIe", "A100-PCIE-80GB"), note="best matmul measured by others 253; "
        "an NVLink bridge joins pairs at 300 GB/s one way",
    ),
    Device(
        "H100 PCIe", "NVIDIA", "gpu", 80, 2000, rates(51, 378, 756, 1513, 1513), _H100,
        rates(None, 756, 1513, 3026, 3026), link=PCIE5, watts=350, aliases=("h100-pcie-80gb",),
        note="an NVLink bridge joins pairs at 300 GB/s one way",
    ),
    Device(
        "H100 SXM", "NVIDIA", "gpu", 80, 3350, _HOPPER_DENSE, _H100, _HOPPER_SPARSE, link=NVLINK4, watts=700,
        aliases=("h100", "H100 SXM5", "H100 80GB", "H100 80GB HBM3"), note="best matmul measured by others 794",
    ),
    Device(
        "H200 SXM", "NVIDIA", "gpu", 141, 4800, _HOPPER_DENSE, _H200, _HOPPER_SPARSE, link=NVLINK4, watts=700,
        aliases=("h200", "H200 141GB"), note="measured by others: matmul 770-800, copy 4300 GB/s",
    ),
    Device(
        "GH200 96GB", "NVIDIA", "gpu", 96, 4000, _HOPPER_DENSE, _GH200, _HOPPER_SPARSE, link=NVLINK4, watts=1000,
        aliases=("gh200", "GH200 480GB"), note="watts: CPU, GPU and memory together, set from 450 to 1000; "
        "the CPU's 480 GB hang on NVLink-C2C, 450 GB/s one way",
    ),
    Device(
        "GH200 144GB", "NVIDIA", "gpu", 144, 4900, _HOPPER_DENSE, _GH200, _HOPPER_SPARSE, link=NVLINK4, watts=1000,
        aliases=("gh200-144gb-hbm3e",), note="watts: CPU, GPU and memory together; best matmul measured by others 829",
    ),
    Device(
        "B200 HGX 180GB", "NVIDIA", "gpu", 180, 7700, _B200_DENSE, _HGX, _B200_SPARSE, link=NVLINK5, watts=1000,
        aliases=("b200", "B200 180GB", "B200 HGX", "HGX B200"), note="best matmul measured by others 1745; "
        "memory and bandwidth differ by board; fp32 75 or 80",
    ),
    Device(
        "B200 192GB", "NVIDIA", "gpu", 192, 8000, _B200_DENSE, _BLACKWELL, _B200_SPARSE, link=NVLINK5, watts=1000,
        aliases=("b200-sxm-192gb",), note="as first announced; fp32 75 or 80",
    ),
    Device(
        "GB200", "NVIDIA", "gpu", 186, 8000, rates(80, 1250, 2500, 5000, 5000, 10000), _GB200,
        rates(None, 2500, 5000, 10000, 10000, 20000), link=NVLINK5, watts=1200, aliases=("GB200 NVL72",),
        note="one of the two GPUs, the rack's figures over 72; best matmul measured by others 1822",
    ),
    Device(
        "B300", "NVIDIA", "gpu", 288, 8000,
        {"fp32": None, "tf32": 1125, "bf16": 2250, "fp16": 2250, "fp8": 4500, "int8": None, "fp4": None}, _HGX,
        rates(None, 2250, 4500, 9000, None, 18000), link=NVLINK5, aliases=("B300 SXM", "HGX B300", "Blackwell Ultra"),
        note="contested: int8 about 4500 or next to none, fp4 12600 to 15000, fp32 75 or 80, watts 1100 to 1400; "
        "best matmul measured by others 1769",
    ),
    Device(
        "RTX 3090", "NVIDIA", "gpu", 24, 936, rates(35.6, 35.6, 71, None, 284), _GA102, rates(None, 71, 142, None, 568),
        link=PCIE4, watts=350, aliases=("3090",), note="fp16 with fp16 accumulation 142",
    ),
    Device(
        "RTX 4090", "NVIDIA", "gpu", 24, 1008, rates(82.6, 82.6, 165.2, 330.3, 660.6), _ADA,
        rates(None, 165.2, 330.4, 660.6, 1321.2), link=PCIE4, watts=450, aliases=("4090",),
        note="fp16 and fp8 with fp16 accumulation twice that: 330.3 and 660.6",
    ),
    Device(
        "RTX 5090", "NVIDIA", "gpu", 32, 1792, rates(104.8, 104.8, 209.5, 419, 838, 1676), _RTX_BLACKWELL,
        rates(None, 209.5, 419, 838, 1676, 3352), link=PCIE5, watts=575, aliases=("5090",),
        note="fp16 and fp8 with fp16 accumulation twice that: 419 and 838; the headline 3352 AI TOPS is sparse fp4",
    ),
    Device(
        "RTX PRO 6000 Blackwell", "NVIDIA", "gpu", 96, 1792,
        {"fp32": 125.0, "tf32": None, "bf16": None, "fp16": None, "fp8": None, "int8": None, "fp4": 2000.0}, _RTX_PRO,
        {"fp4": 4000.0}, link=PCIE5, watts=600,
        aliases=("rtx pro 6000", "RTX PRO 6000 Blackwell Workstation Edition", "RTX 6000 PRO"),
        note="the vendor's page states fp32 125 and 4000 AI TOPS, which is sparse fp4; fp4 here is half of it",
    ),
)  # fmt: skip
