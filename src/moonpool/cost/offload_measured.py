"""A decode instance whose attention workers were measured, for its simulation.

What is told of the instance alone, but for its contexts, it takes with attention workers, too; then
come the messages and the attention, shared out evenly. Two staggered batches overlap as in
`cost.offload`, and no more work is done at once than there are cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import Chunk
from moonpool.cost.offload_parts import OffloadParts

MIN_STAGGERED = 8
"""Smaller batches go as one; engine/staggered.py has the same."""
_STRAIGHT = 1e-12


class MeasuredOffload:
    """Implements `StepCost`. `alone`: the instance with its own KVCache."""

    def __init__(
        self, alone: FittedCost, parts: OffloadParts, num_workers: int, staggered: bool
    ) -> None:
        assert num_workers >= 1 and parts.cores >= 1 and parts.model
        self._alone = alone
        self._parts = parts
        self._workers = num_workers
        self._staggered = staggered

    @property
    def num_stages(self) -> int:
        return 1

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        chunk_s = self._alone.step_s(chunks, 0, 0) if chunks else 0.0
        return chunk_s + self._decode_s(decode_batch, decode_context_tokens)

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        """Grows with the context in straight pieces that bend upwards only."""
        if not batch:
            return 0.0
        first_s = self._decode_s(batch, context_tokens)
        last_s = self._decode_s(batch, context_tokens + batch * (num_steps - 1))
        if num_steps > 2:
            half = num_steps // 2
            on_line_s = first_s + (last_s - first_s) * half / (num_steps - 1)
            later = context_tokens + batch * half
            if on_line_s - self._decode_s(batch, later) > _STRAIGHT * on_line_s:
                return self.decode_steps_s(batch, context_tokens, half) + self.decode_steps_s(
                    batch, later, num_steps - half
                )
        return num_steps * (first_s + last_s) / 2

    def hop_s(self, num_tokens: int) -> float:
        return 0.0

    def attention_s(self, batch: float, context_tokens: float) -> float:
        """Of a batch shared out to the workers, which compute at once as far as there are cores."""
        e, f, g = self._parts.attention
        each_s = e + (f * batch + g * context_tokens) / self._workers
        return each_s * max(self._workers / self._parts.cores, 1.0)

    def _decode_s(self, batch: int, context_tokens: float) -> float:
        if not batch:
            return 0.0
        message_s = self._parts.message_s
        serial_s = self._alone.decode_step_s(batch, 0) + message_s
        if not self._staggered or batch < MIN_STAGGERED:
            return serial_s + self.attention_s(batch, context_tokens)
        # What is around the layers is done once; halves then wait for each other.
        half = ceil(batch / 2)
        around_s = max(serial_s - self._model_s(batch), 0.0)
        model_s = self._model_s(half)
        attention_s = self.attention_s(half, context_tokens / 2)
        shared_s = (model_s + attention_s * self._workers) / self._parts.cores
        return around_s + max(2 * model_s, 2 * attention_s, model_s + attention_s, 2 * shared_s)

    def _model_s(self, batch: int) -> float:
        points = self._parts.model
        before, before_s = points[0]
        for after, after_s in points:
            if batch <= after:
                share = (batch - before) / max(after - before, 1)
                return before_s + share * (after_s - before_s)
            before, before_s = after, after_s
        return before_s * batch / before
