"""Builds an instance's engine: loads the model, allocates the arena, and measures step times.

An engine is one process, several pipeline stages, several tensor-parallel ranks, or a process whose
attention runs on attention workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moonpool.config.tables import ConfigError, ParallelConfig, SpeculativeConfig
from moonpool.cores import CoreShare, pin_thread, usable_cores
from moonpool.cost.fitted import FittedCost, pipelined
from moonpool.plugins.policies import load_eviction
from moonpool.protocol.block_layout import DTYPE_BYTES, BlockLayout
from moonpool.protocol.frames import Setup
from moonpool.scheduler.speculation.draft_model import KVCACHE_SHARE, DraftModelPlace
from moonpool.text.tokenizer import TokenizerError
from moonpool.types import Role
from moonpool_engine.attention_offload.boot import (
    CalibrationEngine,
    OffloadedParts,
    boot_attention_group,
)
from moonpool_engine.attention_offload.client import AttentionError
from moonpool_engine.engine.builtin import LoadedModel, open_model
from moonpool_engine.engine.calibrate import measure_samples
from moonpool_engine.engine.cuda.host_sync import make_host_sync
from moonpool_engine.engine.device import free_bytes, stages_of_fullest
from moonpool_engine.engine.device_choice import check_device
from moonpool_engine.engine.drafting.drafter import Drafter
from moonpool_engine.engine.gguf.shared_weights import SharedWeights
from moonpool_engine.engine.ops import KvCache, Ops, block_dtype
from moonpool_engine.engine.parallel.pipeline import PipelineEngine, StageOptions
from moonpool_engine.engine.parallel.process_group import StageLostError
from moonpool_engine.engine.parallel.tensor_ranks import (
    RankOptions,
    Ranks,
    check_ranks,
    sharded_engine,
)
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout
from moonpool_engine.engine.sampler import NonFiniteLogitsError
from moonpool_engine.storage.block_ledger import BlockLedger
from moonpool_engine.storage.folder import StoreError
from moonpool_engine.storage.kept_memory import OFF, KeptMemory, open_in_folder
from moonpool_engine.transfer.arena import Arena, ArenaError, available_memory_bytes
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.touch_ahead import may_touch_late
from moonpool_engine.worker.profile_store import refine_profile

log = logging.getLogger("moonpool.worker")

DEFAULT_POOL_TOKENS = 65_536
MEMORY_SHARE = 0.25
GPU_SHARE = 0.8
"""The share of a GPU's free memory for weights and KVCache. The rest of the GPU's memory is for the
steps' tensors."""
WARM_UP_S = 20.0
MIB = 1 << 20
NO_DRAFTS = (
    "a model with linear attention cannot take back the state of a wrong guess: leave out"
    " --speculative-config"
)


class BootError(Exception):
    """The instance cannot start; one line says why and what to do."""


