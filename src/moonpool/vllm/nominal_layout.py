"""The nominal layout that an instance of a server states for blocks that it does not hold
itself."""

from __future__ import annotations

import msgspec

from moonpool.cost.fitted import FittedCost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId
from moonpool.vllm.facts import VllmFacts

NO_ADDRESS = PeerAddress(
    instance_id=InstanceId(""), host_id="", unix_name="", tcp_host="", tcp_port=0
)
NETWORK_BYTES_PER_S = 1e9
"""The speed of a fetch from another host's pool, until fetches have been measured."""


def layout_of(model: str, facts: VllmFacts) -> BlockLayout:
    """Returns a nominal layout: the blocks stay in vLLM, and only their keys are used here."""
    return BlockLayout(
        model_fingerprint=f"vllm {model}",
        dtype="bfloat16",
        block_tokens=facts.block_tokens,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        inner="vllm",
    )


def with_pool(cost: FittedCost, layout: BlockLayout, rates: tuple[int, float]) -> FittedCost:
    """Adds the times of fetches and loads. `rates`: bytes of a block of the pool, and bytes/s of
    reads from its SSD (0 without an SSD). The result's rates are in bytes of the nominal layout."""
    block_bytes, ssd_bytes_per_s = rates
    share = layout.block_bytes / block_bytes
    return msgspec.structs.replace(
        cost,
        network_bytes_per_s=NETWORK_BYTES_PER_S * share,
        shared_memory_bytes_per_s=NETWORK_BYTES_PER_S * share,
        ssd_read_bytes_per_s=ssd_bytes_per_s * share or cost.ssd_read_bytes_per_s,
    )
