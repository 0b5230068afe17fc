"""Drafts: guessed tokens that a step computes after a decode's newest token, to verify them.

A decode with k drafts is a chunk of 1 + k tokens. The engine draws a token from each row and keeps
those up to the first that differs from the draft. Rows depend neither on their batch nor on chunks,
and a draw is keyed by (seed, position): the tokens are the same as in plain decoding, and correct
drafts only bring them earlier.

Drafts come from other requests' cached blocks, if exactly this text was continued there, or else
from an earlier place in the request's own text. A draft model (`draft_model`) guesses where both
find nothing, or are right less often than the model; its time counts as part of the step. Drafts
run where they pay: the expected number of accepted tokens, by the share of earlier drafts that were
right, must save more decoding time than the drafts' rows cost. A step whose budget is used up has
no room for drafts. Drafts that were found but not run are compared with the tokens that follow, so
a request whose text becomes predictable gets drafts again. A draft model that does not pay is
rarely tried out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from moonpool.config.tables import SpeculativeConfig
from moonpool.cost.model import Chunk, CostModel
from moonpool.cost.online import LearnedFactor
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import ActionBuffer
from moonpool.scheduler.batching.policies import Share
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.request_state import RequestState
from moonpool.scheduler.speculation.draft_model import DraftModel
from moonpool.scheduler.speculation.drafts import (
    FIRST_RATE,
    UNKNOWN,
    AcceptanceRate,
    DraftState,
    Source,
)
from moonpool.scheduler.speculation.prompt_lookup import PromptLookup

LEAST_GAIN = 1.05
"""A step with drafts must promise this many times the tokens per second of a step without drafts,
because the cost model includes only the engine's time."""
TRIAL_STEPS = 200
"""After this many steps for which only the learned factor spoke against drafts, one step has
drafts: the factor may stem from a time when the machine was busy."""
FIRST_MODEL_RATE = 0.7
"""The share of a draft model's guesses that is expected to be right before any is known."""
TRIAL_SHARE = 0.05
"""A trial of a draft model may first compute missing KVCache, for this share of the time between
two trials."""
TBT_SHARE = 0.85
"""A step with drafts is planned for at most this share of the SLO on the time between tokens."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A request's draft, and the expected number of tokens that each of its tokens brings."""

    request: RequestState
    draft: tuple[int, ...]
    gains: tuple[float, ...]
    by_model: bool = False

    @property
    def attempt_id(self) -> AttemptId:
        return self.request.attempt_id


class DraftedStep(NamedTuple):
    """A step with drafts, its predicted seconds, and how many of these its draft model takes."""

    step: list[Share[RequestState]]
    seconds: float
    drafting_s: float


class _Choice(NamedTuple):
    """How many drafts each attempt gets, the draft model's time for them, and the tokens per second
    of such a step relative to a step without drafts."""

    counts: dict[AttemptId, int]
    drafting_s: float = 0.0
    rate: float = 1.0


class _Prepared(NamedTuple):
    """Offers that include those of the draft model, the positions up to which its KVCache will be
    complete, the time for that, and an offer to try out."""

    offers: list[_Offer]
    until: Mapping[AttemptId, int] = MappingProxyType({})
    seconds: float = 0.0
    trial: _Offer | None = None


