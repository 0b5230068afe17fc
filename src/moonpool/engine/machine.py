"""What machine this is, for profiles and reports."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """As the kernel calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or "unknown CPU"
