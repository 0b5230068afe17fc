"""Brings an instance up: model, arena, engine, messenger, cost estimates and state machine."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from moonpool.attention.client import AttentionError
from moonpool.config import Degree, InstanceConfig
from moonpool.cost.belief import pipelined
from moonpool.cost.fitted import FittedCost
from moonpool.engine.builtin import LoadedModel, open_model
from moonpool.engine.calibrate import measure_samples
from moonpool.engine.cuda.choice import check_device, free_bytes, stages_of_fullest
from moonpool.engine.cuda.mirror import mirrored
from moonpool.engine.native.slices import open_slices
from moonpool.engine.ops import KvCache, Ops
from moonpool.engine.runner import Engine, choose_ops, make_layout
from moonpool.engine.sampler import NonFiniteLogitsError
from moonpool.engine.stages.fellows import StageLostError
from moonpool.engine.stages.pipeline import PipelineEngine, StageOptions
from moonpool.engine.tensor.ranks import RankOptions, Ranks, check_ranks, sharded_engine
from moonpool.engine.tokenizer import TokenizerError
from moonpool.kvcache.layout import DTYPE_BYTES, BlockLayout
from moonpool.kvcache.transfers import MessengerEvent, PeerAddress
from moonpool.messenger.arena import Arena, ArenaError, available_memory_bytes
from moonpool.messenger.courier import Courier, CourierError
from moonpool.messenger.messenger import Messenger
from moonpool.messenger.store.folder import StoreError, default_folder
from moonpool.messenger.store.mooncake import MooncakeStore
from moonpool.messenger.store.store import BlockStore, open_store
from moonpool.messenger.store.tier_store import TierStore
from moonpool.runtime.cores import CoreShare, pin_thread, usable_cores
from moonpool.runtime.offload import Event, Offload
from moonpool.runtime.offload_boot import OffloadedParts, Spread, gather_crew
from moonpool.runtime.profile_store import refine_profile
from moonpool.runtime.protocol import Setup
from moonpool.types import InstanceId, Role
from moonpool.workers.batch import steps_in_flight
from moonpool.workers.instance import Instance
from moonpool.workers.messages import InstanceInfo, InstanceLoad, TierLoad

DEFAULT_POOL_TOKENS = 65_536
MEMORY_SHARE = 0.25
GPU_SHARE = 0.8
"""Of a GPU's free memory, for weights and KVCache; the rest is for what steps need in between."""
WARM_UP_S = 20.0

log = logging.getLogger("moonpool.worker")


class BootError(Exception):
    """The instance cannot be brought up; one line says why and what to do."""


@dataclass(slots=True)
class BootedInstance:
    """Everything one instance consists of, but for the threads that drive it."""

    instance_id: InstanceId
    incarnation: int
    layout: BlockLayout
    arena: Arena
    engine: Engine | PipelineEngine
    messenger: Messenger | Offload
    address: PeerAddress
    cost: FittedCost
    instance: Instance
    eos_token_ids: tuple[int, ...]
    threads: int
    store: TierStore | None = None
    store_error: str = ""  # why there is none, though one was asked for
    store_name: str = ""  # of the one that was
    ranks: Ranks | None = None  # the engine's others, if it has any

    def info(self, host: str, pid: int) -> InstanceInfo:
        return InstanceInfo(
            instance_id=self.instance_id,
            role=self.instance.role,  # it may have switched since it was booted
            incarnation=self.incarnation,
            address=self.address,
            layout=self.layout,
            num_blocks=self.instance.num_blocks,
            cost=self.cost,
            pid=pid,
            host=host,
            chunk_tokens=self.instance.config.chunk_tokens,
            num_stages=self.instance.config.micro_batches,
            num_ranks=1 if self.ranks is None else 1 + len(self.ranks.pids),
            largest_blocks=min(self.instance.pool.largest, self.instance.num_blocks),
        )

    def load(self) -> InstanceLoad:
        """The instance's gauges and counters, with those of messenger and store added."""
        load = self.instance.load()
        moved = self.messenger.counts()
        counters = load.counters | {
            f"{transport}_received_bytes": float(count)
            for transport, count in moved.received_bytes.items()
        }
        ssd = load.ssd
        if self.store is not None:
            found = msgspec.structs.asdict(self.store.counts())
            counters |= {f"ssd_{name}": float(count) for name, count in found.items()}
            if ssd is not None:
                ssd = msgspec.structs.replace(ssd, name=self.store.name)
        elif self.store_error:
            ssd = TierLoad(
                blocks=0,
                held=0,
                available=0,
                cached=0,
                owners={},
                error=self.store_error,
                name=self.store_name,
            )
        return msgspec.structs.replace(load, counters=counters, ssd=ssd)

    def close(self) -> None:
        if isinstance(self.engine, PipelineEngine):
            self.engine.close()
        if self.ranks is not None:
            self.ranks.close()
        self.messenger.close()
        if self.store is not None:
            self.store.close()
        self.arena.close()


