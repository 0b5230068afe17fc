"""Limits of steps that mix prefill chunks with decodes.

The scheduler of an instance plans by them (`scheduler.batching.chunk_budget`), and the Conductor
predicts by them.
"""

from __future__ import annotations

CHUNKED_STEP_SHARE = 0.85
"""Share of the TBT SLO that such a step is planned for: not all of the longest tenth of the gaps
lies at its lower edge."""
LEAST_CHUNK_TOKENS = 4
"""A prefill's chunk where the decodes leave no room, so that the prefill ends in any case. It is
small: on a device without tiles, 32 tokens can take most of the SLO, and with a few decodes more
than that."""
SHARED_CHUNK_TOKENS = 128
"""The least chunk for which a decode instance takes prompts: a tile of most devices. The Conductor
counts it in the step time of an instance that computes prompts so."""
