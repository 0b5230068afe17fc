"""What is known of one request's drafts: where to find them, and how often they were right."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from moonpool.scheduler.speculation.prompt_lookup import PromptLookup

FIRST_RATE = 0.5
FIRST_DRAFTS = 3.0
UNKNOWN = -1
"""Stands for a token that the draft model guesses only when the step begins."""


class Source(IntEnum):
    """The source of a draft."""

    OWN_TEXT = 0
    CACHED_BLOCKS = 1
    MODEL = 2


class AcceptanceRate:
    """The share of right drafts, recent ones first; a draft counts if all before it were right."""

    __slots__ = ("_keep", "_right", "_seen")

    def __init__(self, first: float = FIRST_RATE, keep: float = 0.95) -> None:
        """It begins at `first`, as if that had been seen in three drafts. Each observation
        leaves `keep` of the weight of those before it."""
        self._right, self._seen, self._keep = first * FIRST_DRAFTS, FIRST_DRAFTS, keep

    @property
    def value(self) -> float:
        """From 0 to 1."""
        return self._right / self._seen

    def observe(self, num_right: int, wrong: bool) -> None:
        """`num_right` drafts were right; `wrong`: the one after them was not."""
        for right in (1.0,) * num_right + (0.0,) * wrong:
            self._right = self._right * self._keep + right
            self._seen = self._seen * self._keep + 1.0


@dataclass(slots=True)
class DraftState:
    """One request's drafts. `rates`: the rates by source; `source` is that of the offered draft.

    The draft model's KVCache of the first `num_computed` tokens is in `block_ids`.
    """

    lookup: PromptLookup
    rates: list[AcceptanceRate]
    source: Source = Source.OWN_TEXT
    offered: tuple[int, ...] = ()  # for the step in progress, whether or not it computes them
    passed_over: tuple[Source, int] | None = None  # the first token of another source's draft
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