class Speculation:
    """The drafts of one instance's steps."""

    def __init__(
        self,
        settings: SpeculativeConfig,
        config: InstanceConfig,
        kv_cache: KVCacheManager,
        actions_out: ActionBuffer,
        cost: CostModel,
        eos_token_ids: frozenset[int],
        model: DraftModel | None = None,
    ) -> None:
        self._settings = settings
        self._config = config
        self._kv_cache = kv_cache
        self._actions_out = actions_out
        self._cost = cost
        self._eos = eos_token_ids
        self._model = model
        # factor by which steps with drafts are slower, beyond the factor of decodes
        self._factor = LearnedFactor()
        self._pooled = [
            AcceptanceRate(FIRST_MODEL_RATE if source is Source.MODEL else FIRST_RATE, keep=0.99)
            for source in Source
        ]
        # number of steps that had no drafts because of the learned factor alone
        self._steps_without = 0
        # the attempt whose guesses are on trial, although they were not expected to pay
        self._tried: AttemptId | None = None
        # number of steps in which the draft model was not used because its guesses do not pay
        self._steps_without_model = TRIAL_STEPS

    def add_drafts(self, step: list[Share[RequestState]], budget_tokens: int) -> DraftedStep | None:
        """Returns the step with drafts within the budget, or None if no draft pays. Sets `drafts`
        and `draft_task` of the requests that get drafts."""
        spare = budget_tokens - sum(num_tokens for _, num_tokens in step)
        decodes = [request for request, _ in step if request.decoding]
        if not decodes or spare <= 0:
            return None
        times = StepTimes(self._cost, step, decodes)
        if times.rate(1, 1.0) <= 1.0:
            return None  # even a draft that is certainly right would not pay
        offers, limit_s = [self._offer(request) for request in decodes], self._limit_s(decodes)
        prepared = _Prepared(offers)
        if self._model is not None and any(offer.by_model for offer in offers):
            prepared = self._prepare(self._model, offers, times, spare, limit_s)
        limit_s -= prepared.seconds
        choice = self._choose(prepared.offers, times, spare, limit_s)
        if prepared.trial is not None and not choice.counts:
            choice = self._try_out(prepared.trial, times, spare, limit_s)
        if not choice.counts and not prepared.until:
            return None
        for offer in prepared.offers:
            self._give(offer, choice.counts.get(offer.attempt_id, 0), prepared.until)
        if not any(request.drafts or request.draft_task for request in decodes):
            return None
        extended = [(request, number + len(request.drafts)) for request, number in step]
        num_drafts = sum(len(request.drafts) for request in decodes)
        drafting_s = choice.drafting_s + prepared.seconds
        return DraftedStep(extended, times.seconds(num_drafts) + drafting_s, drafting_s)

    def end_draft_task(
        self, request: RequestState, drafted: Sequence[int] | None, num_right: int
    ) -> None:
        """Takes the draft model's guesses for a request, or None if it has failed. Must be called
        before `judge` for the same step."""
        task, request.draft_task = request.draft_task, None
        if task is None or self._model is None:
            return
        self._model.end(request, task, drafted, num_right)
        if self._tried == request.attempt_id:
            self._tried = None
            if drafted and num_right == len(drafted):
                # the trial continues until a guess is wrong
                self._steps_without_model = TRIAL_STEPS
        request.drafts = tuple(drafted or ())

    def forget(self, request: RequestState) -> None:
        """Gives back what the draft model holds for a request that ends or is preempted."""
        if self._model is not None:
            self._model.forget(request)

    def judge(self, request: RequestState, token_ids: Sequence[int]) -> None:
        """Learns from the tokens that a step drew for a request. Must be called before its drafts
        are forgotten."""
        state, num_drafts = request.speculation, len(request.drafts)
        if state is None or not state.offered:
            return
        num_right = len(token_ids) - 1
        wrong = num_right < num_drafts
        if state.passed_over is not None:
            source, first = state.passed_over
            self._observe(state, source, int(first == token_ids[0]), first != token_ids[0])
        if not num_drafts and state.source is Source.MODEL:
            state.offered = ()
            return
        if not num_drafts:  # the drafts did not run, so only the first one can be compared
            num_right = int(state.offered[0] == token_ids[0])
            wrong = not num_right
        else:
            self._actions_out.count("drafts")
            self._actions_out.count("draft_tokens", num_drafts)
            self._actions_out.count("accepted_draft_tokens", num_right)
        self._observe(state, state.source, num_right, wrong)
        state.offered = ()

    def _observe(self, state: DraftState, source: Source, num_right: int, wrong: bool) -> None:
        state.rates[source].observe(num_right, wrong)
        self._pooled[source].observe(num_right, wrong)

    def learn(self, expected_s: float, seconds: float) -> None:
        """Learns from a step with drafts that took `seconds`. `expected_s`: the predicted seconds,
        times the factor by which all decodes are slower."""
        if self._config.learning and self._config.micro_batches == 1:
            self._factor.observe(seconds, expected_s)

    def _offer(self, request: RequestState) -> _Offer:
        state = request.speculation
        if state is None:
            settings = self._settings
            lookup = PromptLookup(settings.prompt_lookup_min, settings.prompt_lookup_max)
            rates = [AcceptanceRate(pooled.value) for pooled in self._pooled]
            state = request.speculation = DraftState(lookup, rates)
        sampling, tokens = request.attempt.sampling, request.tokens
        most = min(
            self._settings.num_speculative_tokens, sampling.max_tokens - tokens.num_generated - 1
        )
        state.offered, state.passed_over = (), None
        if most <= 0:
            return _Offer(request, (), ())
        draft = self._look_up(request, state, most)
        by_model = self._model is not None and self._model.takes(request, most)
        # a found draft costs nothing, so it is preferred if it is right as often
        if by_model and draft:
            by_model = state.rates[state.source].value < state.rates[Source.MODEL].value
            if by_model:
                state.passed_over = state.source, draft[0]
        if by_model:
            state.source, draft = Source.MODEL, (UNKNOWN,) * most
        state.offered = draft
        rate = state.rates[state.source].value
        gains = tuple([rate ** (i + 1) for i in range(len(draft))])
        return _Offer(request, draft, gains, by_model)

    def _look_up(self, request: RequestState, state: DraftState, most: int) -> tuple[int, ...]:
        """Returns the draft from cached blocks, or else from the request's own text; sets its
        source."""
        state.source, tokens = Source.OWN_TEXT, request.tokens
        # a simulated request has no tokens: the simulated engine knows which drafts are right
        if request.attempt.keys is not None:
            return () if self._settings.method == "draft_model" else (0,) * most
        known = self._kv_cache.continuations
        if known is not None and self._kv_cache.caches(request):
            found = self._before_end(request, known.draft(request.keys, tokens, most))
            if found:
                state.source = Source.CACHED_BLOCKS
                return found
        return self._before_end(request, state.lookup.draft(tokens, most))

    def _before_end(self, request: RequestState, draft: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the draft without tokens that may end the answer, because nothing follows
        them."""
        ends = self._ends(request)
        for index, token_id in enumerate(draft):
            if token_id in ends:
                return draft[:index]
        return draft

    def _ends(self, request: RequestState) -> frozenset[int]:
        """Returns the tokens that may end the answer."""
        sampling = request.attempt.sampling
        eos: frozenset[int] = frozenset() if sampling.ignore_eos else self._eos
        return eos.union(sampling.stop_token_ids) if sampling.stop_token_ids else eos

    # The draft model

    def _prepare(
        self,
        model: DraftModel,
        offers: list[_Offer],
        times: StepTimes,
        spare: int,
        limit_s: float,
    ) -> _Prepared:
        """Lets the draft model compute missing KVCache where its guesses will pay for that."""
        by_model = [offer for offer in offers if offer.by_model]
        aim = self._best(offers, times, spare, limit_s, self._factor.value)
        saved_s = times.saved_s * (1.0 - 1.0 / aim.rate)
        wanted = {
            offer.attempt_id
            for offer in by_model
            if aim.counts.get(offer.attempt_id) and model.pays(offer.request, saved_s)
        }
        trial: _Offer | None = None
        if any(aim.counts.get(offer.attempt_id) for offer in by_model):
            self._steps_without_model = 0
        else:
            self._steps_without_model += 1
            if self._steps_without_model > TRIAL_STEPS:
                nearest = min(by_model, key=lambda offer: model.num_lacking(offer.request))
                most_s = TRIAL_SHARE * TRIAL_STEPS * times.seconds(0)
                certain = replace(nearest, gains=(1.0,) * len(nearest.draft))
                might_pay = self._best([certain], times, spare, limit_s, self._factor.value).counts
                if might_pay and model.lacking_s(nearest.request) <= most_s:
                    trial = nearest
                    wanted = {nearest.attempt_id}
        requests = [(offer.request, len(offer.draft)) for offer in by_model]
        until, seconds = model.prepare(requests, wanted, limit_s - times.seconds(0))
        settled: list[_Offer] = []
        for offer in offers:
            if offer.by_model and until.get(offer.attempt_id) != offer.request.tokens.size:
                # the draft model lacks more KVCache than this step can compute
                offer = replace(offer, gains=())
            settled.append(offer)
            if trial is not None and trial.attempt_id == offer.attempt_id:
                trial = offer if offer.gains else None
        return _Prepared(settled, until, seconds, trial)

    def _try_out(self, offer: _Offer, times: StepTimes, spare: int, limit_s: float) -> _Choice:
        """Tries drafts that are not expected to pay, because how good the model's guesses are is
        known only after it has made some."""
        number = min(len(offer.draft), spare)
        while number:
            drafting = self._drafting([(offer, i) for i in range(number)])
            if times.seconds(number) + drafting.seconds <= limit_s:
                self._steps_without_model, self._tried = 0, offer.attempt_id
                return _Choice({offer.attempt_id: number}, drafting.seconds)
            number -= 1
        return _Choice({})

    def _drafting(self, guesses: Sequence[tuple[_Offer, int]] = ()) -> DraftingTimes:
        times = DraftingTimes(None if self._model is None else self._model.cost)
        for offer, number in guesses:
            self._add_guess(times, offer, number)
        return times

    def _add_guess(self, times: DraftingTimes, offer: _Offer, number: int) -> None:
        if self._model is not None and offer.by_model:
            # Without KVCache for the request, the draft model first computes it in a separate
            # chunk.
            ready = self._model.is_ready(offer.request)
            lacking = self._model.num_lacking(offer.request) if ready else 1
            times.add(offer.request, number, lacking)

    # How many

    def _choose(
        self, offers: Sequence[_Offer], times: StepTimes, spare: int, limit_s: float
    ) -> _Choice:
        """Returns how many drafts each attempt gets, so that the step yields the most tokens per
        second."""
        best = self._best(offers, times, spare, limit_s, self._factor.value)
        if best.counts:
            self._steps_without = 0
            return best
        plain = self._best(offers, times, spare, limit_s, 1.0)
        if plain.counts:
            self._steps_without += 1
            if self._steps_without >= TRIAL_STEPS:
                self._steps_without = 0
                return plain
        return best

    def _best(
        self,
        offers: Sequence[_Offer],
        times: StepTimes,
        spare: int,
        limit_s: float,
        slower: float,
    ) -> _Choice:
        """Returns the best choice if steps with drafts take `slower` times as long as predicted."""
        guesses = [
            (gain, offer, number) for offer in offers for number, gain in enumerate(offer.gains)
        ]
        # of the drafts of one request, the first one is considered first
        guesses.sort(key=lambda each: -each[0])
        best, best_rate, best_s, gained = 0, LEAST_GAIN, 0.0, 0.0
        drafting = self._drafting()
        for number, (gain, offer, place) in enumerate(guesses[:spare], 1):
            self._add_guess(drafting, offer, place)
            if times.seconds(number) + drafting.seconds > limit_s:
                break
            gained += gain
            rate = times.rate(number, gained, drafting.seconds) / slower
            if rate > best_rate:
                best, best_rate, best_s = number, rate, drafting.seconds
        counts: dict[AttemptId, int] = {}
        for _, offer, _ in guesses[:best]:
            counts[offer.attempt_id] = counts.get(offer.attempt_id, 0) + 1
        return _Choice(counts, best_s, best_rate)

    def _give(self, offer: _Offer, number: int, until: Mapping[AttemptId, int]) -> None:
        """Sets a request's drafts and its task for the draft model."""
        request, draft = offer.request, offer.draft[:number]
        request.drafts = draft[: self._room(request, len(draft))]
        end = until.get(offer.attempt_id)
        if self._model is None or not offer.by_model or end is None:
            return
        if request.drafts or not self._model.is_ready(request):
            request.draft_task = self._model.task(
                request, end, len(request.drafts), self._ends(request)
            )

    def _limit_s(self, decodes: Sequence[RequestState]) -> float:
        own = (request.attempt.slo.tbt_s for request in decodes)
        return TBT_SHARE * min(self._config.tbt_slo_s if tbt_s == inf else tbt_s for tbt_s in own)

    def _room(self, request: RequestState, num_drafts: int) -> int:
        """Returns how many drafts the request's blocks have room for; holds more blocks if some are
        free."""
        size = request.tokens.size
        if num_drafts and not self._kv_cache.grow(request, size + num_drafts):
            held = len(request.block_ids) * self._kv_cache.layout.block_tokens
            return min(num_drafts, held - size)
        return num_drafts


class StepTimes:
    """Times of one step with any number of drafts. Each draft adds one row of a decode to the
    step."""

    def __init__(
        self,
        cost: CostModel,
        step: Sequence[Share[RequestState]],
        decodes: Sequence[RequestState],
    ) -> None:
        self._cost = cost
        self._chunks = [
            Chunk(number, request.num_scheduled, request.num_reused, False)
            for request, number in step
            if not request.decoding
        ]
        self._batch = len(decodes)
        self._context_tokens = sum(request.tokens.size for request in decodes)
        self._base_s = self.seconds(0)
        # A right draft saves its request a row of a later step.
        self.saved_s = cost.decode_step_s(self._batch, self._context_tokens) / self._batch

    def seconds(self, num_drafts: int) -> float:
        """Returns the time of the step with this many drafts."""
        batch = self._batch + num_drafts
        return self._cost.step_s(self._chunks, batch, self._context_tokens)

    def rate(self, num_drafts: int, gained_tokens: float, drafting_s: float = 0.0) -> float:
        """Returns the work per second relative to a step without drafts, if the drafts bring
        `gained_tokens` and a draft model takes `drafting_s`."""
        seconds = self.seconds(num_drafts) + drafting_s
        return (self._base_s + gained_tokens * self.saved_s) / seconds if seconds else 1.0


class DraftingTimes:
    """The time of a draft model, as guesses are added one by one. The draft model guesses in
    rounds: each round is a step of its own, and adds one token to every request that wants
    another."""

    def __init__(self, cost: CostModel | None) -> None:
        self.seconds = 0.0
        self._cost = cost
        self._rows: list[int] = []
        self._context_tokens: list[int] = []
        self._round_s: list[float] = []

    def add(self, request: RequestState, number: int, num_lacking: int) -> None:
        """Adds the request's guess `number`, counted from 0. Before the request's first guess, the
        draft model computes `num_lacking` tokens."""
        assert self._cost is not None
        if number == len(self._rows):
            self._rows.append(0)
            self._context_tokens.append(0)
            self._round_s.append(0.0)
        self._rows[number] += 1 if number else num_lacking
        self._context_tokens[number] += request.tokens.size
        rows, context_tokens = self._rows[number], self._context_tokens[number]
        round_s = self._cost.decode_step_s(rows, context_tokens)
        self.seconds += round_s - self._round_s[number]
        self._round_s[number] = round_s
