"""Measures how fast this machine is now: others may slow a virtual machine.

No counter on this machine shows their work, but the same loop takes longer. A profile and the live
run that it is compared with are minutes apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

LOOPS = 200_000
TRIES = 7
NOTICED = 1.15


def loop_s() -> float:
    """Returns the best time of a fixed loop. Call it while nothing else runs."""
    return min(_one_loop_s() for _ in range(TRIES))


def drift_words(profiled_loop_s: float, loop_s: float) -> Iterator[str]:
    """Yields a warning if the machine is not as fast as it was when it was profiled."""
    ratio = loop_s / profiled_loop_s
    if not 1 / NOTICED < ratio < NOTICED:
        yield (
            f"the machine took {ratio:.2f} times as long for a loop as when it was profiled: live"
            " figures may differ from simulated ones as much"
        )


def _one_loop_s() -> float:
    began_s = perf_counter()
    found = 0
    for number in range(LOOPS):
        found += number & 3
    return perf_counter() - began_s
