"""How long things take. The Conductor holds one cost model as its belief; a simulator, one as
truth."""

from __future__ import annotations

from typing import Protocol


class CostModel(Protocol):
    """All durations in seconds. Deterministic, without side effects."""

    def prefill_s(self, num_tokens: int, cached_tokens: int) -> float:
        """Time to prefill a prompt of `num_tokens`, of which the first `cached_tokens` are
        cached."""
        ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Time of one decode step of `batch` requests whose contexts sum to `context_tokens`."""
        ...

    def transfer_s(self, num_bytes: int, same_host: bool, num_sharing: int = 1) -> float:
        """Time to move KVCache between instances while `num_sharing` transfers share the source."""
        ...
