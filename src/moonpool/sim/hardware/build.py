"""Builds the hardware of simulated instances: true cost, the Conductor's estimate, links."""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs

from moonpool.config.tables import Config, ConfigError, HardwareConfig, ParallelConfig
from moonpool.cost.domain import CostDomain
from moonpool.cost.fitted import DecodeSpread, FittedCost, fit_to_ground_truth, scaled
from moonpool.cost.model import StepCost
from moonpool.protocol.block_layout import FP8, LATENT, BlockLayout
from moonpool.scheduler.ssd_tiering import reserved_blocks
from moonpool.sim.hardware.catalogue import BUILT_IN, Catalogue
from moonpool.sim.hardware.draft_cost import DraftHardware, with_draft
from moonpool.sim.hardware.node_cost import NodeCost, open_node
from moonpool.sim.hardware.offload_cost import MeasuredOffload
from moonpool.sim.hardware.prices import Prices
from moonpool.types import Role

LONGEST_SAMPLE_TOKENS = 131_072
INSTANT_BYTES_PER_S = 1e15
"""PCIe bandwidth of a machine that computes on the KVCache in place."""
CONTROL_LATENCY_S = 0.0005
"""Latency of a message between head and worker, if it was not measured."""


@dataclass(frozen=True, slots=True)
class NodeHardware:
    """The hardware of one instance. Bandwidths are totals of the instance, one way."""

    ground_truth: StepCost
    estimate: FittedCost
    nic_bytes_per_s: float
    pcie_bytes_per_s: float
    num_blocks: int
    engine_tokens: int
    ssd_read_bytes_per_s: float
    ssd_write_bytes_per_s: float
    num_slots: int  # number of SSD slots; 0 means no SSD
    arenas: tuple[int, ...] = ()  # blocks per memory, if several memories hold them
    contention: tuple[float, float] = (1.0, 1.0)
    decode_spread: DecodeSpread = ((), (), ())
    domain: CostDomain | None = None  # the sizes for which a measured ground truth is valid
    outside_domain: str = ""  # name of the cost model that counts outside of these sizes
    kept_tokens: int = 0  # the window, if all layers have one
    draft: DraftHardware | None = None  # the draft model, if there is one

    @property
    def steady(self) -> bool:
        """Whether equal decode steps take equally long, so that they can be advanced together."""
        return self.contention == (1.0, 1.0) and not any(self.decode_spread)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of all roles, and the layout of a block."""

    layout: BlockLayout
    prefill: NodeHardware
    decode: NodeHardware
    mixed: NodeHardware
    largest_request_tokens: int  # most tokens of a request that every instance can hold
    control_latency_s: float = CONTROL_LATENCY_S
    front_s: float = 0.0
    is_one_machine: bool = False  # whether all instances share one machine's memory

    def of_role(self, role: Role) -> NodeHardware:
        """The hardware of the instances with this role."""
        match role:
            case Role.PREFILL:
                return self.prefill
            case Role.DECODE:
                return self.decode
            case Role.MIXED:
                return self.mixed


def build_hardware(
    config: Config,
    profile: FittedCost | None = None,
    catalogue: Catalogue = BUILT_IN,
    prefill_error: float = 1.0,
    decode_error: float = 1.0,
) -> Hardware:
    """Builds the hardware that a configuration describes.

    `profile` is a measured machine, used in place of a cost model. The Conductor's estimates of
    prefill and decode times are multiplied by `prefill_error` and `decode_error`. Raises
    ConfigError for hardware that cannot exist.
    """
    grouped, decoding_nodes = prefill_nodes(config), decode_nodes(config)
    most_nodes = max(grouped.nodes_per_prefill, decoding_nodes.nodes_per_prefill)
    if config.conductor.role_balance == "switch" and most_nodes > 1:
        raise ConfigError(
            'conductor.role_balance = "switch" cannot be simulated with instances of several'
            ' stages or ranks, because their nodes would change too; use "advise"'
        )
    node = open_node(grouped, profile, catalogue, config.model)
    decoder = open_node(decoding_nodes, profile, catalogue, config.model)
    layout = _layout(node, config, profile)
    drafting_node, mixed_draft = with_draft(node, config, catalogue)
    decoder, draft = with_draft(decoder, config, catalogue)
    stages = decoding_nodes.nodes_per_prefill
    decoder_ground_truth = decoder.cost if stages == 1 else decoder.prefill_cost
    single = _node_hardware(config, decoder, decoder_ground_truth, stages, layout)
    single = _with_attention(config, single, profile)
    group = grouped.nodes_per_prefill
    prefill = _node_hardware(config, node, node.prefill_cost, group, layout)
    wrong = [
        replace(part, estimate=scaled(part.estimate, prefill_error, decode_error))
        for part in (prefill, single)
    ]
    wrong[1] = replace(wrong[1], draft=draft)
    mixed = wrong[0]
    if mixed_draft is not None:
        tokens = drafting_node.kv_capacity_tokens * group
        mixed = replace(mixed, draft=mixed_draft, engine_tokens=tokens)
    decoding = wrong[1] if config.cluster.decode else mixed
    largest_blocks = min(
        max(part.arenas, default=part.num_blocks) - reserved_blocks(part.num_blocks, part.num_slots)
        for part in (wrong[0], decoding)
    )
    largest_tokens = min(largest_blocks * layout.block_tokens, decoding.engine_tokens)
    hardware = Hardware(layout, wrong[0], wrong[1], mixed, largest_tokens)
    return hardware if profile is None else _as_measured(hardware, profile)


def prefill_nodes(config: Config) -> HardwareConfig:
    """The hardware of prefill and mixed instances, with the number of nodes of one.

    A pipeline stage or a rank is a node. These instances compute attention themselves.
    """
    hardware = structs.replace(config.hardware, attention_device="", attention_devices_per_node=0)
    degree = config.engine.degree(Role.PREFILL)
    if degree.num_processes == 1:
        return hardware
    return _joined(hardware, degree)


def instance_usd_per_h(config: Config, prices: Prices) -> dict[Role, float]:
    """Returns the price of one instance of each role, without DRAM. Raises ConfigError if a device
    has no price."""
    nodes = prefill_nodes(config)
    prefill = nodes.nodes_per_prefill * prices.node_usd_per_h(nodes.device, nodes.devices_per_node)
    nodes = decode_nodes(config)
    decode = prices.node_usd_per_h(nodes.device, nodes.devices_per_node)
    if nodes.attention_device:
        decode += prices.node_usd_per_h(nodes.attention_device, nodes.attention_devices_per_node)
    decode *= nodes.nodes_per_prefill
    return {Role.PREFILL: prefill, Role.DECODE: decode, Role.MIXED: prefill}


def attention_workers(config: Config) -> int:
    """The number of attention workers of each decode instance. Raises ConfigError if mixed
    instances have some, too."""
    cluster = config.cluster
    if cluster.attention and cluster.mixed:
        raise ConfigError(
            "attention workers of mixed instances cannot be simulated: set cluster.mixed or"
            " cluster.attention to 0"
        )
    return cluster.attention_each


def _with_attention(
    config: Config, decoding: NodeHardware, profile: FittedCost | None
) -> NodeHardware:
    """Adds the attention workers of a decode instance.

    Their memories hold equal numbers of blocks; the blocks that the instance keeps come last.
    Raises ConfigError for an arrangement that is not simulated, or not measured in the profile.
    """
    workers, own_tokens = attention_workers(config), config.attention.own_tokens
    if not workers:
        if profile is not None and profile.offload and profile.offload.seen_workers:
            raise ConfigError(
                f"{config.hardware.cost} was measured with attention workers: add some with"
                " --attention, or measure a cluster without them"
            )
        return decoding
    if config.attention.partition != "request":
        raise ConfigError(
            f'attention.partition = "{config.attention.partition}" cannot be simulated, only'
            ' "request": leave it out'
        )
    ground_truth = decoding.ground_truth
    if profile is not None:
        if profile.offload is None:
            raise ConfigError(
                f"{config.hardware.cost} was measured without attention workers: measure with"
                " `moonpool profile URL --attention --json FILE`"
            )
        staggered = config.engine.staggered_decodes
        ground_truth = MeasuredOffload(profile, profile.offload, workers, staggered, own_tokens)
    elif own_tokens:
        raise ConfigError(
            "attention.own_tokens can be simulated only with a profile by `moonpool profile"
            " --attention`: name its file with --cost"
        )
    own = -(-own_tokens // config.pool.block_tokens)
    arenas = (decoding.num_blocks,) * workers + ((own,) if own else ())
    return replace(
        decoding,
        ground_truth=ground_truth,
        num_blocks=sum(arenas),
        arenas=arenas if len(arenas) > 1 else (),
        num_slots=0,  # attention workers have no SSD
    )


def decode_nodes(config: Config) -> HardwareConfig:
    """The hardware of decode instances, with the number of nodes of one.

    An attention worker is a node of `attention_devices_per_node` devices, by default as many as the
    nodes with the weights.
    """
    hardware = _with_attention_nodes(config)
    hardware = structs.replace(
        hardware,
        device=hardware.decode_device or hardware.device,
        devices_per_node=hardware.decode_devices_per_node or hardware.devices_per_node,
    )
    return _joined(hardware, config.engine.degree(Role.DECODE))


def _joined(hardware: HardwareConfig, degree: ParallelConfig) -> HardwareConfig:
    return structs.replace(
        hardware,
        nodes_per_prefill=degree.num_processes,
        parallelism="tp" if degree.num_ranks > 1 else "cpp",
    )


def _with_attention_nodes(config: Config) -> HardwareConfig:
    hardware, workers = config.hardware, attention_workers(config)
    if not workers or hardware.cost.endswith(".json"):
        return hardware
    own = hardware.decode_devices_per_node or hardware.devices_per_node
    each = hardware.attention_devices_per_node or own
    return structs.replace(
        hardware,
        attention_device=hardware.attention_device or hardware.decode_device or hardware.device,
        attention_devices_per_node=workers * each,
        decode_batches=2 if config.engine.staggered_decodes else 1,
    )


def _as_measured(hardware: Hardware, profile: FittedCost) -> Hardware:
    """Replaces figures by measurements of a live machine, whose instances share its memory."""
    if profile.token_bytes:
        rate = profile.shared_memory_bytes_per_s
        prefill, decode, mixed = (
            replace(
                part,
                contention=profile.contention,
                decode_spread=profile.decode_spread,
                nic_bytes_per_s=rate,
                pcie_bytes_per_s=INSTANT_BYTES_PER_S,
                engine_tokens=part.num_blocks * hardware.layout.block_tokens,
            )
            for part in (hardware.prefill, hardware.decode, hardware.mixed)
        )
        hardware = replace(
            hardware, prefill=prefill, decode=decode, mixed=mixed, is_one_machine=True
        )
    latency_s = profile.control_latency_s or CONTROL_LATENCY_S
    return replace(hardware, control_latency_s=latency_s, front_s=profile.front_s)


def _layout(node: NodeCost, config: Config, profile: FittedCost | None) -> BlockLayout:
    shape = node.shape
    if profile is not None and profile.token_bytes:
        return BlockLayout(
            model_fingerprint="measured",
            dtype="bfloat16",
            block_tokens=config.pool.block_tokens,
            num_layers=1,
            num_kv_heads=1,
            head_dim=profile.token_bytes // 4,  # keys and values have two bytes
            arithmetic="simulated",
        )
    if config.model.kv_cache_dtype == FP8:
        return BlockLayout(
            model_fingerprint=shape.name,
            dtype="bfloat16",
            block_tokens=config.pool.block_tokens,
            num_layers=shape.layers,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            inner="paired-v1" if shape.latent is None else LATENT,
            arithmetic="simulated",
            kv_dtype=FP8,
        )
    if shape.latent is not None or shape.bytes_per_kv not in (2, 4):
        return BlockLayout(
            model_fingerprint=shape.name,
            dtype="bfloat16",
            block_tokens=config.pool.block_tokens,
            num_layers=shape.layers,
            num_kv_heads=1,
            # K and V have two bytes
            head_dim=max(round(shape.kv_bytes_per_token_per_layer / 4), 1),
            arithmetic="simulated",
        )
    return BlockLayout(
        model_fingerprint=shape.name,
        dtype="bfloat16" if shape.bytes_per_kv == 2 else "float32",
        block_tokens=config.pool.block_tokens,
        num_layers=shape.layers,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        arithmetic="simulated",
    )


def _node_hardware(
    config: Config,
    node: NodeCost,
    ground_truth: StepCost,
    num_nodes: int,
    layout: BlockLayout,
) -> NodeHardware:
    network_bytes_per_s = node.network_bytes_per_s * num_nodes
    ssd_read_bytes_per_s = node.ssd_read_bytes_per_s * num_nodes
    pool = config.pool
    num_slots = pool.ssd_tokens_per_instance * num_nodes // layout.block_tokens
    num_slots = num_slots or pool.ssd_bytes_per_instance * num_nodes // layout.block_bytes
    pool_tokens = pool.dram_tokens_per_instance or node.dram_tokens
    if isinstance(ground_truth, FittedCost):
        estimate = ground_truth
    else:
        estimate = fit_to_ground_truth(
            ground_truth,
            config.engine.chunk_tokens,
            LONGEST_SAMPLE_TOKENS,
            node.network_latency_s,
            node.host_bytes_per_s * num_nodes,
            network_bytes_per_s,
            node.device.gemm.tile_tokens,
        )
    if num_slots:
        estimate = structs.replace(estimate, ssd_read_bytes_per_s=ssd_read_bytes_per_s)
    return NodeHardware(
        ground_truth=ground_truth,
        estimate=estimate,
        nic_bytes_per_s=network_bytes_per_s,
        pcie_bytes_per_s=node.host_bytes_per_s * num_nodes,
        num_blocks=max(pool_tokens * num_nodes // layout.block_tokens, 1),
        engine_tokens=node.kv_capacity_tokens * num_nodes,
        ssd_read_bytes_per_s=ssd_read_bytes_per_s,
        ssd_write_bytes_per_s=node.ssd_write_bytes_per_s * num_nodes,
        num_slots=num_slots,
        domain=node.domain,
        outside_domain=node.outside_domain,
        kept_tokens=node.shape.window if node.shape.windowed_share == 1 else 0,
    )
