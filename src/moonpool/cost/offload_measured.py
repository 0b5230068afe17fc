"""A decode instance whose attention workers were measured, for its simulation.

The profile is of an instance that attended by itself, or had attention workers, too. What is told
of it holds but for what other workers change: layers of the model's part, messages and attention,
shared out evenly, take the place of those that it had. What the instance keeps itself is one share
more as long as it has room; it attends to that while the others work. With as many workers as it
had nothing changes: a step is what it was seen to take, with all that competed for the cores. Two
staggered batches overlap as in `cost.offload`, and no more is done at once than there are cores.
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
    """Implements `StepCost`. `seen`: an instance with `parts.seen_workers`, one batch at a time."""

    def __init__(
        self,
        seen: FittedCost,
        parts: OffloadParts,
        num_workers: int,
        staggered: bool,
        own_tokens: int = 0,
    ) -> None:
        assert num_workers >= 1 and parts.cores >= 1 and parts.model
        self._seen = seen
        self._parts = parts
        self._workers = num_workers
        self._staggered = staggered
        self._own_tokens = own_tokens

    @property
    def num_stages(self) -> int:
        return 1

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        chunk_s = self._seen.step_s(chunks, 0, 0) if chunks else 0.0
        return chunk_s + self._decode_s(decode_batch, decode_context_tokens)

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        """Grows with the context in straight pieces; where the middle lies on the line between the
        ends, all of it is taken to."""
        if not batch:
            return 0.0
        first_s = self._decode_s(batch, context_tokens)
        last_s = self._decode_s(batch, context_tokens + batch * (num_steps - 1))
        if num_steps > 2:
            half = num_steps // 2
            on_line_s = first_s + (last_s - first_s) * half / (num_steps - 1)
            later = context_tokens + batch * half
            if abs(on_line_s - self._decode_s(batch, later)) > _STRAIGHT * on_line_s:
                return self.decode_steps_s(batch, context_tokens, half) + self.decode_steps_s(
                    batch, later, num_steps - half
                )
        return num_steps * (first_s + last_s) / 2

    def hop_s(self, num_tokens: int) -> float:
        return 0.0

    def _attention_s(
        self, num_workers: int, own_tokens: int, batch: float, context_tokens: float
    ) -> tuple[float, float]:
        """What each worker is busy, and what the instance itself is with what it keeps; they
        compute at once as far as there are cores."""
        e, f, g = self._parts.attention
        places = num_workers + (own_tokens > 0)
        own_context = min(context_tokens / places, own_tokens)
        crowd = max(places / self._parts.cores, 1.0)
        each_s = e + f * batch / places + g * (context_tokens - own_context) / num_workers
        own_s = e + f * batch / places + g * own_context if own_tokens else 0.0
        return each_s * crowd, own_s * crowd

    def _decode_s(self, batch: int, context_tokens: float) -> float:
        if not batch:
            return 0.0
        model_s, seen_workers = self._model_s(batch), self._parts.seen_workers
        if seen_workers:
            seen_s = self._seen.decode_step_s(batch, 0) + self._seen.decode[2] * context_tokens
            seen = seen_workers, self._parts.seen_own_tokens
            seen_layers_s = self._serial_s(*seen, batch, context_tokens)
        else:  # its attention was its own: as far as it goes with contexts, it is not taken along
            seen_s, seen_layers_s = self._seen.decode_step_s(batch, 0), model_s
        if self._staggered and batch >= MIN_STAGGERED:
            layers_s = self._staggered_s(batch, context_tokens)
        else:
            layers_s = self._serial_s(self._workers, self._own_tokens, batch, context_tokens)
        return max(seen_s + layers_s - seen_layers_s, model_s)

    def _serial_s(
        self, num_workers: int, own_tokens: int, batch: int, context_tokens: float
    ) -> float:
        """All layers, one side after the other."""
        attention_s, own_s = self._attention_s(num_workers, own_tokens, batch, context_tokens)
        return self._model_s(batch) + max(self._parts.message_s + attention_s, own_s)

    def _staggered_s(self, batch: int, context_tokens: float) -> float:
        """All layers of two halves that wait for each other."""
        half = ceil(batch / 2)
        attention_s, own_s = self._attention_s(
            self._workers, -(-self._own_tokens // 2), half, context_tokens / 2
        )
        model_s = self._model_s(half) + own_s
        shared_s = (model_s + attention_s * self._workers) / self._parts.cores
        longest_s = max(2 * model_s, 2 * attention_s, model_s + attention_s, 2 * shared_s)
        return self._parts.message_s + longest_s

    def _model_s(self, batch: int) -> float:
        points = self._parts.model
        before, before_s = points[0]
        for after, after_s in points:
            if batch <= after:
                share = (batch - before) / max(after - before, 1)
                return before_s + share * (after_s - before_s)
            before, before_s = after, after_s
        return before_s * batch / before
