"""Makes the Conductor's cost model from another one: fitted to ground truth, pipelined, or scaled.

`fit_to_ground_truth` is what Mooncake calls offline polynomial regression: it evaluates the ground
truth for many prompts and decode steps and fits `FittedCost` to the times. Nothing here is
measured; `engine.calibrate` fits the measurements of a live instance.
"""

from __future__ import annotations

import msgspec

from moonpool.cost.fitted import DecodeSample, FittedCost, MixedSample, PrefillSample, fit_cost
from moonpool.cost.model import Chunk, StepCost, prompt_s

CACHED_SHARES = (0.0, 0.25, 0.5, 0.75, 0.95)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SHORTEST_TOKENS = 128
MIXED_CONTEXTS = (512, 4096)  # tokens of each decode in a mixed step


def fit_to_ground_truth(
    ground_truth: StepCost,
    chunk_tokens: int,
    max_tokens: int,
    transfer_latency_s: float,
    shared_memory_bytes_per_s: float,
    network_bytes_per_s: float,
    tile_tokens: int = 1,
) -> FittedCost:
    """Fits `FittedCost` to the times of prompts of up to `max_tokens` in chunks of `chunk_tokens`.

    In a pipeline, a prompt counts with the time for which it keeps one stage busy, not with its
    latency: queues are sums of these times, and the pipeline is filled only once. A decode step
    counts with the time between two tokens: all stages, each with an even share of the batch.
    """
    fitted = fit_cost(
        _prefill_samples(ground_truth, chunk_tokens, max_tokens),
        _decode_samples(ground_truth, max_tokens),
        _mixed_samples(ground_truth, chunk_tokens),
    )
    return msgspec.structs.replace(
        fitted,
        transfer_latency_s=transfer_latency_s,
        shared_memory_bytes_per_s=shared_memory_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s,
        tile_tokens=tile_tokens,
    )


def pipelined(whole: FittedCost, num_stages: int) -> FittedCost:
    """The cost of an instance with `num_stages` equal stages, from `whole`, the cost of one step
    through all of them; counted as in `fit_to_ground_truth`."""
    if num_stages == 1:
        return whole
    a, b, c, d = (x / num_stages for x in whole.prefill)
    e, f, g = whole.decode
    mixed = whole.mixed or (f, g)  # for one stage's share of the decodes
    domain = whole.domain and whole.domain.of_stages(num_stages)
    return msgspec.structs.replace(
        whole,
        prefill=(a, b, c, d),
        decode=(e, f / num_stages, g / num_stages),
        mixed=mixed,
        decode_curve=tuple((batch * num_stages, x) for batch, x in whole.decode_curve),
        domain=domain,
    )


def scaled(
    cost: FittedCost, prefill_factor: float, decode_factor: float, transfer_factor: float = 1.0
) -> FittedCost:
    """`cost` with its times multiplied: by factors learned online, or to make it wrong on purpose
    in a simulation. Raises ValueError unless all factors are above 0."""
    if min(prefill_factor, decode_factor, transfer_factor) <= 0:
        raise ValueError("cost factors must be above 0")
    a, b, c, d = (x * prefill_factor for x in cost.prefill)
    e, f, g = (x * decode_factor for x in cost.decode)
    mixed = cost.mixed
    if mixed is not None:
        mixed = mixed[0] * decode_factor, mixed[1] * decode_factor
    return msgspec.structs.replace(
        cost,
        prefill=(a, b, c, d),
        decode=(e, f, g),
        transfer_latency_s=cost.transfer_latency_s * transfer_factor,
        shared_memory_bytes_per_s=cost.shared_memory_bytes_per_s / transfer_factor,
        network_bytes_per_s=cost.network_bytes_per_s / transfer_factor,
        mixed=mixed,
        decode_curve=tuple((batch, x * decode_factor) for batch, x in cost.decode_curve),
    )


def _prefill_samples(
    ground_truth: StepCost, chunk_tokens: int, max_tokens: int
) -> list[PrefillSample]:
    samples = []
    for num_tokens in _lengths(max_tokens):
        for share in CACHED_SHARES:
            cached = min(int(num_tokens * share), num_tokens - 1)
            seconds = prompt_s(ground_truth, num_tokens, cached, chunk_tokens)
            samples.append(
                PrefillSample(num_tokens=num_tokens, cached_tokens=cached, seconds=seconds)
            )
    return samples


def _decode_samples(ground_truth: StepCost, max_tokens: int) -> list[DecodeSample]:
    stages = ground_truth.num_stages

    def seconds(batch: int, context: int) -> float:
        if stages == 1:
            return ground_truth.step_s((), batch, batch * context)
        share = -(-batch // stages)
        return stages * (
            ground_truth.step_s((), share, share * context) + ground_truth.hop_s(share)
        )

    return [
        DecodeSample(batch=batch, context_tokens=batch * context, seconds=seconds(batch, context))
        for batch in BATCHES
        for context in _lengths(max_tokens)
    ]


def _mixed_samples(ground_truth: StepCost, chunk_tokens: int) -> list[MixedSample]:
    """Decode-maximal batches: the chunk leaves room for the decodes in the token budget."""
    samples = []
    for batch in (b for b in BATCHES if b <= chunk_tokens // 2):
        new = chunk_tokens - batch
        chunk = Chunk(num_tokens=new, start=0, cached_tokens=0, last=False)
        for context in MIXED_CONTEXTS:
            seconds = ground_truth.step_s((chunk,), batch, batch * context)
            if ground_truth.num_stages > 1:  # the decodes add their part in each stage
                added_s = seconds - ground_truth.step_s((chunk,), 0, 0)
                seconds += (ground_truth.num_stages - 1) * added_s
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
    """Lengths that double up to `max_tokens`."""
    lengths = [max_tokens]
    while lengths[-1] >= 2 * SHORTEST_TOKENS:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]
