"""Drafts: guessed tokens that a step computes after a decode's newest token, to verify them.

A decode with k drafts is a chunk of 1 + k tokens. The engine draws a token from each of its rows
and keeps those up to the first that is not the draft after it. Rows depend neither on their batch
nor on chunks, and a draw is keyed by (seed, position): the tokens are those of plain decoding, and
right drafts only bring them earlier.

Drafts come from what other requests' cached blocks say came next after this very text, else from an
earlier place of the request's own text. They run where they pay: where the tokens that they should
bring, by the share of earlier drafts that were right, save more decoding than their rows cost by
the cost model. A full step has no room for them. Drafts that do not run are still compared with the
token that comes, so a request whose text becomes predictable gets drafts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from moonpool.config import SpeculativeConfig
from moonpool.cost.model import Chunk, CostModel
from moonpool.cost.online import LearnedFactor
from moonpool.scheduler.actions import Effects
from moonpool.scheduler.batch_policies import Share
from moonpool.scheduler.drafts import AcceptanceRate, DraftState
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.kv_cache_manager import KVCacheManager
from moonpool.scheduler.prompt_lookup import PromptLookup
from moonpool.scheduler.request_state import RequestState

LEAST_GAIN = 1.05
"""A step with drafts must promise this many times the tokens per second of one without: what they
cost beside the engine's time is not in the cost model."""
TRIAL_STEPS = 200
"""After so many steps for which only the learned factor spoke against drafts, one step has them:
the factor may stem from a time when the machine was busy."""
TBT_SHARE = 0.85
"""A step with drafts is planned for at most this share of the SLO on the time between tokens."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A request's draft, and the expected number of tokens that each of its tokens brings."""

    request: RequestState
    draft: tuple[int, ...]
    gains: tuple[float, ...]


