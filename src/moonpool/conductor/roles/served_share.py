"""Estimates the share of the recent requests that pools with these loads could serve.

Under overload some of these requests are rejected. Admission by expected goodput serves the
requests that need least, so two splits with equal loads may serve different numbers of requests.
Where a few long prompts cause most of the prefill load, further prefill instances serve few
additional requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from moonpool.conductor.instance_table import Floats, InstanceTable

MAX_REQUESTS = 512
WEIGHTS = ((1.0, 0.0), (1.0, 0.3), (1.0, 1.0), (0.3, 1.0), (0.0, 1.0))
"""Weights of the prefill and decode needs: requests are ordered by the weighted sum. The order that
serves most requests counts."""


class RecentRequest(NamedTuple):
    at_s: float
    new_tokens: int
    cached_tokens: int
    most_tokens: float  # most tokens of the answer after its first token
    kind: int


class RecentRequests:
    """The last requests, served or not."""

    def __init__(self) -> None:
        self._requests: deque[RecentRequest] = deque(maxlen=MAX_REQUESTS)

    def add(self, request: RecentRequest) -> None:
        self._requests.append(request)

    def needs(
        self, table: InstanceTable, since_s: float, mean_tokens: Callable[[int], float]
    ) -> Needs:
        """Returns what each request since then needs of prefill and decode. `mean_tokens`: mean
        tokens of answers of a kind, without their first token."""
        recent = [request for request in self._requests if request.at_s >= since_s]
        rows = (table.prefills | table.decodes).nonzero()[0]
        if not recent or not len(rows):
            return Needs(np.zeros(0), np.zeros(0))
        row = int(rows[0])
        new = np.array([request.new_tokens for request in recent], dtype=np.float64)
        cached = np.array([request.cached_tokens for request in recent], dtype=np.float64)
        answers = np.array([min(r.most_tokens, mean_tokens(r.kind)) for r in recent])
        prefill_s = table.prefill_base_s.item(row) + new * (
            table.prefill_s_per_token.item(row)
            + table.prefill_s_per_token_squared.item(row) * new
            + table.prefill_s_per_new_x_cached.item(row) * cached
        )
        decode_s = answers * (
            table.decode_s_per_sequence.item(row)
            + table.decode_s_per_context_token.item(row) * (new + cached + 0.5 * answers)
        )
        return Needs(_shares(prefill_s), _shares(decode_s))


class Needs(NamedTuple):
    """The share of each request in the demand of all requests. It is empty if no request is
    known."""

    prefill: Floats
    decode: Floats

    def load(self, prefill_load: float, decode_load: float) -> float:
        """Returns one load for both pools: the higher one without overload, else the inverse of the
        share of requests that can be served."""
        worst = max(prefill_load, decode_load)
        if worst <= 1.0 or worst == float("inf") or not len(self.prefill):
            return worst
        prefill, decode = self.prefill * prefill_load, self.decode * decode_load
        served = max(_num_served(prefill, decode, weights) for weights in WEIGHTS)
        return min(len(prefill) / max(served, 1.0), worst)


def _shares(needs: Floats) -> Floats:
    total = float(needs.sum())
    return needs / total if total > 0.0 else needs


def _num_served(prefill: Floats, decode: Floats, weights: tuple[float, float]) -> float:
    """Returns how many requests are served in this order before a pool is used up. The last one
    counts in part, so that the result changes continuously with the loads."""
    order = np.argsort(weights[0] * prefill + weights[1] * decode, kind="stable")
    used = np.maximum(np.cumsum(prefill[order]), np.cumsum(decode[order]))
    num = int(np.searchsorted(used, 1.0, side="right"))
    if num == len(used):
        return float(num)
    before = used.item(num - 1) if num else 0.0
    part: float = (1.0 - before) / max(used.item(num) - before, 1e-12)
    return num + part
