"""Calibrates the cost coefficients of instances online, and measures prediction errors.

An instance joins with its profile. Its measured prefills, steps and fetches yield one factor each,
by which the coefficients of the instance table are multiplied (`cost.online`). A new incarnation
starts from its own profile.

The coefficients predict mean steps, but SLOs are judged by the longest tenth of a request's token
gaps. The ratio of that tenth to the mean step is learned from the answers of all instances
together. The lateness of the latest tenth of first tokens is learned as well, because an overloaded
cluster admits requests that should just meet their SLO. Prefills are timed by the Conductor's
clock, which includes delays outside the engine. Steps are timed by the engine's clock, because
tokens reach a busy head in bursts.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum, inf

import numpy as np
from msgspec import structs

from moonpool.conductor.admission.context import SloBudget
from moonpool.conductor.cluster_state import ClusterState
from moonpool.conductor.forecast.estimators import PredictionError
from moonpool.conductor.observers import ClusterObserver
from moonpool.conductor.placement.choice import Placement
from moonpool.conductor.state import InstanceState, TrackedRequest
from moonpool.cost.fitted import FittedCost, scaled
from moonpool.cost.online import MAX_FACTOR, MIN_CHANGE, LearnedFactor
from moonpool.cost.recorded import CostEstimatorRecord, InstanceRecord
from moonpool.distributions import rank_above
from moonpool.protocol.messages import AttemptId, PrefillStarted, StepTokens
from moonpool.request_record import RequestRecord
from moonpool.types import Role

PROBE_EVERY_S = 5.0
"""Least time between two requests that test the cost estimate of an idle instance."""
TBT_SHARE = 0.7
"""Share of the requests at the limit that should meet the TBT SLO with their longest gaps. With a
higher share, requests that meet the SLO would be rejected."""
STALL_TOKENS = 10
"""Shorter answers say nothing about the longest tenth of the gaps."""
STALL_SHARE = 0.95
"""Prompts should lengthen the longest gaps of this share of the answers by no more than the learned
time. A mean would follow the load: few prompts fill a step below the capacity."""
MIN_STALLS = 8
TTFT_SHARE = 0.9
"""The learned quantile of the ratio of measured to predicted TTFT. A higher share costs nothing
here: the next request in the queue takes the place of a rejected one."""


class CostEstimator(ClusterObserver):
    """A Conductor has one `CostEstimator`. With `learning` off, the profiles remain in use; the
    factors are still measured and reported."""

    def __init__(
        self, cluster_state: ClusterState, learning: bool, decoding_error: PredictionError
    ) -> None:
        self.ttft_s = PredictionError()
        self.tbt_s = PredictionError()
        self.decoding = decoding_error  # prediction error of the number of decodes
        self.tbt_tail = LearnedFactor(TBT_SHARE, summed=1)
        self.ttft_tail = LearnedFactor(TTFT_SHARE, summed=1)
        self._cluster_state, self._table = cluster_state, cluster_state.instance_table
        self._learning = learning
        self._beginners = cluster_state.beginners

    def prefill_started(self, tracked: TrackedRequest, report: PrefillStarted, now: float) -> None:
        """Notes that the first chunk is computed now, and that the fetch has ended if there was
        one."""
        attempt, instances = tracked.attempt, self._cluster_state.instances
        assert attempt is not None
        state = instances[attempt.prefill]
        source = instances.get(attempt.fetch_from) if attempt.fetch_from else None
        cost = state.info.cost
        attempt.expected_s = cost.prefill_s(attempt.num_tokens, report.cached_tokens)
        if report.early or attempt.in_chunks or self._table.decodes_remain(state.row):
            # The prefill's start time is unknown, or the prefill shares the steps of answers, so it
            # is not a sample.
            attempt.expected_s = 0.0
        elif state.row in self._table.beside_decodes:
            new_tokens = attempt.num_tokens - report.cached_tokens
            row, alone_s = np.array([state.row]), np.array([attempt.expected_s])
            beside_s = self._table.mixed_prefill_s(row, alone_s, new_tokens, now=True)
            attempt.expected_s = beside_s.item()
        if not state.prefill_factor.is_learned:
            self._beginners.enter(state)
        if source is None or not report.fetched_tokens or not report.fetch_s:
            return
        host = state.info.address.host_id
        num_bytes = report.fetched_tokens * state.info.layout.token_bytes
        sharing = self._table.num_serving.item(source.row)
        expected_s = cost.transfer_s(
            num_bytes, bool(host) and host == source.info.address.host_id, int(sharing)
        )
        self._learn(state, state.transfer_factor, report.fetch_s, expected_s)

    def prefill_done(self, tracked: TrackedRequest, now: float) -> None:
        """Prefills run one after another, so the oldest prefill has had all the time since its
        predecessor ended. A prefill that ends out of turn counts as 0 s."""
        attempt = tracked.attempt
        assert attempt is not None
        state = self._cluster_state.instances.get(attempt.prefill)
        if state is None or attempt.started_s is None or attempt.attempt_id not in state.started:
            return
        seconds = 0.0
        if next(iter(state.started)) == attempt.attempt_id:
            seconds = now - max(attempt.started_s, state.freed_s)
        self._learn(state, state.prefill_factor, seconds, attempt.expected_s)

    def arrived(self, tracked: TrackedRequest, now: float) -> None:
        self.learn_first_prefills(now)

    def learn_first_prefills(self, now: float) -> None:
        """Called before a request is placed. The first dozen prompts of an instance are too few to
        learn its factor from samples, but if one takes three times as long as predicted, the
        prompts behind it will be late, too.
        """
        for state in self._beginners.due(now):
            name, factor = state.info.instance_id, state.prefill_factor
            if factor.is_learned or self._cluster_state.instances.get(name) is not state:
                self._beginners.leave(name)
                continue
            began_s, expected_s = now, 0.0
            if state.started:  # started prefills may share their steps
                started = list(state.started.values())
                assert started[0].started_s is not None
                if not all(attempt.expected_s for attempt in started):
                    # no new information comes until a prefill starts or ends
                    self._beginners.sleep(state, inf)
                    continue
                began_s = max(started[0].started_s, state.freed_s)
                expected_s = fsum([attempt.expected_s for attempt in started])
            before = factor.value
            if factor.begin(now - began_s, expected_s):
                self._apply(state, factor, before)
            elif now > began_s or not state.started:
                self._beginners.sleep(state, began_s + factor.begins_after_s(expected_s))

    def step(
        self,
        state: InstanceState,
        report: StepTokens,
        attempts: Mapping[AttemptId, TrackedRequest],
        now: float,
    ) -> None:
        """Learns from steps of decodes only."""
        if not report.gap_s:
            return
        batch, num_steps = len(report.attempts), len(report.attempts[0].tokens)
        context_tokens = 0
        for item in report.attempts:
            tracked = attempts.get(item.attempt_id)
            if tracked is None or tracked.attempt is None:
                return  # the context of an ended attempt is unknown
            context_tokens += tracked.attempt.num_tokens
        mean_context = context_tokens + batch * (num_steps - 1) // 2
        info = state.info
        expected_s = info.cost.decode_step_s(
            batch * info.num_stages, mean_context * info.num_stages
        )
        self._learn(state, state.decode_factor, report.gap_s, expected_s)

    def first_token(self, tracked: TrackedRequest, now: float) -> None:
        """Learns from the first token of a request, unless the request had several attempts."""
        record = tracked.record
        ttft_s, predicted_s = record.placed_ttft_s, record.predicted_ttft_s
        if record.attempts != 1 or ttft_s is None or predicted_s is None:
            return
        self.ttft_s.note(predicted_s, ttft_s)
        if self.ttft_tail.observe(ttft_s, predicted_s) and self._learning:
            self._table.ttft_tail = max(self.ttft_tail.value, 1.0)

    def answered(self, tracked: TrackedRequest, decoder: InstanceState | None, now: float) -> None:
        """Learns from an answered request. A request with several attempts says nothing about its
        first placement, so it is ignored, like an embedding request."""
        record = tracked.record
        if record.attempts != 1 or tracked.request.is_embedding:
            return
        tpot_s, longest_s = record.tpot_s, record.tbt_top10_mean_s
        if tpot_s is not None and record.predicted_tbt_s:
            self.tbt_s.note(record.predicted_tbt_s, tpot_s)
        # A gap in which a prompt is computed is as long as the prompt's chunk, at any load.
        decodes_only = decoder is not None and decoder.role is Role.DECODE
        alone = decodes_only and not record.shared_steps
        if alone and tpot_s is not None and longest_s is not None:
            changed = self.tbt_tail.observe(longest_s, tpot_s)
            if changed and self._learning:
                self._table.tbt_tail = self.tbt_tail.value
        if decoder is not None and self._table.fills(decoder.row):
            self._learn_stall(decoder, record)

    def _learn_stall(self, state: InstanceState, record: RequestRecord) -> None:
        """Learns what prompts add to the longest gaps on a server such as vLLM: how many prompt
        tokens that server puts into one step is unknown."""
        table, row, stalls_s = self._table, state.row, state.stalls_s
        longest_s = record.tbt_top10_mean_s
        if longest_s is None or record.num_generated_tokens < STALL_TOKENS:
            return
        stalls_s.append(max(longest_s - table.decodes_beside_s(row, record.predicted_tbt_s), 0.0))
        if not self._learning or len(stalls_s) < MIN_STALLS:
            return
        stall_s = sorted(stalls_s)[rank_above(STALL_SHARE, len(stalls_s))]
        if abs(stall_s - table.prompt_stall_s.item(row)) > MIN_CHANGE * stall_s:
            table.prompt_stall_s[row] = stall_s

    def take_profile(self, state: InstanceState, cost: FittedCost) -> None:
        """Replaces the assumed times of an instance by the times that it has measured since it
        joined. The factors learned so far relate to the assumed times, as do the expected times of
        the prefills under way, from which no factor of the measured times can be learned."""
        for attempt in state.started.values():
            attempt.expected_s = 0.0
        state.info = structs.replace(state.info, cost=cost)
        state.prefill_factor, state.decode_factor = LearnedFactor(), LearnedFactor()
        state.transfer_factor = LearnedFactor()
        self._beginners.leave(state.info.instance_id)
        self._table.set_cost(state.row, cost)

    def may_probe(
        self, placement: Placement, prefill_row: int, budget: SloBudget, limit: float, now: float
    ) -> bool:
        """Whether to admit a request that the cost estimate rejects. An estimate that rejects
        everything would never be corrected. Only idle instances are probed, at most every
        `PROBE_EVERY_S`, and only if the largest possible correction would admit the request."""
        table, row = self._table, placement.decoder_row
        if not self._learning or placement.queue_s > 0.0 or table.booked_batch.item(row):
            return False
        slo = budget.slo
        late_s = budget.waited_s + placement.ttft_s
        if (
            late_s > MAX_FACTOR * limit * slo.ttft_s
            or placement.tbt_s > MAX_FACTOR * limit * slo.tbt_s
        ):
            return False
        last_s = max(table.last_placed_s.item(row), table.last_placed_s.item(prefill_row))
        return now - last_s >= PROBE_EVERY_S

    @property
    def errors(self) -> dict[str, PredictionError]:
        return {"ttft_s": self.ttft_s, "tbt_s": self.tbt_s, "decoding": self.decoding}

    def record(self, states: list[InstanceState]) -> CostEstimatorRecord:
        """Returns all that was learned, for the endpoint `/beliefs`."""
        return CostEstimatorRecord(
            tuple(_recorded(state) for state in states),
            {name: error.summary() for name, error in self.errors.items()},
        )

    def _learn(
        self, state: InstanceState, factor: LearnedFactor, seconds: float, expected_s: float
    ) -> None:
        before = factor.value
        self._beginners.wake(state)
        if factor.observe(seconds, expected_s):
            self._apply(state, factor, before)

    def _apply(self, state: InstanceState, factor: LearnedFactor, before: float) -> None:
        if not self._learning:
            return
        self._table.set_cost(state.row, calibrated_cost(state), state.prefill_factor.value)
        if factor is state.prefill_factor:
            self._cluster_state.rescale_prefills(state, factor.value / before)
            if factor.has_steps:
                self._pass_on(state.info.cost)

    def _pass_on(self, profile: FittedCost) -> None:
        """Instances with this profile that have computed no prompt yet begin with the factors that
        the other instances have learned. Without this, these instances would seem faster than all
        other instances on a slow machine."""
        states = self._cluster_state.instances.values()
        alike = [s for s in states if s.info.cost is profile or s.info.cost == profile]
        known = sorted([s.prefill_factor.value for s in alike if s.prefill_factor.has_steps])
        for state in alike:
            if state.prefill_factor.has_steps:
                continue
            before = state.prefill_factor.value
            self._beginners.wake(state)
            if state.prefill_factor.inherit(known[(len(known) - 1) // 2]):
                self._apply(state, state.prefill_factor, before)


def calibrated_cost(state: InstanceState) -> FittedCost:
    """Returns the profile multiplied by the learned factors."""
    return scaled(
        state.info.cost,
        state.prefill_factor.value,
        state.decode_factor.value,
        state.transfer_factor.value,
    )


def learned_factors(state: InstanceState) -> dict[str, float]:
    """Returns the learned factor of each kind of work."""
    return {
        "prefill": state.prefill_factor.value,
        "decode": state.decode_factor.value,
        "transfer": state.transfer_factor.value,
    }


def _recorded(state: InstanceState) -> InstanceRecord:
    info = state.info
    return InstanceRecord(
        instance_id=info.instance_id,
        role=info.role,
        profile=info.cost,
        prefill=state.prefill_factor.samples,
        decode=state.decode_factor.samples,
        transfer=state.transfer_factor.samples,
        factors=learned_factors(state),
    )
