"""What one tenant has and had lately, by which `fair_share` compares tenants."""

from __future__ import annotations

from dataclasses import dataclass

HALF_LIFE_S = 20.0
"""What was computed for a tenant counts half after this time."""
FOLD_S = 0.5
"""Tokens decay in steps of this time: there are many of them."""


@dataclass(slots=True, eq=False)
class ShareAccount:
    """What one tenant has and had."""

    weight: float = 1.0
    given: float = 0.0  # computed tokens over the weight, decayed up to `at_s`
    at_s: float = 0.0
    held_tokens: int = 0  # of KVCache, by its requests that are under way
    num_under_way: int = 0
    seen_s: float = 0.0

    def level(self, now: float) -> float:
        kept: float = 0.5 ** (max(now - self.at_s, 0.0) / HALF_LIFE_S)
        return self.given * kept + self.held_tokens / self.weight

    def charge(self, num_tokens: int, now: float) -> None:
        """Notes that this many tokens were computed for the tenant."""
        if now - self.at_s > FOLD_S:
            self.given *= 0.5 ** ((now - self.at_s) / HALF_LIFE_S)
            self.at_s = now
        self.given += num_tokens / self.weight
