"""Reads damage counters from a server's metrics. Faults of processes damage nothing."""

from __future__ import annotations

import time

import httpx

from moonpool_lab.replay.server import parse_metrics

CORRUPT = "moonpool:corrupt_slices_total"
REPORT_S = 2.5
"""Within this time, busy instances have reported their counters to the head."""


def corrupt_slices(url: str, wait_s: float = REPORT_S) -> int:
    """Slices with a wrong checksum that this head has counted. Raises httpx.HTTPError."""
    time.sleep(wait_s)
    return int(parse_metrics(httpx.get(f"{url}/metrics", timeout=30).text)[CORRUPT])
