"""Where a request is prefilled and decoded, without side effects.

`place` finds who can take it at all, asks the policy (`policies`) for the prefill, and chooses the
decode instance: the smallest predicted TBT among those with room (`SelectDecodingInstance` is
unspecified in the papers), among near equals the one that already holds most of the prompt, then
the one that has been idle longest.

A decode instance holds blocks from the moment of the booking, because the KVCache streams in while
the prefill runs; so it must have room now. On a mixed instance a prefill takes room, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from moonpool.conductor.explanation import Candidate, Chosen
from moonpool.conductor.fleet import Bools, Fleet, Floats
from moonpool.conductor.inline import best_inline
from moonpool.conductor.policies import POLICIES, Demand, Scene, Scores, source_load_s
from moonpool.config import ConductorConfig
from moonpool.kvcache.prefix_index import PrefixMatch
from moonpool.types import InstanceId

TBT_TIE = 1.05
"""Predicted TBTs within 5 % are equal: below the estimate's own error."""
NUM_EXPLAINED = 4


class Placement(msgspec.Struct, frozen=True):
    """Both halves, chosen together, before any work."""

    prefill: InstanceId
    decode: InstanceId | None  # None: the prefill instance goes on (mixed), or nothing is left
    fetch_from: InstanceId | None
    fetch_tokens: int
    hit_tokens: int  # usable at the prefill instance, the fetch included
    held_blocks: int  # of the prompt's, held in the prefill instance's DRAM now
    source_load_s: float  # of the fetch: that its source should take to read from its SSD
    decoder_row: int
    queue_s: float
    prefill_s: float
    ttft_s: float
    tbt_s: float
    chosen: Chosen


class Rejection(msgspec.Struct, frozen=True):
    status: int
    reason: str  # for machines
    message: str  # for people
    retry_after_s: float
    projection: dict[str, float] | None = None  # the numbers behind it, by name and unit


def place(
    demand: Demand,
    fleet: Fleet,
    match: PrefixMatch,
    config: ConductorConfig,
    now: float,
    avoid: Sequence[int] = (),
) -> Placement | Rejection:
    """Chooses prefill and decode instance, leaving out the rows in `avoid`. Says nothing of SLOs:
    that is `admission`."""
    if not fleet.num_prefills:
        return Rejection(503, "no_prefill_instance", "no prefill instance is up", 5.0)
    if demand.decodes and not fleet.num_decodes:
        return Rejection(503, "no_decode_instance", "no decode instance is up", 5.0)
    has_room: Bools = fleet.room_tokens >= demand.expected_tokens
    if demand.num_tokens > fleet.least_capacity_tokens:
        possible = fleet.prefills & (fleet.capacity_tokens >= demand.num_tokens)
        if not np.count_nonzero(possible):
            return _too_long(demand, fleet)
    else:
        possible = fleet.prefills
    if fleet.mixed is not None:
        possible = possible & (has_room | ~fleet.mixed)
    able: Bools = fleet.decodes & has_room
    if avoid:
        possible = possible.copy()
        possible[list(avoid)] = able[list(avoid)] = False
    # Counting is what numpy does soonest with so few.
    num_possible = np.count_nonzero(possible)
    if not num_possible or (demand.decodes and not np.count_nonzero(able)):
        return _no_room(demand, fleet)
    scene = Scene(demand, fleet, match, config, fleet.queue_s(now), possible)
    scores = POLICIES[config.placement](scene)
    rank = fleet.infinite.copy()
    np.copyto(rank, scores.rank, where=possible)
    best = _first(rank, scene.queue_s, fleet.last_placed_s)
    tbt_s = 0.0
    decoder = best
    if demand.decodes:
        if config.inline_prefill and not fleet.decodes[best]:
            best = decoder = _perhaps_inline(able, scene, scores, best)
        tbts_s = fleet.booked_tbt_s(demand.expected_tokens)
        if not fleet.decodes[best]:
            decoder = _select_decode(able, tbts_s, scene, fleet)
        tbt_s = tbts_s.item(decoder)
    return _describe(scene, scores, rank, best, decoder, tbt_s, int(num_possible))


def _first(rank: Floats, queue_s: Floats, last_placed_s: Floats) -> int:
    """The lowest rank; among equals the shortest queue, then the one idle longest."""
    ties = (rank == rank.item(rank.argmin())).nonzero()[0]
    if len(ties) > 1:
        queues_s = queue_s[ties]
        ties = ties[queues_s == queues_s.item(queues_s.argmin())]
        return int(ties[last_placed_s[ties].argmin()])
    return int(ties[0])


