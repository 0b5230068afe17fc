"""Chooses where a request is prefilled and decoded, without side effects.

`place` determines which instances can take the request, has the policy (`policies`) rank them for
the prefill, and chooses the decode instance: the smallest predicted TBT among those with room (the
papers do not specify `SelectDecodingInstance`), among near equals the one that already holds most
of the prompt, then the one that has been idle longest.

A decode instance holds blocks from the moment of the booking, because the KVCache streams in while
the prefill runs, so it must have room at once. On a mixed instance a prefill takes room, too.

A short prompt may be computed within a decode batch (`InlinePrefill`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from moonpool.conductor.instance_table import Bools, Floats, InstanceTable
from moonpool.conductor.placement.policies import (
    POLICIES,
    CustomPlacement,
    RequestFootprint,
    SelectionContext,
    WorkerScores,
    source_load_s,
)
from moonpool.config.tables import ConductorConfig
from moonpool.cost.model import CHUNKED_STEP_SHARE
from moonpool.kvcache.prefix_index import PrefixMatch
from moonpool.types import InstanceId

TBT_TIE = 1.05
"""Predicted TBTs within 5 % count as equal, because the estimate's own error is larger."""
CHUNKED_TTFT_SHARE = 0.5
"""A decode instance takes a prompt in chunks if its first token comes within this share of the
prefill pool's time: chunks beside decodes take more of a device's time than separate prefills."""
NUM_EXPLAINED = 4

PlacementFunction = Callable[[SelectionContext], WorkerScores]


class PlacementCandidate(NamedTuple):
    """The predictions for one instance that was considered for a prefill."""

    instance_id: InstanceId
    queue_s: float
    hit_tokens: int  # tokens of the prompt that are cached or will be fetched
    fetch_from: InstanceId | None
    prefill_s: float
    ttft_s: float
    load_tokens: int = 0  # tokens of the hit that are read from the instance's own SSD
    source_load_s: float = 0.0  # time that the fetch's source takes to read from its SSD

    def __str__(self) -> str:
        how = f"fetches from {self.fetch_from}" if self.fetch_from else "computes the rest"
        ssd = f" ({self.load_tokens} of them on its SSD)" if self.load_tokens else ""
        return (
            f"{self.instance_id}: queue {self.queue_s:.3f} s, hit {self.hit_tokens} tokens{ssd},"
            f" {how},"
            f" prefill {self.prefill_s:.3f} s, TTFT {self.ttft_s:.3f} s"
        )


class ChosenPlacement(NamedTuple):
    """The reasons for a placement: the best candidates, the chosen one first."""

    candidates: tuple[PlacementCandidate, ...]
    num_others: int
    prefill: InstanceId
    decode: InstanceId | None
    fetch_tokens: int
    tbt_s: float

    def lines(self) -> list[str]:
        lines = [str(candidate) for candidate in self.candidates]
        if self.num_others:
            what = "instance was" if self.num_others == 1 else "instances were"
            lines.append(f"{self.num_others} other {what} considered")
        best = self.candidates[0]
        text = f"prefill on {self.prefill}"
        if self.decode is not None:
            text += f", decode on {self.decode}"
        if best.fetch_from is not None:
            text += f", fetching {self.fetch_tokens} tokens from {best.fetch_from}"
        lines.append(f"{text}; predicted TTFT {best.ttft_s:.3f} s, TBT {self.tbt_s:.4f} s")
        return lines


class Explanation:
    """The decisions about one request and its faults, in order. The decisions are kept as numbers;
    `lines` formats them when `/explain` needs them."""

    __slots__ = ("_notes",)

    def __init__(self) -> None:
        self._notes: list[ChosenPlacement | str] = []

    def add(self, note: ChosenPlacement | str) -> None:
        self._notes.append(note)

    def lines(self) -> tuple[str, ...]:
        lines: list[str] = []
        for note in self._notes:
            lines += [note] if isinstance(note, str) else note.lines()
        return tuple(lines)


