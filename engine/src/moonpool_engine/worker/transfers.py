"""Performs an instance's transfers and tier operations, and lets steps wait for their layers.

The event loop's thread owns `LayerGates`. The engine's thread owns the `LayerWaits` of its step."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from moonpool.protocol.transfer_events import FetchEnded, LoadEnded
from moonpool.scheduler.actions import (
    AbortStream,
    Arriving,
    CancelStream,
    ExpectStream,
    FetchBlocks,
    FinishStream,
    ForgetStored,
    GrantRead,
    LoadBlocks,
    LookUpBlocks,
    RunStep,
    SendBlocks,
    StartStream,
    StepEntry,
    StoreBlocks,
    WorkerEvent,
)
from moonpool.scheduler.instance import Performers
from moonpool_engine.storage.tier_store import SharedStore, TierStore
from moonpool_engine.transfer.block_messenger import BlockMessenger
from moonpool_engine.transfer.gate import LayerGate


class LayerGates:
    """The gates of transfers under way that steps may wait for.

    A gate exists from the action that begins its transfer until the transfer's end is handled, so
    every transfer that a step waits for has one.
    """

    def __init__(self) -> None:
        self._fetches: dict[str, LayerGate] = {}
        self._loads: dict[str, LayerGate] = {}

    def begin(self, action: FetchBlocks | LoadBlocks) -> LayerGate:
        gate = LayerGate()
        if isinstance(action, FetchBlocks):
            self._fetches[action.fetch_id] = gate
        else:
            self._loads[action.load_id] = gate
        return gate

    def note(self, event: WorkerEvent) -> None:
        """Must be called with every event after it is handled."""
        if isinstance(event, FetchEnded):
            self._fetches.pop(event.fetch_id, None)
        elif isinstance(event, LoadEnded):
            self._loads.pop(event.load_id, None)

    def of_step(self, step: RunStep) -> list[Sequence[LayerGate]]:
        """Returns the gates of each entry, or an empty list if no entry waits."""
        arriving = [entry.arriving for entry in step.entries]
        if not any(arriving):
            return []
        return [() if one is None else self._of(one) for one in arriving]

    def _of(self, arriving: Arriving) -> Sequence[LayerGate]:
        gates = [self._loads[load_id] for load_id in arriving.load_ids]
        return [self._fetches[arriving.fetch_id], *gates] if arriving.fetch_id else gates


class LayerWaits:
    """Waits for the layers of one step. `gates[i]` belong to entry i.

    Used by the engine's thread before each layer's attention.
    """

    def __init__(self, step: RunStep, gates: Sequence[Sequence[LayerGate]]) -> None:
        self.waited_s = 0.0
        began_s = time.monotonic()
        self._entries = step.entries
        self._gates = gates
        self._missed: set[int] = set()
        self._deadlines_s = [
            began_s + (entry.arriving.timeout_s if entry.arriving is not None else 0.0)
            for entry in step.entries
        ]

    @property
    def missed(self) -> tuple[int, ...]:
        """Entries of which a layer did not arrive. All that was computed after it is void."""
        return tuple(sorted(self._missed))

    def before_attend(self, layer: int) -> Collection[int]:
        """Waits until `layer` of every entry has arrived, or will not arrive.

        Returns the entries that have missed a layer.
        """
        began_s = time.monotonic()
        for index, gates in enumerate(self._gates):
            if index in self._missed:
                continue
            if not all(gate.wait(layer, self._deadlines_s[index]) for gate in gates):
                self._missed.add(index)
        self.waited_s += time.monotonic() - began_s
        return self._missed

    def sound(self) -> list[StepEntry]:
        """Returns the entries whose computed layers may be sent."""
        return [entry for i, entry in enumerate(self._entries) if i not in self._missed]


def transfers_by(
    messenger: BlockMessenger, num_layers: int, gates: LayerGates | None = None
) -> Performers:
    """What performs transfers: the messenger, which posts their outcomes.

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
    """What performs operations of the tier below DRAM: the store, which posts their outcomes.

    With `gates`, steps can wait for the layers of a load.
    """

    def load(action: LoadBlocks) -> None:
        gate = gates.begin(action) if gates is not None and action.by_layer else None
        store.load(action.load_id, action.keys, action.slots, action.block_ids, gate)

    def look_up(action: LookUpBlocks) -> None:
        assert isinstance(store, SharedStore)  # the state machine looks up in no other
        store.look_up(action.lookup_id, action.keys)

    return {
        StoreBlocks: lambda a: store.store(a.store_id, a.keys, a.block_ids, a.slots),
        LoadBlocks: load,
        LookUpBlocks: look_up,
        ForgetStored: lambda a: store.forget(a.slots),
    }


def send_layer(messenger: BlockMessenger, entries: Iterable[StepEntry], layer: int) -> None:
    """Sends the blocks of one layer that a step has just completed (Mooncake 5.2)."""
    for entry in entries:
        if entry.sends:
            slices = [(index, block_id, layer) for index, block_id in entry.sends]
            messenger.send(entry.attempt_id, slices)


def begin_writing(messenger: BlockMessenger, step: RunStep) -> None:
    """Drops the checksums of the slots that a step writes. Must be called before it is computed."""
    for entry in step.entries:
        end = entry.start + len(entry.new_token_ids) + step.max_repeats - 1
        messenger.forget_checksums(entry.block_ids, entry.start, end)
