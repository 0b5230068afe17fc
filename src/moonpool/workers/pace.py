"""Keeps decodes on pace beside prefill chunks: how many tokens the next step may have.

Owns what an instance has learned of its own steps of both kinds: by what factor they take longer
than the cost model says. Never chooses what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from moonpool.batching.budget import token_budget
from moonpool.config import InstanceConfig
from moonpool.cost.learned import LearnedFactor
from moonpool.cost.model import Chunk, CostModel
from moonpool.workers.active import ActiveWork

SHARE = 0.9
"""Of the steps planned to take all that the SLO leaves, so many should: a promise is judged by the
longest tenth of an answer's gaps, and under load every gap is such a step."""
HEADROOM = 0.85
"""Steps are planned for so much of the SLO: the longest tenth is not all at its lower edge."""

Share = tuple[ActiveWork, int]


class Pace:
    def __init__(self, config: InstanceConfig, cost: CostModel) -> None:
        self._factor = LearnedFactor(SHARE, summed=1)  # of steps with chunks and decodes
        self._config = config
        self._cost = cost

    def budget(self, decodes: Sequence[ActiveWork], prefills: Sequence[ActiveWork]) -> int:
        """Tokens for a step of all these decodes and some of the prefills, which come in order."""
        most_tokens = self._config.chunk_tokens
        tbt_s = min((self._tbt_s(active) for active in decodes), default=inf)
        if tbt_s == inf or not prefills:
            return most_tokens
        batch, context_tokens = len(decodes), sum(active.tokens.size for active in decodes)

        def step_s(num_tokens: int) -> float:
            return self._step_s(_chunks(prefills, num_tokens), batch, context_tokens)

        limit_s = tbt_s * HEADROOM / self._factor.value
        return token_budget(step_s, batch, limit_s, self._cost.tile_tokens, most_tokens)

    def expect(self, step: Sequence[Share]) -> float:
        """What a step should take by the cost model alone, 0 unless it has chunks and decodes. To
        be asked before any of its tokens are booked as scheduled."""
        chunks = [_chunk(active, num) for active, num in step if not active.decoding]
        batch = len(step) - len(chunks)
        if not chunks or not batch:
            return 0.0
        context_tokens = sum(active.tokens.size for active, _ in step if active.decoding)
        return self._step_s(chunks, batch, context_tokens)

    def learn(self, expected_s: float, seconds: float) -> None:
        """What a step took of which `expect` said so much."""
        if self._config.learning and expected_s > 0.0:
            # Each gap counts as one: weighed by what was expected, one that was long by chance
            # would outweigh the short ones that follow because of it.
            self._factor.observe(seconds / expected_s, 1.0)

    def _step_s(self, chunks: list[Chunk], batch: int, context_tokens: int) -> float:
        """From begin to end. Prompts count with the time of one stage (see `cost.belief`); a step
        passes all of them."""
        seconds = self._cost.step_s(chunks, batch, context_tokens)
        further = self._config.micro_batches - 1
        return seconds + further * self._cost.step_s(chunks, 0, 0) if further else seconds

    def _tbt_s(self, active: ActiveWork) -> float:
        promised_s = active.work.slo.tbt_s
        return self._config.tbt_slo_s if promised_s == inf else promised_s


def _chunks(prefills: Sequence[ActiveWork], num_tokens: int) -> list[Chunk]:
    """So many tokens of these prompts, in their order, as a chunked batch takes them."""
    chunks: list[Chunk] = []
    for active in prefills:
        if num_tokens <= 0:
            break
        share = min(active.num_uncomputed, num_tokens)
        chunks.append(_chunk(active, share))
        num_tokens -= share
    return chunks


def _chunk(active: ActiveWork, num_tokens: int) -> Chunk:
    return Chunk(
        num_tokens=num_tokens,
        start=active.num_scheduled,
        cached_tokens=min(active.num_reused, active.num_scheduled),
        last=num_tokens == active.num_uncomputed,
    )
