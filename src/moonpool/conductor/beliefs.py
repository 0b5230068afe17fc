"""What the Conductor learns of its instances' times, and how far its predictions were off.

An instance joins with its profile; what is then seen of its prefills, steps and fetches becomes a
factor each, by which the fleet's coefficients are multiplied (`cost.learned`). It goes with the
instance: a new incarnation begins at its own profile. The coefficients tell of mean steps, while
promises are judged by the longest tenth of an answer's gaps: by how much these are longer is
learned of the answers, for all instances together; so is how much later than predicted the latest
tenth of first tokens came, because under overload all that is admitted is admitted to come just in
time. Prefills are timed by the Conductor's clock, so that they contain what the engine does not
know of; steps by the engine's, because a busy head hears of tokens in bunches. Chooses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from moonpool.conductor.admission import Promise
from moonpool.conductor.bookings import Bookings
from moonpool.conductor.placement import Placement
from moonpool.conductor.prediction_error import PredictionError
from moonpool.conductor.state import Attempt, InstanceState, Tracked
from moonpool.cost.belief import scaled
from moonpool.cost.fitted import FittedCost
from moonpool.cost.learned import MOST, LearnedFactor
from moonpool.cost.recorded import BeliefRecord, InstanceRecord
from moonpool.metrics import RequestRecord
from moonpool.workers.messages import PrefillStarted, StepTokens, WorkId

PROBE_EVERY_S = 5.0
"""How often an idle instance may be given what its belief says it is too slow for."""
TBT_SHARE = 0.7
"""Of the answers at the limit, so many should keep what was promised of their longest gaps. More
refuses those that would have kept it."""
TTFT_SHARE = 0.9
"""The same of first tokens. Refusing more costs nothing here: behind the queue there is another."""


class Beliefs:
    """One per Conductor. With `learning` off, the profiles stay as they are; what would have been
    learned is still kept, to be looked at."""

    def __init__(self, books: Bookings, learning: bool, decoding_error: PredictionError) -> None:
        self.ttft_s = PredictionError()
        self.tbt_s = PredictionError()
        self.decoding = decoding_error  # of the number of answers that decode
        self.tbt_tail = LearnedFactor(TBT_SHARE, summed=1)
        self.ttft_tail = LearnedFactor(TTFT_SHARE, summed=1)
        self._books, self._fleet = books, books.fleet
        self._learning = learning

    def start_prefill(
        self,
        state: InstanceState,
        source: InstanceState | None,
        attempt: Attempt,
        report: PrefillStarted,
    ) -> None:
        """Its first chunk is computed now (mutates `attempt`); what was fetched is here."""
        cost = state.info.cost
        attempt.expected_s = cost.prefill_s(attempt.num_tokens, report.cached_tokens)
        if report.early:
            attempt.expected_s = 0.0  # when it began is not known: it teaches nothing
        if source is None or not report.fetched_tokens or not report.fetch_s:
            return
        host = state.info.address.host_id
        num_bytes = report.fetched_tokens * state.info.layout.token_bytes
        sharing = self._fleet.num_serving.item(source.row)
        expected_s = cost.transfer_s(
            num_bytes, bool(host) and host == source.info.address.host_id, int(sharing)
        )
        self._learn(state, state.transfer_factor, report.fetch_s, expected_s)

    def end_prefill(self, state: InstanceState | None, attempt: Attempt, now: float) -> None:
        """To be told while it is still booked. Prefills run one after another: the oldest has had
        all the time since the one before it ended, and what ended before its turn had none."""
        if state is None or attempt.started_s is None or attempt.work_id not in state.started:
            return
        seconds = 0.0
        if next(iter(state.started)) == attempt.work_id:
            seconds = now - max(attempt.started_s, state.freed_s)
        self._learn(state, state.prefill_factor, seconds, attempt.expected_s)

    def learn_steps(
        self, state: InstanceState, report: StepTokens, works: Mapping[WorkId, Tracked]
    ) -> None:
        """From steps of decodes alone, before their tokens count."""
        if not report.gap_s:
            return
        batch, num_steps = len(report.works), len(report.works[0].tokens)
        context_tokens = 0
        for item in report.works:
            tracked = works.get(item.work_id)
            if tracked is None or tracked.attempt is None:
                return  # of one that is gone, the tokens are not known
            context_tokens += tracked.attempt.num_tokens
        mean_context = context_tokens + batch * (num_steps - 1) // 2
        info = state.info
        expected_s = info.cost.decode_step_s(
            batch * info.num_stages, mean_context * info.num_stages
        )
        self._learn(state, state.decode_factor, report.gap_s, expected_s)

    def note_answer(self, record: RequestRecord, decodes_only: bool) -> None:
        """A request was answered; `decodes_only`: by an instance whose role that is. One that was
        tried again tells nothing of its first placement."""
        if record.attempts != 1 or record.first_token_s is None or record.placed_s is None:
            return
        if record.predicted_ttft_s is not None:
            ttft_s = record.first_token_s - record.placed_s
            self.ttft_s.note(record.predicted_ttft_s, ttft_s)
            if self.ttft_tail.observe(ttft_s, record.predicted_ttft_s) and self._learning:
                self._fleet.ttft_tail = max(self.ttft_tail.value, 1.0)
        tpot_s, longest_s = record.tpot_s, record.tbt_top10_mean_s
        if tpot_s is not None and record.predicted_tbt_s:
            self.tbt_s.note(record.predicted_tbt_s, tpot_s)
        # A gap in which a prompt was computed is as long as that was planned to be, at any load.
        alone = decodes_only and not record.shared_steps
        if alone and tpot_s is not None and longest_s is not None:
            changed = self.tbt_tail.observe(longest_s, tpot_s)
            if changed and self._learning:
                self._fleet.tbt_tail = self.tbt_tail.value

    def may_probe(
        self, placement: Placement, prefill_row: int, promise: Promise, limit: float, now: float
    ) -> bool:
        """Whether a request is to be taken although the belief refuses it: of a belief that refuses
        everything nothing would ever be learned. Only instances that do nothing are so tried, now
        and then, and only where the belief could be as wrong as that."""
        fleet, row = self._fleet, placement.decoder_row
        if not self._learning or placement.queue_s > 0.0 or fleet.booked_batch.item(row):
            return False
        slo = promise.slo
        late_s = promise.waited_s + placement.ttft_s
        if late_s > MOST * limit * slo.ttft_s or placement.tbt_s > MOST * limit * slo.tbt_s:
            return False
        last_s = max(fleet.last_placed_s.item(row), fleet.last_placed_s.item(prefill_row))
        return now - last_s >= PROBE_EVERY_S

    @property
    def errors(self) -> dict[str, PredictionError]:
        return {"ttft_s": self.ttft_s, "tbt_s": self.tbt_s, "decoding": self.decoding}

    def record(self, states: list[InstanceState]) -> BeliefRecord:
        """All of it, to be kept or shown."""
        return BeliefRecord(
            tuple(_recorded(state) for state in states),
            {name: error.summary() for name, error in self.errors.items()},
        )

    def _learn(
        self, state: InstanceState, factor: LearnedFactor, seconds: float, expected_s: float
    ) -> None:
        before = factor.value
        if not factor.observe(seconds, expected_s) or not self._learning:
            return
        self._fleet.believe(state.row, believed(state))
        if factor is state.prefill_factor:
            self._books.rescale_prefills(state, factor.value / before)


def believed(state: InstanceState) -> FittedCost:
    """The profile times what was learned."""
    return scaled(
        state.info.cost,
        state.prefill_factor.value,
        state.decode_factor.value,
        state.transfer_factor.value,
    )


def learned_factors(state: InstanceState) -> dict[str, float]:
    """What was learned, by the kind of work."""
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
