"""What runs in one step: frozen data. A batch has no phase; a request has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moonpool.types import RequestId


class PlanEntry(NamedTuple):
    """`num_tokens` more tokens of one request are computed: 1 for a decode, up to a chunk in
    prefill."""

    request_id: RequestId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BatchPlan:
    entries: tuple[PlanEntry, ...]

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    def __bool__(self) -> bool:
        return bool(self.entries)


class Candidate(NamedTuple):
    """A request that could run: it still lacks `num_uncomputed` tokens (1 when it decodes)."""

    request_id: RequestId
    num_uncomputed: int