class Placement(msgspec.Struct, frozen=True):
    """The prefill and decode instance of a request, chosen together before any work."""

    prefill: InstanceId
    # None if the prefill instance also decodes (mixed), or no token is left to decode
    decode: InstanceId | None
    fetch_from: InstanceId | None
    fetch_tokens: int
    hit_tokens: int  # prompt tokens that are cached at the prefill instance or will be fetched
    held_blocks: int  # blocks of the prompt that the prefill instance holds in DRAM now
    source_load_s: float  # time that the fetch's source takes to read from its SSD
    decoder_row: int
    queue_s: float
    prefill_s: float
    ttft_s: float  # with `decode_wait_s`
    tbt_s: float
    chosen: ChosenPlacement
    decode_wait_s: float = 0.0  # time from the end of the prefill until the decode pool has room
    max_step_s: float | None = None  # same meaning as in `AttemptSpec`
    # whether the decode instance computes the prompt in chunks beside its decodes
    in_chunks: bool = False


class PlannedAttempt(NamedTuple):
    """A placement that the policies admit, with the tokens and needs for which it was planned."""

    placement: Placement
    footprint: RequestFootprint
    tokens: Sequence[int]  # the prompt, followed by the tokens that earlier attempts generated


NO_ROOM = "no_decode_capacity"
"""The reason of a rejection because other requests hold the KVCache that the request needs."""


LONG_QUEUE = "long_queue"
"""The reason of a rejection because the prompts in front of a request take too long."""


BATCH_FULL = "batch_full"
"""The reason of a rejection because one more answer in the batch would make the other answers
late."""
BATCH_SHARE = 0.7
"""The share of its TTFT SLO that a request may wait for room in a batch. The rest is a margin,
because the time of the prompt after the wait is uncertain on a server that fills its steps with
prompts."""
TIMED_REASONS = (NO_ROOM, LONG_QUEUE, BATCH_FULL)
"""Reasons of rejections for which the Conductor predicts how long a request would wait."""


PROGRAMS_WAIT = "programs_wait"
"""The reason of a rejection because programs that began before a new one go first."""


class Rejection(msgspec.Struct, frozen=True):
    """Why a request is not served."""

    status: int  # of HTTP
    reason: str  # for machines
    message: str  # for people
    retry_after_s: float  # least time until a retry can succeed; infinite if waiting cannot help
    projection: dict[str, float] | None = None  # the numbers behind the decision, by name and unit
    room_tokens: int = 0  # KVCache tokens that the request needs where it decodes
    prefill_s: float = 0.0  # predicted time from its placement to its first token, without queues


def place(
    footprint: RequestFootprint,
    table: InstanceTable,
    match: PrefixMatch,
    config: ConductorConfig,
    now: float,
    avoid: Sequence[int] = (),
    policy: PlacementFunction | None = None,
) -> Placement | Rejection:
    """Chooses prefill and decode instance, leaving out the rows in `avoid`. SLOs are checked by
    `admission`. `policy`: a policy from outside the package, or None for the built-in policy that
    the config names.

    Raises PolicyError if a policy from outside the package fails.
    """
    if not table.num_prefills:
        return Rejection(503, "no_prefill_instance", "no prefill instance is up", 5.0)
    if footprint.decodes and not table.num_decodes:
        return Rejection(503, "no_decode_instance", "no decode instance is up", 5.0)
    possible, has_room = _able(footprint, table, table.room_tokens)
    if table.remainders:
        possible = possible.copy()
        possible[table.remainders] &= has_room[table.remainders]
        possible = _spares_last_answers(table, possible)
    able: Bools = table.decodes & has_room
    if avoid:
        possible = possible.copy()
        possible[list(avoid)] = able[list(avoid)] = False
    # Counting the true elements is numpy's fastest test for such short arrays.
    num_possible = np.count_nonzero(possible)
    if not num_possible or (footprint.decodes and not np.count_nonzero(able)):
        return _no_room(footprint, table, avoid)
    context = SelectionContext(footprint, table, match, config, table.queue_s(now), possible, able)
    policy = policy or POLICIES[config.placement]  # type: ignore[index]
    scores = policy(context)
    rank = table.infinite.copy()
    np.copyto(rank, scores.rank, where=possible)
    best = _first(rank, context.queue_s, table.last_placed_s)
    tbt_s, inline = 0.0, None
    decoder = best
    if footprint.decodes:
        if config.inline_prefill and not table.decodes[best]:
            inline = best_inline(context, scores.ttft_s.item(best))
            if inline is not None:
                best = decoder = inline.row
                scores.ttft_s[best], scores.prefill_s[best] = inline.ttft_s, inline.prefill_s
        tbts_s = table.booked_tbt_s(footprint.expected_tokens)
        if not table.decodes[best]:
            decoder = _select_decode(context, tbts_s, policy)
        tbt_s = tbts_s.item(decoder)
    in_chunks = inline is not None and inline.in_chunks
    return _describe(context, scores, rank, best, decoder, tbt_s, int(num_possible), in_chunks)


