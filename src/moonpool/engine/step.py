"""What the engine is asked to do in one step, and what comes of it.

A step mixes prefill chunks and decodes of any lengths: the engine does not tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from moonpool.types import RequestId, SamplingParams, Token


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One sequence's share of a step.

    `new_token_ids` stand at positions `start ...`; the KVCache of every position before `start`
    is already in the blocks of `block_ids`, which also has room for the new ones. If `draw` is
    set, the token that follows the last new one is drawn.
    """

    request_id: RequestId
    new_token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]
    draw: Draw | None


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw the next token. `generated` are the tokens generated so far (for the penalties,
    `min_tokens`), the new ones of this step included; `prompt_ids` the prompt's tokens, each once,
    if there is a penalty for them."""

    params: SamplingParams
    generated: Sequence[int]
    eos_token_ids: Sequence[int]
    prompt_ids: frozenset[int] = frozenset()


LayerDone = Callable[[int], None]
"""Called in the engine's thread after a layer's K and V of the whole step are in their blocks."""


BeforeAttend = Callable[[int], Collection[int]]
"""Called in the engine's thread before a layer's attention reads the KVCache of earlier tokens:
returns when that layer of it is there, and of which sequences of the step it never will be. Those
are computed on with whatever lies there, which changes no other's rows, and nothing is drawn."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens[i]` belongs to the i-th sequence of the step; None where none was asked for."""

    tokens: list[Token | None]
    seconds: float
