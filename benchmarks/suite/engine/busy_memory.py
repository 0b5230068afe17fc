"""Measures how long a long prompt occupies KVCache on the instance that prefills it (Mooncake v3
section 5): inlined in decode batches, on a prefill instance that stores it at the end, and on one
that streams each layer when it is computed.

The measured instance has an engine and a messenger, and its peer is a separate process that
receives the blocks over TCP. The simulator then predicts the same times from the measured costs and
rates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.suite.engine.timed_instance import TimedJob, serve
from benchmarks.suite.pool.layers import LayerwisePair
from moonpool.config.parse import parse_config
from moonpool.cost.fitted import FittedCost
from moonpool.gc_tuning import settle_threads
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.row import TraceRow
from moonpool.types import Role

BLOCK_TOKENS = 64
CHUNK_TOKENS = 512
PROBE_TOKENS = 512  # tokens of the prompt that measures the rate of a stream
DECODES = ((256, 300),) * 4
WAYS = ("inlined", "separate", "separate, layer-wise")
Say = Callable[[str], None]


def bench_occupation(
    model: str, prompt_tokens: int, tbt_s: float, rounds: int, say: Say
) -> dict[str, Any]:
    """Bytes x seconds by way, measured (medians over the rounds) and simulated. Answers under way
    need a token every `tbt_s`. Raises ArenaError, BenchError, ValueError."""
    tokens = 2 * prompt_tokens + sum(map(sum, DECODES)) + 4096
    settle_threads()
    far = LayerwisePair((model, tokens, CHUNK_TOKENS), shared_memory=False)
    try:
        cost = _with_rate(far, rounds)
        layout = far.near.layout
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds + 1):
            for way, held_block_s in _measured(far, prompt_tokens, tbt_s).items():
                if number:  # the first round connects, and touches memory
                    taken[way].append(held_block_s * layout.block_bytes)
    finally:
        far.close()
    measured = {way: statistics.median(values) for way, values in taken.items()}
    simulated = {
        "inlined": _inlined(far, prompt_tokens, tbt_s, cost),
        "separate": separate_s(prompt_tokens, cost, layer_wise=False),
        "separate, layer-wise": separate_s(prompt_tokens, cost, layer_wise=True),
    }
    for way in WAYS:
        say(
            f"occupation, {way}: {measured[way] / 1e9:.4f} GB s,"
            f" simulated {simulated[way] / 1e9:.4f} ({simulated[way] / measured[way] - 1:+.0%})"
        )
    return {
        "prompt_tokens": prompt_tokens,
        "decodes": DECODES,
        "tbt_slo_s": tbt_s,
        "stream_bytes_per_s": cost.shared_memory_bytes_per_s,
        "measured": measured,
        "simulated": simulated,
        "all": taken,
    }


def _with_rate(far: LayerwisePair, rounds: int) -> FittedCost:
    """Returns the instance's cost estimate, and the rate of a stream that is sent when everything
    is computed."""
    layout, seconds = far.near.layout, []
    for _ in range(rounds + 1):
        took = _stored(far, PROBE_TOKENS, layer_wise=False)
        seconds.append(took.stored_s - took.prefill_s)
    rate = PROBE_TOKENS * layout.token_bytes / statistics.median(seconds[1:])
    cost = far.near.cost
    return msgspec.structs.replace(
        cost, shared_memory_bytes_per_s=rate, token_bytes=layout.token_bytes
    )


def _stored(far: LayerwisePair, num_tokens: int, layer_wise: bool) -> Any:
    near = far.near
    near.begin(False, layer_wise_store=layer_wise)
    tokens = near.tokens(num_tokens)
    far.expect(near.next_work_id, near.layout.blocks_for(num_tokens))
    return near.prefill(tokens, False, target=far.address)


def _measured(far: LayerwisePair, prompt_tokens: int, tbt_s: float) -> dict[str, float]:
    near = far.near
    near.begin(False)
    inline = near.prefill_inline(near.tokens(prompt_tokens), DECODES, tbt_s)
    return {
        "inlined": inline.held_block_s,
        "separate": _stored(far, prompt_tokens, layer_wise=False).held_block_s,
        "separate, layer-wise": _stored(far, prompt_tokens, layer_wise=True).held_block_s,
    }


def _inlined(far: LayerwisePair, prompt_tokens: int, tbt_s: float, cost: FittedCost) -> float:
    layout = far.near.layout
    config = InstanceConfig(chunk_tokens=CHUNK_TOKENS, prefix_caching=False, tbt_slo_s=tbt_s)
    jobs = [TimedJob(0.0, *lengths) for lengths in DECODES]
    began_s = 2.0 * cost.prefill_s(sum(prompt for prompt, _ in DECODES), 0)
    jobs.append(TimedJob(began_s, prompt_tokens, 1))
    timed = serve(jobs, config, layout, far.near.num_blocks, cost)
    return timed.held_block_s[-1] * layout.block_bytes


def separate_s(prompt_tokens: int, cost: FittedCost, layer_wise: bool) -> float:
    """The prefill instance of a simulated 1P+1D. Without streams no block leaves before the whole
    prompt is computed, so the prompt is one chunk."""
    chunk_tokens = CHUNK_TOKENS if layer_wise else max(prompt_tokens, CHUNK_TOKENS)
    config = parse_config(
        "",
        {
            "cluster": {"prefill": 1, "decode": 1},
            "pool": {"block_tokens": BLOCK_TOKENS, "dram_tokens_per_instance": 4 * prompt_tokens},
            "engine": {"chunk_tokens": chunk_tokens},
            "conductor": {"admission": "none"},
            "slo": {"ttft_s": 1e5, "tbt_s": 1e5},
            "hardware": {"cost": "profile.json"},
        },
    )
    simulation = Simulation(
        config, build_hardware(config, cost), SimulationSettings(layer_wise=layer_wise)
    )
    row = TraceRow(0.0, prompt_tokens, 2, tuple(range(-(-prompt_tokens // BLOCK_TOKENS))))
    simulation.run(make_arrivals([row], BLOCK_TOKENS, BLOCK_TOKENS, 4 * prompt_tokens))
    held_block_s = sum(
        node.held_block_s.get(Role.PREFILL, 0.0) for node in simulation.nodes.values()
    )
    return held_block_s * BLOCK_TOKENS * cost.token_bytes
