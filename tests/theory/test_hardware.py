from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from nanoinfer.data import read_toml
from nanoinfer.errors import DeviceError
from nanoinfer.theory import hardware
from nanoinfer.theory.hardware import DEVICES, DTYPES, LINKS, device, link, peak, read_devices, ridge

# GB, GB/s, then bf16, fp8 and int8 in dense TFLOP/s. None: the device lacks it, or it is contested.
TABLE = {
    "T4": (16, 320, None, None, 130),
    "L4": (24, 300, 121, 242, 242),
    "RTX 4090": (24, 1008, 165, 330, 661),
    "L40S": (48, 864, 362, 733, 733),
    "A100 SXM 40GB": (40, 1555, 312, None, 624),
    "A100 SXM 80GB": (80, 2039, 312, None, 624),
    "H100 PCIe": (80, 2000, 756, 1513, 1513),
    "H100 SXM": (80, 3350, 989, 1979, 1979),
    "H200 SXM": (141, 4800, 989, 1979, 1979),
    "B200 HGX 180GB": (180, 7700, 2250, 4500, 4500),
    "B200 192GB": (192, 8000, 2250, 4500, 4500),
    "B300": (288, 8000, 2250, 4500, None),
    "MI300X": (192, 5300, 1307, 2615, 2615),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_datasheets(name: str) -> None:
    memory, bandwidth, *rates = TABLE[name]
    row = device(name)
    assert (row.memory_gb, row.bandwidth_gbs) == (memory, bandwidth)
    for dtype, value in zip(("bf16", "fp8", "int8"), rates, strict=True):
        if value is None:
            with pytest.raises(DeviceError):
                peak(row, dtype)
        else:
            assert round(peak(row, dtype) / 1e12) == value
    assert peak("T4", "fp16") == 65e12


def test_links_one_way() -> None:
    assert [link(f"NVLink {i}").gbs_one_way for i in (3, 4, 5)] == [300, 450, 900]
    assert [int(link(f"pcie {i} x16").gbs_one_way) for i in (4, 5)] == [31, 63]
    assert (link("InfiniBand NDR-400").gbs_one_way, link("xgmi mi300x").gbs_one_way) == (50, 448)
    assert device("H100").link is LINKS["NVLink 4"]
    assert LINKS["NVLink 4"].latency_us == 8.0
    with pytest.raises(DeviceError, match=r"unknown link 'nvlink9'; did you mean 'nvlink"):
        link("nvlink9")


def test_ridge_and_the_sparse_trap() -> None:
    assert int(ridge("H100", "bf16")) == 295
    # Dividing the headline rate gives twice that: it is the 2:4-sparse one.
    trap = peak("H100", "bf16", sparse=True) / (device("H100").bandwidth_gbs * 1e9)
    assert int(trap) == 590
    assert ridge("H100", "fp8") == pytest.approx(2 * ridge("H100", "bf16"), rel=1e-3)


def test_no_sparse_rate_unless_asked_for() -> None:
    checked = 0
    for row in DEVICES.values():
        for dtype, sparse in row.sparse_tflops.items():
            dense = row.dense_tflops[dtype]
            if dense is None or sparse is None:
                continue
            assert peak(row, dtype) == dense * 1e12 < sparse * 1e12 == peak(row, dtype, sparse=True), row.name
            # Halves, as vendors round them; MI355X alone is 1% off.
            assert sparse / dense == pytest.approx(2, rel=0.03)
            checked += 1
    assert checked > 80
    with pytest.raises(DeviceError, match="2:4-sparse"):
        peak("T4", "fp16", sparse=True)


@pytest.mark.parametrize("row", DEVICES.values(), ids=list(DEVICES))
def test_rows_are_consistent(row: hardware.Device) -> None:
    assert row.source.title and row.source.url.startswith("https://")
    assert set(row.sparse_tflops) <= set(row.dense_tflops) <= set(DTYPES)
    assert row.dense_tflops and row.memory_bytes == row.memory_gb * 1e9
    assert row.watts is None or 60 <= row.watts <= 1500
    known = {dtype: value for dtype, value in row.dense_tflops.items() if value is not None}
    for dtype in known:
        assert 5 < ridge(row, dtype) < 2500, dtype
    # The narrower the dtype, the faster: never slower at least.
    order = [known[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8", "fp4") if dtype in known]
    assert order == sorted(order)
    if row.link is not None:
        assert LINKS[row.link.name] is row.link and row.link.gbs_one_way < row.bandwidth_gbs
    if row.kind == "cpu":
        assert not known, "no vendor states a CPU's rate"


@pytest.mark.parametrize("row", LINKS.values(), ids=list(LINKS))
def test_links_have_a_source(row: hardware.Link) -> None:
    assert row.source.url.startswith("https://") and row.gbs_one_way > 0


def test_what_readers_ask_for_is_there() -> None:
    names = (
        "L4 A10G 3090 4090 5090 rtx-pro-6000 L40S a100-40gb a100 a100-pcie h100-pcie h100 h200 gh200 b200 b300 gb200 "
        "mi300x mi325x mi355x v5e v5p v6e gaudi3 t4 v100 epyc-9654 xeon-8480+ 7950x 14900k "
        "m1-pro m1-max m1-ultra m2-pro m2-max m2-ultra m3-pro m3-max m3-ultra m4-pro m4-max"
    )
    assert len({device(name).name for name in names.split()}) == len(names.split())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("h100", "H100 SXM"),
        ("H100 80gb", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200 SXM"),
        ("a100", "A100 SXM 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 SXM2 16GB"),
        ("b200", "B200 HGX 180GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Apple M2 Max", "M2 Max"),
        ("trillium", "TPU v6e"),
    ],
)
def test_names_and_aliases(given: str, name: str) -> None:
    assert device(given).name == name


def test_errors_say_the_way_out() -> None:
    with pytest.raises(DeviceError, match=r"^unknown device 'h10'; did you mean .*'h100'"):
        device("h10")
    with pytest.raises(DeviceError, match=r"^unknown device ''; known: "):
        device("")
    with pytest.raises(DeviceError, match=r"^T4 has no fp8; it has fp32, fp16, int8$"):
        peak("T4", "fp8")
    with pytest.raises(DeviceError, match=r"^T4 has no bf16; "):
        ridge("T4", "bfloat16")
    with pytest.raises(DeviceError, match=r"^B300 has no published and agreed dense int8 peak \(contested"):
        peak("B300", "int8")
    with pytest.raises(DeviceError, match="unknown dtype 'fp9'; did you mean"):
        peak("H100", "fp9")
    with pytest.raises(
        DeviceError, match=r"EPYC 9654 has no published and agreed dense fp32 peak .*nanoinfer\.calibrate\.machine$"
    ):
        peak("EPYC 9654", "fp32")


def test_torch_names_of_dtypes() -> None:
    assert peak("H100", "bfloat16") == peak("H100", "float16") == peak("h100", "BF16") == 989e12
    assert peak("H100", "float32") == 67e12
    assert peak("H100", "float8_e4m3fn") == 1979e12


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("board", "memory_gb"), 0, "memory_gb of T4 must be above 0, got 0"),
        (("board", "watts"), "70", "watts of T4 must be above 0, got '70'"),
        (("dense_tflops", "fp16"), -65, "fp16 of T4 must be above 0, got -65"),
        (("dense_tflops", "fp16"), "unknown", "fp16 of T4 must be above 0, got 'unknown'"),
        (("sparse_tflops",), {"fp17": 1}, "unknown dtype 'fp17' of T4; did you mean"),
        (("board", "source"), "hearsay", "hearsay"),
        (("board", "link"), "NVLink 9", "NVLink 9"),
        (("wats",), 70, "wats"),
    ],
)
def test_a_bad_row_is_refused_when_it_is_read(path: tuple[str, ...], value: Any, words: str) -> None:
    data = deepcopy(read_toml("devices"))
    row = data["devices"]["T4"]
    for key in path[:-1]:
        row = row[key]
    row[path[-1]] = value
    with pytest.raises((DeviceError, KeyError, TypeError), match=words):
        read_devices(data, LINKS)


def test_links_between_servers_by_name() -> None:
    assert [link(name).gbs_one_way for name in ("ib-ndr", "ethernet-100g", "100GbE", "ethernet-400g")] == [
        50,
        12.5,
        12.5,
        50,
    ]
    assert link("ib-ndr") is link("InfiniBand NDR-400") and link("pcie5") is link("PCIe 5 x16")
    assert link("nvlink5").gbs_one_way == 900 and not link("nvlink5").between_servers
    assert all(link(name).between_servers for name in ("ib-ndr", "ethernet-100g", "ethernet-400g"))
    assert link("ib-ndr").latency_us == 10 > link("nvlink5").latency_us
    with pytest.raises(DeviceError, match="unknown link 'ib-ndt'; did you mean 'ib-ndr'"):
        link("ib-ndt")
