"""The configuration of one instance's state machine, and how both drivers derive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.config.tables import (
    Batching,
    EngineConfig,
    PolicyName,
    PoolConfig,
    SloConfig,
    SpeculativeConfig,
    SsdAdmission,
)
from moonpool.types import BlockId, BlockKey, Struct


class InstanceConfig(Struct, frozen=True):
    """The settings of one instance."""

    chunk_tokens: int = 512
    max_sequences: int = 128
    prefix_caching: bool = True
    eviction: PolicyName = "lru"
    batching: Batching = "chunked"
    # most steps in progress at a time; more than one if the stages of a pipeline overlap
    max_steps_in_flight: int = 1
    micro_batches: int = 1  # number of steps that divide the decodes evenly: one per stage
    # KVCache tokens that the engine's own memory holds; 0 means the whole pool
    engine_tokens: int = 0
    tbt_slo_s: float = float("inf")  # TBT SLO of requests without an SLO of their own
    layer_wise_load: bool = False  # whether a prefill may compute while its prefix still arrives
    max_repeats: int = 1  # most steps of decodes alone that run without a report between them
    ssd_blocks: int = 0  # number of slots of the SSD tier; 0 means no such tier
    ssd_admission: SsdAdmission = "always"
    ssd_write_ahead: bool = False
    # whether a store that other instances also use takes the place of the SSD
    store_shared: bool = False
    learning: bool = True  # whether measured times correct the cost model
    # length of the attention window in tokens, including the token itself; 0 means no window
    kept_tokens: int = 0
    speculative: SpeculativeConfig | None = None  # None means that steps have no drafts


@dataclass(frozen=True, slots=True)
class InstanceMemory:
    """Properties of an instance's memories other than the number of blocks, and their content from
    earlier runs.

    `stored`: the SSD's content as (slot, key), least recently used first. `arenas`: blocks of each
    arena if there are several; `kept`: what the blocks contain. `segment_blocks`: consecutive
    blocks of a sequence that share an arena, if one sequence may use several.
    """

    stored: Sequence[tuple[int, BlockKey]] = ()
    arenas: Sequence[int] = ()
    kept: Sequence[tuple[BlockId, BlockKey]] = ()
    segment_blocks: int = 0


NEW_MEMORY = InstanceMemory()


def instance_config(
    engine: EngineConfig,
    pool: PoolConfig,
    slo: SloConfig,
    learning: bool,
    num_stages: int,
    *,
    ssd_blocks: int,
    store_shared: bool,
    engine_tokens: int,
    layer_wise_load: bool,
    max_repeats: int,
    kept_tokens: int,
) -> InstanceConfig:
    """Derives an instance's settings from the cluster's, for the live worker and the simulator.

    The positional arguments come from the cluster's configuration. The keyword arguments describe
    the driver's store, engine and memory. They have no defaults, so that no driver omits one. A
    pipeline neither overlaps layers nor repeats steps, even if its driver allows this.
    """
    return InstanceConfig(
        chunk_tokens=engine.chunk_tokens,
        max_sequences=engine.max_sequences,
        prefix_caching=pool.prefix_caching,
        eviction=pool.eviction,
        batching=engine.batching,
        max_steps_in_flight=steps_in_flight(num_stages),
        micro_batches=num_stages,
        engine_tokens=engine_tokens,
        tbt_slo_s=slo.usual.tbt_s,
        layer_wise_load=layer_wise_load and num_stages == 1,
        max_repeats=max_repeats if num_stages == 1 else 1,
        ssd_blocks=ssd_blocks,
        ssd_admission=pool.ssd_admission,
        ssd_write_ahead=pool.ssd_write_ahead,
        store_shared=store_shared,
        learning=learning,
        kept_tokens=kept_tokens,
        speculative=engine.speculative_config,
    )


def steps_in_flight(num_stages: int) -> int:
    """The most steps in progress at a time: one per stage, and one that waits for the first."""
    return num_stages + 1 if num_stages > 1 else 1
