"""Placement policies: which instance prefills a request. Each policy ranks all instances at once.

* random: any instance, by a hash of (seed, number of the decision).
* load-balancing: the shortest predicted queue. A prefix that happens to be cached on that instance
  is used.
* cache-aware: the smallest predicted TTFT with the prefix that each instance itself holds (Mooncake
  v3 section 6.1; FAST'25 Fig. 5 calls it local).
* kvcache-centric: Algorithm 1. Like cache-aware, but the missing part of the prefix may be fetched
  from another instance. Fetches of this kind replicate hot prefixes.
* module:Class: a policy from outside the package (`PlacementPolicy`, docs/extending.md).

On mixed instances, the last two built-in policies add the decode time of a part of the answer,
because the instance that prefills also decodes.

Algorithm 1 departs from the paper (v3 page 10, FAST'25 page 8) for these reasons:

* `best_hit / hit` is undefined at hit = 0: here 0/0 counts as 1 (nothing to gain), x/0 as infinite.
* v3 scores with `<` and migrates with `>`, so at equality the score assumes a transfer that never
  starts. Here one decision determines both the score and the transfer.
* The paper fetches whenever the ratio exceeds the threshold. Here the threshold only permits a
  fetch; it takes place when it is predicted to be faster than computing the gap (the paper's prose
  says so too, though with the comparison reversed).
* TTFT is not a plain sum: a fetch runs while the request waits in the queue, so the longer of the
  two counts, then the prefill.
* In the paper the first instance wins all ties, so an idle cluster would send every request to it.
  Here ties go to the instance that has been idle longest.
* Any instance may be a source, decode instances included: they hold the last turn's answer.
* Only the few sources with the longest prefix are considered, among equals those with most of it in
  DRAM, then those that serve the fewest fetches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from moonpool.conductor.instance_table import Bools, Floats, InstanceTable, Rows
from moonpool.config.tables import ConductorConfig
from moonpool.config.tables import Placement as PolicyName
from moonpool.kvcache.prefix_index import PrefixMatch

MAX_SOURCES = 3
ANSWER_SHARE = 0.2
"""The part of an answer during which its batch stays about the same. After that, the batches of all
instances are about equal, because other answers begin and end."""
_MASK = (1 << 64) - 1
_Result = TypeVar("_Result")


class RequestFootprint(msgspec.Struct, frozen=True):
    """The tokens, KVCache and time that a request needs, as placement and admission know them."""

    number: int  # number of this decision, counted by the Conductor
    num_tokens: int  # tokens of the prompt; after a retry, including the tokens generated so far
    # KVCache tokens to book where the request decodes: prompt and answer, in whole blocks
    expected_tokens: int
    decodes: bool  # whether the request decodes: False if the first token is also the last
    block_tokens: int
    token_bytes: int  # bytes of KVCache of one token
    answer_s: float  # mean time that an answer decodes
    answer_tokens: int = 0  # expected tokens of the answer
    # the TBT SLO of this request, or the cluster's if that is stricter, because other requests have
    # it
    tbt_s: float = float("inf")
    competes: bool = False  # whether other tenants send requests, too
    # most tokens of prompt and answer; an instance needs a context of this length
    context_tokens: int = 0

    @property
    def usable_blocks(self) -> int:
        """Blocks that a prefix hit may cover: at least one token has to be computed."""
        return (self.num_tokens - 1) // self.block_tokens


class LocalPrefixHits(msgspec.Struct, frozen=True):
    """Predictions by row, without any fetch. `near_tokens` of the `hit_tokens` are in DRAM, and
    loading the remaining tokens from the SSD takes `load_s`. Both are None if all tokens are in
    DRAM."""

    hit_tokens: Floats
    prefill_s: Floats
    ttft_s: Floats
    near_tokens: Floats | None = None
    load_s: Floats | None = None


class SelectionContext(msgspec.Struct, frozen=True):
    """The input of a placement policy. All arrays are indexed by row of `table`, and none of them
    may be written to."""

    footprint: RequestFootprint
    table: InstanceTable
    match: PrefixMatch  # blocks of this prompt that each instance holds
    config: ConductorConfig
    queue_s: Floats  # predicted time until a prefill that is placed now starts
    possible: Bools  # instances that can prefill this request
    decode_possible: Bools  # instances that have room to decode it

    def hit_tokens(self) -> Floats:
        """Tokens of this prompt that each instance holds or is computing."""
        if not self.match.deepest and self.match.hits is self.match.held:
            return self.match.hits  # zeros
        return self._tokens(self.match.hits)

    def _tokens(self, blocks: Floats) -> Floats:
        usable = np.minimum(blocks, float(self.footprint.usable_blocks))
        tokens: Floats = usable * float(self.footprint.block_tokens)
        return tokens

    def usable_tokens(self, num_blocks: float) -> float:
        return min(num_blocks, self.footprint.usable_blocks) * self.footprint.block_tokens

    def local(self) -> LocalPrefixHits:
        """Predicted prefill time and TTFT of each instance with the prefix that it holds itself.

        An instance loads the part on its SSD while the prompt waits in the queue, or computes that
        part if this is faster.
        """
        table, footprint, match = self.table, self.footprint, self.match
        hit_tokens = self.hit_tokens()
        prefill_s = table.prefill_s(footprint.num_tokens, hit_tokens)
        if match.hits_in_dram is None:
            return LocalPrefixHits(hit_tokens, prefill_s, self.queue_s + prefill_s)
        near_tokens = self._tokens(match.hits_in_dram)
        load_s = (hit_tokens - near_tokens) * (float(footprint.token_bytes) * table.s_per_ssd_byte)
        loaded_s = np.maximum(self.queue_s, load_s) + prefill_s
        near_prefill_s = table.prefill_s(footprint.num_tokens, near_tokens)
        computed_s = self.queue_s + near_prefill_s
        loads = loaded_s < computed_s
        return LocalPrefixHits(
            np.where(loads, hit_tokens, near_tokens),
            np.where(loads, prefill_s, near_prefill_s),
            np.where(loads, loaded_s, computed_s),
            near_tokens,
            np.where(loads, load_s, 0.0),
        )

    def of_possible(self, values: Floats) -> Floats:
        """Returns a copy that is infinite for the rows where the request cannot be prefilled."""
        kept: Floats = self.table.infinite.copy()
        np.copyto(kept, values, where=self.possible)
        return kept


class WorkerScores(msgspec.Struct, frozen=True):
    """A policy's scores by row: the instance with the lowest `rank` prefills. `sources`: rows to
    fetch the prefix from, with -1 for none, or None without any fetch."""

    rank: Floats
    ttft_s: Floats
    prefill_s: Floats
    local: LocalPrefixHits
    sources: Rows | None = None


class PolicyError(Exception):
    """A policy from outside the package failed or returned an unusable value."""


class PlacementPolicy(Protocol):
    """A placement policy from outside the package: an object or function to be called.

    A policy returns one score per row of `context.table`, where the lowest wins, or the row of one
    instance, or `WorkerScores`, which may also name the instances to fetch the prefix from. Rows
    outside `context.possible` are ignored. Equal scores go to the shorter queue, then to the
    instance that has been idle longest. A policy may keep state, but must not modify the context or
    read a clock.

    A policy object may also have a method `score_decode(context, tbt_s)`, which chooses the decode
    instance among `context.decode_possible`: it returns scores or a row. Equal scores go to the
    smaller `tbt_s`, the predicted time between tokens by row, then to the instance that has been
    idle longest. Without that method, the built-in rule chooses: about the smallest `tbt_s`.
    """

    def __call__(self, context: SelectionContext, /) -> WorkerScores | Floats | int: ...


class CustomPlacement:
    """Adapts a `PlacementPolicy` to the built-in policies' interface and checks what it returns.

    Its methods raise PolicyError.
    """

    def __init__(self, name: str, policy: PlacementPolicy) -> None:
        self.name = f"the placement policy {name}"
        self.policy = policy
        self._score_decode: Callable[[SelectionContext, Floats], Floats | int] | None = getattr(
            policy, "score_decode", None
        )

    def __call__(self, context: SelectionContext) -> WorkerScores:
        result = guarded(self.name, lambda: self.policy(context))
        if isinstance(result, WorkerScores):
            return result
        rank = self._scores(result, context, context.possible)
        local = context.local()
        return WorkerScores(rank, local.ttft_s, local.prefill_s, local)

    def decode_scores(self, context: SelectionContext, tbt_s: Floats) -> Floats | None:
        """Returns the scores of decode instances, or None to leave the choice to the built-in
        rule."""
        score = self._score_decode
        if score is None:
            return None
        result = guarded(self.name, lambda: score(context, tbt_s))
        return self._scores(result, context, context.decode_possible)

    def _scores(self, result: object, context: SelectionContext, possible: Bools) -> Floats:
        num_rows = len(context.table)
        if isinstance(result, int | np.integer) and not isinstance(result, bool):
            if not 0 <= result < num_rows or not possible[result]:
                raise PolicyError(f"{self.name} chose row {result}, which is not possible")
            scores = np.full(num_rows, np.inf)
            scores[result] = 0.0
            return scores
        if not isinstance(result, np.ndarray) or result.shape != (num_rows,):
            shape = f" of shape {result.shape}" if isinstance(result, np.ndarray) else ""
            raise PolicyError(
                f"{self.name} returned {type(result).__name__}{shape}: it must return an array with"
                f" one score for each of the {num_rows} rows, or one row's index"
            )
        if not np.isfinite(result[possible]).any() or np.isnan(result[possible]).any():
            raise PolicyError(f"{self.name} returned no finite score, or not-a-number")
        return result.astype(np.float64)


def guarded(name: str, call: Callable[[], _Result]) -> _Result:
    """Calls code from outside the package. Raises PolicyError, which names the line that failed."""
    try:
        return call()
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        line = "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}: "
        raise PolicyError(f"{name} failed: {line}{type(error).__name__}: {error}") from error


def _random(context: SelectionContext) -> WorkerScores:
    local = context.local()
    rows = context.possible.nonzero()[0]
    chosen = rows[mix(context.config.seed, context.footprint.number) * len(rows) >> 64]
    rank = np.full(len(context.table), np.inf)
    rank[chosen] = 0.0
    return WorkerScores(rank, local.ttft_s, local.prefill_s, local)


def _load_balancing(context: SelectionContext) -> WorkerScores:
    local = context.local()
    return WorkerScores(context.queue_s, local.ttft_s, local.prefill_s, local)


def _cache_aware(context: SelectionContext) -> WorkerScores:
    local = context.local()
    rank = _with_decoding(context, local.ttft_s)
    return WorkerScores(rank, local.ttft_s, local.prefill_s, local)


def _kvcache_centric(context: SelectionContext) -> WorkerScores:
    local = context.local()
    ttft_s = context.of_possible(local.ttft_s)
    if not context.match.deepest:
        return WorkerScores(_with_decoding(context, ttft_s), ttft_s, local.prefill_s, local)
    prefill_s = local.prefill_s.copy()
    waits_s = context.of_possible(context.queue_s)
    least_wait_s = waits_s.item(waits_s.argmin())
    sources: Rows = np.full(len(context.table), -1, dtype=np.int64)
    for source in _deepest_holders(context):
        _consider_fetch(context, source, least_wait_s, local, ttft_s, prefill_s, sources)
    return WorkerScores(_with_decoding(context, ttft_s), ttft_s, prefill_s, local, sources)


def _with_decoding(context: SelectionContext, ttft_s: Floats) -> Floats:
    """Returns the TTFT plus the time that the answer decodes until batches have levelled out,
    because a mixed instance that is chosen for the prefill also decodes."""
    table, footprint = context.table, context.footprint
    if table.mixed is None or not footprint.decodes:
        return ttft_s
    tokens = ANSWER_SHARE * footprint.answer_tokens
    decoding_s = tokens * table.booked_tbt_s(footprint.expected_tokens)
    elsewhere_s = decoding_s[context.decode_possible].min(initial=np.inf)
    rank: Floats = ttft_s + np.where(table.mixed, decoding_s, elsewhere_s)
    return rank


POLICIES: dict[PolicyName, Callable[[SelectionContext], WorkerScores]] = {
    "random": _random,
    "load-balancing": _load_balancing,
    "cache-aware": _cache_aware,
    "kvcache-centric": _kvcache_centric,
}


_Source = tuple[float, float, float, int]
"""A sort key: negative length of the prefix, its part on the SSD, the fetches served, the row."""


def _deepest_holders(context: SelectionContext) -> list[int]:
    """Rows of the sources to consider, best first: the longest prefix; among equals the most of it
    in DRAM, then the fewest fetches served."""
    held, serving = context.match.held, context.table.num_serving
    in_dram = context.match.held_in_dram
    rows = context.match.deepest_rows
    if context.match.crowd_depth:
        busy = any(serving.item(row) for row in rows)
        if in_dram is not None:
            busy = busy or any(in_dram.item(row) < held.item(row) for row in rows)
        if not rows or busy:
            crowd = (held == context.match.crowd_depth).nonzero()[0]
            rows = (*rows, int(crowd[serving[crowd].argmin()]))
    usable = context.footprint.usable_blocks
    candidates: list[_Source] = []
    for row in rows:
        depth = min(held.item(row), usable)
        on_ssd = 0.0 if in_dram is None else max(depth - in_dram.item(row), 0.0)
        candidates.append((-depth, on_ssd, serving.item(row), row))
    candidates.sort()
    chosen: list[_Source] = []
    for one in candidates:
        if not any(_dominates(context.table, other, one) for other in chosen):
            chosen.append(one)
            if len(chosen) == MAX_SOURCES:
                break
    return [row for _, _, _, row in chosen]


def _dominates(table: InstanceTable, one: _Source, other: _Source) -> bool:
    """Whether `other`, whose prefix is not longer, has no advantage over `one` as a source. This is
    so if `other` serves at least as many fetches, has at least as much of its prefix on its SSD,
    and is the nearer source for no instance: it is alone on its host or on the host of `one`, or
    hosts are unknown."""
    if one[1] > other[1] or one[2] > other[2]:
        return False
    host = table.host.item(other[3])
    return host == 0 or table.num_on_host[host] == 1 or host == table.host.item(one[3])


def source_load_s(context: SelectionContext, source: int, from_tokens: float) -> float:
    """Returns the time that the source takes to read the fetched part from its SSD. `from_tokens`:
    length of the prefix that the fetching instance already has."""
    in_dram = context.match.held_in_dram
    if in_dram is None:
        return 0.0
    depth = context.usable_tokens(context.match.held.item(source))
    near = max(context.usable_tokens(in_dram.item(source)), from_tokens)
    s_per_token = context.footprint.token_bytes * context.table.s_per_ssd_byte.item(source)
    return max(depth - near, 0.0) * s_per_token


def _consider_fetch(
    context: SelectionContext,
    source: int,
    least_wait_s: float,
    local: LocalPrefixHits,
    ttft_s: Floats,
    prefill_s: Floats,
    sources: Rows,
) -> None:
    """Updates the last three arguments in place where a fetch from this source shortens the TTFT.
    Returns early if no such fetch could change the best instance."""
    table, footprint = context.table, context.footprint
    depth = float(context.usable_tokens(context.match.held.item(source)))
    fetched_s = table.prefill_s(footprint.num_tokens, depth)
    soonest_s = least_wait_s + fetched_s.item(fetched_s.argmin())
    if soonest_s >= ttft_s.item(ttft_s.argmin()):
        return
    permitted = local.hit_tokens * context.config.kvcache_balancing_threshold < depth
    permitted &= context.possible
    permitted[source] = False
    waits_s = np.maximum(context.queue_s, _transfer_s(context, source, depth, local))
    if local.load_s is not None:
        waits_s = np.maximum(waits_s, local.load_s)
    with_fetch_s = waits_s + fetched_s
    sooner = permitted & (with_fetch_s < ttft_s)
    np.copyto(ttft_s, with_fetch_s, where=sooner)
    np.copyto(prefill_s, fetched_s, where=sooner)
    np.copyto(sources, source, where=sooner)


def _transfer_s(
    context: SelectionContext, source: int, depth: float, local: LocalPrefixHits
) -> Floats:
    """Returns the time to fetch what each row lacks of the first `depth` tokens, by row. The source
    may have to read these tokens from its SSD first."""
    table, footprint = context.table, context.footprint
    gap_bytes = (depth - local.hit_tokens) * float(footprint.token_bytes)
    host = table.host.item(source)
    s_per_byte = table.s_per_net_byte
    if host and table.num_on_host[host] > 1:
        s_per_byte = np.where(table.host == host, table.s_per_shm_byte, s_per_byte)
    sharing = table.num_serving.item(source) + 1.0
    transfer_s: Floats = table.latency_s + gap_bytes * (s_per_byte * sharing)
    in_dram = context.match.held_in_dram
    if in_dram is not None and in_dram.item(source) * footprint.block_tokens < depth:
        near = np.maximum(local.hit_tokens, in_dram.item(source) * footprint.block_tokens)
        s_per_token = footprint.token_bytes * table.s_per_ssd_byte.item(source)
        transfer_s += np.maximum(depth - near, 0.0) * s_per_token
    return transfer_s


def mix(seed: int, number: int) -> int:
    """Returns 64 pseudo-random bits that depend on both arguments (splitmix64)."""
    bits = (seed * 0xD1342543DE82EF95 + number * 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _MASK
    return bits ^ bits >> 31
