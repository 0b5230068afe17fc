"""Describes candidate clusters: instances, hardware, cache, policies, price and neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import msgspec

from moonpool.config.tables import EVICTIONS as EVICTIONS
from moonpool.config.tables import Config, PolicyName
from moonpool.sim.hardware.prices import Prices
from moonpool.types import Struct

CACHE_STEPS = tuple(
    n * 1000
    for n in (32, 64, 125, 250, 375, 500, 750, 1000, 1500, 2000, 3000, 4000, 6000, 8000, 12000)
)
"""The sizes of the DRAM pool that a search tries, in tokens per instance."""
SSD_STEPS = (0, 1_000_000, 4_000_000, 16_000_000)
"""The sizes of the SSD tier that a search tries, in tokens per instance."""
CHUNK_STEPS = (128, 256, 512, 1024, 2048, 4096, 8192)


class NodeKind(Struct, frozen=True):
    """A kind of node. With `num_attention` more devices, which keep the KVCache and compute
    attention (Lamina), the node can only decode."""

    device: str
    num_devices: int
    attention_device: str = ""
    num_attention: int = 0

    def __str__(self) -> str:
        own = f"{self.num_devices} x {self.device}"
        return f"{own} + {self.num_attention} x {self.attention_device}" if self.offloads else own

    def words(self, count: int) -> str:
        """Returns this many nodes in words, such as "one node of 8 A800-SXM"."""
        nodes = "one node" if count == 1 else f"{count} nodes"
        own = f"{nodes} of {self.num_devices} {self.device}"
        if not self.offloads:
            return own
        return f"{own} and {self.num_attention} {self.attention_device} for attention"

    @property
    def offloads(self) -> bool:
        return self.num_attention > 0

    def usd_per_h(self, prices: Prices) -> float:
        """Returns the price per hour. Raises ConfigError if a device has no price."""
        usd = prices.node_usd_per_h(self.device, self.num_devices)
        if self.offloads:
            usd += prices.node_usd_per_h(self.attention_device, self.num_attention)
        return usd


class Candidate(Struct, frozen=True):
    """Instances of three roles, each with `cache_tokens` of DRAM pool and `ssd_tokens` of SSD.

    A prefill or mixed instance has `prefill_stages` nodes of `kind`. A decode instance has one node
    of `decode_kind`.
    """

    kind: NodeKind
    decode_kind: NodeKind
    prefill: int
    decode: int
    mixed: int
    cache_tokens: int
    chunk_tokens: int
    placement: PolicyName = "kvcache-centric"
    admission: PolicyName = "early"
    eviction: PolicyName = "lru"
    ssd_tokens: int = 0
    prefill_stages: int = 1

    @property
    def num_instances(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def counts(self) -> str:
        """Returns the number of instances of each role in short, such as "2P+1D", for programs."""
        roles = ((self.prefill, "P"), (self.decode, "D"), (self.mixed, "M"))
        return "+".join(f"{number}{role}" for number, role in roles if number)

    @property
    def roles(self) -> str:
        """Returns the number of instances of each role in words, such as "2 prefill + 1 decode"."""
        roles = ((self.prefill, "prefill"), (self.decode, "decode"), (self.mixed, "mixed"))
        return " + ".join(f"{number} {role}" for number, role in roles if number)

    @property
    def hardware(self) -> str:
        own = _staged(self.kind, self.prefill_stages)
        other = str(self.decode_kind)
        if not self.decode or own == other:
            return own
        return other if self.decode == self.num_instances else f"{own} / {other}"

    @property
    def layout(self) -> str:
        """Says whether prefill and decode have separate instances, share instances, or both."""
        if not self.mixed:
            return "P/D"
        return "mixed" if self.mixed == self.num_instances else "P/D and mixed"

    def config(self, base: Config) -> Config:
        """Returns `base` with this cluster."""
        change = msgspec.structs.replace
        split = bool(self.decode)
        hardware = change(
            base.hardware,
            device=self.kind.device,
            devices_per_node=self.kind.num_devices,
            decode_device=self.decode_kind.device if split else "",
            decode_devices_per_node=self.decode_kind.num_devices if split else 0,
            attention_device=self.decode_kind.attention_device if split else "",
            attention_devices_per_node=self.decode_kind.num_attention if split else 0,
        )
        return change(
            base,
            cluster=change(
                base.cluster,
                prefill=self.prefill,
                decode=self.decode,
                mixed=self.mixed,
                attention=0,  # `hardware` has the attention devices
            ),
            hardware=hardware,
            pool=change(
                base.pool,
                dram_tokens_per_instance=self.cache_tokens,
                ssd_tokens_per_instance=self.ssd_tokens,
                ssd_bytes_per_instance=0,
                eviction=self.eviction,
            ),
            engine=change(
                base.engine,
                chunk_tokens=self.chunk_tokens,
                staggered_decodes=False,
                pipeline_parallel_size=self.prefill_stages,
            ),
            conductor=change(base.conductor, placement=self.placement, admission=self.admission),
        )

    def may_only_lose(self, other: Candidate) -> bool:
        """Whether this candidate has at most the cache of `other`, and is equal otherwise."""
        equal = msgspec.structs.replace(
            self, cache_tokens=other.cache_tokens, ssd_tokens=other.ssd_tokens
        )
        return (
            equal == other
            and self.cache_tokens <= other.cache_tokens
            and self.ssd_tokens <= other.ssd_tokens
        )


def _staged(kind: NodeKind, num_stages: int) -> str:
    return str(kind) if num_stages == 1 else f"{num_stages} stages of {kind}"


class Priced(Struct, frozen=True):
    """Computes prices of candidates, from the model's bytes of KVCache per token and the nodes of
    one prefill (or mixed) instance and of one decode instance."""

    prices: Prices
    kv_bytes_per_token: float
    nodes_per_prefill: int = 1
    nodes_per_decode: int = 1
    device_power_w: Mapping[str, float] = {}
    max_power_w: float = inf

    def usd_per_h(self, candidate: Candidate) -> float:
        """Returns the price per hour, which is infinite for a cluster that draws more than
        `max_power_w`. Raises ConfigError if a device has no price."""
        if self.max_power_w < inf and self.power_w(candidate) > self.max_power_w:
            return inf
        groups = (candidate.prefill + candidate.mixed) * candidate.prefill_stages
        groups *= self.nodes_per_prefill
        decodes = candidate.decode * self.nodes_per_decode
        usd = groups * candidate.kind.usd_per_h(self.prices)
        if candidate.decode:
            usd += decodes * candidate.decode_kind.usd_per_h(self.prices)
        usd += self.prices.dram_usd_per_h(self.pool_bytes(candidate, candidate.cache_tokens))
        return usd + self.prices.ssd_usd_per_h(self.pool_bytes(candidate, candidate.ssd_tokens))

    def pool_bytes(self, candidate: Candidate, tokens: int) -> float:
        """Returns the total bytes of this many tokens of KVCache on each instance."""
        groups = (candidate.prefill + candidate.mixed) * candidate.prefill_stages
        groups *= self.nodes_per_prefill
        return (groups + candidate.decode * self.nodes_per_decode) * (
            self.kv_bytes_per_token * tokens
        )

    def power_w(self, candidate: Candidate) -> float:
        """Returns the most power that the devices draw, or 0 if the power of one is unknown."""
        groups = (candidate.prefill + candidate.mixed) * candidate.prefill_stages
        groups *= self.nodes_per_prefill
        decodes = candidate.decode * self.nodes_per_decode
        watts = [
            (number, self.device_power_w.get(device, 0.0))
            for number, device in (
                (groups * candidate.kind.num_devices, candidate.kind.device),
                (decodes * candidate.decode_kind.num_devices, candidate.decode_kind.device),
                (
                    decodes * candidate.decode_kind.num_attention,
                    candidate.decode_kind.attention_device,
                ),
            )
            if number
        ]
        return sum(n * w for n, w in watts) if all(w for _, w in watts) else 0.0

    def words(self, candidate: Candidate) -> str:
        """Returns instances with nodes, such as "1 mixed instance on one node of 8 A800-SXM"."""
        stages = candidate.prefill_stages
        groups = (candidate.prefill + candidate.mixed) * stages * self.nodes_per_prefill
        decodes = candidate.decode * self.nodes_per_decode
        staged = f" ({stages} stages)" if stages > 1 else ""
        own = [(candidate.prefill, f"prefill{staged}"), (candidate.mixed, f"mixed{staged}")]
        other = [(candidate.decode, "decode")]
        if not decodes or not groups or candidate.kind == candidate.decode_kind:
            kind = candidate.kind if groups else candidate.decode_kind
            return f"{_instances(*own, *other)} on {kind.words(groups + decodes)}"
        return (
            f"{_instances(*own)} on {candidate.kind.words(groups)}, and {_instances(*other)} on"
            f" {candidate.decode_kind.words(decodes)}"
        )


def _instances(*roles: tuple[int, str]) -> str:
    """Returns instances of several roles, such as "2 prefill and 1 decode instances"."""
    named = " and ".join(f"{number} {role}" for number, role in roles if number)
    return f"{named} {'instance' if sum(number for number, _ in roles) == 1 else 'instances'}"


class Steps(Struct, frozen=True):
    """The sizes and policies that a search chooses from, with the smallest first."""

    caches: tuple[int, ...]
    ssds: tuple[int, ...] = (0,)
    evictions: tuple[PolicyName, ...] = ("lru",)
    chunks: tuple[int, ...] = CHUNK_STEPS


class Neighbour(Struct, frozen=True):
    """A candidate one step away. `change` says how it differs, in words that follow "with"."""

    change: str
    candidate: Candidate


def neighbours(of: Candidate, steps: Steps) -> list[Neighbour]:
    """Returns the candidates that differ by one instance, by one step of cache, SSD or chunk size,
    or in the eviction policy. Candidates that differ by an instance come first."""
    found = _instance_neighbours(of)
    for name, choices, words in (
        ("cache_tokens", steps.caches, "{} cached tokens an instance"),
        ("ssd_tokens", steps.ssds, "{} tokens of SSD an instance"),
        ("chunk_tokens", steps.chunks, "chunks of {} tokens"),
    ):
        for step in (-1, 1):
            value = stepped(choices, getattr(of, name), step)
            if value is not None:
                number = str(value) if name == "chunk_tokens" else tokens(value)
                other = msgspec.structs.replace(of, **{name: value})
                found.append(Neighbour(words.format(number), other))
    for eviction in steps.evictions:
        if eviction != of.eviction:
            other = msgspec.structs.replace(of, eviction=eviction)
            found.append(Neighbour(f"eviction {eviction}", other))
    return found


def _instance_neighbours(of: Candidate) -> list[Neighbour]:
    found = []
    for role in ("prefill", "decode", "mixed"):
        count = getattr(of, role)
        for step, word in ((-1, "fewer"), (1, "more")):
            other = msgspec.structs.replace(of, **{role: count + step})
            if count and can_serve(other.prefill, other.decode, other.mixed):
                found.append(Neighbour(f"one {role} instance {word}", other))
    return found


def can_serve(prefill: int, decode: int, mixed: int) -> bool:
    """Whether instances of these roles together can prefill and decode."""
    if min(prefill, decode, mixed) < 0:
        return False
    return bool(mixed) or bool(prefill and decode)


def stepped(steps: Sequence[int], value: int, number: int) -> int | None:
    """Returns the step that is `number` above the step nearest to `value`, or None past an end."""
    at = min(range(len(steps)), key=lambda i: abs(steps[i] - value)) + number
    return steps[at] if 0 <= at < len(steps) else None


def tokens(number: float) -> str:
    """Formats a number of tokens, such as `40M`, `1.5M` or `500k`."""
    if number >= 999_500:
        return f"{number / 1e6:.3g}M"
    return f"{number / 1e3:.3g}k" if number >= 1000 else f"{number:.0f}"
