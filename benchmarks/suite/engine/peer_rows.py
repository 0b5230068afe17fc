"""Steps an engine through the rows. This module runs under the peer's Python, not ours, beside the
`*_peer.py` script that was started. Imports nothing of moonpool.
"""

import json
import random
import statistics
from collections.abc import Callable
from typing import Any

Steps = Callable[[list[tuple[int, int]]], list[tuple[float, int]]]
"""Seconds and tokens of each step of all sequences (prompt, answer) together."""
VOCABULARY = 8192


class RandomPrompts:
    """Random tokens, the same in every run."""

    def __init__(self) -> None:
        self._rng = random.Random(1)

    def draw(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(VOCABULARY) for _ in range(num_tokens)]


def print_rows(version: str, plan: dict[str, Any], steps: Steps) -> None:
    """Measures the plan's rows, and prints them as one line of JSON."""

    def prefill_s(tokens: int) -> float:
        return sum(seconds for seconds, _ in steps([(tokens, 1)]))

    def decode_s(lengths: list[tuple[int, int]]) -> float:
        """Returns the median of the steps in which all sequences decode, without the first of them,
        in which a prompt ended."""
        full = [seconds for seconds, tokens in steps(lengths) if tokens == len(lengths)]
        return statistics.median(full[1:])

    found: dict[str, Any] = {"version": version, "prefill": {}, "decode": {}}
    prefill_s(plan["chunk_tokens"])  # warms up
    for tokens in plan["prefills"]:
        best_s = min(prefill_s(tokens) for _ in range(plan["repeats"]))
        found["prefill"][str(tokens)] = tokens / best_s
    for row in plan["decodes"]:
        rates = found["decode"].setdefault(str(row["context"]), {})
        rates[str(row["batch"])] = row["batch"] / decode_s(row["lengths"])
    print(json.dumps(found))
