"""Says in the log how far a model's weights are loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

REPORT_S = 5.0
"""Seconds between two lines. A model that loads faster causes none."""
log = logging.getLogger("moonpool.worker")


def reported(layers: range, now: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """Yields the layers to load, and logs how many are loaded."""
    said_s = now()
    for number, layer in enumerate(layers):
        if now() - said_s >= REPORT_S:
            said_s = now()
            log.info("loading weights: %d of %d layers", number, len(layers))
        yield layer
