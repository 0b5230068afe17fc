"""Which prefill instance: one function per policy, each ranking all instances at once.

* random: any of them, by a hash of (seed, number of the decision).
* load-balancing: the shortest predicted queue. What is cached there is used, but not looked for.
* cache-aware: the smallest predicted TTFT with what each instance itself holds (Mooncake v3
  section 6.1; FAST'25 Fig. 5 calls it local).
* kvcache-centric: Algorithm 1. As cache-aware, but what is missing may be fetched from another
  instance, which so gets a copy of what is hot.

Algorithm 1 is mended with respect to the paper (v3 page 10, FAST'25 page 8), for these reasons:

* `best_hit / hit` is undefined at hit = 0: 0/0 counts as 1 (nothing to gain), x/0 as infinite.
* v3 scores with `<` and migrates with `>`, so at equality the score assumes a transfer that never
  starts. Here the score and the transfer are one decision: what was scored is what is done.
* The paper fetches whenever the ratio exceeds the threshold. Here the threshold only permits a
  fetch; it is chosen when the estimate says it is faster than computing the gap (the paper's
  prose says so too, though with the comparison turned round).
* TTFT is not the plain sum: a fetch runs while the request waits in the queue, so the longer of
  the two counts, then the prefill.
* The first instance won all ties, so an idle cluster sent everything to it. Ties go to the
  instance that has been idle longest.
* A holder may be any instance, decode ones included: the last turn's answer lies there.
* Of the holders only the deepest few are asked, among equals those that serve fewest fetches.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from moonpool.conductor.fleet import Bools, Fleet, Floats
from moonpool.config import ConductorConfig
from moonpool.config import Placement as PolicyName
from moonpool.kvcache.prefix_index import PrefixMatch

Rows = npt.NDArray[np.int64]
MAX_SOURCES = 3
_MASK = (1 << 64) - 1


class Demand(msgspec.Struct, frozen=True):
    """What placement needs to know of a request."""

    number: int  # of this decision: the n-th of this Conductor
    num_tokens: int
    expected_tokens: int  # room to book where it decodes: prompt and answer, in whole blocks
    decodes: bool  # False if the first token is also the last
    block_tokens: int
    token_bytes: int
    answer_s: float  # how long an answer takes
    tbt_s: float = float("inf")  # promised to it and to those it would share a batch with

    @property
    def usable_blocks(self) -> int:
        """At least one token has to be computed."""
        return (self.num_tokens - 1) // self.block_tokens


class Local(msgspec.Struct, frozen=True):
    """By row, without any fetch. `near_tokens` of the `hit_tokens` are in DRAM, the others come
    from the SSD in `load_s`; None: all of them are."""

    hit_tokens: Floats
    prefill_s: Floats
    ttft_s: Floats
    near_tokens: Floats | None = None
    load_s: Floats | None = None


class Scene(msgspec.Struct, frozen=True):
    """One decision's view of the fleet. Arrays are by row; none may be written to."""

    demand: Demand
    fleet: Fleet
    match: PrefixMatch
    config: ConductorConfig
    queue_s: Floats
    possible: Bools

    def hit_tokens(self) -> Floats:
        """Of this prompt, held there or being computed there."""
        if not self.match.deepest and self.match.hits is self.match.held:
            return self.match.hits  # zeros
        return self._tokens(self.match.hits)

    def _tokens(self, blocks: Floats) -> Floats:
        usable = np.minimum(blocks, float(self.demand.usable_blocks))
        tokens: Floats = usable * float(self.demand.block_tokens)
        return tokens

    def usable_tokens(self, num_blocks: float) -> float:
        return min(num_blocks, self.demand.usable_blocks) * self.demand.block_tokens

    def local(self) -> Local:
        """What each instance makes of what it has itself. What is on its SSD only, it loads while
        the prompt waits in the queue, or computes if that is sooner."""
        fleet, demand, match = self.fleet, self.demand, self.match
        hit_tokens = self.hit_tokens()
        prefill_s = fleet.prefill_s(demand.num_tokens, hit_tokens)
        if match.hits_in_dram is None:
            return Local(hit_tokens, prefill_s, self.queue_s + prefill_s)
        near_tokens = self._tokens(match.hits_in_dram)
        load_s = (hit_tokens - near_tokens) * (float(demand.token_bytes) * fleet.s_per_ssd_byte)
        loaded_s = np.maximum(self.queue_s, load_s) + prefill_s
        near_prefill_s = fleet.prefill_s(demand.num_tokens, near_tokens)
        computed_s = self.queue_s + near_prefill_s
        loads = loaded_s < computed_s
        return Local(
            np.where(loads, hit_tokens, near_tokens),
            np.where(loads, prefill_s, near_prefill_s),
            np.where(loads, loaded_s, computed_s),
            near_tokens,
            np.where(loads, load_s, 0.0),
        )

    def of_possible(self, values: Floats) -> Floats:
        """A copy that is infinite where the request cannot be prefilled."""
        kept: Floats = self.fleet.infinite.copy()
        np.copyto(kept, values, where=self.possible)
        return kept


