"""The state of one request's drafts: where to find them, and how often they were right."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from moonpool.scheduler.speculation.prompt_lookup import PromptLookup

FIRST_RATE = 0.5
FIRST_DRAFTS = 3.0
UNKNOWN = -1
"""Stands for a token that the draft model guesses only when the step begins."""


class Source(IntEnum):
    """The part that guessed a draft: cached blocks, the request's text, or the draft model."""

    OWN_TEXT = 0
    CACHED_BLOCKS = 1
    MODEL = 2


class AcceptanceRate:
    """The share of right drafts, of which recent ones weigh most; a draft counts if all before it
    were right."""

    __slots__ = ("_keep", "_right", "_seen")

    def __init__(self, first: float = FIRST_RATE, keep: float = 0.95) -> None:
        """The rate starts at `first`, as if that share had been seen in three drafts. Each
        observation leaves `keep` of the weight of those before it."""
        self._right, self._seen, self._keep = first * FIRST_DRAFTS, FIRST_DRAFTS, keep

    @property
    def value(self) -> float:
        """Returns the rate, from 0 to 1."""
        return self._right / self._seen

    def observe(self, num_right: int, wrong: bool) -> None:
        """Records that `num_right` drafts were right; `wrong`: whether the next one was wrong."""
        for right in (1.0,) * num_right + (0.0,) * wrong:
            self._right = self._right * self._keep + right
            self._seen = self._seen * self._keep + 1.0


@dataclass(slots=True)
class DraftState:
    """The drafts of one request. `rates`: the acceptance rates by source; `source` is the source of
    the offered draft.

    The draft model's KVCache of the first `num_computed` tokens is in `block_ids`.
    """

    lookup: PromptLookup
    rates: list[AcceptanceRate]
    source: Source = Source.OWN_TEXT
    # drafts for the step in progress, whether or not the step computes them
    offered: tuple[int, ...] = ()
    passed_over: tuple[Source, int] | None = None  # (another source, the first token of its draft)
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
