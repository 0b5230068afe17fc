"""The section of docs/benchmarks.md about programs (agents)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def program_rows(*results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of each load, by call-level policy and by the rules of programs."""
    for found in results:
        for row in found["rows"]:
            yield (
                f"{found['instances']}",
                f"{row['load']:g}, {row['policy']}",
                f"{row['p50_s']:.0f} s",
                f"{row['p90_s']:.0f} s",
                f"{row['mean_s']:.0f} s",
                f"{row['computed_twice']:.1%}",
                f"{row['failed']} of {row['programs']}",
            )


_TEXT = (
    "Generated tool agents in a closed loop, simulated on mixed instances whose KVCache cannot hold"
    " all of them at the higher load: from a program's first call to the end of its last one."
)
PROGRAM_SECTION = (
    "Programs of agents",
    _TEXT,
    ("programs", "programs-100"),
    ("instances", "load, policy", "P50", "P90", "mean", "computed twice", "given up"),
    program_rows,
)
