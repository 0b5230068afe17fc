"""Computes step times, memory sizes and links of one simulated node, from the configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moonpool.config.tables import ConfigError, HardwareConfig, ModelConfig
from moonpool.cost.domain import CostDomain
from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import StepCost
from moonpool.sim.hardware import calibrated
from moonpool.sim.hardware.catalogue import BUILT_IN, Catalogue, nearest
from moonpool.sim.hardware.devices import Device
from moonpool.sim.hardware.domain_cost import DomainCost
from moonpool.sim.hardware.model_shapes import ModelShape, in_formats, is_plain
from moonpool.sim.hardware.offload_cost import AttentionPool, OffloadCost, OffloadNetwork
from moonpool.sim.hardware.parallel_cost import Nic, group_cost
from moonpool.sim.hardware.roofline import RooflineCost

MEMORY_SHARE = 0.9
"""The memory share for weights and KVCache; activations use the rest (vLLM's default)."""
DRAM_BYTES = 10**12
"""DRAM of a node for the KVCache pool: about 1 TB, as in Mooncake's testbed."""
SSD_READ_BYTES_PER_S = 4 * 6.8e9
SSD_WRITE_BYTES_PER_S = 4 * 4.0e9
"""The bandwidth of a node's four NVMe drives on PCIe 4.0 x4, by a vendor's data sheet. The value is
an assumption, because Mooncake mentions SSDs without figures."""
COSTS = (calibrated.NAME, "roofline")
PLAIN = ModelConfig()


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One node, and the prefill instance made of `nodes_per_prefill` such nodes.

    `cost` and `prefill_cost` are their ground-truth step times. With `attention`, the attention
    devices give KVCache capacity and links, and `device` holds the weights.
    """

    device: Device
    shape: ModelShape
    num_devices: int
    nodes_per_prefill: int
    cost: StepCost
    prefill_cost: StepCost
    kv_bytes_per_token: float
    kv_capacity_tokens: int  # tokens of KVCache in the memory of one node's devices
    dram_tokens: int  # tokens of KVCache in one node's DRAM
    # bandwidth of one node's NICs in each direction, as bulk transfers achieve it
    network_bytes_per_s: float
    host_bytes_per_s: float  # bandwidth between DRAM and the devices
    network_latency_s: float
    ssd_read_bytes_per_s: float
    ssd_write_bytes_per_s: float
    attention: AttentionPool | None = None

    @property
    def domain(self) -> CostDomain | None:
        """The sizes that `cost` was measured for, or None if `cost` is not measured."""
        return self.cost.domain if isinstance(self.cost, DomainCost | FittedCost) else None

    @property
    def outside_domain(self) -> str:
        """The name of the cost model that applies outside `domain`."""
        if isinstance(self.cost, DomainCost):
            return f"the roofline of {self.num_devices} x {self.device.name}"
        return "its own formula"


def open_cost(
    name: str,
    device: Device,
    shape: ModelShape,
    num_devices: int,
    profile: FittedCost | None = None,
) -> StepCost:
    """The ground-truth cost for `hardware.cost`, or the measured `profile`. Raises ConfigError."""
    if profile is not None:
        return profile
    if name == calibrated.NAME:
        configured = (device.name, shape.name, num_devices)
        measured = (calibrated.DEVICE, calibrated.SHAPE, calibrated.NUM_DEVICES)
        if configured != measured:
            raise ConfigError(
                f"hardware.cost {name!r} was measured on {measured[2]} {measured[0]} with "
                f"{measured[1]}, not on {configured[2]} "
                f"{configured[0]} with {configured[1]}; "
                'use hardware.cost = "roofline"'
            )
        return DomainCost(calibrated.CALIBRATED, RooflineCost(device, shape, num_devices))
    if name != "roofline":
        raise ConfigError(f"unknown hardware.cost {name!r}{nearest(name, COSTS)}")
    try:
        return RooflineCost(device, shape, num_devices)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def open_node(
    hardware: HardwareConfig,
    profile: FittedCost | None = None,
    catalogue: Catalogue = BUILT_IN,
    model: ModelConfig = PLAIN,
) -> NodeCost:
    """Builds a node; `model` says the number formats of weights and KVCache. Raises ConfigError for
    unknown names, and for a model that does not fit the memory or cannot be divided as configured.
    """
    device, shape = catalogue.device(hardware.device), catalogue.shape(hardware.shape)
    if profile is None and hardware.cost == calibrated.NAME and not is_plain(model):
        raise ConfigError(
            f"hardware.cost {calibrated.NAME!r} was measured with bfloat16: use hardware.cost ="
            ' "roofline", or leave out model.quantization and model.kv_cache_dtype'
        )
    shape = in_formats(shape, model)
    num_devices, num_nodes = hardware.devices_per_node, hardware.nodes_per_prefill
    cost = open_cost(hardware.cost, device, shape, num_devices, profile)
    nic = Nic.of(device, num_devices)
    try:
        prefill_cost = group_cost(cost, shape, num_nodes, hardware.parallelism, nic)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    measured = profile is None and hardware.cost == calibrated.NAME
    kv_bytes = shape.kv_bytes_per_token
    node = NodeCost(
        device=device,
        shape=shape,
        num_devices=num_devices,
        nodes_per_prefill=num_nodes,
        cost=cost,
        prefill_cost=prefill_cost,
        kv_bytes_per_token=kv_bytes,
        kv_capacity_tokens=kv_capacity_tokens(device, shape, num_devices),
        dram_tokens=calibrated.DRAM_TOKENS if measured else int(DRAM_BYTES / kv_bytes),
        network_bytes_per_s=num_devices * device.nic_bytes_per_s * device.rdma_share,
        host_bytes_per_s=calibrated.HOST_BYTES_PER_S
        if measured
        else num_devices * device.pcie_bytes_per_s * device.rdma_share,
        network_latency_s=0.0 if measured else device.nic_latency_s,
        ssd_read_bytes_per_s=hardware.ssd_read_bytes_per_s or SSD_READ_BYTES_PER_S,
        ssd_write_bytes_per_s=hardware.ssd_write_bytes_per_s or SSD_WRITE_BYTES_PER_S,
    )
    if not hardware.attention_device:
        return node
    pool = AttentionPool(
        catalogue.device(hardware.attention_device), hardware.attention_devices_per_node
    )
    return _offloaded(node, pool, hardware.decode_batches)


def _offloaded(node: NodeCost, pool: AttentionPool, num_batches: int) -> NodeCost:
    """Returns the node with its KVCache, and the links for it, on the attention devices of `pool`.

    Raises ConfigError if the cost model does not separate attention from the rest.
    """
    if not isinstance(node.cost, RooflineCost):
        raise ConfigError(
            "hardware.attention_device needs a cost model that separates attention from the dense"
            ' layers; use hardware.cost = "roofline"'
        )
    attends = pool.device
    if node.shape.latent is not None or node.shape.window:
        raise ConfigError(
            f"attention devices are not simulated for {node.shape.name}, which has latents or "
            "windows: leave out hardware.attention_device"
        )
    wire = OffloadNetwork.of(node.device, node.num_devices, pool)
    return replace(
        node,
        cost=OffloadCost(node.cost, pool, wire, num_batches),
        kv_capacity_tokens=pool.capacity_tokens(node.shape, MEMORY_SHARE),
        network_bytes_per_s=pool.num_devices * attends.nic_bytes_per_s * attends.rdma_share,
        host_bytes_per_s=pool.num_devices * attends.pcie_bytes_per_s * attends.rdma_share,
        attention=pool,
    )


def kv_capacity_tokens(
    device: Device,
    shape: ModelShape,
    num_devices: int,
    memory_share: float = MEMORY_SHARE,
    taken_bytes: float = 0.0,
) -> int:
    """Returns the KVCache tokens that fit beside the weights. Raises ConfigError if none fit.

    capacity = (memory_share * devices * memory_bytes - weight_bytes) / kv_bytes_per_token / copies

    `taken_bytes` is the memory that a draft model takes of each device.
    """
    usable = memory_share * num_devices * device.memory_bytes - num_devices * taken_bytes
    tokens = int((usable - shape.weight_bytes) / shape.kv_bytes_per_token)
    tokens //= shape.kv_copies(num_devices)
    if tokens < 1:
        raise ConfigError(
            f"{shape.name} does not fit {num_devices} {device.name}: its weights need "
            f"{shape.weight_bytes / 1e9:.0f} GB of {usable / 1e9:.0f} GB usable; use more devices"
        )
    return tokens
