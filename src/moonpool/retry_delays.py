"""How long to wait before the next try, after failures in a row (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryDelays:
    """The figures of one schedule. The caller keeps the number of failures in a row."""

    delays_s: tuple[float, ...]
    """The delay after the first, second, ... failure; the last delay also follows all further
    failures."""
    steady_s: float = math.inf
    """A process or connection that lasted longer than this had started well, so its end counts as a
    first failure."""

    def count(self, num_failures: int, lasted_s: float = 0.0) -> int:
        """Returns the failures in a row, with one more of what lasted `lasted_s`."""
        return 1 if lasted_s > self.steady_s else num_failures + 1

    def after(self, num_failures: int) -> float:
        """Returns the seconds to wait after this many failures in a row."""
        return self.delays_s[min(max(num_failures, 1), len(self.delays_s)) - 1]