@dataclass(frozen=True, slots=True)
class InstancePlace:
    """One instance to start: its name, its role, and its place on this machine."""

    peer: LocalPeer
    role: Role
    degree: ParallelConfig = field(default_factory=ParallelConfig)
    share: CoreShare = field(default_factory=CoreShare)
    # memory files that an earlier process of this instance has left
    kept: tuple[str, str] | None = None
    shared: SharedWeights | None = None  # weights packed for all workers of this machine


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The engine and the memory it computes in."""

    model: LoadedModel
    arena: Arena
    engine: Engine | PipelineEngine
    threads: int  # number of threads of one process of the engine
    ranks: Ranks | None = None
    parts: OffloadedParts | None = None  # only set if attention workers hold the blocks
    ledger: BlockLedger | None = None  # only set if the arena's memory outlives this process


def build_engine(setup: Setup, place: InstancePlace, on_lost: Callable[[str], None]) -> BuiltEngine:
    """Loads the weights and allocates the arena. Raises BootError."""
    try:
        load_eviction(setup.pool.eviction)
    except ConfigError as error:
        raise BootError(str(error)) from None
    threads = _settle_threads(setup, place)
    try:
        own, shared = setup.model, _shared(setup, place)
        if shared is not None:
            model = shared.model
        else:
            log.info("loading %s", own.name)
            model = open_model(own.name, own.dtype, own.lora_modules, own.kv_cache_dtype)
        check_device(setup.engine.device)
        if setup.engine.speculative_config is not None and model.spec.delta is not None:
            raise BootError(NO_DRAFTS)
        check_ranks(model, place.degree.num_ranks, setup.engine.num_shards)
        if setup.attention:
            return _offloading_engine(setup, place, model, threads)
        return _local_engine(setup, place, model, threads, on_lost)
    except (ArenaError, AttentionError, StageLostError, ValueError) as error:
        # errors of a model are ValueErrors
        raise BootError(str(error)) from None
    except RuntimeError as error:
        raise _in_one_line(error) from None


def measure_cost(built: BuiltEngine, num_stages: int) -> FittedCost:
    """Measures the engine's step times and prepares its grammars. Raises BootError.

    With attention workers, uses requests at each worker in turn. If blocks were kept from an
    earlier start, measures only if no times are stored, because measuring overwrites these blocks.
    """
    engine, threads, parts = built.engine, built.threads, built.parts
    log.info("measuring step times, or waiting for another instance's measurement")
    try:
        if engine.host_sync is not None:
            measure_samples(engine, WARM_UP_S)  # compiles the kernels before the first request
        if parts is None:
            kept = built.ledger is not None and built.ledger.names_any
            cost = pipelined(refine_profile(engine, threads, only_if_new=kept), num_stages)
        else:
            spread = CalibrationEngine(parts.engine, parts.group.sizes)
            cost = refine_profile(spread, threads, only_if_new=bool(parts.group.cached))
        # with several stages, only the last one samples
        if isinstance(engine, Engine) and not engine.grammars.can_wait:
            engine.grammars.prepare()
    except NonFiniteLogitsError as error:
        text = f"weights or config.json are damaged: {error}; download the model again"
        raise BootError(text) from None
    except TokenizerError as error:
        raise BootError(str(error)) from None
    _settle_arena(built)
    return cost


@dataclass(frozen=True, slots=True)
class BootedDraft:
    """A draft model that is ready, and the facts that the state machine knows about it."""

    drafter: Drafter
    place: DraftModelPlace


def boot_draft(setup: Setup, role: Role, built: BuiltEngine) -> BootedDraft | None:
    """Returns None if no draft model is wanted; a prefill instance needs none. Raises BootError."""
    settings = setup.engine.speculative_config
    if settings is None or settings.method != "draft_model" or role is Role.PREFILL:
        return None
    log.info("loading the draft model %s", settings.model)
    try:
        model = open_model(settings.model, setup.model.dtype)
        if model.spec.delta is not None:
            raise BootError(f"the draft model {settings.model} has linear attention: use another")
        ops = choose_ops(model.dtype, quantization=settings.quantization)
        layout = make_layout(model, setup.pool.block_tokens, ops)
        num_blocks = draft_blocks(settings, layout, built.arena.layout, _num_pool_blocks(built))
        vocab_size = built.model.spec.vocab_size
        drafter = Drafter(model, ops, num_blocks, layout.block_tokens, vocab_size)
    except ValueError as error:  # errors of a model are ValueErrors
        raise BootError(f"the draft model: {error}") from None
    cost = refine_profile(drafter.engine, built.threads)
    text = "draft model %s: %.0f million parameters, KVCache of %d tokens in %.0f MiB"
    num_tokens, parameters = num_blocks * layout.block_tokens, model.spec.num_parameters
    log.info(text, settings.model, parameters / 1e6, num_tokens, drafter.num_bytes / MIB)
    place = DraftModelPlace(cost, num_blocks, layout.block_tokens, model.spec.max_positions)
    return BootedDraft(drafter, place)


def _num_pool_blocks(built: BuiltEngine) -> int:
    """Blocks of the instance's pool, which attention workers may hold."""
    return built.arena.num_blocks if built.parts is None else sum(built.parts.group.sizes)


def draft_blocks(
    settings: SpeculativeConfig, layout: BlockLayout, pool: BlockLayout, num_pool_blocks: int
) -> int:
    """Blocks of the draft model's KVCache, beside a pool of `num_pool_blocks`."""
    if settings.draft_kv_tokens:
        return layout.blocks_for(settings.draft_kv_tokens)
    fitting = int(KVCACHE_SHARE * num_pool_blocks * pool.block_bytes / layout.block_bytes)
    return max(1, min(fitting, num_pool_blocks))


