"""A candidate cluster: instances, hardware, cache and policies; its price and its neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonpool.config import Admission, Config, EvictionName, Placement
from moonpool.sim.hardware.prices import Prices
from moonpool.types import Struct

CACHE_STEPS = tuple(
    n * 1000 for n in (125, 250, 375, 500, 750, 1000, 1500, 2000, 3000, 4000, 6000, 8000, 12000)
)
"""Tokens of DRAM pool per instance."""
CHUNK_STEPS = (128, 256, 512, 1024, 2048, 4096, 8192)
PLACEMENTS: tuple[Placement, ...] = ("kvcache-centric", "cache-aware")
ADMISSIONS: tuple[Admission, ...] = ("early", "predictive")
EVICTIONS: tuple[EvictionName, ...] = ("lru", "length-aware")


class NodeKind(Struct, frozen=True):
    """A kind of node. With `num_attention` more devices, which keep the KVCache and compute
    attention (Lamina), it can only decode."""

    device: str
    num_devices: int
    attention_device: str = ""
    num_attention: int = 0

    def __str__(self) -> str:
        own = f"{self.num_devices} x {self.device}"
        return f"{own} + {self.num_attention} x {self.attention_device}" if self.offloads else own

    @property
    def offloads(self) -> bool:
        return self.num_attention > 0

    def usd_per_h(self, prices: Prices) -> float:
        """Returns the price per hour. Raises ConfigError where a device has no price."""
        usd = prices.node_usd_per_h(self.device, self.num_devices)
        if self.offloads:
            usd += prices.node_usd_per_h(self.attention_device, self.num_attention)
        return usd


class Candidate(Struct, frozen=True):
    """Either `prefill` and `decode` or `mixed` instances, each with `cache_tokens` of DRAM pool."""

    kind: NodeKind
    decode_kind: NodeKind
    prefill: int
    decode: int
    mixed: int
    cache_tokens: int
    chunk_tokens: int
    placement: Placement = "kvcache-centric"
    admission: Admission = "early"
    eviction: EvictionName = "lru"

    @property
    def num_instances(self) -> int:
        return self.prefill + self.decode + self.mixed

    @property
    def counts(self) -> str:
        return f"{self.mixed}M" if self.mixed else f"{self.prefill}P+{self.decode}D"

    @property
    def hardware(self) -> str:
        if self.mixed or self.kind == self.decode_kind:
            return str(self.kind)
        return f"{self.kind} / {self.decode_kind}"

    @property
    def policies(self) -> str:
        return f"{self.placement}, {self.admission}, {self.eviction}"

    def config(self, base: Config) -> Config:
        """Returns `base` with this cluster."""
        change = msgspec.structs.replace
        hardware = change(
            base.hardware,
            device=self.kind.device,
            devices_per_node=self.kind.num_devices,
            decode_device="" if self.mixed else self.decode_kind.device,
            decode_devices_per_node=0 if self.mixed else self.decode_kind.num_devices,
            attention_device=self.decode_kind.attention_device,
            attention_devices_per_node=self.decode_kind.num_attention,
        )
        return change(
            base,
            cluster=change(
                base.cluster,
                prefill=self.prefill,
                decode=self.decode,
                mixed=self.mixed,
                attention=0,  # `hardware` has them
            ),
            hardware=hardware,
            pool=change(
                base.pool, dram_tokens_per_instance=self.cache_tokens, eviction=self.eviction
            ),
            engine=change(base.engine, chunk_tokens=self.chunk_tokens, staggered_decodes=False),
            conductor=change(base.conductor, placement=self.placement, admission=self.admission),
        )

    def may_only_lose(self, other: Candidate) -> bool:
        """Whether this has no more of anything than the other one, and is equal otherwise."""
        mine = (self.prefill, self.decode, self.mixed, self.cache_tokens)
        others = (other.prefill, other.decode, other.mixed, other.cache_tokens)
        equal = msgspec.structs.replace(
            self, prefill=other.prefill, decode=other.decode, mixed=other.mixed,
            cache_tokens=other.cache_tokens,
        )  # fmt: skip
        return equal == other and all(a <= b for a, b in zip(mine, others, strict=True))


class Priced(Struct, frozen=True):
    """Prices of candidates, for one model's bytes of KVCache per token, and for the nodes of one
    prefill (or mixed) and of one decode instance."""

    prices: Prices
    kv_bytes_per_token: float
    nodes_per_prefill: int = 1
    nodes_per_decode: int = 1

    def usd_per_h(self, candidate: Candidate) -> float:
        """Returns the price per hour. Raises ConfigError where a device has no price."""
        groups = (candidate.prefill + candidate.mixed) * self.nodes_per_prefill
        decodes = candidate.decode * self.nodes_per_decode
        usd = groups * candidate.kind.usd_per_h(self.prices)
        if candidate.decode:
            usd += decodes * candidate.decode_kind.usd_per_h(self.prices)
        num_bytes = (groups + decodes) * candidate.cache_tokens * self.kv_bytes_per_token
        return usd + self.prices.dram_usd_per_h(num_bytes)


class Neighbour(Struct, frozen=True):
    """A candidate one step away; `change` says how it differs, as words after "with"."""

    change: str
    candidate: Candidate


def neighbours(of: Candidate, least_cache_tokens: int) -> list[Neighbour]:
    """Returns the candidates one instance, one step of cache, one chunk size or one policy away."""
    found = [*_instance_neighbours(of), *_step_neighbours(of, least_cache_tokens)]
    choices: list[tuple[str, Sequence[str]]] = [
        ("placement", PLACEMENTS),
        ("admission", ADMISSIONS),
        ("eviction", EVICTIONS),
    ]
    for name, values in choices:
        for value in values:
            if value != getattr(of, name):
                other = msgspec.structs.replace(of, **{name: value})
                found.append(Neighbour(f"{name} {value}", other))
    return found


def _instance_neighbours(of: Candidate) -> list[Neighbour]:
    found = []
    for role in ("prefill", "decode", "mixed"):
        count = getattr(of, role)
        for step, word in ((-1, "fewer"), (1, "more")):
            if count and count + step >= 1:
                other = msgspec.structs.replace(of, **{role: count + step})
                found.append(Neighbour(f"one {role} instance {word}", other))
    return found


def _step_neighbours(of: Candidate, least_cache_tokens: int) -> list[Neighbour]:
    found = []
    for step in (-1, 1):
        cache = stepped(CACHE_STEPS, of.cache_tokens, step)
        if cache is not None and cache >= least_cache_tokens:
            other = msgspec.structs.replace(of, cache_tokens=cache)
            found.append(Neighbour(f"{tokens(cache)} cached tokens an instance", other))
    for step in (-1, 1):
        chunk = stepped(CHUNK_STEPS, of.chunk_tokens, step)
        if chunk is not None:
            other = msgspec.structs.replace(of, chunk_tokens=chunk)
            found.append(Neighbour(f"chunks of {chunk} tokens", other))
    return found


def stepped(steps: Sequence[int], value: int, number: int) -> int | None:
    """Returns the step `number` steps above the one nearest to `value`; None beyond the ends."""
    at = min(range(len(steps)), key=lambda i: abs(steps[i] - value)) + number
    return steps[at] if 0 <= at < len(steps) else None


def tokens(number: float) -> str:
    """Formats a number of tokens, such as `40M`, `1.5M` or `500k`."""
    if number >= 999_500:
        return f"{number / 1e6:.3g}M"
    return f"{number / 1e3:.3g}k" if number >= 1000 else f"{number:.0f}"
