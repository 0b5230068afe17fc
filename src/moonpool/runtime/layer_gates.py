"""The gates of an instance's transfers under way that steps may wait for: from the action that
begins one until its end has been handled, so that whatever a step waits for has one. Used in the
event loop's thread."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.kvcache.transfers import FetchEnded, LoadEnded
from moonpool.messenger.gate import LayerGate
from moonpool.workers.actions import Arriving, FetchBlocks, LoadBlocks, RunStep, WorkerEvent


class LayerGates:
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
        """To be called with every event once it is handled."""
        if isinstance(event, FetchEnded):
            self._fetches.pop(event.fetch_id, None)
        elif isinstance(event, LoadEnded):
            self._loads.pop(event.load_id, None)

    def of_step(self, step: RunStep) -> list[Sequence[LayerGate]]:
        """What each entry has to pass; nothing at all if none has."""
        arriving = [entry.arriving for entry in step.entries]
        if not any(arriving):
            return []
        return [() if one is None else self._of(one) for one in arriving]

    def _of(self, arriving: Arriving) -> Sequence[LayerGate]:
        gates = [self._loads[load_id] for load_id in arriving.load_ids]
        return [self._fetches[arriving.fetch_id], *gates] if arriving.fetch_id else gates
