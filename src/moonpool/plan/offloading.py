"""Says whether attention offloading pays (Lamina, arXiv 2405.01814v2).

Decode nodes with and without attention devices are compared by the cost model, and by the cheapest
clusters that the search found with each. The paper compares with nodes of the computing device
alone. The paper omits the comparison with nodes of only the memory device at the same price; this
module always makes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.config.tables import Config
from moonpool.cost.model import StepCost
from moonpool.plan.candidate import CACHE_STEPS, Candidate, NodeKind
from moonpool.plan.search import ClusterPlan, MixFound
from moonpool.sim.hardware.build import decode_nodes
from moonpool.sim.hardware.catalogue import Catalogue
from moonpool.sim.hardware.node_cost import open_node
from moonpool.sim.hardware.offload_cost import (
    OffloadCost,
    OffloadNetwork,
    least_bandwidth_bytes_per_s,
)
from moonpool.sim.hardware.prices import Prices
from moonpool.types import Struct

MOST_DEVICES = 8  # most devices of a node


class Balance(Struct, frozen=True):
    """The times of one layer for half the batch (model, attention and wire), and the bandwidth that
    the wire needs (Lamina's BW_min, section 3.1) and has."""

    model_s: float
    attention_s: float
    wire_s: float
    least_bytes_per_s: float
    wire_bytes_per_s: float

    @property
    def slower(self) -> str:
        """The name of the slower side; equal times are best (t_a = t_m / (n - 1), n = 2)."""
        return "attention" if self.attention_s > self.model_s else "model"


class DecodeNode(Struct, frozen=True):
    """The largest batch of one decode node within its memory and the TBT SLO, and its step time."""

    kind: NodeKind
    usd_per_h: float
    kv_tokens: int
    batch: int
    step_s: float
    full: bool  # whether memory limits the batch
    balance: Balance | None = None

    @property
    def tokens_per_usd(self) -> float:
        return 3600 * self.batch / self.step_s / self.usd_per_h if self.batch else 0.0


def all_memory(kind: NodeKind, prices: Prices) -> NodeKind:
    """Returns the largest node that has attention devices only and costs no more than `kind`; its
    number of devices is a power of two."""
    usd = kind.usd_per_h(prices)
    number = MOST_DEVICES
    while number > 1 and prices.node_usd_per_h(kind.attention_device, number) > usd:
        number //= 2
    return NodeKind(kind.attention_device, number)


def with_rivals(kinds: Sequence[NodeKind], prices: Prices) -> list[NodeKind]:
    """Returns the kinds, and for each kind that offloads attention the node of `all_memory`. Raises
    ConfigError if a device has no price."""
    rivals = [all_memory(kind, prices) for kind in kinds if kind.offloads]
    return list(dict.fromkeys([*kinds, *rivals]))


def decode_nodes_of(
    kinds: Sequence[NodeKind],
    base: Config,
    catalogue: Catalogue,
    prices: Prices,
    context_tokens: int,
) -> list[DecodeNode]:
    """Returns the nodes, with the most tokens per dollar first. Raises ConfigError."""
    found = [_decode_node(kind, base, catalogue, prices, context_tokens) for kind in kinds]
    return sorted(found, key=lambda one: -one.tokens_per_usd)


def verdict(plan: ClusterPlan) -> str:
    """Says in one sentence whether the chosen cluster offloads, and what the cheapest cluster of
    the other kind costs."""
    if plan.choice is None:
        return "Whether offloading attention pays is unknown: no cluster was found."
    chosen = plan.choice.candidate
    name = f"{chosen.roles} of {chosen.hardware} ({plan.choice.usd_per_h:,.2f} USD/h)"
    offloads = chosen.decode_kind.offloads
    says = "pays" if offloads else "does not pay"
    others = [mix for mix in plan.mixes if mix.start.decode_kind.offloads is not offloads]
    if not others:
        return f"Offloading attention {says}: only {name} was compared."
    rival = min(others, key=_price)
    roles = rival.start.roles if rival.cheapest is None else rival.cheapest.candidate.roles
    way = "without it" if offloads else "with it"
    seen = "" if rival.cheapest is not None else " by the cost model"
    return (
        f"Offloading attention {says}: {name} was chosen, and the cheapest {way},"
        f" {roles} of {rival.start.hardware}, costs {_price(rival):,.2f} USD/h{seen}."
    )


def _price(mix: MixFound) -> float:
    return mix.start_usd_per_h if mix.cheapest is None else mix.cheapest.usd_per_h


def _decode_node(
    kind: NodeKind, base: Config, catalogue: Catalogue, prices: Prices, context_tokens: int
) -> DecodeNode:
    candidate = Candidate(kind, kind, 1, 1, 0, CACHE_STEPS[-1], base.engine.chunk_tokens)
    node = open_node(decode_nodes(candidate.config(base)), None, catalogue, base.model)
    room = node.kv_capacity_tokens // context_tokens
    most = min(room, base.engine.max_sequences)
    batch = _largest_batch(node.cost, context_tokens, most, base.slo.usual.tbt_s)
    balance = None
    if isinstance(node.cost, OffloadCost) and batch:
        balance = _balance(node.cost, batch, context_tokens, node.num_devices)
    return DecodeNode(
        kind,
        kind.usd_per_h(prices),
        node.kv_capacity_tokens,
        batch,
        node.cost.step_s((), max(batch, 1), max(batch, 1) * context_tokens),
        batch == room,
        balance,
    )


def _largest_batch(cost: StepCost, context_tokens: int, most: int, limit_s: float) -> int:
    """Returns the largest batch whose step takes at most `limit_s`. Bisection finds it, because a
    larger batch never takes less time."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if cost.step_s((), middle, middle * context_tokens) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low


def _balance(cost: OffloadCost, batch: int, context_tokens: int, num_devices: int) -> Balance:
    half = max(batch / cost.num_batches, 1)
    times = cost.layer_times(half, half * context_tokens)
    wire = OffloadNetwork.of(cost.model.device, num_devices, cost.attention)
    least = least_bandwidth_bytes_per_s(cost.model, cost.attention, int(half), context_tokens)
    return Balance(times.model_s, times.attention_s, times.network_s, least, wire.bytes_per_s)
