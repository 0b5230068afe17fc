"""Does attention offloading pay (Lamina, arXiv 2405.01814v2)? Decode nodes side by side by the cost
model, and what the search found with them and without.

The paper compares with the computing devices alone. Devices with much memory alone, for no more
money, are the rival that it leaves out; they are always put beside it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moonpool.config import Config
from moonpool.cost.catalogue import Catalogue
from moonpool.cost.model import StepCost
from moonpool.cost.node import open_node
from moonpool.cost.offload import OffloadCost, Wire, least_bandwidth_bytes_per_s
from moonpool.cost.prices import Prices
from moonpool.plan.candidate import CACHE_STEPS, Candidate, NodeKind
from moonpool.plan.search import MixFound, Plan
from moonpool.sim.hardware import decode_nodes
from moonpool.types import Struct

MOST_DEVICES = 8  # of a node


class Balance(Struct, frozen=True):
    """Of one layer with the batch halved among two: the model's part, attention's, the wire's; and
    the bandwidth that the wire needs (Lamina's BW_min, section 3.1) beside what it has."""

    model_s: float
    attention_s: float
    wire_s: float
    least_bytes_per_s: float
    wire_bytes_per_s: float

    @property
    def slower(self) -> str:
        """Which side sets the pace; they are best alike (t_a = t_m / (n - 1), n = 2)."""
        return "attention" if self.attention_s > self.model_s else "model"


class DecodeNode(Struct, frozen=True):
    """What one decode node of a kind can do: the largest batch within the limit between tokens and
    its memory, `context_tokens` each."""

    kind: NodeKind
    usd_per_h: float
    kv_tokens: int
    batch: int
    step_s: float
    full: bool  # of KVCache, so that memory is what binds
    balance: Balance | None = None

    @property
    def tokens_per_usd(self) -> float:
        return 3600 * self.batch / self.step_s / self.usd_per_h if self.batch else 0.0


def all_memory(kind: NodeKind, prices: Prices) -> NodeKind:
    """As many of its attention devices alone, a power of two, as its price buys."""
    usd = kind.usd_per_h(prices)
    number = MOST_DEVICES
    while number > 1 and prices.node_usd_per_h(kind.attention_device, number) > usd:
        number //= 2
    return NodeKind(kind.attention_device, number)


def with_rivals(kinds: Sequence[NodeKind], prices: Prices) -> list[NodeKind]:
    """The kinds, and the rival of each that offloads. Raises ConfigError: no price."""
    rivals = [all_memory(kind, prices) for kind in kinds if kind.offloads]
    return list(dict.fromkeys([*kinds, *rivals]))


def decode_nodes_of(
    kinds: Sequence[NodeKind],
    base: Config,
    catalogue: Catalogue,
    prices: Prices,
    context_tokens: int,
) -> list[DecodeNode]:
    """Most tokens per dollar first. Raises ConfigError."""
    found = [_decode_node(kind, base, catalogue, prices, context_tokens) for kind in kinds]
    return sorted(found, key=lambda one: -one.tokens_per_usd)


def verdict(plan: Plan, usd_per_h: Callable[[Candidate], float]) -> str:
    """One sentence: whether the cluster that was chosen offloads, and what the cheapest of the
    other way costs. `usd_per_h`: of any candidate."""
    if plan.choice is None:
        return "Whether offloading attention pays is open: no cluster was found."
    chosen = plan.choice.candidate
    name = f"{chosen.counts} of {chosen.hardware} ({plan.choice.usd_per_h:,.2f} USD/h)"
    offloads = chosen.decode_kind.offloads
    says = "pays" if offloads else "does not pay"
    others = [mix for mix in plan.mixes if mix.start.decode_kind.offloads is not offloads]
    if not others:
        return f"Offloading attention {says}: nothing else than {name} was compared."
    rival = min(others, key=lambda mix: usd_per_h(_furthest(mix)))
    usd = usd_per_h(_furthest(rival))
    counts = f"{_furthest(rival).counts} of {rival.start.hardware}"
    way = "without it" if offloads else "with it"
    return (
        f"Offloading attention {says}: {name} was chosen, and the cheapest {way},"
        f" {counts}, costs {usd:,.2f} USD/h{_seen(rival)}."
    )


def _furthest(mix: MixFound) -> Candidate:
    """How far a mix came: the later, the surer its price."""
    return mix.settled.candidate if mix.settled is not None else mix.boundary or mix.start


def _seen(mix: MixFound) -> str:
    if mix.settled is not None:
        return ""
    return " at the busiest part" if mix.boundary is not None else " by the cost model"


def _decode_node(
    kind: NodeKind, base: Config, catalogue: Catalogue, prices: Prices, context_tokens: int
) -> DecodeNode:
    candidate = Candidate(kind, kind, 1, 1, 0, CACHE_STEPS[-1], base.engine.chunk_tokens)
    node = open_node(decode_nodes(candidate.config(base)), None, catalogue)
    room = node.kv_capacity_tokens // context_tokens
    most = min(room, base.engine.max_sequences)
    batch = _largest_batch(node.cost, context_tokens, most, base.slo.tbt_s)
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
    """A step's time only grows with its batch, so halving finds it."""
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
    wire = Wire.of(cost.model.device, num_devices, cost.attention)
    least = least_bandwidth_bytes_per_s(cost.model, cost.attention, int(half), context_tokens)
    return Balance(times.model_s, times.attention_s, times.wire_s, least, wire.bytes_per_s)
