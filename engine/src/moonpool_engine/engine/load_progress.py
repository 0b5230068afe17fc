"""Says in the log how far a model's weights are loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

REPORT_S = 5.0
"""Seconds between two lines. A model that loads faster than this logs no line."""
DRAW_S = 0.3
"""Seconds between two states of a terminal's bar."""
log = logging.getLogger("moonpool.worker")


def reported(layers: range, now: Callable[[], float] = time.monotonic) -> Iterator[int]:
    """Yields the layers to load, and logs how many are loaded.

    Records have `done` and `total`, for a bar. Records with `only_drawn` are not lines of a log.
    """
    said_s = drawn_s = now()
    for number, layer in enumerate(layers):
        now_s = now()
        if now_s - drawn_s >= DRAW_S:
            drawn_s = now_s
            is_line = now_s - said_s >= REPORT_S
            said_s = now_s if is_line else said_s
            state = {"done": number, "total": len(layers), "only_drawn": not is_line}
            log.info("loading weights: %d of %d layers", number, len(layers), extra=state)
        yield layer