class Scores(msgspec.Struct, frozen=True):
    """By row; `rank` decides, lowest first. `sources`: rows to fetch from, -1 for none."""

    rank: Floats
    ttft_s: Floats
    prefill_s: Floats
    local: Local
    sources: Rows | None = None


def _random(scene: Scene) -> Scores:
    local = scene.local()
    rows = scene.possible.nonzero()[0]
    chosen = rows[mix(scene.config.seed, scene.demand.number) * len(rows) >> 64]
    rank = np.full(len(scene.fleet), np.inf)
    rank[chosen] = 0.0
    return Scores(rank, local.ttft_s, local.prefill_s, local)


def _load_balancing(scene: Scene) -> Scores:
    local = scene.local()
    return Scores(scene.queue_s, local.ttft_s, local.prefill_s, local)


def _cache_aware(scene: Scene) -> Scores:
    local = scene.local()
    return Scores(local.ttft_s, local.ttft_s, local.prefill_s, local)


def _kvcache_centric(scene: Scene) -> Scores:
    local = scene.local()
    ttft_s = scene.of_possible(local.ttft_s)
    if not scene.match.deepest:
        return Scores(ttft_s, ttft_s, local.prefill_s, local)
    prefill_s = local.prefill_s.copy()
    waits_s = scene.of_possible(scene.queue_s)
    least_wait_s = waits_s.item(waits_s.argmin())
    sources: Rows = np.full(len(scene.fleet), -1, dtype=np.int64)
    for source in _deepest_holders(scene):
        _consider_fetch(scene, source, least_wait_s, local, ttft_s, prefill_s, sources)
    return Scores(ttft_s, ttft_s, prefill_s, local, sources)


POLICIES: dict[PolicyName, Callable[[Scene], Scores]] = {
    "random": _random,
    "load-balancing": _load_balancing,
    "cache-aware": _cache_aware,
    "kvcache-centric": _kvcache_centric,
}


_Source = tuple[float, float, float, int]
"""Depth, negative, to be sorted by; of it, on the SSD; fetches served; row."""


def _deepest_holders(scene: Scene) -> list[int]:
    """Rows worth asking, best first: the deepest; of equals the one with most of it in DRAM, then
    the one that serves fewest fetches."""
    held, serving = scene.match.held, scene.fleet.num_serving
    in_dram = scene.match.held_in_dram
    rows = scene.match.few
    if scene.match.crowd:
        busy = any(serving.item(row) for row in rows)
        if in_dram is not None:
            busy = busy or any(in_dram.item(row) < held.item(row) for row in rows)
        if not rows or busy:
            crowd = (held == scene.match.crowd).nonzero()[0]
            rows = (*rows, int(crowd[serving[crowd].argmin()]))
    usable = scene.demand.usable_blocks
    asked: list[_Source] = []
    for row in rows:
        depth = min(held.item(row), usable)
        on_ssd = 0.0 if in_dram is None else max(depth - in_dram.item(row), 0.0)
        asked.append((-depth, on_ssd, serving.item(row), row))
    asked.sort()
    chosen: list[_Source] = []
    for one in asked:
        if not any(_dominates(scene.fleet, other, one) for other in chosen):
            chosen.append(one)
            if len(chosen) == MAX_SOURCES:
                break
    return [row for _, _, _, row in chosen]


