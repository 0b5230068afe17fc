"""Computes how many tokens the next step may have, so that its decodes meet their TBT SLO.

SARATHI aligns a chunk together with the decodes to the device's tile: one token more than a tile
costs a whole tile (section 4.3). Sarathi-Serve takes the largest budget whose step meets the SLO on
the time between tokens (section 4.3), once, from a profile. This module computes the budget for
every step, because contexts grow and batches change.

For each size of step, the module learns the factor by which steps of chunks and decodes take longer
than the cost model predicts. The module does not choose which requests run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from moonpool.cost.model import CHUNKED_STEP_SHARE, LEAST_CHUNK_TOKENS, Chunk, CostModel
from moonpool.cost.online import FactorsBySize
from moonpool.scheduler.batching.policies import Share
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.scheduler.request_state import RequestState

TARGET_SHARE = 0.9
"""Share of the steps with a full budget that should meet the SLO. The SLO is judged by the longest
tenth of an answer's gaps, and under load every gap is such a step."""


class ExpectedStep(NamedTuple):
    """The cost model's prediction for a step of chunks and decodes."""

    tiles: int
    seconds: float


class ChunkBudget:
    """The token budget of steps that mix prefill chunks with decodes."""

    def __init__(self, config: InstanceConfig, cost: CostModel) -> None:
        self._factors = FactorsBySize(TARGET_SHARE)
        self._config = config
        self._cost = cost

    def budget(
        self, decodes: Sequence[Share[RequestState]], prefills: Sequence[Share[RequestState]]
    ) -> int:
        """Returns the tokens of a step with all these decodes and, in their order, some of the
        prefills."""
        most_tokens = self._config.chunk_tokens
        levels_s = {request.attempt.slo.tbt_s for request, _ in decodes}
        usual_s = self._config.tbt_slo_s
        tbt_s = min([usual_s if own_s == inf else own_s for own_s in levels_s], default=inf)
        if tbt_s == inf or not prefills:
            return most_tokens
        batch = len(decodes)
        context_tokens = sum([request.tokens.size for request, _ in decodes])
        waiting_tokens = sum([num for _, num in prefills])

        def step_s(num_tokens: int) -> float:
            chunks = _chunks(prefills, num_tokens)
            tiles = self._tiles(min(num_tokens, waiting_tokens) + batch)
            return self._step_s(chunks, batch, context_tokens) * self._factors.value(tiles)

        limit_s = tbt_s * CHUNKED_STEP_SHARE
        return token_budget(step_s, batch, limit_s, self._cost.tile_tokens, most_tokens)

    def expect(self, step: Sequence[Share[RequestState]]) -> ExpectedStep | None:
        """Returns the cost model's prediction for a step of chunks and decodes, whose last tile
        counts as full, or None for other steps. Callers must ask before they count the step's
        tokens as scheduled."""
        chunks: list[Chunk] = []
        context_tokens = 0
        for request, num in step:
            if request.decoding:
                context_tokens += request.tokens.size
            else:
                chunks.append(_chunk(request, num))
        batch = len(step) - len(chunks)
        if not chunks or not batch:
            return None
        num_tokens = sum(chunk.num_tokens for chunk in chunks) + batch
        tiles = self._tiles(num_tokens)
        empty = tiles * self._cost.tile_tokens - num_tokens
        chunks[-1] = chunks[-1]._replace(num_tokens=chunks[-1].num_tokens + empty)
        return ExpectedStep(tiles, self._step_s(chunks, batch, context_tokens))

    def learn(self, expected: ExpectedStep, seconds: float) -> None:
        """Learns from a step that took `seconds`."""
        if self._config.learning and expected.seconds > 0.0:
            self._factors.observe(expected.tiles, seconds, expected.seconds)

    def _tiles(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cost.tile_tokens)

    def _step_s(self, chunks: list[Chunk], batch: int, context_tokens: int) -> float:
        """Returns the predicted seconds of a step from start to end. The cost model gives the time
        of prompts in one stage (see `cost.fitted`); a step passes all stages."""
        seconds = self._cost.step_s(chunks, batch, context_tokens)
        further = self._config.micro_batches - 1
        return seconds + further * self._cost.step_s(chunks, 0, 0) if further else seconds


def token_budget(
    step_s: Callable[[int], float],
    num_decodes: int,
    limit_s: float,
    tile_tokens: int,
    most_tokens: int,
    least_chunk_tokens: int = LEAST_CHUNK_TOKENS,
) -> int:
    """Returns the tokens of the next step, decodes included.

    The result is `most_tokens` if a step of that many takes at most `limit_s`, or else the largest
    number of whole tiles that does. It is at least the smallest number of tiles that gives a chunk
    `least_chunk_tokens`, even above `limit_s`, but never more than `most_tokens`.

    `step_s(n)` is the time of a step of n prefill tokens and all decodes. Where that time falls
    although n grows, the result meets the limit, but need not be the largest number, because this
    function searches by bisection.
    """
    assert tile_tokens > 0 and most_tokens > 0 and num_decodes >= 0
    least = -(-(num_decodes + least_chunk_tokens) // tile_tokens)
    if least * tile_tokens >= most_tokens:
        return most_tokens
    if step_s(most_tokens - num_decodes) <= limit_s:
        return most_tokens
    # all numbers above `high` are known to be too many
    low, high = least, most_tokens // tile_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(middle * tile_tokens - num_decodes) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low * tile_tokens


def _chunks(prefills: Sequence[Share[RequestState]], num_tokens: int) -> list[Chunk]:
    """Returns the chunks of these prompts in a chunked batch of `num_tokens`."""
    chunks: list[Chunk] = []
    for request, num_uncomputed in prefills:
        if num_tokens <= 0:
            break
        share = min(num_uncomputed, num_tokens)
        chunks.append(_chunk(request, share))
        num_tokens -= share
    return chunks


def _chunk(request: RequestState, num_tokens: int) -> Chunk:
    return Chunk(
        num_tokens=num_tokens,
        start=request.num_scheduled,
        cached_tokens=min(request.num_reused, request.num_scheduled),
        last=num_tokens == request.num_uncomputed,
    )