def _able(
    footprint: RequestFootprint, table: InstanceTable, room_tokens: Floats
) -> tuple[Bools, Bools]:
    """Returns the rows that may prefill the request, and the rows that have room for its decode, if
    this much of each row's KVCache is free."""
    has_room: Bools = room_tokens >= footprint.expected_tokens
    possible = table.prefills
    if max(footprint.num_tokens, footprint.context_tokens) > table.least_context_tokens:
        has_room &= table.context_tokens >= footprint.context_tokens
        possible = possible & (table.context_tokens >= footprint.num_tokens + footprint.decodes)
    if table.mixed is not None:
        possible = possible & (has_room | ~table.mixed)
    return possible, has_room


def _spares_last_answers(table: InstanceTable, possible: Bools) -> Bools:
    """Leaves out former decode instances that still have answers, if a prompt in the same step
    would break the TBT SLO of these answers. Keeps all instances if none would be left."""
    rows = np.array(table.remainders)
    free: Bools = possible.copy()
    free[rows] &= (table.booked_batch[rows] == 0) | table.chunk_fits(rows)
    return free if np.count_nonzero(free) else possible


def _first(rank: Floats, queue_s: Floats, last_placed_s: Floats) -> int:
    """Returns the row of lowest rank; among equals the shortest queue, then the longest idle
    time."""
    ties = (rank == rank.item(rank.argmin())).nonzero()[0]
    if len(ties) > 1:
        queues_s = queue_s[ties]
        ties = ties[queues_s == queues_s.item(queues_s.argmin())]
        return int(ties[last_placed_s[ties].argmin()])
    return int(ties[0])


def _select_decode(context: SelectionContext, tbts_s: Floats, policy: PlacementFunction) -> int:
    table, able = context.table, context.decode_possible
    able_s = table.infinite.copy()
    if isinstance(policy, CustomPlacement):
        scores = policy.decode_scores(context, tbts_s)
        if scores is not None:
            np.copyto(able_s, scores, where=able)
            return _first(able_s, tbts_s, table.last_placed_s)
    np.copyto(able_s, tbts_s, where=able)
    near = (able_s <= able_s.item(able_s.argmin()) * TBT_TIE).nonzero()[0]
    if len(near) > 1 and context.match.deepest:
        held = np.minimum(context.match.hits[near], context.footprint.usable_blocks)
        near = near[held == held.item(held.argmax())]
    return int(near[table.last_placed_s[near].argmin()])


class InlinePrefill(NamedTuple):
    """A prompt that a decode instance computes itself, beside its decodes."""

    row: int
    prefill_s: float
    ttft_s: float
    in_chunks: bool = False


def best_inline(context: SelectionContext, separate_ttft_s: float) -> InlinePrefill | None:
    """The decode instance that computes the prompt itself, or None. `separate_ttft_s`: the TTFT if
    a prefill instance computes the prompt.

    Where tenants compete, no prompt runs in chunks on a decode instance: the prompts of a tenant
    that sends without pause would be in the steps of all others.
    """
    hit_tokens = context.hit_tokens()
    prefill_s = context.table.prefill_s(context.footprint.num_tokens, hit_tokens)
    whole = _best_whole(context, hit_tokens, prefill_s, separate_ttft_s)
    if whole is not None or not context.config.inline_chunks or context.footprint.competes:
        return whole
    limit_s = CHUNKED_TTFT_SHARE * separate_ttft_s
    return _best_in_chunks(context, hit_tokens, prefill_s, limit_s)


