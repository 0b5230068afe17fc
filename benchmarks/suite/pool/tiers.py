"""Measures the gain of each tier of the KVCache pool: one trace, simulated with one more tier at a
time.

All runs have the same cluster, requests and policies, except for the difference that their names
say. Simulated figures do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from moonpool.config.parse import parse_config
from moonpool.config.tables import Config
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.reader import open_trace


def bench_tiers(
    trace_file: str,
    engine_tokens: int,
    dram_tokens: int,
    ssd_tokens: int,
    requests: int | None,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Sizes are per instance. Raises TraceError, ConfigError."""
    rows = []
    for name, config in _configs(engine_tokens, dram_tokens, ssd_tokens):
        row = {"tiers": name, **_run(trace_file, config, requests)}
        rows.append(row)
        echo(
            f"{name:<32} hit {row['hit_ratio']:6.1%} (own DRAM {row['own_dram']:5.1%}, own SSD"
            f" {row['own_ssd']:5.1%}, others {row['others']:5.1%}),"
            f" TTFT {row['mean_ttft_s']:.3f} s, P99 {row['p99_ttft_s']:.2f},"
            f" prefill {row['prefill_s']:.3f} s,"
            f" written {row['written_tb']:.1f} TB, read {row['read_tb']:.1f}"
        )
    return {"rows": rows}


def _configs(engine_tokens: int, dram_tokens: int, ssd_tokens: int) -> Iterator[tuple[str, Config]]:
    def config(placement: str, **pool: Any) -> Config:
        tables = {"conductor": {"placement": placement}, "pool": pool}
        return parse_config("", tables, DEFAULTS)

    yield "engine memory", config("cache-aware", dram_tokens_per_instance=engine_tokens)
    yield "+ DRAM", config("cache-aware", dram_tokens_per_instance=dram_tokens)
    yield "+ remote DRAM", config("kvcache-centric", dram_tokens_per_instance=dram_tokens)
    for admission in ("second-use", "always"):
        yield (
            f"+ SSD, admission {admission}",
            config(
                "kvcache-centric",
                dram_tokens_per_instance=dram_tokens,
                ssd_tokens_per_instance=ssd_tokens,
                ssd_admission=admission,
            ),
        )


def _run(trace_file: str, config: Config, requests: int | None) -> dict[str, float]:
    hardware = build_hardware(config)
    trace = open_trace(trace_file, limit=requests)
    simulation = Simulation(config, hardware)
    block_tokens, longest = config.pool.block_tokens, hardware.largest_request_tokens
    simulation.run(make_arrivals(iter(trace), trace.info.block_tokens, block_tokens, longest))
    found = summarise(simulation, 0.0)
    cache, ssd = found["cache"], found["ssd"]
    total = max(cache["input_tokens"], 1)
    others, loaded = cache["fetched_tokens"], cache["loaded_tokens"]
    return {
        "hit_ratio": cache["hit_ratio"],
        "own_dram": round((cache["hit_tokens"] - others - loaded) / total, 4),
        "own_ssd": round(loaded / total, 4),
        "others": round(others / total, 4),
        "mean_ttft_s": found["ttft_s"]["mean"],
        "p99_ttft_s": found["ttft_s"]["p99"],
        "prefill_s": found["prefill_compute_s"]["mean"],
        "rejected": found["rejected"],
        "written_tb": round(ssd["written_bytes"] / 1e12, 3),
        "read_tb": round(ssd["read_bytes"] / 1e12, 3),
        "dropped_blocks": ssd["dropped_blocks"],
    }