def _dominates(fleet: Fleet, one: _Source, other: _Source) -> bool:
    """Whether the other one, which is no deeper, is neither less busy nor nearer to anybody, and
    has no less on its SSD."""
    if one[1] > other[1] or one[2] > other[2]:
        return False
    host = fleet.host.item(other[3])
    return fleet.num_on_host[host] == 1 or host == fleet.host.item(one[3]) or host == 0


def source_load_s(scene: Scene, source: int, from_tokens: float) -> float:
    """How long this source takes to read from its SSD what somebody fetches who has the first
    tokens himself."""
    in_dram = scene.match.held_in_dram
    if in_dram is None:
        return 0.0
    depth = scene.usable_tokens(scene.match.held.item(source))
    near = max(scene.usable_tokens(in_dram.item(source)), from_tokens)
    s_per_token = scene.demand.token_bytes * scene.fleet.s_per_ssd_byte.item(source)
    return max(depth - near, 0.0) * s_per_token


def _consider_fetch(
    scene: Scene,
    source: int,
    least_wait_s: float,
    local: Local,
    ttft_s: Floats,
    prefill_s: Floats,
    sources: Rows,
) -> None:
    """Improves the last three (mutates) where fetching from this source gives the first token
    sooner; unless it cannot change who is best."""
    fleet, demand = scene.fleet, scene.demand
    depth = float(scene.usable_tokens(scene.match.held.item(source)))
    new = demand.num_tokens - depth
    fetched_s = fleet.a + new * (fleet.b + new * fleet.c + depth * fleet.d)
    soonest_s = least_wait_s + fetched_s.item(fetched_s.argmin())
    if soonest_s >= ttft_s.item(ttft_s.argmin()):
        return  # nobody could be sooner than the best is already
    permitted = local.hit_tokens * scene.config.kvcache_balancing_threshold < depth
    permitted &= scene.possible
    permitted[source] = False
    waits_s = np.maximum(scene.queue_s, _transfer_s(scene, source, depth, local))
    if local.load_s is not None:
        waits_s = np.maximum(waits_s, local.load_s)
    with_fetch_s = waits_s + fetched_s
    sooner = permitted & (with_fetch_s < ttft_s)
    np.copyto(ttft_s, with_fetch_s, where=sooner)
    np.copyto(prefill_s, fetched_s, where=sooner)
    np.copyto(sources, source, where=sooner)


def _transfer_s(scene: Scene, source: int, depth: float, local: Local) -> Floats:
    """Time to fetch what each row lacks of the first `depth` tokens, which the source may have to
    read from its SSD first."""
    fleet, demand = scene.fleet, scene.demand
    gap_bytes = (depth - local.hit_tokens) * float(demand.token_bytes)
    host = fleet.host.item(source)
    s_per_byte = fleet.s_per_net_byte
    if host and fleet.num_on_host[host] > 1:
        s_per_byte = np.where(fleet.host == host, fleet.s_per_shm_byte, s_per_byte)
    sharing = fleet.num_serving.item(source) + 1.0
    transfer_s: Floats = fleet.latency_s + gap_bytes * (s_per_byte * sharing)
    in_dram = scene.match.held_in_dram
    if in_dram is not None and in_dram.item(source) * demand.block_tokens < depth:
        near = np.maximum(local.hit_tokens, in_dram.item(source) * demand.block_tokens)
        s_per_token = demand.token_bytes * fleet.s_per_ssd_byte.item(source)
        transfer_s += np.maximum(depth - near, 0.0) * s_per_token
    return transfer_s


def mix(seed: int, number: int) -> int:
    """64 bits that look random and follow from both (splitmix64)."""
    bits = (seed * 0xD1342543DE82EF95 + number * 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _MASK
    return bits ^ bits >> 31
