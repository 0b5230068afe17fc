"""Admission by expected goodput: a request is admitted if it adds more effective requests than it
costs.

It adds its own chance to meet both SLOs: the chance of its TTFT, given the queue, times the chance
of its TBT, given the decode load at the end of its prefill and through its answer. It costs
* the requests that could have used the same seconds of prefill and of decode, and those that come
  too late because they wait for its prefill (`resource_prices`);
* on a mixed instance, the chances of the other requests that decode there: one more lengthens all
  steps.

With the rule `decode_wait`, the load of a decode instance follows from that rule: no other answer
is slowed down, and the wait counts in the TTFT. Without that rule, one more answer lengthens the
gaps of the others there too. The same holds for a server that fills its steps with prompts, where
the wait comes before the prefill.

The chances are learned from the answers that have ended (`slo_chances`). Nothing in this module
books load.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from moonpool.conductor.admission.context import (
    LEAST_CHANCE,
    REST_CHANCE,
    AdmissionContext,
    ExpectedGoodput,
)
from moonpool.conductor.admission.decode_wait import (
    DecodeLoad,
    DecodeWait,
    added_step_s,
    full_step_s,
    is_mixed,
    until_room_s,
)
from moonpool.conductor.admission.resource_prices import (
    ClusterCapacity,
    RequestNeed,
    ResourcePrices,
)
from moonpool.conductor.admission.sharing_forecast import SharingForecast
from moonpool.conductor.admission.slo_chances import TtftChances
from moonpool.conductor.forecast.estimators import FIRST_GUESS_TOKENS, RunningMean, length_bucket
from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.placement.choice import Rejection
from moonpool.conductor.state import InstanceState, TrackedRequest
from moonpool.types import BlockKey, Role

MIN_SIMILAR = 8
"""The mean of a prompt length is used once it comes from this many answers."""
TIGHT_TTFT, TIGHT_TBT = "ttft_slo", "decode_load_predicted"
OUT_OF_PREFILL, OUT_OF_DECODE = "goodput_prefill", "goodput_decode"
"""The reasons of a rejection in favour of requests that need less of that resource."""


class AnswerLengths:
    """Mean lengths of answers, by the length of the prompt."""

    def __init__(self) -> None:
        self._mean = RunningMean(FIRST_GUESS_TOKENS)
        self._by_prompt: dict[int, RunningMean] = {}  # keyed by half octaves of the prompt's length

    def note_answer(self, num_prompt_tokens: int, num_tokens: int) -> None:
        self._mean.add(num_tokens)
        half_octave = length_bucket(num_prompt_tokens)
        self._by_prompt.setdefault(half_octave, RunningMean(0.0)).add(num_tokens)

    def relative(self, num_prompt_tokens: int) -> float:
        """Returns the mean length of the answers to prompts of about this length, divided by the
        mean length of all answers."""
        similar = self._by_prompt.get(length_bucket(num_prompt_tokens))
        if similar is None or similar.count < MIN_SIMILAR:
            return 1.0
        return max(similar.value, 1.0) / max(self._mean.value, 1.0)


class GoodputModel(ClusterObserver):
    """What the Conductor has learned for admission by expected goodput. A Conductor has one
    `GoodputModel`. With `learning` off, the first guesses of the chances stay in use, while the
    prices still follow the arrivals."""

    def __init__(self, table: InstanceTable, learning: bool = True, waits: bool = True) -> None:
        self._table, self._learning = table, learning
        self.ttft = TtftChances()
        self.decode = DecodeWait(waits)
        self.prices = ResourcePrices()
        self.lengths = AnswerLengths()
        self.sharing = SharingForecast()
        self._sharer_s = RunningMean(0.0)  # prefill of a prompt whose known blocks are cached
        # Means over the requests that could meet their SLOs if no prefill waited.
        self._usual_prefill_s, self._usual_step_s = RunningMean(0.0), RunningMean(0.0)

    def answered(self, tracked: TrackedRequest, decoder: InstanceState | None, now: float) -> None:
        """Learns from an answer that has ended. A request with several attempts says nothing about
        its first placement, so its answer is ignored, like that of an embedding request."""
        record = tracked.record
        if not self._learning or record.attempts != 1 or tracked.request.is_embedding:
            return
        mixed = decoder is not None and decoder.role is not Role.DECODE
        chances = self.decode.tbt_mixed if mixed else self.decode.tbt_decode
        step_s = tracked.predicted_step_s
        if decoder is not None and self._table.fills(decoder.row):
            chances = self.decode.tbt_filled
            step_s = full_step_s(self._table, decoder.row, record)
        self.decode.note_answer(record, step_s, chances)
        self.lengths.note_answer(record.num_prompt_tokens, record.num_generated_tokens)

    def first_token(self, tracked: TrackedRequest, now: float) -> None:
        """Learns from the first token of a request, unless it had several attempts."""
        record = tracked.record
        ttft_s, predicted_s = record.placed_ttft_s, record.predicted_ttft_s
        if self._learning and record.attempts == 1 and ttft_s is not None and predicted_s:
            self.ttft.note_first_token(ttft_s, predicted_s, record.slo.ttft_s)

    def note_placed(self, context: AdmissionContext) -> None:
        """Notes that a request was placed as `context` describes."""
        placement, table = context.placement, context.table
        on_decode = placement.decode is None and not table.prefills[placement.decoder_row]
        self.prices.note_placed(self._pool_prefill_s(context), on_decode, context.now)

    def _pool_prefill_s(self, context: AdmissionContext) -> float:
        """Returns the time of the request's prefill. If a decode instance computes the prompt,
        returns the time on a prefill instance: a prefill beside decodes takes longer, although the
        work is the same."""
        placement, table = context.placement, context.table
        if placement.decode is not None or table.prefills[placement.decoder_row]:
            return placement.prefill_s
        alone_s = table.prefill_s(context.footprint.num_tokens, float(placement.hit_tokens))
        alone_s = alone_s[table.prefills]
        return min(float(alone_s.min(initial=placement.prefill_s)), placement.prefill_s)

    def expect(
        self,
        context: AdmissionContext,
        load: DecodeLoad,
        keys: Sequence[BlockKey],
        first: bool,
    ) -> ExpectedGoodput:
        """Call this method before the request is booked. `load`: the load of the request's decode
        instance; the placement does not contain its decode wait yet. `keys`: the keys of the
        prompt's blocks. `first`: whether the request has just arrived, so that it counts as
        demand."""
        budget, placement = context.budget, context.placement
        ttft_stated, tbt_stated = budget.slo.ttft_s < inf, budget.slo.tbt_s < inf
        left_s = budget.slo.ttft_s - budget.waited_s
        chances, slo_s = self.decode.chances(context.table, placement.decoder_row), budget.slo.tbt_s
        tbt_chance = chances.chance(load.with_s, slo_s)
        worth = tbt_chance * self.ttft.chance(placement.prefill_s, budget.slo.ttft_s)
        if first:
            self._note_sharing(context, keys)
        own_prefill_s = self._own_prefill_s(context, keys)
        need = self._need(context, own_prefill_s, worth)
        if first:
            self.prices.note_arrival(need)
            self._note_usual(context, worth)
        capacity = self._capacity(context, load.max_step_s)
        prefill_cost, decode_cost = self.prices.cost(need, capacity, context.now)
        ttft_chance = self.ttft.chance(placement.ttft_s + load.wait_s, left_s)
        # A request without a stated TTFT SLO may wait, so it displaces no other.
        return ExpectedGoodput(
            worth,
            ttft_chance,
            tbt_chance,
            load.others * (chances.chance(load.without_s, slo_s) - tbt_chance),
            prefill_cost if ttft_stated else 0.0,
            decode_cost if ttft_stated and tbt_stated else 0.0,
            load.with_s,
            load.wait_s,
            (placement.queue_s + load.wait_s) / max(placement.ttft_s + load.wait_s, 1e-9),
            self._delay(context, own_prefill_s) if ttft_stated else 0.0,
            self._rest_chance(context, load, left_s) if ttft_chance < REST_CHANCE else 0.0,
        )

    def _rest_chance(self, context: AdmissionContext, load: DecodeLoad, left_s: float) -> float:
        """Returns `REST_CHANCE` where it applies, else 0. On an instance with another engine, such
        as vLLM, the load model leaves out some of what slows prompts down. The learned factor
        includes it, and so makes the instance seem slow even while it is idle."""
        table, placement = context.table, context.placement
        factor = table.prefill_factor.item(table.ids.index(placement.prefill))
        if factor <= 1.0 or placement.queue_s + load.wait_s > 0.0:
            return 0.0
        rest_s = placement.ttft_s - placement.prefill_s * (1.0 - 1.0 / factor)
        return REST_CHANCE if self.ttft.chance(rest_s, left_s) >= LEAST_CHANCE else 0.0

    def _need(self, context: AdmissionContext, own_prefill_s: float, worth: float) -> RequestNeed:
        footprint, table = context.footprint, context.table
        prefill_s = context.placement.prefill_s
        # On a mixed instance a long prompt delays the decodes, even if later requests share it.
        if not is_mixed(table, context.placement.decoder_row):
            prefill_s = own_prefill_s
        decode = 0.0
        if footprint.decodes:
            decode = added_step_s(table, context.placement.decoder_row, footprint.expected_tokens)
            decode *= self.lengths.relative(footprint.num_tokens)
        return RequestNeed(context.now, worth, prefill_s, decode, context.placement.prefill_s)

    def _own_prefill_s(self, context: AdmissionContext, keys: Sequence[BlockKey]) -> float:
        """Prefill time without the part that is expected to serve later requests."""
        footprint, prefill_s = context.footprint, self._pool_prefill_s(context)
        num_cached = context.placement.hit_tokens // footprint.block_tokens
        share = self.sharing.own_share(keys, num_cached, footprint.block_tokens)
        return share * prefill_s + (1.0 - share) * min(self._sharer_s.value, prefill_s)

    def _delay(self, context: AdmissionContext, own_prefill_s: float) -> float:
        """If the first prompt over a document is rejected, the next one causes the same delay, so
        the delay is shared out, too."""
        table, placement = context.table, context.placement
        if placement.decode is None and not table.prefills[placement.decoder_row]:
            return 0.0  # a decode instance computes the prompt, so no prefill is delayed
        slo_ttft_s = context.budget.yardstick.ttft_s
        return self.prices.delay(placement.queue_s, own_prefill_s, table.num_prefills, slo_ttft_s)

    def _note_sharing(self, context: AdmissionContext, keys: Sequence[BlockKey]) -> None:
        """Counts the demand for the prompt's blocks, and learns the cost of a prompt whose known
        blocks are all cached."""
        footprint, placement = context.footprint, context.placement
        known = self.sharing.note_arrival(keys, footprint.block_tokens, context.now)
        if known:
            computed = max(footprint.num_tokens - placement.hit_tokens, 1)
            new = max(footprint.num_tokens - known * footprint.block_tokens, 1)
            self._sharer_s.add(placement.prefill_s * min(new / computed, 1.0))

    def _note_usual(self, context: AdmissionContext, worth: float) -> None:
        if worth < LEAST_CHANCE:
            return
        self._usual_prefill_s.add(context.placement.prefill_s)
        if context.footprint.decodes:
            row, tokens = context.placement.decoder_row, context.footprint.expected_tokens
            self._usual_step_s.add(added_step_s(context.table, row, tokens))

    def _capacity(self, context: AdmissionContext, max_step_s: float | None) -> ClusterCapacity:
        """Uses the waits of a usual request. A very long prompt waits mostly for itself, which says
        nothing about the pools."""
        table, slo = context.table, context.budget.yardstick
        row = context.placement.decoder_row
        base_s = table.decode_base_s.item(row)
        ttft_s = wait_s = context.placement.queue_s + self._usual_prefill_s.value
        if max_step_s is not None:
            own_s = self._usual_step_s.value
            if not self._usual_step_s.count:
                own_s = added_step_s(table, row, context.footprint.expected_tokens)
            wait_s = max(until_room_s(context, max_step_s, own_s, ttft_s), ttft_s)
        room_s = max(self.decode.limit_step_s(table, row, slo.tbt_s) - base_s, 0.0)
        num = table.num_decodes
        decoding = table.without_remainders(table.total_decoding, table.total_decoding_context)
        step_s = table.tbt_s(row, *(each / max(num, 1) for each in decoding))
        return ClusterCapacity(
            table.num_prefills,
            context.placement.queue_s,
            wait_s,
            slo.ttft_s,
            room_s * num,
            (step_s - base_s) * num,
            context.forecast.lifetime_s or context.footprint.answer_s,
        )


def decide(context: AdmissionContext, expected: ExpectedGoodput) -> Rejection | None:
    """Returns None if the request adds more than it costs."""
    if expected.adds_more:
        return None
    placement, numbers = context.placement, _numbers(context, expected)
    if expected.best_ttft_chance < expected.least_ttft_chance:
        if context.rest_prefill_s > context.budget.slo.ttft_s:
            text = f"{_ttft_text(context, expected)}, also on an idle instance: shorten the prompt"
            return Rejection(422, TIGHT_TTFT, f"{text} or raise the SLO", inf, numbers)
        wait_s = placement.queue_s + expected.wait_s
        # `prefill_s` includes what is computed beside the prompt
        if placement.prefill_s > context.budget.slo.ttft_s:
            wait_s = max(wait_s, 1.0)
        return Rejection(429, TIGHT_TTFT, _ttft_text(context, expected), wait_s, numbers)
    if expected.tbt_chance < LEAST_CHANCE:
        text = _tbt_text(context, expected)
        if _alone_s(context) > context.budget.slo.tbt_s:
            text += ", also on an idle instance: raise the SLO"
            return Rejection(422, TIGHT_TBT, text, inf, numbers)
        return Rejection(429, TIGHT_TBT, text, context.footprint.answer_s, numbers)
    crowding = {
        OUT_OF_PREFILL: max(expected.prefill_cost, expected.delay),
        OUT_OF_DECODE: expected.decode_cost,
        TIGHT_TBT: expected.harm,
    }
    reason = max(crowding, key=lambda name: crowding[name])
    wait_s = max(placement.queue_s + expected.wait_s, 1.0)
    return Rejection(429, reason, _cost_text(expected), wait_s, numbers)


def _numbers(context: AdmissionContext, expected: ExpectedGoodput) -> dict[str, float]:
    """Returns the numbers behind the decision, by name."""
    numbers = {
        "ttft_chance": expected.ttft_chance,
        "tbt_chance": expected.tbt_chance,
        "expected_gain": expected.gain,
        "expected_cost": expected.cost,
        "predicted_ttft_s": context.placement.ttft_s,
        "limit_ttft_s": context.budget.slo.ttft_s,
        "predicted_tbt_s": expected.step_s,
        "limit_tbt_s": context.budget.slo.tbt_s,
    }
    return {name: number for name, number in numbers.items() if number < inf}


def _alone_s(context: AdmissionContext) -> float:
    """Step time of the request alone on its decode instance."""
    table, row = context.table, context.placement.decoder_row
    own_s = added_step_s(table, row, context.footprint.expected_tokens)
    return table.decode_base_s.item(row) + own_s


def _ttft_text(context: AdmissionContext, expected: ExpectedGoodput) -> str:
    placement, budget = context.placement, context.budget
    return (
        f"predicted TTFT {budget.waited_s + placement.ttft_s:.2f} s meets the SLO"
        f" of {budget.slo.ttft_s:g} s with a chance of {expected.ttft_chance:.0%}"
    )


def _tbt_text(context: AdmissionContext, expected: ExpectedGoodput) -> str:
    return (
        f"predicted time between tokens {expected.step_s:.3f} s meets the SLO of"
        f" {context.budget.slo.tbt_s:g} s with a chance of {expected.tbt_chance:.0%}"
    )


def _cost_text(expected: ExpectedGoodput) -> str:
    parts = {
        "its prefill takes the place of": expected.prefill_cost,
        "its decode takes the place of": expected.decode_cost,
        "others would wait for it, which costs": expected.delay,
        "it slows down others, which costs": expected.harm,
    }
    what = max(parts, key=lambda name: parts[name])
    return (
        f"the request would meet its SLOs with a chance of {expected.gain:.0%}, and"
        f" {what} {parts[what]:.2f} requests that would meet theirs"
    )
