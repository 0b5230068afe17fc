"""Performs an instance's transfers and tier operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.scheduler.actions import (
    AbortStream,
    CancelStream,
    ExpectStream,
    FetchBlocks,
    FinishStream,
    ForgetStored,
    GrantRead,
    LoadBlocks,
    LookUpBlocks,
    SendBlocks,
    StartStream,
    StoreBlocks,
)
from moonpool.scheduler.instance import Performers
from moonpool_engine.storage.tier_store import SharedStore, TierStore
from moonpool_engine.transfer.block_messenger import BlockMessenger

if TYPE_CHECKING:  # a pool without an engine performs transfers, too
    from moonpool_engine.worker.engine_thread import LayerGates


def transfers_by(
    messenger: BlockMessenger, num_layers: int, gates: LayerGates | None = None
) -> Performers:
    """Returns the performers of transfers: methods of the messenger, which posts their outcomes.

    With `gates`, steps can wait for the layers of a fetch.
    """

    def fetch(action: FetchBlocks) -> None:
        messenger.fetch(
            action.fetch_id,
            action.source,
            action.keys,
            action.block_ids,
            action.timeout_s,
            None if gates is None else gates.begin(action),
        )

    def send(action: SendBlocks) -> None:
        layers = range(num_layers)
        slices = [(index, block, layer) for layer in layers for index, block in action.blocks]
        messenger.send(action.stream_id, slices)

    return {
        FetchBlocks: fetch,
        GrantRead: lambda a: messenger.grant(a.read_id, a.block_ids),
        StartStream: lambda a: messenger.open_stream(a.stream_id, a.target, a.timeout_s),
        SendBlocks: send,
        FinishStream: lambda a: messenger.finish_stream(a.stream_id),
        AbortStream: lambda a: messenger.abort_stream(a.stream_id),
        ExpectStream: lambda a: messenger.expect(
            a.stream_id, a.block_ids, a.first_index, a.timeout_s
        ),
        CancelStream: lambda a: messenger.cancel(a.stream_id),
    }


def storage_by(store: TierStore, gates: LayerGates | None = None) -> Performers:
    """Returns the performers of operations of the tier below DRAM: methods of the store, which
    posts their outcomes.

    With `gates`, steps can wait for the layers of a load.
    """

    def load(action: LoadBlocks) -> None:
        gate = gates.begin(action) if gates is not None and action.by_layer else None
        store.load(action.load_id, action.keys, action.slots, action.block_ids, gate)

    def look_up(action: LookUpBlocks) -> None:
        assert isinstance(store, SharedStore)  # the state machine looks up blocks in no other store
        store.look_up(action.lookup_id, action.keys)

    return {
        StoreBlocks: lambda a: store.store(a.store_id, a.keys, a.block_ids, a.slots),
        LoadBlocks: load,
        LookUpBlocks: look_up,
        ForgetStored: lambda a: store.forget(a.slots),
    }
