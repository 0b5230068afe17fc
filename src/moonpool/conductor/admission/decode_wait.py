"""Delays first tokens: after its prefill, a request joins its decode instance only when the batch
has room for it.

Its KVCache is already on the decode instance. There is room while a step takes less than the time
at which the largest number of answers meet their TBT SLO (`AttemptSpec.max_step_s`). So bursts wait
within the TTFT SLO, and a batch is full without making the answers in it late. The rule is separate
(`conductor.decode_wait`) and works with any admission policy. The policy judges a TTFT that
includes the predicted wait.

Only decode instances hold a first token back. A mixed instance has no handover at which to wait. A
server such as vLLM has a batch of its own, and fills its steps with prompts whatever the TBT SLO
(`InstanceTable.fills`). So a request waits at the Conductor until such a batch has room, and its
prompt is computed after that. `CostEstimator` learns how much prompts lengthen the longest gaps
there.
"""

from __future__ import annotations

import msgspec

from moonpool.conductor.admission.context import AdmissionContext
from moonpool.conductor.admission.slo_chances import TbtChances
from moonpool.conductor.instance_table import InstanceTable
from moonpool.cost.model import CHUNKED_STEP_SHARE
from moonpool.request_record import RequestRecord

LONGEST_FIRST_GAP = 2.0
"""Length of an answer's first gap, in steps, if the answer may join at any time. If that many steps
meet the TBT SLO, requests join at once."""

FULL_SHARE = 0.98
"""Where prompts fill the steps, the longest gaps may be predicted up to this share of the TBT SLO.
The rest of the step is a margin, because contexts grow and later prompts may be longer."""


class DecodeLoad(msgspec.Struct, frozen=True):
    """The load of a decode instance when an answer can begin."""

    others: float  # other decodes on the instance, if this request could make them late
    without_s: float  # predicted step time without this request
    with_s: float
    wait_s: float  # time from the end of the prefill until the answer can begin
    max_step_s: float | None  # the step time to wait for, or None if the request joins at once
    lasts: bool = False  # whether the instance stays as full as it is now
    # whether the instance should get no prompt before an answer ends (`InstanceTable.fills`)
    is_full: bool = False


class DecodeWait:
    """Predicts how long a request waits for a decode batch, and the chance that its answer meets
    the TBT SLO. All admission policies use it. A Conductor has one `DecodeWait`."""

    def __init__(self, waits: bool = True) -> None:
        """`waits`: whether requests wait for room in the decode batch. If they do not wait,
        requests join at once and slow the other answers down."""
        self._waits = waits
        self.tbt_decode, self.tbt_mixed = TbtChances(joins_between=waits), TbtChances()
        # For instances that fill their steps with prompts: their predicted step includes a prompt,
        # so a first gap is no longer than that step.
        self.tbt_filled = TbtChances(joins_between=True)

    def note_answer(
        self, record: RequestRecord, predicted_step_s: float, chances: TbtChances
    ) -> None:
        """Learns from the token gaps of an answer that has ended. `predicted_step_s`: the step time
        in `load`, or 0 if no lasting step time was predicted. `chances`: the learned chances of
        instances of this kind."""
        longest_s = record.tbt_top10_mean_s or 0.0
        chances.note_answer(record.num_generated_tokens, longest_s, predicted_step_s)

    def chances(self, table: InstanceTable, row: int) -> TbtChances:
        if table.fills(row):
            return self.tbt_filled
        return self.tbt_mixed if is_mixed(table, row) else self.tbt_decode

    def limit_step_s(self, table: InstanceTable, row: int, slo_tbt_s: float) -> float:
        """Returns the step time above which a decode instance serves fewer effective requests."""
        base_s = table.decode_base_s.item(row) + table.prompt_stall_s.item(row)
        return self.chances(table, row).best_step_s(base_s, slo_tbt_s)

    def load(self, context: AdmissionContext) -> DecodeLoad:
        """Returns the load of the decode instance when the answer can begin. `context.placement`
        must not contain the wait yet."""
        table, row, slo_s = context.table, context.placement.decoder_row, context.budget.slo.tbt_s
        if not context.footprint.decodes:
            return DecodeLoad(0.0, 0.0, 0.0, 0.0, None)  # a step of 0 s meets any SLO
        own_s = added_step_s(table, row, context.footprint.expected_tokens)
        if table.fills(row):
            return self._filled(context, own_s)
        ready_s = context.now + context.placement.ttft_s
        batch, tokens = context.forecast.project(ready_s, context.now)
        context.forecast.note_projection(ready_s, batch)
        batch, tokens = table.without_remainders(batch, tokens)
        others = batch / table.num_decodes
        if table.decodes_alike:
            without_s = table.tbt_s(row, others, tokens / table.num_decodes)
        else:
            without_s = max(table.level_tbt_s(batch, tokens), table.decode_base_s.item(row))
        if is_mixed(table, row):
            planned_s = CHUNKED_STEP_SHARE * context.budget.yardstick.tbt_s
            with_s = max(without_s + own_s, planned_s)
            return DecodeLoad(others, max(without_s, planned_s), with_s, 0.0, None, lasts=True)
        if not self._waits:
            return DecodeLoad(others, without_s, without_s + own_s, 0.0, None, lasts=True)
        if (without_s + own_s) * LONGEST_FIRST_GAP <= slo_s:
            return DecodeLoad(0.0, without_s, without_s + own_s, 0.0, None)
        # A request joins only when there is room, so it harms nobody.
        limit_s = self.limit_step_s(table, row, slo_s)
        ttft_s = context.placement.ttft_s
        wait_s = max(until_room_s(context, limit_s, own_s, ttft_s) - ttft_s, 0.0)
        with_s = limit_s if wait_s else min(without_s + own_s, max(limit_s, own_s))
        # Without a wait, the load still grows after the answer has begun, so its step time does not
        # last.
        return DecodeLoad(0.0, without_s, with_s, wait_s, limit_s, lasts=wait_s > 0.0)

    def _filled(self, context: AdmissionContext, own_s: float) -> DecodeLoad:
        """Returns the load of an instance, such as a vLLM server, that fills its steps with
        prompts. The load is what is booked on that instance now, because such an instance computes
        the prompt immediately."""
        table, row = context.table, context.placement.decoder_row
        limit_s = FULL_SHARE * context.budget.slo.tbt_s
        stall_s, others = table.prompt_stall_s.item(row), table.booked_batch.item(row)
        with_s = context.placement.tbt_s + stall_s
        if not self._waits:
            return DecodeLoad(others, with_s - own_s, with_s, 0.0, None)
        # A request is placed only when there is room, so it harms nobody. A request that would be
        # late even alone does not wait.
        alone_s = table.decode_base_s.item(row) + stall_s + own_s
        is_full = others > 0 and with_s > limit_s >= alone_s
        expected_s = min(with_s, max(limit_s, alone_s))
        return DecodeLoad(0.0, expected_s, expected_s, 0.0, None, is_full=is_full)


