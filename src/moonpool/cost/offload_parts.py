"""What was measured of a machine's attention workers, so that clusters with them can be told."""

from __future__ import annotations

from moonpool.types import Struct


class OffloadParts(Struct, frozen=True):
    """Of a decode step with one attention worker, all layers together.

    `model`: what the model worker computes, by its batch, straight between these points.
    `attention`: e + f batch + g context, what the worker is busy. `message_s`: what a step takes
    beyond the model's part and attention's. `cores`: that computed. `seen_workers`: how many had
    the instance that the profile around it tells of, beside `seen_own_tokens` that it kept; 0: it
    attended by itself.
    """

    model: tuple[tuple[int, float], ...]
    attention: tuple[float, float, float]
    message_s: float
    cores: int
    seen_workers: int = 0
    seen_own_tokens: int = 0
