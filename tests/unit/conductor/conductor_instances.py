"""Makes instances with simple cost coefficients."""

from __future__ import annotations

from moonpool.cost.fitted import FittedCost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import InstanceInfo
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId, Role

ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED}
COST = FittedCost(
    prefill=(0.0, 0.001, 0.0, 0.0),  # a prefill takes 1 ms per token
    decode=(0.0, 0.01, 1e-6),  # a decode step takes 10 ms per answer, and 1 us per token of context
    transfer_latency_s=0.0,
    shared_memory_bytes_per_s=1e8,
    network_bytes_per_s=1e6,
)
LAYOUT = BlockLayout(
    model_fingerprint="m",
    dtype="float32",
    block_tokens=1,
    num_layers=1,
    num_kv_heads=1,
    head_dim=4,
)


def info(
    name: str,
    host_id: str = "",
    num_blocks: int = 1000,
    engine_tokens: int = 0,
    cost: FittedCost = COST,
    layout: BlockLayout = LAYOUT,
    incarnation: int = 1,
    context_tokens: int = 0,
) -> InstanceInfo:
    """Describes an instance, whose role follows from the first letter of its name."""
    address = PeerAddress(
        instance_id=InstanceId(name), host_id=host_id, unix_name="", tcp_host="x", tcp_port=1
    )
    return InstanceInfo(
        instance_id=InstanceId(name),
        role=ROLES[name[0]],
        incarnation=incarnation,
        address=address,
        layout=layout,
        num_blocks=num_blocks,
        cost=cost,
        pid=1,
        host="x",
        engine_tokens=engine_tokens,
        context_tokens=context_tokens,
    )
