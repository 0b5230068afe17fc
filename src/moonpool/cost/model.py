"""How long steps, transfers and loads take: the protocols.

The Conductor predicts with a `CostModel`; a simulator takes a `StepCost` as ground truth. Both
models are deterministic and without state: equal arguments give equal results on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import NamedTuple, Protocol

# The scheduler of an instance uses these limits to plan steps that mix prefill chunks with decodes,
# and the Conductor uses them to predict.
CHUNKED_STEP_SHARE = 0.85
"""Share of the TBT SLO that a step with chunks and decodes may take. The rest is a margin, because
the mean of the longest tenth of the gaps is above the shortest of them."""
LEAST_CHUNK_TOKENS = 4
"""A prefill's chunk where the decodes leave no room, so that the prefill ends in any case. The
number is small: on a device without tiles, 32 tokens can take most of the SLO, and with a few
decodes more than that."""
SHARED_CHUNK_TOKENS = 128
"""The least chunk for which a decode instance takes prompts: a tile of most devices. The Conductor
counts it in the step time of an instance that computes prompts in chunks beside its decodes."""


class Chunk(NamedTuple):
    """A run of one prompt's tokens computed in one step."""

    num_tokens: int
    start: int  # number of context tokens before the chunk, cached or computed earlier
    cached_tokens: int  # number of cached tokens of the prompt, at which computing began
    last: bool  # whether the chunk ends the prompt, so that its last token needs logits
    prompt_tokens: int = 0  # tokens of the whole prompt; 0 if unknown

    @property
    def first(self) -> bool:
        """Whether this is the first computed chunk of its prompt."""
        return self.start == self.cached_tokens


class CostModel(Protocol):
    """A cost model, with all durations in seconds. Deterministic, without side effects."""

    @property
    def tile_tokens(self) -> int:
        """Steps of a multiple of this many tokens use the device best; 1 means that the device has
        no tiles."""
        ...

    def prefill_s(self, num_tokens: int, cached_tokens: int) -> float:
        """Time to prefill a prompt of `num_tokens`, of which the first `cached_tokens` are
        cached."""
        ...

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Time of one decode step of `batch` requests whose contexts sum to `context_tokens`."""
        ...

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        """Time of a step of these chunks and of `decode_batch` requests whose contexts sum to
        `decode_context_tokens`. An empty step takes no time."""
        ...

    def transfer_s(self, num_bytes: int, same_host: bool, num_sharing: int = 1) -> float:
        """Time to move KVCache between instances while `num_sharing` transfers, this one included,
        share the source."""
        ...

    def load_s(self, num_bytes: int, num_sharing: int = 1) -> float:
        """Time to read KVCache from the instance's SSD while `num_sharing` loads, this one
        included, share it; infinite without an SSD."""
        ...


class StepCost(Protocol):
    """How long a step of any chunks and decodes takes on an instance, in seconds.

    A pipeline has `num_stages` > 1: `step_s` is then the time of ONE stage, and `hop_s` the time to
    send the activations to the next. An empty step takes no time.
    """

    @property
    def num_stages(self) -> int: ...

    def step_s(
        self, chunks: Sequence[Chunk], decode_batch: int, decode_context_tokens: int
    ) -> float:
        """Time of a step of these chunks and of `decode_batch` requests whose contexts sum to
        `decode_context_tokens`."""
        ...

    def decode_steps_s(self, batch: int, context_tokens: int, num_steps: int) -> float:
        """Time of `num_steps` consecutive steps of decodes alone, each adding `batch` tokens of
        context: the sum of `step_s`, to rounding, without computing each."""
        ...

    def hop_s(self, num_tokens: int) -> float:
        """Time to send the activations of `num_tokens` tokens to the next stage."""
        ...


def prompt_chunks(num_tokens: int, cached_tokens: int, chunk_tokens: int) -> tuple[Chunk, ...]:
    """Cuts a prompt into chunks of at most `chunk_tokens`. At least the last token of the prompt is
    computed, for its logits."""
    start = min(cached_tokens, num_tokens - 1)
    assert start >= 0 and chunk_tokens >= 1
    return tuple(
        Chunk(
            num_tokens=min(chunk_tokens, num_tokens - at),
            start=at,
            cached_tokens=start,
            last=at + chunk_tokens >= num_tokens,
            prompt_tokens=num_tokens,
        )
        for at in range(start, num_tokens, chunk_tokens)
    )


def prompt_s(
    ground_truth: StepCost, num_tokens: int, cached_tokens: int, chunk_tokens: int
) -> float:
    """Time for which a prompt's chunks keep an instance, or each of its stages, busy."""
    chunks = prompt_chunks(num_tokens, cached_tokens, chunk_tokens)
    return fsum(ground_truth.step_s((chunk,), 0, 0) for chunk in chunks)


class OneStage:
    """The part of a `StepCost` that an instance without a pipeline has."""

    @property
    def num_stages(self) -> int:
        return 1

    def hop_s(self, num_tokens: int) -> float:
        return 0.0
