"""Accelerators as the cost models see them: peak rates, achieved shares of them, links and price.

The figures of the built-in devices, with their sources, are in `catalogue.toml`.
"""

from __future__ import annotations

from moonpool.types import Struct


class Gemm(Struct, frozen=True):
    """The matrix products of a device: t = launch_s + [memory^q + compute^q]^(1/q), q = sharpness.

    `compute` covers rows rounded up to whole tiles of `tile_tokens` (see `roofline.py`).
    """

    launch_s: float = 6e-6
    bandwidth_share: float = 0.94  # achieved share of memory_bytes_per_s
    flops_share: float = 0.74  # achieved share of peak_flops_per_s
    tile_tokens: int = 128
    sharpness: int = 4  # 1, 2, 4 or 8


class Attention(Struct, frozen=True):
    """The attention kernels of a device. `flops_share` counts causal FLOPs once."""

    launch_s: float = 3e-6
    flops_share: float = 0.6  # in prefill
    # achieved share of memory_bytes_per_s when decode reads the KVCache
    bandwidth_share: float = 0.6


class AllReduce(Struct, frozen=True):
    """An all-reduce among `num_devices` of one node takes alpha_s + bytes / bytes_per_s."""

    num_devices: int
    alpha_s: float
    bytes_per_s: float


class Price(Struct, frozen=True):
    """US dollars per hour of one device (or of one GB of DRAM), with date and source."""

    usd_per_h: float
    date: str
    source: str


class Device(Struct, frozen=True):
    """One accelerator. Bandwidths are one way; `nic_bytes_per_s` is its share of the node's NICs.

    The defaults of the last three rates are measurements: `rdma_share` is Mooncake's 87 of 100 GB/s
    in bulk transfers, `collective_share` and `nic_latency_s` are Lamina's 35.5 of 50 GB/s and 66.6
    us of round trip with NCCL.
    """

    name: str
    peak_flops_per_s: float  # dense bfloat16
    memory_bytes_per_s: float
    memory_bytes: int
    nvlink_bytes_per_s: float  # 0 means no NVLink
    pcie_bytes_per_s: float
    nic_bytes_per_s: float
    all_reduce: tuple[AllReduce, ...]
    # FLOPs of dense products; 0 if products in FP8 run as bfloat16
    peak_fp8_flops_per_s: float = 0.0
    gemm: Gemm = Gemm()
    attention: Attention = Attention()
    elementwise_share: float = 0.5  # achieved share of memory_bytes_per_s
    rdma_share: float = 0.87  # achieved share of nic_bytes_per_s in bulk transfers
    collective_share: float = 0.71  # achieved share of nic_bytes_per_s with NCCL
    nic_latency_s: float = 33e-6  # latency in one direction, by NCCL
    price: Price | None = None
    power_w: float = 0.0  # most power of the device, without a share of the node's; 0 if unknown
    source: str = ""

    def all_reduce_row(self, num_devices: int) -> AllReduce | None:
        """Returns the row for `num_devices`, or for the next larger number with a row, or None."""
        wide_enough = [row for row in self.all_reduce if row.num_devices >= num_devices]
        return min(wide_enough, key=lambda row: row.num_devices, default=None)
