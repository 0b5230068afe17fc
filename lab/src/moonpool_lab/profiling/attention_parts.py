"""Measures the parts of a decode step with one attention worker: model, attention, messages.

A simulation composes clusters with attention workers from these parts.
"""

from __future__ import annotations

from statistics import median

import torch

from moonpool.cores import usable_cores
from moonpool.cost.fitted import DecodeSample, OffloadParts, PrefillSample, fit_cost
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.device_choice import resolve_dtype
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import Engine, choose_split_ops, make_layout
from moonpool_lab.profiling.attention_group import (
    Decodes,
    median_times,
    open_attention_group,
    timed_step,
)

BATCHES = (1, 2, 4, 8, 16)
CONTEXTS = (64, 512, 1024)
REPEATS = 7
_NO_PREFILL = (PrefillSample(num_tokens=1, cached_tokens=0, seconds=1.0),)


def measure_parts(model_name: str, dtype: str = "auto", block_tokens: int = 64) -> OffloadParts:
    """Measures the parts in some seconds. Raises AttentionError or ValueError."""
    torch.set_num_threads(1)
    model = open_model(model_name, resolve_dtype(dtype))
    layout = make_layout(model, block_tokens, choose_split_ops())
    each = max(BATCHES) * layout.blocks_for(max(CONTEXTS) + 1)
    local = Engine(model, choose_split_ops(), empty_cache(layout, each))
    own: list[DecodeSample] = []
    attention: list[DecodeSample] = []
    remote: list[float] = []
    dense: dict[int, list[float]] = {}
    with open_attention_group(model, layout, 1, each) as made:
        engine, ops = made.engine()
        for batch in BATCHES:
            for context in CONTEXTS:
                decodes = Decodes(batch, context, (each,), block_tokens)
                local_s, ways = [], []
                for turn in range(REPEATS + 1):
                    once_s, way = decodes.seconds(local), timed_step(engine, ops, decodes)
                    if turn:  # the first turn only warms up
                        local_s.append(once_s)
                        ways.append(way)
                way = median_times(ways)
                tokens = batch * context
                own.append(DecodeSample(batch, tokens, median(local_s)))
                attention.append(DecodeSample(batch, tokens, way.attention_s))
                remote.append(way.step_s)
                dense.setdefault(batch, []).append(way.model_s)
    alone = fit_cost(_NO_PREFILL, own)
    apart = fit_cost(_NO_PREFILL, attention).decode
    beyond = [
        step_s - alone.decode_step_s(sample.batch, 0) - sample.seconds
        for step_s, sample in zip(remote, attention, strict=True)
    ]
    return OffloadParts(
        model=tuple((batch, median(found)) for batch, found in dense.items()),
        attention=apart,
        message_s=max(median(beyond), 0.0),
        cores=usable_cores(),
    )


def parts_words(parts: OffloadParts) -> str:
    """Describes the parts in one line."""
    e, f, g = parts.attention
    batch, model_s = parts.model[-1]
    return (
        f"attention workers: in a step of {batch} decodes the model takes {1e3 * model_s:.1f}"
        f" ms, attention {1e3 * (e + f * batch):.2f} ms and {1e6 * 1024 * g:.0f} us per 1,024"
        f" tokens, the messages {1e3 * parts.message_s:.2f} ms"
    )
