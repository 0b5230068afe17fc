"""The devices that instances run on: peaks, links, achieved shares and dated prices.

Sources, by the letter at the end of each device's `source`: (S) the vendor's sheet, (V) constants
fitted to Vidur's measured kernels, (M) Mooncake's testbed, (D) DistServe's and (A) SARATHI's
published measurements, (L) Lamina, (H) measured by `benchmarks/gpu/roofline.py`, (=) taken over
from the nearest device measured: an assumption. Every figure can be changed by configuration
(`cost.catalogue`).
"""

from __future__ import annotations

from moonpool.types import Struct

GIB = 1 << 30
MIB = 1 << 20


class Gemm(Struct, frozen=True):
    """How well the device's matrix products do: t = launch + soft maximum of memory and compute."""

    launch_s: float = 6e-6
    bandwidth_share: float = 0.94  # of the memory's bytes/s
    flops_share: float = 0.74  # of the peak
    tile_tokens: int = 128  # rows are computed in whole tiles
    sharpness: int = 4  # q of [memory^q + compute^q]^(1/q): 1, 2, 4 or 8


class Attention(Struct, frozen=True):
    """How well its attention kernels do. `flops_share` is of causal FLOPs, counted once."""

    launch_s: float = 3e-6
    flops_share: float = 0.6  # while prefilling
    bandwidth_share: float = 0.6  # reading KVCache while decoding


class AllReduce(Struct, frozen=True):
    """Time among so many devices of one node: alpha_s + bytes / bytes_per_s."""

    num_devices: int
    alpha_s: float
    bytes_per_s: float


class Price(Struct, frozen=True):
    usd_per_h: float  # of one device
    date: str
    source: str


class Device(Struct, frozen=True):
    """One accelerator. Rates in one direction; `nic_bytes_per_s` is its share of its node's."""

    name: str
    peak_flops_per_s: float  # dense bfloat16
    memory_bytes_per_s: float
    memory_bytes: int
    nvlink_bytes_per_s: float  # 0: none
    pcie_bytes_per_s: float
    nic_bytes_per_s: float
    all_reduce: tuple[AllReduce, ...]
    gemm: Gemm = Gemm()
    attention: Attention = Attention()
    elementwise_share: float = 0.5  # of the memory's bytes/s, by norms, rotary, activation, adds
    rdma_share: float = 0.87  # of the NIC's, by bulk transfers (M: 87 of 100 GB/s)
    collective_share: float = 0.71  # of the NIC's, by NCCL (L: 35.5 of 50 GB/s)
    nic_latency_s: float = 33e-6  # one way, by NCCL (L: 66.6 us there and back)
    price: Price | None = None
    source: str = ""

    def all_reduce_row(self, num_devices: int) -> AllReduce | None:
        """The figures among so many devices, or among the next larger number known."""
        wide_enough = [row for row in self.all_reduce if row.num_devices >= num_devices]
        return min(wide_enough, key=lambda row: row.num_devices, default=None)


def _rows(*rows: tuple[int, float, float]) -> tuple[AllReduce, ...]:
    """From microseconds and GB/s."""
    return tuple(
        AllReduce(num_devices=n, alpha_s=alpha * 1e-6, bytes_per_s=rate * 1e9)
        for n, alpha, rate in rows
    )


def _ring(bytes_per_s: float, alphas_us: tuple[float, float, float]) -> tuple[AllReduce, ...]:
    """A ring among 2, 4 and 8 devices: each sends 2 (n-1) / n of the data over its link."""
    return tuple(
        AllReduce(num_devices=n, alpha_s=alpha * 1e-6, bytes_per_s=bytes_per_s * n / (2 * (n - 1)))
        for n, alpha in zip((2, 4, 8), alphas_us, strict=True)
    )


def _price(usd_per_h: float, date: str, source: str) -> Price:
    return Price(usd_per_h=usd_per_h, date=date, source=source)


# Measured among 2, 4 and 8 devices, >= 1 MB. They are .55 and .75 of the NVLink's rate as a ring.
_A100_DGX = _rows((2, 43, 169), (4, 47, 114), (8, 51, 92))
_H100_DGX = _rows((2, 24, 318), (4, 26, 238), (8, 31, 199))
_HOST_ALPHAS_US = (63.0, 63.0, 63.0)  # measured among 4 whose pairs only are joined by NVLink