def boot_instance(
    setup: Setup,
    role: Role,
    instance_id: InstanceId,
    listen_host: str,
    secret: bytes,
    post: Callable[[Event], None],
    degree: Degree,
    on_lost: Callable[[str], None],
    share: CoreShare,
) -> BootedInstance:
    """Takes seconds: loads weights, allocates, measures. `on_lost` is called, from a thread, with
    why the instance cannot go on, if one of several processes ends. Raises BootError."""
    threads = _settle_threads(setup, degree, share)
    built = _build(setup, (degree, threads, share), instance_id, secret, listen_host, on_lost)
    model, arena, engine, parts = built.model, built.arena, built.engine, built.parts
    layout = arena.layout
    try:
        cost = _measured_cost(engine, threads, degree.num_stages, parts)
        if isinstance(engine, Engine):  # of several stages, the last draws
            engine.grammars.prepare()
    except NonFiniteLogitsError as error:
        raise BootError(f"weights or config.json are damaged: {error}") from None
    except TokenizerError as error:
        raise BootError(str(error)) from None
    pin_thread(share.others)  # and so all threads that are started from here on
    messenger = Messenger(
        arena,
        layout,
        instance_id,
        secret,
        post,
        tcp_host=listen_host,
        use_shared_memory=setup.network.use_shared_memory,
        courier=_open_courier(setup, arena, listen_host),
        native=open_slices(),
    )
    eos = model.spec.eos_token_ids
    store, store_error = _open_store(setup, instance_id, listen_host, arena, post)
    if store is not None:
        cost = msgspec.structs.replace(cost, ssd_read_bytes_per_s=store.read_bytes_per_s)
    address = messenger.start()
    if parts is not None:
        parts.offload.run(messenger, post)
    return BootedInstance(
        instance_id=instance_id,
        incarnation=secrets.randbits(62),
        layout=layout,
        arena=arena,
        engine=engine,
        messenger=messenger if parts is None else parts.offload,
        address=address,
        cost=cost,
        instance=_state_machine(
            setup, arena, role, cost, eos, store, degree.num_stages, engine, parts
        ),
        eos_token_ids=eos,
        threads=threads,
        store=store,
        store_error=store_error,
        store_name=MooncakeStore.name if _wants_mooncake(setup) else BlockStore.name,
        ranks=built.ranks,
    )


@dataclass(frozen=True, slots=True)
class _Built:
    """What computes, and in which memory."""

    model: LoadedModel
    arena: Arena
    engine: Engine | PipelineEngine
    ranks: Ranks | None = None
    parts: OffloadedParts | None = None  # where others hold the blocks


def _build(
    setup: Setup,
    processes: tuple[Degree, int, CoreShare],
    instance_id: InstanceId,
    secret: bytes,
    listen_host: str,
    on_lost: Callable[[str], None],
) -> _Built:
    """An engine of such processes, with so many threads each, on these cores. Raises BootError."""
    try:
        model = open_model(setup.model.name, setup.model.dtype)
        check_device(setup.engine.device)
        check_ranks(model, processes[0].num_ranks, setup.engine.num_shards)
        if setup.attention:
            parts = gather_crew(setup, model, instance_id, secret, processes[1:], listen_host)
            return _Built(model, parts.arena, parts.engine, parts=parts)
        return _own_engine(setup, model, processes, instance_id, on_lost)
    except (ArenaError, AttentionError, StageLostError, ValueError) as error:
        # a model's errors are ValueErrors
        raise BootError(str(error)) from None
    except RuntimeError as error:
        raise _in_one_line(error) from None


def _in_one_line(error: RuntimeError) -> Exception:
    """A BootError if memory ran out, else the error as it is."""
    if isinstance(error, torch.OutOfMemoryError):
        return BootError(f"the GPU's memory is too small: {error}; lower --kv-tokens")
    if "can't allocate memory" in str(error):
        return BootError(f"this machine's memory is too small for the model: {error}")
    return error


