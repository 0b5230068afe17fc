"""Performs what a state machine asks of the messenger and the SSD store."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.messenger.messenger import Messenger
from moonpool.messenger.store.tier_store import SharedStore, TierStore
from moonpool.runtime.layer_gates import LayerGates
from moonpool.runtime.offload import Offload
from moonpool.workers.actions import (
    AbortStream,
    CancelStream,
    ExpectStream,
    FetchBlocks,
    FinishStream,
    ForgetStored,
    GrantRead,
    LoadBlocks,
    LookUpBlocks,
    OpenStream,
    RunStep,
    SendBlocks,
    StepEntry,
    StoreBlocks,
)

Transfer = (
    FetchBlocks
    | GrantRead
    | OpenStream
    | SendBlocks
    | FinishStream
    | AbortStream
    | ExpectStream
    | CancelStream
)
Storage = StoreBlocks | LoadBlocks | LookUpBlocks | ForgetStored


def perform_transfer(
    messenger: Messenger | Offload,
    num_layers: int,
    action: Transfer,
    gates: LayerGates | None = None,
) -> None:
    """Begins or ends the operation; what comes of it is posted by the messenger. Only with `gates`
    is told how far a fetch has come, and can steps wait for its layers."""
    match action:
        case SendBlocks():
            layers = range(num_layers)
            slices = [(index, block, layer) for layer in layers for index, block in action.blocks]
            messenger.send(action.stream_id, slices)
        case OpenStream():
            messenger.open_stream(action.stream_id, action.target, action.timeout_s)
        case FinishStream():
            messenger.finish_stream(action.stream_id)
        case AbortStream():
            messenger.abort_stream(action.stream_id)
        case ExpectStream():
            messenger.expect(
                action.stream_id, action.block_ids, action.first_index, action.timeout_s
            )
        case CancelStream():
            messenger.cancel(action.stream_id)
        case FetchBlocks():
            fetch = (
                action.fetch_id,
                action.source,
                action.keys,
                action.block_ids,
                action.timeout_s,
            )
            if gates is None or isinstance(messenger, Offload):
                messenger.fetch(*fetch)
            else:
                messenger.fetch(*fetch, gates.begin(action))
        case GrantRead():
            messenger.grant(action.read_id, action.block_ids)


def perform_storage(store: TierStore, action: Storage, gates: LayerGates | None = None) -> None:
    """Begins the operation; what comes of it is posted by the store. Only with `gates` can steps
    wait for the layers of a load."""
    match action:
        case StoreBlocks():
            store.store(action.store_id, action.keys, action.block_ids, action.slots)
        case LoadBlocks():
            gate = gates.begin(action) if gates is not None and action.by_layer else None
            store.load(action.load_id, action.keys, action.slots, action.block_ids, gate)
        case LookUpBlocks():
            assert isinstance(store, SharedStore)  # no other is asked
            store.look_up(action.lookup_id, action.keys)
        case ForgetStored():
            store.forget(action.slots)


def send_layer(messenger: Messenger | Offload, entries: Iterable[StepEntry], layer: int) -> None:
    """Streams what a step has just completed of one layer (Mooncake 5.2)."""
    for entry in entries:
        if entry.sends:
            slices = [(index, block_id, layer) for index, block_id in entry.sends]
            messenger.send(entry.work_id, slices)


def begin_writing(messenger: Messenger | Offload, step: RunStep) -> None:
    """To be called before the step is computed: the checksums of what it writes end here."""
    for entry in step.entries:
        end = entry.start + len(entry.new_token_ids) + step.max_repeats - 1
        messenger.forget_sums(entry.block_ids, entry.start, end)
