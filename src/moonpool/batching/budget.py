"""How many tokens a step may have beside decodes, so that none of them waits beyond its SLO.

SARATHI aligns chunk and decodes together to the device's tile (section 4.3: one token more than a
tile costs a whole one), and Sarathi-Serve takes the largest budget whose step meets the SLO on the
time between tokens (section 4.3). Theirs is chosen once, from a profile; here it is chosen for
every step, since contexts grow and batches change. Estimates come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable

LEAST_CHUNK_TOKENS = 32
"""A prefill's share of a step where the decodes leave it none: so it ends, whatever they take."""


def token_budget(
    step_s: Callable[[int], float],
    num_decodes: int,
    limit_s: float,
    tile_tokens: int,
    most_tokens: int,
) -> int:
    """Tokens for the next step, decodes included: the most whole tiles that `step_s` of their chunk
    says take at most `limit_s`; `most_tokens` at most, and never less than the smallest number of
    tiles that gives a chunk `LEAST_CHUNK_TOKENS`.

    `step_s(n)` is the time of a step of n prefill tokens and all the decodes; it must not fall.
    """
    assert tile_tokens > 0 and most_tokens > 0 and num_decodes >= 0
    least = -(-(num_decodes + LEAST_CHUNK_TOKENS) // tile_tokens)
    if least * tile_tokens >= most_tokens:
        return most_tokens
    if step_s(most_tokens - num_decodes) <= limit_s:
        return most_tokens
    low, high = least, most_tokens // tile_tokens  # high is too many, or not looked at yet
    while low < high:
        middle = (low + high + 1) // 2
        if step_s(middle * tile_tokens - num_decodes) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return low * tile_tokens
