"""Everything chosen for the experiments, once, each with its reason. No experiment overrides any.

The constants of devices and kernels are not here but in `cost.hardware`, which all of moonpool
uses; they are not tuned to any single table.
"""

from __future__ import annotations

from moonpool.cost.catalogue import BUILT_IN
from moonpool.cost.hardware import Device
from moonpool.cost.model import StepCost
from moonpool.cost.parallel import Nic, group_cost
from moonpool.cost.roofline import RooflineCost
from moonpool.cost.shapes import ModelShape

KV_UNLIMITED_TOKENS = 1 << 24
"""Where a paper gives the batch size, which its memory allowed, sequences are limited, not blocks:
counting the same memory twice would let preemption into experiments that had none."""

WORKLOAD_BATCHES = 40
"""Requests of a closed workload, in batches. SARATHI does not say; its gains are steady-state ones,
and with 40 batches filling and draining the batch changes a gain by about 1 %."""

SARATHI_A100 = "A100-PCIE"
"""SARATHI says A100 80 GB; its authors' next paper names Azure NC96ads v4, which has PCIe ones."""

GPT3_A100 = "A100-SXM"
"""Of 8 servers with 8 A100 each and InfiniBand: machines of that kind have SXM ones."""

ABLATION_SEQUENCE_TOKENS = 1024
"""Length in SARATHI's chunk-size ablation (Fig 13): that of its Table 2 and Fig 7."""


def roofline(device: str, shape: str, num_devices: int = 1) -> RooflineCost:
    """The operator model with the catalogue's constants, as the simulator has it by default."""
    return RooflineCost(BUILT_IN.device(device), BUILT_IN.shape(shape), num_devices)


def pipeline(base: RooflineCost, num_stages: int) -> StepCost:
    """`num_stages` nodes like `base` in a row."""
    nic = Nic.of(base.device, base.num_devices)
    return group_cost(base, base.shape, num_stages, "pp", nic)


def shape_of(name: str) -> ModelShape:
    return BUILT_IN.shape(name)


def device_of(name: str) -> Device:
    return BUILT_IN.device(name)
