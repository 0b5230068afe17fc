"""The sections of docs/benchmarks.md about fronts and the simulator beside peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def front_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of rates and CPU time by what stands before the servers."""
    for name, row in found.items():
        if name not in ("asked", "on_paper", "origin"):
            yield (
                name,
                f"{row['tokens_per_s']:,.0f}",
                f"{row['requests_per_s']:,.0f}",
                f"{row['ttft_p50_ms']:.1f} ms",
                _costs(row["cpu_us_per_token"], "us"),
                _costs(row["cpu_ms_per_request"], "ms"),
            )
    for name, row in found["on_paper"].items():
        tokens, requests = f"{row['tokens_per_s']:,.0f}", f"{row['requests_per_s']:,.0f}"
        yield (f"on paper, {name}", tokens, requests, "-", "-", "-")


def _costs(found: dict[str, float], unit: str) -> str:
    costs = [f"{kind} {cost:.2f} {unit}" for kind, cost in found.items() if cost >= 0.005]
    return ", ".join(costs) or "-"


def simulator_peer_rows(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of CPU time and memory of two simulators by the size of the cluster."""
    for row in found["rows"]:
        prefill, decode, speed = row["size"]
        for name in ("moonpool", "dynamo"):
            one = row[name]
            yield (
                f"{prefill} + {decode}, {speed:g} x, {row['requests']:,} requests",
                name,
                f"{one['cpu_s']:.1f} s",
                f"{one['ms']:.2f} ms",
                f"{one['peak_mb']:,.0f} MB",
            )


_FRONT_TEXT = (
    "Streams and short calls before servers that compute nothing: straight to one server, through"
    " moonpool with one process and with fronts, through vllm-router. Load and servers share the"
    " two threads, so rates are not limits. On paper, each front and the Conductor have a core."
)
FRONT_SECTION = (
    "Fronts",
    _FRONT_TEXT,
    ("front-scale",),
    ("", "tokens/s", "requests/s", "TTFT P50", "CPU a token", "CPU a request"),
    front_rows,
)
_SIMULATOR_TEXT = (
    "The conversation trace on prefill + decode instances with KV-aware placement, whole processes."
    " Their models of time differ, so only the cost of simulating is compared."
)
SIMULATOR_PEER_SECTION = (
    "The simulator beside Dynamo's",
    _SIMULATOR_TEXT,
    ("simulator-peer",),
    ("instances, speed", "simulator", "CPU time", "a request", "peak memory"),
    simulator_peer_rows,
)
