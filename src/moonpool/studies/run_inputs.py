"""Checks whether two runs have the inputs in common that a comparison needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

INPUTS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("trace", (("run", "trace_sha256"),)),
    ("requests", (("requests",),)),
    ("speed", (("run", "speed"),)),
    ("share of tokens", (("run", "scale_tokens"),)),
    ("seed", (("seed",),)),
    ("TTFT SLO", (("slo", "ttft_s"), ("config", "slo", "ttft_s"))),
    ("TBT SLO", (("slo", "tbt_s"), ("config", "slo", "tbt_s"))),
)
"""The inputs that two runs must share. Each name has the places in the figures where the input may
stand; a replay's own SLO stands before its server's SLO."""


def different_inputs(simulated: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """Returns as phrases the inputs in which two runs differ. If a file lacks an input, the runs
    count as equal in this input."""
    phrases = []
    for name, paths in INPUTS:
        one, other = _first_at(simulated, paths), _first_at(live, paths)
        if one is None or other is None or one == other:
            continue
        if name == "trace":
            one, other = simulated["run"]["trace"], live["run"]["trace"]
            if one == other:
                phrases.append(f"two traces are named {one}")
                continue
        phrases.append(f"{name} {_shown(one)} and {_shown(other)}")
    return phrases


def _first_at(figures: Mapping[str, Any], paths: Sequence[tuple[str, ...]]) -> Any:
    for path in paths:
        found: Any = figures
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        if found is not None and found != "":
            return found
    return None


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
