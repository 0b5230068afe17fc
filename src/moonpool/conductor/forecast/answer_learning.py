"""What the Conductor learns from a complete answer: lengths, room, chances, prediction errors."""

from __future__ import annotations

from collections.abc import Mapping

from moonpool.conductor.forecast.learners import Learners
from moonpool.conductor.state import InstanceState, TrackedRequest
from moonpool.conductor.waiting.room_forecast import RoomForecast
from moonpool.types import InstanceId, Role


class AnswerLearning:
    """Tells each complete answer to all that learn from it."""

    def __init__(
        self,
        instances: Mapping[InstanceId, InstanceState],
        learners: Learners,
        rooms: RoomForecast,
    ) -> None:
        self._instances = instances
        self._output_predictor = learners.output_predictor
        self._cost_estimator = learners.cost_estimator
        self._goodput = learners.goodput
        self._roles = learners.roles
        self._prefetching = learners.prefetching
        self._rooms = rooms

    def learn_first(self, tracked: TrackedRequest) -> None:
        """Learns from a request that has its first token."""
        if tracked.request.forwarded:  # its tokens are estimates
            return
        self._cost_estimator.note_first_token(tracked.record)
        self._goodput.note_first_token(tracked.record)

    def learn(self, tracked: TrackedRequest, block_tokens: int, now: float) -> None:
        """Call it while the last attempt is still there."""
        if tracked.request.forwarded:
            return
        if self._prefetching is not None:
            self._prefetching.end(tracked, now)
        record, num_prompt_tokens = tracked.record, tracked.request.num_prompt_tokens
        self._rooms.note_answer(record.num_generated_tokens)
        self._roles.note_answer(
            num_prompt_tokens, record.cached_tokens or 0, record.num_generated_tokens
        )
        if tracked.request.sampling.pooling != "none":  # an embedding is no answer of one token
            return
        num_blocks = num_prompt_tokens // block_tokens
        self._output_predictor.learn(tracked, tracked.keys[:num_blocks], now)
        attempt = tracked.attempt
        state = None if attempt is None else self._instances.get(attempt.decoder)
        decodes_only = state is not None and state.role is Role.DECODE
        self._cost_estimator.note_answer(record, decodes_only)
        mixed = state is not None and state.role is not Role.DECODE
        self._goodput.note_answer(record, tracked.predicted_step_s, mixed)