_A100_GEMM = Gemm(launch_s=6e-6, bandwidth_share=0.94, flops_share=0.74, sharpness=4)
_A100_SXM_GEMM = Gemm(launch_s=6e-6, bandwidth_share=0.94, flops_share=0.82, sharpness=4)
_H100_GEMM = Gemm(launch_s=6e-6, bandwidth_share=0.94, flops_share=0.74, sharpness=2)
_A40_GEMM = Gemm(launch_s=4e-6, bandwidth_share=0.82, flops_share=0.78, tile_tokens=64, sharpness=2)
_A100_ATTENTION = Attention(flops_share=0.65, bandwidth_share=0.6)
_H100_ATTENTION = Attention(flops_share=0.6, bandwidth_share=0.7)
# On the H200 no cliff at 128 rows is left; attention is the fastest of flash and cuDNN.
_H200_GEMM = Gemm(
    launch_s=3.375e-6, bandwidth_share=0.86, flops_share=0.69, tile_tokens=32, sharpness=4
)
_H200_ATTENTION = Attention(launch_s=9.5e-6, flops_share=0.5, bandwidth_share=0.94)
_A40_ATTENTION = Attention(flops_share=0.28, bandwidth_share=0.77)

_AMPERE = (
    Device(
        name="A100-SXM",
        peak_flops_per_s=312e12,
        memory_bytes_per_s=2039e9,
        memory_bytes=80 * GIB,
        nvlink_bytes_per_s=300e9,
        pcie_bytes_per_s=32e9,
        nic_bytes_per_s=25e9,
        all_reduce=_A100_DGX,
        gemm=_A100_SXM_GEMM,
        attention=_A100_ATTENTION,
        price=_price(1.50, "2026-05", "top of specialty, bottom of hyperscaler clouds"),
        source="peaks S; GEMM V, its FLOPs share D (.81 of whole steps); attention M, D",
    ),
    Device(
        name="A100-PCIE",
        peak_flops_per_s=312e12,
        memory_bytes_per_s=1935e9,
        memory_bytes=80 * GIB,
        nvlink_bytes_per_s=300e9,  # a bridge between pairs
        pcie_bytes_per_s=32e9,
        nic_bytes_per_s=12.5e9,
        all_reduce=_rows((2, 43, 169), (4, 63, 16), (8, 63, 13.7)),
        gemm=_A100_GEMM,
        attention=_A100_ATTENTION,
        price=_price(1.10, "2026-05", "bottom of specialty clouds"),
        source="peaks S; GEMM V; all-reduce among 4 V, among 2 and 8 =",
    ),
    Device(
        name="A800-SXM",
        peak_flops_per_s=312e12,
        memory_bytes_per_s=2039e9,
        memory_bytes=80 * GIB,
        nvlink_bytes_per_s=200e9,
        pcie_bytes_per_s=32e9,
        nic_bytes_per_s=12.5e9,  # 4 x 200 Gbit/s for 8 devices
        all_reduce=_ring(0.55 * 200e9, (43, 47, 51)),
        gemm=_A100_SXM_GEMM,
        attention=_A100_ATTENTION,
        price=_price(1.50, "2026-05", "as the A100-SXM: no price of its own was found"),
        source="an A100-SXM with 2/3 of the NVLink; network M",
    ),
    Device(
        name="A6000",
        peak_flops_per_s=154.8e12,
        memory_bytes_per_s=768e9,
        memory_bytes=48 * GIB,
        nvlink_bytes_per_s=56.25e9,  # a bridge between pairs
        pcie_bytes_per_s=32e9,
        nic_bytes_per_s=12.5e9,
        all_reduce=_ring(16e9, _HOST_ALPHAS_US),
        gemm=Gemm(launch_s=4e-6, bandwidth_share=0.82, flops_share=0.78, sharpness=4),
        attention=_A40_ATTENTION,
        elementwise_share=0.8,
        source="peaks S; GEMM = A40's with A's tile of 128, q of 4; attention, elementwise A",
    ),
    Device(
        name="A40",
        peak_flops_per_s=149.7e12,
        memory_bytes_per_s=696e9,
        memory_bytes=46068 * MIB,
        nvlink_bytes_per_s=56.25e9,  # a bridge between pairs
        pcie_bytes_per_s=32e9,
        nic_bytes_per_s=12.5e9,
        all_reduce=_ring(16e9, _HOST_ALPHAS_US),
        gemm=_A40_GEMM,
        attention=_A40_ATTENTION,
        elementwise_share=0.8,
        price=_price(1.28, "2024", "Vidur's price table"),
        source="peaks S; GEMM V; the rest = A6000's; all-reduce over half of PCIe =",
    ),
    Device(
        name="A10",
        peak_flops_per_s=125e12,
        memory_bytes_per_s=600e9,
        memory_bytes=23028 * MIB,
        nvlink_bytes_per_s=0.0,
        pcie_bytes_per_s=32e9,
        nic_bytes_per_s=3.125e9,
        all_reduce=_ring(16e9, _HOST_ALPHAS_US),
        gemm=_A40_GEMM,
        attention=_A40_ATTENTION,
        elementwise_share=0.8,
        price=_price(1.006, "2026-06", "AWS g5.xlarge (A10G)"),
        source="peaks S; the rest = A40's",
    ),
)
_HOPPER_AND_LATER = (
    Device(
        name="L40S",
        peak_flops_per_s=362e12,
        memory_bytes_per_s=864e9,
        memory_bytes=46068 * MIB,
        nvlink_bytes_per_s=0.0,
        pcie_bytes_per_s=32e9,
        nic_bytes_per_s=50e9,
        all_reduce=_ring(16e9, _HOST_ALPHAS_US),
        gemm=_A40_GEMM,
        attention=_A40_ATTENTION,
        elementwise_share=0.8,
        price=_price(1.40, "2026-03", "RunPod, on demand"),
        source="peaks S; the rest = A40's",
    ),
    Device(
        name="H100-SXM",
        peak_flops_per_s=989e12,
        memory_bytes_per_s=3350e9,
        memory_bytes=80 * GIB,
        nvlink_bytes_per_s=450e9,
        pcie_bytes_per_s=64e9,
        nic_bytes_per_s=50e9,
        all_reduce=_H100_DGX,
        gemm=_H100_GEMM,
        attention=_H100_ATTENTION,
        price=_price(3.50, "2026-05", "top of specialty, bottom of hyperscaler clouds"),
        source="peaks S; GEMM V; attention between FlashAttention 2 and 3, decoding L",
    ),
    Device(
        name="H100-PCIE",
        peak_flops_per_s=756e12,
        memory_bytes_per_s=2000e9,
        memory_bytes=80 * GIB,
        nvlink_bytes_per_s=300e9,  # a bridge between pairs
        pcie_bytes_per_s=64e9,
        nic_bytes_per_s=50e9,
        all_reduce=_rows((2, 24, 225), (4, 63, 21), (8, 63, 18)),
        gemm=_H100_GEMM,
        attention=_H100_ATTENTION,
        price=_price(2.50, "2026-05", "bottom of specialty clouds"),
        source="peaks S; the rest = H100-SXM's; all-reduce over half of PCIe =",
    ),
    Device(
        name="H200",
        peak_flops_per_s=989e12,
        memory_bytes_per_s=4800e9,
        memory_bytes=141 * 10**9,
        nvlink_bytes_per_s=450e9,
        pcie_bytes_per_s=55e9,
        nic_bytes_per_s=50e9,
        all_reduce=_H100_DGX,
        gemm=_H200_GEMM,
        attention=_H200_ATTENTION,
        price=_price(4.50, "2026-05", "top of specialty, bottom of hyperscaler clouds"),
        source="peaks S; products, attention and PCIe H; the rest = H100-SXM's",
    ),
    Device(
        name="H20",
        peak_flops_per_s=148e12,
        memory_bytes_per_s=4000e9,
        memory_bytes=96 * 10**9,
        nvlink_bytes_per_s=450e9,
        pcie_bytes_per_s=64e9,
        nic_bytes_per_s=50e9,
        all_reduce=_H100_DGX,
        gemm=_H100_GEMM,
        attention=_H100_ATTENTION,
        price=_price(4.63, "2025-04", "Lamina's estimate; no cloud price was found"),
        source="peaks L; the rest = H100-SXM's",
    ),
    Device(
        name="H800",
        peak_flops_per_s=989e12,
        memory_bytes_per_s=3350e9,
        memory_bytes=80 * GIB,
        nvlink_bytes_per_s=200e9,
        pcie_bytes_per_s=64e9,
        nic_bytes_per_s=50e9,
        all_reduce=_ring(0.75 * 200e9, (24, 26, 31)),
        gemm=_H100_GEMM,
        attention=_H100_ATTENTION,
        price=_price(3.50, "2026-05", "as the H100-SXM: no price of its own was found"),
        source="an H100-SXM with 4/9 of the NVLink",
    ),
    Device(
        name="MI300X",
        peak_flops_per_s=1307e12,
        memory_bytes_per_s=5300e9,
        memory_bytes=192 * GIB,
        nvlink_bytes_per_s=448e9,  # 7 xGMI links of 64 GB/s, one to each peer
        pcie_bytes_per_s=64e9,
        nic_bytes_per_s=50e9,
        all_reduce=_rows((2, 31, 48), (4, 31, 96), (8, 31, 183)),
        gemm=Gemm(flops_share=0.47, bandwidth_share=0.8, sharpness=2),
        attention=Attention(flops_share=0.4, bandwidth_share=0.6),
        price=_price(1.85, "2026-05", "TensorWave, Vultr: top of 1.71 to 1.85"),
        source="peaks S; GEMM share as published (620 of 1307 TF); the rest assumed",
    ),
)
DEVICES = _AMPERE + _HOPPER_AND_LATER