def _best_whole(
    context: SelectionContext, hit_tokens: Floats, prefill_s: Floats, separate_ttft_s: float
) -> InlinePrefill | None:
    """Returns the decode instance that gives the first token soonest in a single step, or None if
    the prefill pool is faster. So in an idle cluster the pools stay separate.

    Mooncake's inline rule: "a prefill is put into a decode batch only if it needs no chunking and
    does not break the TBT SLO; otherwise it goes to the separate pool" (v3 section 5). A cached
    prefix needs no computing, so the next turn of a conversation often qualifies on the instance
    that holds its last answer.

    All prompts that are booked inline and have not ended share one step with this prompt, and
    together they must keep the SLO. The instance sizes its chunks by the SLO anyway
    (`scheduler.batching.chunk_budget`), so a wrong estimate here delays the prompt, but not the
    decodes.
    """
    footprint, table = context.footprint, context.table
    new = footprint.num_tokens - hit_tokens
    rows = (context.decode_possible & ~table.prefills & (new <= table.chunk_tokens)).nonzero()[0]
    if not len(rows):
        return None
    base_s, decodes_s = table.decode_base_s[rows], table.decodes_s(rows)
    prefill_s = prefill_s[rows]
    step_s = np.maximum(base_s, context.queue_s[rows] + prefill_s) + decodes_s
    # A step is under way when the prompt arrives, unless the instance decodes nothing.
    under_way_s = np.where(table.booked_batch[rows] > 0, base_s + decodes_s, 0.0)
    ttft_s = under_way_s + step_s
    fits = step_s <= footprint.tbt_s
    fits &= table.booked_context[rows] + footprint.num_tokens <= table.engine_tokens[rows]
    fits &= ttft_s < separate_ttft_s
    if not np.count_nonzero(fits):
        return None
    best = int(np.where(fits, ttft_s, np.inf).argmin())
    return InlinePrefill(int(rows[best]), prefill_s.item(best), ttft_s.item(best))


def _best_in_chunks(
    context: SelectionContext, hit_tokens: Floats, prefill_s: Floats, limit_s: float
) -> InlinePrefill | None:
    """Returns the decode instance that gives the first token soonest by computing the prompt in
    chunks beside its decodes, or None if that takes longer than `limit_s`.

    In this way decode instances help a prefill pool that has a queue. They do so only while a chunk
    fits into their steps, and their decodes are booked with that chunk
    (`InstanceTable.num_chunked`).
    """
    footprint, table = context.footprint, context.table
    fits = context.decode_possible & ~table.prefills & (table.chunk_tokens > 0)
    fits &= context.queue_s + prefill_s <= limit_s
    rows = fits.nonzero()[0]
    if not len(rows):
        return None
    step_s = table.decode_base_s[rows] + table.decodes_s(rows)
    fits = step_s + table.shared_chunk_s[rows] <= CHUNKED_STEP_SHARE * footprint.tbt_s
    fits &= table.booked_context[rows] + footprint.num_tokens <= table.engine_tokens[rows]
    new_tokens = footprint.num_tokens - hit_tokens[rows]
    prefill_s = table.chunked_prefill_s(rows, prefill_s[rows], new_tokens)
    under_way_s = np.where(table.booked_batch[rows] > 0, step_s, 0.0)
    ttft_s = under_way_s + context.queue_s[rows] + prefill_s
    fits &= ttft_s <= limit_s
    if not np.count_nonzero(fits):
        return None
    best = int(np.where(fits, ttft_s, np.inf).argmin())
    return InlinePrefill(int(rows[best]), prefill_s.item(best), ttft_s.item(best), True)


