"""Starts an instance: engine, cost estimates, messenger, SSD tier and state machine."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from moonpool.config.tables import ConfigError
from moonpool.cores import pin_thread
from moonpool.cost.fitted import FittedCost
from moonpool.plugins.policies import load_eviction
from moonpool.protocol.frames import Setup
from moonpool.protocol.messages import InstanceInfo, InstanceLoad, TierLoad
from moonpool.protocol.transfer_events import MessengerEvent, PeerAddress
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig, InstanceMemory, instance_config
from moonpool.types import BlockId, BlockKey
from moonpool_engine.attention_offload.remote_messenger import Event, RemoteAttentionMessenger
from moonpool_engine.engine.drafting.drafter import Drafter
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.engine.parallel.pipeline import PipelineEngine
from moonpool_engine.engine.runner import Engine
from moonpool_engine.storage.block_ledger import BlockLedger
from moonpool_engine.storage.folder import StoreError, default_folder
from moonpool_engine.storage.mooncake import MooncakeStore
from moonpool_engine.storage.store import BlockStore, open_store
from moonpool_engine.storage.tier_store import TierStore
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.block_messenger import BlockMessenger
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.messenger import Messenger
from moonpool_engine.transfer.nixl_agent import NixlAgent, NixlAgentError
from moonpool_engine.transfer.slice_copier import fastest_copier
from moonpool_engine.worker.engine_boot import (
    BootedDraft,
    BootError,
    BuiltEngine,
    InstancePlace,
    boot_draft,
    build_engine,
    measure_cost,
)

log = logging.getLogger("moonpool.worker")


@dataclass(frozen=True, slots=True)
class LowerTier:
    """The tier of blocks below DRAM, named `name`; without a `store` there is none, and `error`
    says why if one is configured."""

    store: TierStore | None = None
    error: str = ""
    name: str = BlockStore.name

    def loaded(self, load: InstanceLoad) -> InstanceLoad:
        """Returns the load with the tier's counters."""
        if self.store is not None:
            found = msgspec.structs.asdict(self.store.counts())
            counters = load.counters | {f"ssd_{name}": float(n) for name, n in found.items()}
            ssd = load.ssd and msgspec.structs.replace(load.ssd, name=self.store.name)
            return msgspec.structs.replace(load, counters=counters, ssd=ssd)
        if self.error:
            return msgspec.structs.replace(load, ssd=_missing_tier(self.name, self.error))
        return load


@dataclass(slots=True)
class BootedInstance:
    """Everything one instance consists of, except the threads that drive it."""

    built: BuiltEngine
    messenger: BlockMessenger
    address: PeerAddress
    tier: LowerTier
    instance: Instance
    cost: FittedCost
    incarnation: int
    drafter: Drafter | None = None  # the drafter that guesses tokens, which steps verify

    @property
    def offload(self) -> RemoteAttentionMessenger | None:
        """The messenger if attention workers hold the blocks, otherwise None."""
        return None if self.built.parts is None else self.built.parts.offload

    @property
    def part_pids(self) -> list[int]:
        """The processes of the stages or ranks after the first."""
        if self.built.ranks is not None:
            return self.built.ranks.pids
        engine = self.built.engine
        return engine.pids if isinstance(engine, PipelineEngine) else []

    def info(self, host: str, pid: int) -> InstanceInfo:
        return InstanceInfo(
            instance_id=self.address.instance_id,
            role=self.instance.role,  # the role may have switched since the start
            incarnation=self.incarnation,
            address=self.address,
            layout=self.built.arena.layout,
            num_blocks=self.instance.num_blocks,
            cost=self.cost,
            pid=pid,
            host=host,
            chunk_tokens=self.instance.config.chunk_tokens,
            num_stages=self.instance.config.micro_batches,
            num_ranks=1 if self.built.ranks is None else 1 + len(self.built.ranks.pids),
            adapters=tuple(self.built.model.adapter_numbers),
            largest_blocks=min(self.instance.max_sequence_blocks, self.instance.num_blocks),
        )

    def load(self) -> InstanceLoad:
        """Returns the gauges and counters of the instance, its messenger and its store."""
        load = self.instance.load()
        moved = self.messenger.counts()
        counters = load.counters | {
            f"{transport}_received_bytes": float(count)
            for transport, count in moved.received_bytes.items()
        }
        return self.tier.loaded(msgspec.structs.replace(load, counters=counters))

    def close(self) -> None:
        built = self.built
        if isinstance(built.engine, PipelineEngine):
            built.engine.close()
        if built.ranks is not None:
            built.ranks.close()
        self.messenger.close()
        if self.tier.store is not None:
            self.tier.store.close()
        if built.ledger is not None:
            built.ledger.close()
        built.arena.close()


def boot_instance(
    setup: Setup,
    place: InstancePlace,
    post: Callable[[Event], None],
    on_lost: Callable[[str], None],
) -> BootedInstance:
    """Starts an instance, which takes seconds. Raises BootError.

    `on_lost` is called from a thread if one of the instance's processes ends, after which the
    instance cannot continue.
    """
    try:
        load_eviction(setup.pool.eviction)
    except ConfigError as error:
        raise BootError(str(error)) from None
    built = build_engine(setup, place, on_lost)
    arena, num_stages, parts = built.arena, place.degree.num_stages, built.parts
    cost = measure_cost(built, num_stages)
    draft = boot_draft(setup, place.role, built)
    pin_thread(place.share.others)  # also pins all threads that are started after this call
    messenger = _open_messenger(setup, place, arena, post)
    tier = _open_tier(setup, place.peer, arena, post)
    if tier.store is not None:
        cost = msgspec.structs.replace(cost, ssd_read_bytes_per_s=tier.store.read_bytes_per_s)
    kept = _recover(built.ledger, arena)
    arena.reach(0)  # takes the pages of the first request
    address = messenger.start()
    if parts is not None:
        parts.offload.run(messenger, post)
    return BootedInstance(
        built,
        messenger if parts is None else parts.offload,
        address,
        tier,
        _state_machine(setup, place, built, cost, tier.store, kept, draft),
        cost,
        incarnation=secrets.randbits(62),
        drafter=None if draft is None else draft.drafter,
    )