def _stage_options(setup: Setup, num_stages: int, threads: int, share: CoreShare) -> StageOptions:
    """The caller's thread, which measures as the first stage, goes to that stage's cores."""
    chunk_tokens, quantization = setup.engine.chunk_tokens, setup.model.quantization
    device = setup.engine.device
    options = StageOptions(num_stages, threads, chunk_tokens, quantization, share.engine, device)
    pin_thread(options.cores_of(0))
    return options


def _settle_threads(setup: Setup, degree: Degree, share: CoreShare) -> int:
    """Of one process of the engine. The caller's thread computes with as many and on the cores of
    the engine's: what is measured now is what will be done there."""
    fair = len(share.engine) // degree.num_processes or max(
        1, usable_cores() // setup.num_processes
    )
    threads = setup.engine.threads or fair
    pin_thread(share.engine)
    torch.set_num_threads(threads)
    return threads


def _open_courier(setup: Setup, arena: Arena, listen_host: str) -> Courier | None:
    """None where NIXL is not wanted, or cannot be had: blocks go over TCP then."""
    if setup.attention or not setup.network.nixl:
        return None  # blocks of attention workers are in arenas of theirs
    try:
        return Courier(arena, listen_host)
    except CourierError as error:
        log.warning("blocks go over TCP, not by NIXL: %s", error)
        return None


def _open_store(
    setup: Setup,
    instance_id: InstanceId,
    listen_host: str,
    arena: Arena,
    post: Callable[[MessengerEvent], None],
) -> tuple[TierStore | None, str]:
    """The tier below DRAM if one is wanted, or why it cannot be had: no reason not to serve."""
    pool = setup.pool
    if setup.attention:
        return None, ""  # blocks are at the attention workers, which have no such tier
    if not (pool.ssd_tokens_per_instance or _wants_mooncake(setup)) or not pool.prefix_caching:
        return None, ""
    began_s = time.monotonic()
    store: TierStore
    try:
        if _wants_mooncake(setup):
            store = MooncakeStore(arena, setup.mooncake, listen_host, post)
        else:
            root = Path(pool.ssd_folder).expanduser() if pool.ssd_folder else default_folder()
            num_slots = arena.layout.blocks_for(pool.ssd_tokens_per_instance)
            store = open_store(root, instance_id, arena, num_slots, post)
    except StoreError as error:
        tier = "Mooncake Store" if _wants_mooncake(setup) else "SSD tier"
        log.warning("serving goes on without the %s: %s", tier, error)
        return None, str(error)
    log.info(
        "%s tier at %s: %d of %d blocks found again in %.2f s",
        store.name,
        store.describe(),
        len(store.stored),
        store.num_slots,
        time.monotonic() - began_s,
    )
    return store, ""


def _wants_mooncake(setup: Setup) -> bool:
    return bool(setup.mooncake.master_server_address)


def _state_machine(
    setup: Setup,
    arena: Arena,
    role: Role,
    cost: FittedCost,
    eos_token_ids: tuple[int, ...],
    store: TierStore | None,
    num_stages: int,
    engine: Engine | PipelineEngine,
    parts: OffloadedParts | None,
) -> Instance:
    config = InstanceConfig(
        chunk_tokens=setup.engine.chunk_tokens,
        max_sequences=setup.engine.max_sequences,
        prefix_caching=setup.pool.prefix_caching,
        eviction=setup.pool.eviction,
        batching=setup.engine.batching,
        tbt_slo_s=setup.slo.tbt_s,
        ssd_blocks=0 if store is None else store.num_slots,
        ssd_admission=setup.pool.ssd_admission,
        store_shared=store is not None and store.shared,
        learning=setup.learning,
        max_steps_in_flight=steps_in_flight(num_stages),
        micro_batches=num_stages,
        # A GPU's mirror, stages and attention workers do not wait for layers that still arrive.
        layer_wise_load=parts is None and isinstance(engine, Engine) and engine.mirror is None,
    )
    stored = () if store is None else store.stored
    if parts is not None:
        return Instance(
            config,
            arena.layout,
            sum(parts.crew.sizes),
            role,
            cost,
            eos_token_ids,
            arenas=parts.crew.sizes,
            kept=parts.crew.named,
            segment_blocks=parts.segment_blocks,
        )
    return Instance(config, arena.layout, arena.num_blocks, role, cost, eos_token_ids, stored)