def _settle_arena(built: BuiltEngine) -> None:
    """Gives back the memory that only the measurement has used, and seals the arena."""
    arena = built.arena
    if not arena.is_late:
        return  # the arena was sealed when it was made, or when its processes had mapped it
    if built.ledger is None or not built.ledger.names_any:
        arena.forget_content()
    arena.seal()


def pool_blocks(setup: Setup, layout: BlockLayout, most_bytes: float = float("inf")) -> int:
    """Returns the number of blocks in one worker's arena."""
    tokens = setup.pool.dram_tokens_per_instance
    if not tokens:
        share_bytes = MEMORY_SHARE * available_memory_bytes() / setup.num_instances
        share_bytes = min(share_bytes, most_bytes)
        tokens = min(DEFAULT_POOL_TOKENS, int(share_bytes / layout.token_bytes))
    return max(layout.blocks_for(tokens), 1)


def _settle_threads(setup: Setup, place: InstancePlace) -> int:
    """Returns the number of threads of one process of the engine.

    The caller's thread gets as many threads as the engine and the engine's cores, so that the
    measured times are the engine's.
    """
    share, degree = place.share, place.degree
    fair = len(share.engine) // degree.num_processes or max(
        1, usable_cores() // setup.num_processes
    )
    threads = setup.engine.threads or fair
    pin_thread(share.engine)
    torch.set_num_threads(threads)
    return threads


def _offloading_engine(
    setup: Setup, place: InstancePlace, model: LoadedModel, threads: int
) -> BuiltEngine:
    """Builds an engine whose blocks and attention are at attention workers."""
    parts = boot_attention_group(
        setup,
        model,
        place.peer,
        threads,
        place.share,
    )
    return BuiltEngine(model, parts.arena, parts.engine, threads, parts=parts)


def _local_engine(
    setup: Setup,
    place: InstancePlace,
    model: LoadedModel,
    threads: int,
    on_lost: Callable[[str], None],
) -> BuiltEngine:
    """Builds an arena in this process and the engine that computes in it."""
    degree, num_shards, owner = place.degree, setup.engine.num_shards, place.peer.instance_id
    if degree.num_ranks > 1 and degree.num_stages > 1:
        raise BootError("ranks have no stages: use --pipeline-parallel-size 1")
    ops = choose_ops(model.dtype, setup.engine.device, setup.model.quantization)
    layout = make_layout(model, setup.pool.block_tokens, ops, num_shards)
    if layout.block_tokens > setup.pool.block_tokens:
        text = "blocks of %d tokens: a state of linear attention needs their room"
        log.info(text, layout.block_tokens)
    several, nixl = degree.num_processes > 1, setup.network.nixl
    memory = _open_kept(setup, place)
    num_blocks = memory.num_blocks(layout) if memory is not None else None
    if num_blocks is None or setup.pool.dram_tokens_per_instance:
        num_blocks = _num_blocks(setup, layout, model, degree.num_stages)
    late = _takes_memory_late(setup)
    sealed = not several and not nixl and not late
    arena, ledger = _make_arena(layout, num_blocks, sealed, memory, late)
    cache = _cache_over(arena, layout)
    engine: Engine | PipelineEngine
    ranks: Ranks | None = None
    if degree.num_ranks > 1:
        options = _rank_options(setup, place, threads)
        ranks = Ranks(model, ops, cache, arena.fd, options, owner, on_lost)
        engine = ranks.engine
    elif degree.num_stages > 1:
        stages = _stage_options(setup, place, threads)
        engine = PipelineEngine(model, ops, cache, arena.fd, stages, owner, on_lost)
    elif num_shards > 1:
        engine = sharded_engine(model, ops, cache, num_shards)
    else:
        engine = _single_engine(model, ops, cache, _shared(setup, place))
    if several and not nixl and not late:
        arena.seal()  # all processes have mapped it; the NIXL agent would seal it itself
    return BuiltEngine(model, arena, engine, threads, ranks, ledger=ledger)


def _open_kept(setup: Setup, place: InstancePlace) -> KeptMemory | None:
    """Opens the memory that outlives this process. Returns None if there is none, or if it cannot
    be used: the instance then starts cold."""
    wanted = setup.pool.keep_memory
    if wanted == OFF or setup.engine.device != "cpu" or not setup.pool.prefix_caching:
        return None  # of a GPU's blocks, the arena only has copies of some
    try:
        if wanted:
            return open_in_folder(Path(wanted).expanduser(), place.peer.instance_id)
        return None if place.kept is None else KeptMemory(*place.kept)
    except StoreError as error:
        log.warning("serving without kept memory: %s", error)
        return None