def _select_decode(able: Bools, tbts_s: Floats, scene: Scene, fleet: Fleet) -> int:
    able_s = fleet.infinite.copy()
    np.copyto(able_s, tbts_s, where=able)
    near = (able_s <= able_s.item(able_s.argmin()) * TBT_TIE).nonzero()[0]
    if len(near) > 1 and scene.match.deepest:
        held = np.minimum(scene.match.hits[near], scene.demand.usable_blocks)
        near = near[held == held.item(held.argmax())]
    return int(near[fleet.last_placed_s[near].argmin()])


def _perhaps_inline(able: Bools, scene: Scene, scores: Scores, best: int) -> int:
    """Where to prefill by the inline rule: there (its scores are corrected), or where it was."""
    separate_s = scores.ttft_s.item(best)
    hit_tokens = scene.hit_tokens()
    inline = best_inline(scene.demand, scene.fleet, able, hit_tokens, scene.queue_s, separate_s)
    if inline is None:
        return best
    scores.ttft_s[inline.row], scores.prefill_s[inline.row] = inline.ttft_s, inline.prefill_s
    return inline.row


def _describe(
    scene: Scene,
    scores: Scores,
    rank: Floats,
    best: int,
    decoder: int,
    tbt_s: float,
    num_possible: int,
) -> Placement:
    """Uses up `rank`."""
    ids, demand = scene.fleet.ids, scene.demand
    candidates = [_candidate(scene, scores, best)]
    rank[best] = np.inf
    for _ in range(NUM_EXPLAINED - 1):
        row = int(rank.argmin())
        if rank.item(row) == np.inf:
            break
        candidates.append(_candidate(scene, scores, row))
        rank[row] = np.inf
    taken = candidates[0]
    decode = ids[decoder] if demand.decodes and decoder != best else None
    fetch_tokens = taken.hit_tokens if taken.fetch_from is not None else 0
    num_others = num_possible - len(candidates)
    return Placement(
        prefill=ids[best],
        decode=decode,
        fetch_from=taken.fetch_from,
        fetch_tokens=fetch_tokens,
        hit_tokens=taken.hit_tokens,
        held_blocks=int(_in_dram(scene).item(best)),
        source_load_s=taken.source_load_s,
        decoder_row=decoder,
        queue_s=taken.queue_s,
        prefill_s=taken.prefill_s,
        ttft_s=taken.ttft_s,
        tbt_s=tbt_s,
        chosen=Chosen(tuple(candidates), num_others, ids[best], decode, fetch_tokens, tbt_s),
    )


def _in_dram(scene: Scene) -> Floats:
    match = scene.match
    return match.held if match.held_in_dram is None else match.held_in_dram


def _candidate(scene: Scene, scores: Scores, row: int) -> Candidate:
    ids, local = scene.fleet.ids, scores.local
    hit_tokens = int(local.hit_tokens.item(row))
    load_tokens = 0
    if local.near_tokens is not None:
        load_tokens = hit_tokens - int(local.near_tokens.item(row))
    source = -1 if scores.sources is None else scores.sources.item(row)
    load_s = 0.0
    if source >= 0:
        load_s = source_load_s(scene, source, hit_tokens)
        hit_tokens = int(scene.usable_tokens(scene.match.held.item(source)))
    return Candidate(
        instance_id=ids[row],
        queue_s=scene.queue_s.item(row),
        hit_tokens=hit_tokens,
        fetch_from=ids[source] if source >= 0 else None,
        prefill_s=scores.prefill_s.item(row),
        ttft_s=scores.ttft_s.item(row),
        load_tokens=load_tokens,
        source_load_s=load_s,
    )


def _too_long(demand: Demand, fleet: Fleet) -> Rejection:
    most = int(fleet.capacity_tokens[fleet.prefills].max())
    text = (
        f"the prompt of {demand.num_tokens} tokens is longer than the {most} tokens of KVCache of"
        f" any prefill instance: shorten it"
    )
    return Rejection(503, "no_prefill_capacity", text, 5.0)


def _no_room(demand: Demand, fleet: Fleet) -> Rejection:
    text = f"no decode instance has room for {demand.expected_tokens} more tokens of KVCache"
    most = int(fleet.booked_batch.max())
    if not most:
        return Rejection(503, "no_decode_capacity", f"{text}, not even an idle one", 5.0)
    wait_s = demand.answer_s / most  # their answers end one after another
    text += f"; the next answer should end within {max(wait_s, 0.1):.1f} s"
    return Rejection(503, "no_decode_capacity", text, wait_s)