def full_step_s(table: InstanceTable, row: int, record: RequestRecord) -> float:
    """Returns the predicted length of an ended answer's longest gaps on an instance that fills its
    steps with prompts, or 0 while the effect of prompts is unknown."""
    stall_s = table.prompt_stall_s.item(row)
    return table.decodes_beside_s(row, record.predicted_tbt_s) + stall_s if stall_s else 0.0


def until_room_s(context: AdmissionContext, limit_s: float, own_s: float, ttft_s: float) -> float:
    """Returns the time until the batch has room for a request, behind all that are booked before
    it. At full load, the share of the load that ends in a second is one over the mean lifetime in
    seconds. The request adds `own_s` to each step, and its prefill ends in `ttft_s`."""
    table, row = context.table, context.placement.decoder_row
    per_sequence_s = table.decode_s_per_sequence.item(row)
    per_token_s = table.decode_s_per_context_token.item(row)
    booked_s = per_sequence_s * table.booked_batch.item(row)
    booked_s += per_token_s * table.booked_context.item(row)
    free_s = limit_s - table.decode_base_s.item(row)
    free_s = max(free_s, own_s, 1e-12)
    lacking_s = booked_s + own_s - free_s
    if lacking_s <= 0.0 or not table.booked_batch.item(row):
        return 0.0
    used_s = per_sequence_s * table.decoding_batch.item(row)
    used_s += per_token_s * table.decoding_context.item(row)
    # Until the prefills under way have filled the batch, less than that ends.
    empty = max(1.0 - used_s / free_s, 0.0)
    filled = min(empty * free_s / max(booked_s - used_s, 1e-12), 1.0)
    lost_s = 0.5 * empty * filled * ttft_s
    lifetime_s = context.forecast.lifetime_s or context.footprint.answer_s
    return lacking_s / free_s * lifetime_s + lost_s


def added_step_s(table: InstanceTable, row: int, num_tokens: int) -> float:
    """Returns the time that one more decode of `num_tokens` adds to each step of an instance."""
    per_token_s = table.decode_s_per_context_token.item(row)
    return table.decode_s_per_sequence.item(row) + per_token_s * num_tokens


def is_mixed(table: InstanceTable, row: int) -> bool:
    return table.mixed is not None and bool(table.mixed.item(row))