class Speculation:
    """The drafts of one instance's steps."""

    def __init__(
        self,
        settings: SpeculativeConfig,
        config: InstanceConfig,
        kv_cache: KVCacheManager,
        effects: Effects,
        cost: CostModel,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._settings = settings
        self._config = config
        self._kv_cache = kv_cache
        self._effects = effects
        self._cost = cost
        self._eos = eos_token_ids
        self._factor = LearnedFactor()  # of steps with drafts, beyond that of decodes
        self._pooled = [AcceptanceRate(keep=0.99), AcceptanceRate(keep=0.99)]
        self._steps_without = 0  # because of the factor alone

    def add_drafts(
        self, step: list[Share[RequestState]], budget_tokens: int
    ) -> tuple[list[Share[RequestState]], float]:
        """Returns the step with drafts within the budget, and its predicted seconds; 0 without any.
        Sets `drafts` of the requests that have some."""
        spare = budget_tokens - sum(num_tokens for _, num_tokens in step)
        decodes = [request for request, _ in step if request.decoding]
        if not decodes or spare <= 0:
            return step, 0.0
        times = _StepTimes(self._cost, step, decodes)
        if times.rate(1, 1.0) <= 1.0:
            return step, 0.0  # not even a certain draft would pay
        offers = [self._offer(request) for request in decodes]
        counts = self._choose(offers, times, spare, self._limit_s(decodes))
        if not counts:
            return step, 0.0
        for offer in offers:
            draft = offer.draft[: counts.get(offer.request.attempt_id, 0)]
            offer.request.drafts = draft[: self._room(offer.request, len(draft))]
        extended = [(request, number + len(request.drafts)) for request, number in step]
        return extended, times.seconds(sum(len(request.drafts) for request in decodes))

    def judge(self, request: RequestState, token_ids: Sequence[int]) -> None:
        """Learns from the tokens that a step drew for a request. Must be called before its drafts
        are forgotten."""
        state, num_drafts = request.speculation, len(request.drafts)
        if state is None or not state.offered:
            return
        num_right = len(token_ids) - 1
        wrong = num_right < num_drafts
        if not num_drafts:  # they did not run, so only the first can be compared
            num_right = int(state.offered[0] == token_ids[0])
            wrong = not num_right
        else:
            self._effects.count("drafts")
            self._effects.count("draft_tokens", num_drafts)
            self._effects.count("accepted_draft_tokens", num_right)
        state.rates[state.source].observe(num_right, wrong)
        self._pooled[state.source].observe(num_right, wrong)
        state.offered = ()

    def learn(self, expected_s: float, seconds: float) -> None:
        """Learns from a step with drafts that took `seconds` of which `expected_s` were predicted,
        both without what slows all decodes."""
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
        draft: tuple[int, ...] = ()
        if request.attempt.keys is not None:  # no tokens in a simulation: its engine knows
            draft = (0,) * max(most, 0)
            state.source, state.offered = 0, draft
            return _Offer(request, draft, self._gains(state, len(draft)))
        state.source = 1
        known = self._kv_cache.continuations
        if most > 0 and known is not None and self._kv_cache.caches(request):
            draft = known.draft(request.keys, tokens, most)
        if most > 0 and not draft:
            state.source = 0
            draft = state.lookup.draft(tokens, most)
        state.offered = draft = self._before_end(request, draft)
        return _Offer(request, draft, self._gains(state, len(draft)))

    def _gains(self, state: DraftState, num_drafts: int) -> tuple[float, ...]:
        rate = state.rates[state.source].value
        return tuple([rate ** (i + 1) for i in range(num_drafts)])

    def _before_end(self, request: RequestState, draft: tuple[int, ...]) -> tuple[int, ...]:
        """The draft without tokens that may end the answer: nothing comes after them."""
        sampling = request.attempt.sampling
        for index, token_id in enumerate(draft):
            ends = token_id in self._eos and not sampling.ignore_eos
            if ends or token_id in sampling.stop_token_ids:
                return draft[:index]
        return draft

    def _choose(
        self, offers: Sequence[_Offer], times: _StepTimes, spare: int, limit_s: float
    ) -> dict[str, int]:
        """How many drafts each attempt gets, so that the step yields the most tokens per second."""
        steps = [(gain, offer.request.attempt_id) for offer in offers for gain in offer.gains]
        steps.sort(key=lambda each: -each[0])  # of one request, the first draft comes first
        slower = self._factor.value
        best, best_rate, gained = 0, LEAST_GAIN, 0.0
        best_plain, best_plain_rate = 0, LEAST_GAIN
        for number, (gain, _) in enumerate(steps[:spare], 1):
            if times.seconds(number) > limit_s:
                break
            gained += gain
            rate = times.rate(number, gained)
            if rate > best_plain_rate:
                best_plain, best_plain_rate = number, rate
            if rate / slower > best_rate:
                best, best_rate = number, rate / slower
        if best:
            self._steps_without = 0
        elif best_plain:
            self._steps_without += 1
            if self._steps_without >= TRIAL_STEPS:
                best, self._steps_without = best_plain, 0
        counts: dict[str, int] = {}
        for _, attempt_id in steps[:best]:
            counts[attempt_id] = counts.get(attempt_id, 0) + 1
        return counts

    def _limit_s(self, decodes: Sequence[RequestState]) -> float:
        own = (request.attempt.slo.tbt_s for request in decodes)
        return TBT_SHARE * min(self._config.tbt_slo_s if tbt_s == inf else tbt_s for tbt_s in own)

    def _room(self, request: RequestState, num_drafts: int) -> int:
        """How many drafts the request's blocks have room for; takes more blocks if there are."""
        size = request.tokens.size
        if num_drafts and not self._kv_cache.grow(request, size + num_drafts):
            held = len(request.block_ids) * self._kv_cache.layout.block_tokens
            return min(num_drafts, held - size)
        return num_drafts


class _StepTimes:
    """Predicted times of one step with any number of drafts. A draft costs a decode's row."""

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
        self._saved_s = cost.decode_step_s(self._batch, self._context_tokens) / self._batch

    def seconds(self, num_drafts: int) -> float:
        """The step's time with so many drafts."""
        batch = self._batch + num_drafts
        return self._cost.step_s(self._chunks, batch, self._context_tokens)

    def rate(self, num_drafts: int, gained_tokens: float) -> float:
        """How many times the work per second of a step without drafts this one does, if they bring
        `gained_tokens`."""
        seconds = self.seconds(num_drafts)
        return (self._base_s + gained_tokens * self._saved_s) / seconds if seconds else 1.0
