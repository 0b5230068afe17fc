"""What `moonpool profile` writes: the fitted costs, and what they and the curve recommend."""

from __future__ import annotations

import msgspec

from moonpool.cost.fitted import FittedCost
from moonpool.types import Struct


class ChunkChoice(Struct, frozen=True):
    """The largest chunk, in whole tiles, beside such decodes within such an SLO."""

    tbt_s: float
    decodes: int
    context_tokens: int  # of each decode
    chunk_tokens: int  # the decodes not included
    step_s: float  # predicted
    holds: bool  # False: it is the least chunk, and the SLO is missed with it


class Profile(FittedCost, frozen=True):
    """A file of it serves wherever fitted costs do (`hardware.cost`)."""

    # The curve: a step of one chunk, nothing cached.
    step_s_by_tokens: dict[int, float] = msgspec.field(default_factory=dict)
    saturation_tokens: int = 0  # the least chunk with nearly the highest throughput
    chunks: tuple[ChunkChoice, ...] = ()
