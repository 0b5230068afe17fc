"""Prices steps by a measured cost inside its domain, and by the device's roofline outside. Pure.

    step = roofline(step) + what the measurement adds to it

The roofline prices a step by its parts: chunks and decodes share one read of the weights, and
attention counts separately. The measurement adds its departure from the roofline:

    prompt    weight (fit(n, p) - roofline(n, p)), spread evenly over the n - p computed tokens
    decodes   fit - roofline, at the nearest measured batch and sum of contexts

So a prompt of the domain costs as much as in the fit, if its chunks run alone with `CHUNK_TOKENS`
each. A decode step of the domain costs as much as in the fit, too. The weight falls to 0 outside
the domain (`cost.domain`), and a decode's departure keeps its value at the border, so no cost jumps
there.

Prompts were measured one at a time. All departures that shorten a step count, but only the largest
departure that lengthens it: a constant of each prompt, such as the engine's overhead, occurs once
per step.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.cost.domain import CostDomain
from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import Chunk, OneStage, prompt_s
from moonpool.sim.hardware.roofline import RooflineCost

CHUNK_TOKENS = 2048
"""The assumed chunk size of the measured prompts, which is also the default of `simulate`."""
MEMO_ENTRIES = 65_536


class DomainCost(OneStage):
    """`fitted`, which must have a domain, on the device of `roofline`; implements `StepCost`."""

    def __init__(self, fitted: FittedCost, roofline: RooflineCost) -> None:
        assert fitted.domain is not None
        self.fitted = fitted
        self.roofline = roofline
        self.domain: CostDomain = fitted.domain
        self._context_token_s = fitted.decode[2] - roofline.decode_attention_s(1)
        self._prompt_memo: dict[tuple[int, int], float] = {}
        self._decode_memo: dict[int, float] = {}

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        seconds = self.roofline.step_s(chunks, decode_batch, decode_context_tokens)
        shorter_s = longest_s = 0.0
        if decode_batch:
            longest_s = self._batch_departure_s(decode_batch)
            longest_s += self._context_token_s * self.domain.nearest_context(decode_context_tokens)
            if longest_s < 0.0:
                shorter_s, longest_s = longest_s, 0.0
        for chunk in chunks:
            added_s = chunk.num_tokens * self._departure_s_per_token(chunk)
            if added_s < 0.0:
                shorter_s += added_s
            elif added_s > longest_s:
                longest_s = added_s
        return seconds + shorter_s + longest_s

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        if batch == 0:
            return 0.0
        seconds = self.roofline.decode_steps_s(batch, context_tokens, num_steps)
        contexts = self._sum_of_nearest_contexts(batch, context_tokens, num_steps)
        departure_s = num_steps * self._batch_departure_s(batch)
        return seconds + departure_s + self._context_token_s * contexts

    def prompt_departure_s(self, num_tokens: int, cached_tokens: int) -> float:
        """Returns the seconds by which a prompt departs from the roofline, its computed tokens
        together."""
        computed = num_tokens - cached_tokens
        return computed * self._prompt_departure_s(num_tokens, cached_tokens)

    def decode_departure_s(self, batch: int) -> float:
        """Returns the least difference from the roofline of a step of `batch` decodes, over all
        contexts."""
        ends = (self._context_token_s * context for context in self.domain.context_tokens)
        return self._batch_departure_s(batch) + min(ends)

    def _departure_s_per_token(self, chunk: Chunk) -> float:
        """Returns how far a computed token of the chunk's prompt departs from the roofline, in
        seconds."""
        num_tokens = max(chunk.prompt_tokens, chunk.start + chunk.num_tokens)
        key = num_tokens, chunk.cached_tokens
        found = self._prompt_memo.get(key)
        if found is None:
            if len(self._prompt_memo) >= MEMO_ENTRIES:
                self._prompt_memo.clear()
            found = self._prompt_memo[key] = self._prompt_departure_s(*key)
        return found

    def _prompt_departure_s(self, num_tokens: int, cached_tokens: int) -> float:
        weight = self.domain.prompt_weight(num_tokens, cached_tokens)
        if weight == 0.0:
            return 0.0
        roofline_s = prompt_s(self.roofline, num_tokens, cached_tokens, CHUNK_TOKENS)
        departure_s = self.fitted.prefill_s(num_tokens, cached_tokens) - roofline_s
        return weight * departure_s / (num_tokens - cached_tokens)

    def _batch_departure_s(self, batch: int) -> float:
        """Returns the departure of a decode step without its contexts."""
        found = self._decode_memo.get(batch)
        if found is None:
            nearest, _ = self.domain.nearest_decodes(batch, 0)
            fitted_s = self.fitted.decode_step_s(nearest, 0)
            found = self._decode_memo[batch] = fitted_s - self.roofline.step_s((), nearest, 0)
        return found

    def _sum_of_nearest_contexts(self, batch: int, context_tokens: int, num_steps: int) -> int:
        """The sum of `nearest_context` over steps that each add `batch` tokens of context."""
        least, most = self.domain.context_tokens
        below = min(max(-(-(least - context_tokens) // batch), 0), num_steps)
        within = min(max((most - context_tokens) // batch + 1, below), num_steps)
        inside = (within - below) * context_tokens
        inside += batch * ((within - below) * (below + within - 1) // 2)
        return least * below + inside + most * (num_steps - within)