def _engine(model: LoadedModel, ops: Ops, arena: KvCache) -> Engine:
    """On the CPU the engine works in the arena itself; on a GPU, in blocks of its own there."""
    if ops.device.type == "cpu":
        return Engine(model, ops, arena)
    mirror = mirrored(arena, ops.device)
    return Engine(model, ops, mirror.cache, mirror)


def _own_engine(
    setup: Setup,
    model: LoadedModel,
    processes: tuple[Degree, int, CoreShare],
    instance_id: InstanceId,
    on_lost: Callable[[str], None],
) -> _Built:
    """An arena in this process, and what computes in it. Raises what its parts raise."""
    degree, threads, share = processes
    num_shards = setup.engine.num_shards
    if degree.num_ranks > 1 and degree.num_stages > 1:
        raise BootError("ranks have no stages: use --pipeline-parallel-size 1")
    ops = choose_ops(model.dtype, setup.engine.device, setup.model.quantization)
    layout = make_layout(model, setup.pool.block_tokens, ops, num_shards)
    several, nixl = degree.num_processes > 1, setup.network.nixl
    num_blocks = _num_blocks(setup, layout, model, degree.num_stages)
    arena = Arena(layout, num_blocks, sealed=not several and not nixl)
    cache = _cache_over(arena, layout)
    if not several:
        if num_shards > 1:
            return _Built(model, arena, sharded_engine(model, ops, cache, num_shards))
        return _Built(model, arena, _engine(model, ops, cache))
    engine: Engine | PipelineEngine
    ranks: Ranks | None = None
    if degree.num_ranks > 1:
        options = RankOptions(
            degree.num_ranks, num_shards, threads, setup.model.quantization, share.engine
        )
        pin_thread(options.cores_of(0))
        ranks = Ranks(model, ops, cache, arena.fd, options, instance_id, on_lost)
        engine = ranks.engine
    else:
        stages = _stage_options(setup, degree.num_stages, threads, share)
        engine = PipelineEngine(model, ops, cache, arena.fd, stages, instance_id, on_lost)
    if not nixl:
        arena.seal()  # all processes have mapped it; a courier seals it when it has
    return _Built(model, arena, engine, ranks)


def _measured_cost(
    engine: Engine | PipelineEngine, threads: int, num_stages: int, parts: OffloadedParts | None
) -> FittedCost:
    """With attention workers: with requests at all of them by turns; and not at all where blocks
    are found again that measuring would overwrite and an earlier start measured."""
    if engine.mirror is not None:
        measure_samples(engine, WARM_UP_S)  # compiles the kernels, which nobody should wait for
    if parts is None:
        return pipelined(refine_profile(engine, threads), num_stages)
    spread = Spread(parts.engine, parts.crew.sizes)
    return refine_profile(spread, threads, only_if_new=bool(parts.crew.named))


def _num_blocks(setup: Setup, layout: BlockLayout, model: LoadedModel, num_stages: int) -> int:
    most_bytes = float("inf")
    if setup.engine.device == "cuda":
        weights_bytes = model.spec.num_parameters * DTYPE_BYTES[model.dtype]
        share = stages_of_fullest(num_stages) / num_stages  # of the model, on one GPU
        most_bytes = GPU_SHARE * free_bytes() / setup.num_instances / share - weights_bytes
    return pool_blocks(setup, layout, most_bytes)


def pool_blocks(setup: Setup, layout: BlockLayout, most_bytes: float = float("inf")) -> int:
    """Blocks of one worker's arena."""
    tokens = setup.pool.dram_tokens_per_instance
    if not tokens:
        share_bytes = MEMORY_SHARE * available_memory_bytes() / setup.num_instances
        share_bytes = min(share_bytes, most_bytes)
        tokens = min(DEFAULT_POOL_TOKENS, int(share_bytes / layout.token_bytes))
    return max(layout.blocks_for(tokens), 1)


def _cache_over(arena: Arena, layout: BlockLayout) -> KvCache:
    """The arena's bytes as the engine's tensor: the same memory, no copy."""
    dtype = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float32
    flat = torch.frombuffer(arena.buffer, dtype=dtype)
    shape = (arena.num_blocks, layout.num_layers, layout.slice_elements)
    return KvCache(flat.view(shape), layout)
