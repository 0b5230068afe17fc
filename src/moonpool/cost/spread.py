"""How far single steps depart from the time that is usual for them, as a few equally likely ratios.

A machine that serves has company of its own doing: the head, the client, transfers, the kernel. A
mean alone would put every gap at the same place, and no quantile of gaps would be right. Pure; a
simulation draws from the ratios with a generator of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

NUM_RATIOS = 32


def equally_likely(ratios: Sequence[float]) -> tuple[float, ...]:
    """A few that stand for all of these, rising, with the same mean; empty if they are too few."""
    if len(ratios) < NUM_RATIOS:
        return ()
    found = sorted(ratios)
    share = len(found) / NUM_RATIOS
    parts = (found[int(i * share) : int((i + 1) * share)] for i in range(NUM_RATIOS))
    return tuple(fsum(part) / len(part) for part in parts)
