"""What a server's metrics say of damage. Faults of processes damage nothing."""

from __future__ import annotations

import time

import httpx

from moonpool_lab.replay.server import parse_metrics

CORRUPT = "moonpool:corrupt_slices_total"
REPORT_S = 2.5
"""Within this time, busy instances have told the head what they counted."""


def corrupt_slices(url: str, wait_s: float = REPORT_S) -> int:
    """Slices with a wrong checksum that this head has counted. Raises httpx.HTTPError."""
    time.sleep(wait_s)
    return int(parse_metrics(httpx.get(f"{url}/metrics", timeout=30).text)[CORRUPT])