def _recover(ledger: BlockLedger | None, arena: Arena) -> list[tuple[BlockId, BlockKey]]:
    """Returns the blocks that an earlier process left in the arena, as far as they are right."""
    if ledger is None or not ledger.names_any:
        return []
    began_s = time.monotonic()
    kept, num_damaged = ledger.recover()
    seconds = time.monotonic() - began_s
    text = "kept memory: found %d of %d blocks in %.2f s; %d more were overwritten or damaged"
    log.info(text, len(kept), arena.num_blocks, seconds, num_damaged)
    return kept


def _open_messenger(
    setup: Setup, place: InstancePlace, arena: Arena, post: Callable[[Event], None]
) -> Messenger:
    copier = fastest_copier(arena, open_slices())
    agent = _open_nixl_agent(setup, arena, place.peer.listen_host)
    return Messenger(arena, arena.layout, place.peer, post, copier, agent)


def _open_nixl_agent(setup: Setup, arena: Arena, listen_host: str) -> NixlAgent | None:
    """Opens the NIXL agent. Returns None if NIXL is off or fails: blocks go over TCP then."""
    if setup.attention or not setup.network.nixl:
        return None  # the blocks are in arenas of the attention workers
    try:
        return NixlAgent(arena, listen_host)
    except NixlAgentError as error:
        log.warning("NIXL is not available, blocks go over TCP: %s", error)
        return None


def _open_tier(
    setup: Setup, peer: LocalPeer, arena: Arena, post: Callable[[MessengerEvent], None]
) -> LowerTier:
    """Opens the tier below DRAM. The instance serves without this tier if that fails."""
    pool, is_mooncake = setup.pool, bool(setup.mooncake.master_server_address)
    if setup.attention:
        return LowerTier()  # the attention workers have the blocks, and no such tier
    if not (pool.wants_ssd or is_mooncake) or not pool.prefix_caching:
        return LowerTier()
    began_s = time.monotonic()
    store: TierStore
    try:
        if is_mooncake:
            store = MooncakeStore(arena, setup.mooncake, peer.listen_host, post)
        else:
            root = Path(pool.ssd_folder).expanduser() if pool.ssd_folder else default_folder()
            num_slots = arena.layout.blocks_for(pool.ssd_tokens_per_instance)
            num_slots = num_slots or pool.ssd_bytes_per_instance // arena.layout.block_bytes
            store = open_store(root, peer.instance_id, arena, num_slots, post)
    except StoreError as error:
        what = "Mooncake Store" if is_mooncake else "SSD tier"
        log.warning("serving without the %s: %s", what, error)
        return LowerTier(None, str(error), MooncakeStore.name if is_mooncake else BlockStore.name)
    log.info(
        "%s tier at %s: recovered %d of %d blocks in %.2f s",
        store.name,
        store.describe(),
        len(store.stored),
        store.num_slots,
        time.monotonic() - began_s,
    )
    return LowerTier(store, name=store.name)


def live_config(
    setup: Setup,
    num_stages: int,
    store: TierStore | None,
    layer_wise_load: bool,
    kept_tokens: int = 0,
) -> InstanceConfig:
    """The settings of a live instance's state machine."""
    return instance_config(
        setup.engine,
        setup.pool,
        setup.slo,
        setup.learning,
        num_stages,
        ssd_blocks=0 if store is None else store.num_slots,
        store_shared=store is not None and store.shared,
        # the engine computes in the pool's own memory, or in a copy of that memory
        engine_tokens=0,
        layer_wise_load=layer_wise_load,
        max_repeats=1,  # the live engine reports after every step
        kept_tokens=kept_tokens,
    )


def _state_machine(
    setup: Setup,
    place: InstancePlace,
    built: BuiltEngine,
    cost: FittedCost,
    store: TierStore | None,
    kept: Sequence[tuple[BlockId, BlockKey]],
    draft: BootedDraft | None,
) -> Instance:
    arena, engine, parts = built.arena, built.engine, built.parts
    num_stages, eos_token_ids = place.degree.num_stages, built.model.spec.eos_token_ids
    draft_model = None if draft is None else draft.place
    # An engine with host-GPU sync, stages and attention workers do not wait for single layers.
    layer_wise = parts is None and isinstance(engine, Engine) and engine.host_sync is None
    config = live_config(setup, num_stages, store, layer_wise, engine.spec.kept_tokens)
    stored = () if store is None else store.stored
    if parts is not None:
        return Instance(
            config,
            arena.layout,
            sum(parts.group.sizes),
            place.role,
            cost,
            eos_token_ids,
            InstanceMemory(
                arenas=parts.group.sizes,
                kept=parts.group.cached,
                segment_blocks=parts.segment_blocks,
            ),
            draft_model,
        )
    instance = Instance(
        config,
        arena.layout,
        arena.num_blocks,
        place.role,
        cost,
        eos_token_ids,
        InstanceMemory(stored=stored, kept=kept),
        draft_model,
    )
    instance.pool.watch_keys()
    return instance


def _missing_tier(name: str, error: str) -> TierLoad:
    return TierLoad(blocks=0, held=0, available=0, cached=0, owners={}, error=error, name=name)