def _describe(
    context: SelectionContext,
    scores: WorkerScores,
    rank: Floats,
    best: int,
    decoder: int,
    tbt_s: float,
    num_possible: int,
    in_chunks: bool,
) -> Placement:
    """Overwrites `rank`."""
    ids, footprint = context.table.ids, context.footprint
    candidates = [_candidate(context, scores, best)]
    # The list also has the decode instance that computes the prompt inline, which is not in
    # `possible`.
    num_others = num_possible - int(context.possible[best])
    rank[best] = np.inf
    for _ in range(NUM_EXPLAINED - 1):
        row = int(rank.argmin())
        if rank.item(row) == np.inf:
            break
        candidates.append(_candidate(context, scores, row))
        num_others -= 1
        rank[row] = np.inf
    chosen = candidates[0]
    decode = ids[decoder] if footprint.decodes and decoder != best else None
    fetch_tokens = chosen.hit_tokens if chosen.fetch_from is not None else 0
    return Placement(
        prefill=ids[best],
        decode=decode,
        fetch_from=chosen.fetch_from,
        fetch_tokens=fetch_tokens,
        hit_tokens=chosen.hit_tokens,
        held_blocks=int(_in_dram(context).item(best)),
        source_load_s=chosen.source_load_s,
        decoder_row=decoder,
        queue_s=chosen.queue_s,
        prefill_s=chosen.prefill_s,
        ttft_s=chosen.ttft_s,
        tbt_s=tbt_s,
        chosen=ChosenPlacement(
            tuple(candidates), num_others, ids[best], decode, fetch_tokens, tbt_s
        ),
        in_chunks=in_chunks,
    )


def _in_dram(context: SelectionContext) -> Floats:
    match = context.match
    return match.held if match.held_in_dram is None else match.held_in_dram


def _candidate(context: SelectionContext, scores: WorkerScores, row: int) -> PlacementCandidate:
    ids, local = context.table.ids, scores.local
    hit_tokens = int(local.hit_tokens.item(row))
    load_tokens = 0
    if local.near_tokens is not None:
        load_tokens = hit_tokens - int(local.near_tokens.item(row))
    source = -1 if scores.sources is None else scores.sources.item(row)
    load_s = 0.0
    if source >= 0:
        load_s = source_load_s(context, source, hit_tokens)
        hit_tokens = int(context.usable_tokens(context.match.held.item(source)))
    return PlacementCandidate(
        instance_id=ids[row],
        queue_s=context.queue_s.item(row),
        hit_tokens=hit_tokens,
        fetch_from=ids[source] if source >= 0 else None,
        prefill_s=scores.prefill_s.item(row),
        ttft_s=scores.ttft_s.item(row),
        load_tokens=load_tokens,
        source_load_s=load_s,
    )


def _no_room(footprint: RequestFootprint, table: InstanceTable, avoid: Sequence[int]) -> Rejection:
    """Returns the rejection of a request that no instance has room for; its status says whether a
    wait for the rows that are not in `avoid` helps. The caller adds the time at which there will be
    room (`waiting.room_forecast`)."""
    num_tokens, wanted = footprint.num_tokens, footprint.expected_tokens
    allowed: Bools = np.ones(len(table), dtype=np.bool_)
    allowed[list(avoid)] = False
    for role, rows in (("prefill", table.prefills), ("decode", table.decodes)):
        if not (rows & allowed).any() and (footprint.decodes or role == "prefill"):
            text = f"no {role} instance that is up may serve this request"
            return Rejection(503, f"no_{role}_instance", text, 5.0)
    most = int(table.context_tokens[table.prefills & allowed].max())
    if num_tokens + footprint.decodes > most:
        what = f"the prompt of {num_tokens} tokens"
        what += " and an answer do" if footprint.decodes else " does"
        text = f"{what} not fit the {most} tokens of context of any prefill instance that is up"
        return Rejection(422, "no_prefill_capacity", f"{text}: shorten it", float("inf"))
    role = "decode instance" if footprint.decodes else "instance"
    text = f"no {role} has room for {wanted} more tokens of KVCache"
    possible, has_room = _able(footprint, table, table.capacity_tokens)
    able = table.decodes & has_room & allowed
    if not (possible & allowed).any() or (footprint.decodes and not able.any()):
        text += ", not even an idle one: ask for fewer tokens"
        return Rejection(422, NO_ROOM, text, float("inf"))
    return Rejection(503, NO_ROOM, text, 0.0, room_tokens=wanted)
