"""The Conductor's belief, made from a truth: what Mooncake calls offline polynomial regression.

It asks the truth for the times of many prompts and decode steps and fits `FittedCost` to them.
Nothing here is measured; a live instance's measurements are fitted by `engine.calibrate`.
"""

from __future__ import annotations

import msgspec

from moonpool.cost.fitted import (
    DecodeSample,
    FittedCost,
    MixedSample,
    PrefillSample,
    fit_cost,
)
from moonpool.cost.model import Chunk, StepCost, prompt_s

CACHED_SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SHORTEST_TOKENS = 128
MIXED_CONTEXTS = (512, 4096)  # of each decode beside a chunk


def fit_belief(
    truth: StepCost,
    chunk_tokens: int,
    max_tokens: int,
    transfer_latency_s: float,
    shared_memory_bytes_per_s: float,
    network_bytes_per_s: float,
    tile_tokens: int = 1,
) -> FittedCost:
    """What `truth` takes for prompts of up to `max_tokens` in chunks of `chunk_tokens`.

    A pipeline's prompt counts with the time for which it keeps a stage busy, not with its latency:
    queues are sums of these, and a prompt behind others pays for filling the pipeline but once. A
    decode step counts with what lies between two tokens: all stages, at an even share of the batch.
    """
    fitted = fit_cost(
        _prefill_samples(truth, chunk_tokens, max_tokens),
        _decode_samples(truth, max_tokens),
        _mixed_samples(truth, chunk_tokens),
    )
    return msgspec.structs.replace(
        fitted,
        transfer_latency_s=transfer_latency_s,
        shared_memory_bytes_per_s=shared_memory_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s,
        tile_tokens=tile_tokens,
    )


def pipelined(whole: FittedCost, num_stages: int) -> FittedCost:
    """Of an instance of so many equal stages that takes `whole` for one step through all of them:
    as `fit_belief` has it."""
    if num_stages == 1:
        return whole
    a, b, c, d = (x / num_stages for x in whole.prefill)
    e, f, g = whole.decode
    mixed = whole.mixed or (f, g)  # those of a step's own share of the decodes
    return msgspec.structs.replace(
        whole,
        prefill=(a, b, c, d),
        decode=(e, f / num_stages, g / num_stages),
        mixed=mixed,
        decode_curve=tuple((batch * num_stages, x) for batch, x in whole.decode_curve),
    )


def scaled(
    belief: FittedCost, prefill_factor: float, decode_factor: float, transfer_factor: float = 1.0
) -> FittedCost:
    """Its times multiplied: because the truth was seen to be so, or to be wrong on purpose."""
    if min(prefill_factor, decode_factor, transfer_factor) <= 0:
        raise ValueError("a belief's times can only be multiplied by factors above 0")
    a, b, c, d = (x * prefill_factor for x in belief.prefill)
    e, f, g = (x * decode_factor for x in belief.decode)
    mixed = belief.mixed
    if mixed is not None:
        mixed = mixed[0] * decode_factor, mixed[1] * decode_factor
    return msgspec.structs.replace(
        belief,
        prefill=(a, b, c, d),
        decode=(e, f, g),
        transfer_latency_s=belief.transfer_latency_s * transfer_factor,
        shared_memory_bytes_per_s=belief.shared_memory_bytes_per_s / transfer_factor,
        network_bytes_per_s=belief.network_bytes_per_s / transfer_factor,
        mixed=mixed,
        decode_curve=tuple((batch, x * decode_factor) for batch, x in belief.decode_curve),
    )


def _prefill_samples(truth: StepCost, chunk_tokens: int, max_tokens: int) -> list[PrefillSample]:
    samples = []
    for num_tokens in _lengths(max_tokens):
        for share in CACHED_SHARES:
            cached = min(int(num_tokens * share), num_tokens - 1)
            seconds = prompt_s(truth, num_tokens, cached, chunk_tokens)
            samples.append(
                PrefillSample(num_tokens=num_tokens, cached_tokens=cached, seconds=seconds)
            )
    return samples


def _decode_samples(truth: StepCost, max_tokens: int) -> list[DecodeSample]:
    stages = truth.num_stages

    def seconds(batch: int, context: int) -> float:
        if stages == 1:
            return truth.step_s((), batch, batch * context)
        share = -(-batch // stages)
        return stages * (truth.step_s((), share, share * context) + truth.hop_s(share))

    return [
        DecodeSample(batch=batch, context_tokens=batch * context, seconds=seconds(batch, context))
        for batch in BATCHES
        for context in _lengths(max_tokens)
    ]


def _mixed_samples(truth: StepCost, chunk_tokens: int) -> list[MixedSample]:
    """Chunks as decode-maximal batches have them: they leave room for the decodes."""
    samples = []
    for batch in (b for b in BATCHES if b <= chunk_tokens // 2):
        new = chunk_tokens - batch
        chunk = Chunk(num_tokens=new, start=0, cached_tokens=0, last=False)
        for context in MIXED_CONTEXTS:
            seconds = truth.step_s((chunk,), batch, batch * context)
            if truth.num_stages > 1:  # what the decodes add, they add in each stage
                added_s = seconds - truth.step_s((chunk,), 0, 0)
                seconds += (truth.num_stages - 1) * added_s
            samples.append(
                MixedSample(
                    num_tokens=new,
                    cached_tokens=0,
                    batch=batch,
                    context_tokens=batch * context,
                    seconds=seconds,
                )
            )
    return samples


def _lengths(max_tokens: int) -> list[int]:
    """Doubling up to the longest."""
    lengths = [max_tokens]
    while lengths[-1] >= 2 * SHORTEST_TOKENS:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]