def _takes_memory_late(setup: Setup) -> bool:
    """Whether the arena takes memory only for blocks in use. Only pools of the default size do,
    which is a small share of the free memory. A size that the user chose is taken at the start, so
    that it is there. NIXL and GPUs need all pages in place, and a user's folder may be too small.
    """
    pool = setup.pool
    chosen = pool.dram_tokens_per_instance or pool.keep_memory not in ("", OFF)
    pinned = setup.network.nixl or setup.engine.device != "cpu"
    return not chosen and not pinned and may_touch_late()


def _make_arena(
    layout: BlockLayout, num_blocks: int, sealed: bool, memory: KeptMemory | None, late: bool
) -> tuple[Arena, BlockLedger | None]:
    if memory is None:
        return Arena(layout, num_blocks, sealed=sealed, late=late), None
    try:
        fd, ledger = memory.prepare(layout, num_blocks, late)
    finally:
        memory.close()
    arena = Arena(layout, num_blocks, sealed=sealed, kept_fd=fd, late=late)
    return arena, BlockLedger(arena, ledger)


def _shared(setup: Setup, place: InstancePlace) -> SharedWeights | None:
    """Returns the weights that were packed for all workers, if this instance computes with them."""
    shared, alone = place.shared, place.degree.num_processes == 1 and not setup.attention
    return (
        shared if shared is not None and alone and shared.fit(setup.model, setup.engine) else None
    )


def _single_engine(
    model: LoadedModel, ops: Ops, arena: KvCache, shared: SharedWeights | None
) -> Engine:
    """On the CPU, the engine computes in the arena. On a GPU, it has its own copy of the blocks."""
    if shared is not None:
        engine = Engine(model, ops, arena, decoder=shared.decoder)
        engine.grammars = shared.grammars
        return engine
    if ops.device.type == "cpu":
        return Engine(model, ops, arena)
    sync = make_host_sync(arena, ops.device)
    return Engine(model, ops, sync.cache, sync)


def _rank_options(setup: Setup, place: InstancePlace, threads: int) -> RankOptions:
    """Returns the options for tensor ranks. Pins the caller's thread, which is the first rank, to
    that rank's cores."""
    num_ranks, num_shards = place.degree.num_ranks, setup.engine.num_shards
    cores, quantization = place.share.engine, setup.model.quantization
    options = RankOptions(num_ranks, num_shards, threads, quantization, cores)
    pin_thread(options.cores_of(0))
    return options


def _stage_options(setup: Setup, place: InstancePlace, threads: int) -> StageOptions:
    """Returns the options for pipeline stages. Pins the caller's thread, which measures as the
    first stage, to that stage's cores."""
    chunk_tokens, quantization = setup.engine.chunk_tokens, setup.model.quantization
    num_stages, cores = place.degree.num_stages, place.share.engine
    device = setup.engine.device
    options = StageOptions(num_stages, threads, chunk_tokens, quantization, cores, device)
    pin_thread(options.cores_of(0))
    return options


def _num_blocks(setup: Setup, layout: BlockLayout, model: LoadedModel, num_stages: int) -> int:
    most_bytes = float("inf")
    if setup.engine.device == "cuda":
        weights_bytes = model.spec.num_parameters * DTYPE_BYTES[model.dtype]
        share = stages_of_fullest(num_stages) / num_stages  # share of the model on one GPU
        most_bytes = GPU_SHARE * free_bytes() / setup.num_instances / share - weights_bytes
    return pool_blocks(setup, layout, most_bytes)


def _cache_over(arena: Arena, layout: BlockLayout) -> KvCache:
    """Returns the arena's bytes as the engine's tensor: the same memory, no copy."""
    flat = torch.frombuffer(arena.buffer, dtype=block_dtype(layout))
    shape = (arena.num_blocks, layout.num_layers, layout.slice_elements)
    return KvCache(flat.view(shape), layout)


def _in_one_line(error: RuntimeError) -> Exception:
    """Returns a BootError if memory ran out, or else the error itself."""
    if isinstance(error, torch.OutOfMemoryError):
        return BootError(f"the GPU's memory is too small: {error}; lower --kv-tokens")
    if "can't allocate memory" in str(error):
        text = f"this machine has too little memory for the model: {error}; use a smaller model"
        return BootError(text)
    return error
