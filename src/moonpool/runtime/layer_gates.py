"""The gates of an instance's fetches under way: from the action that begins one until its end has
been handled, so that whatever a step waits for has one. Used in the event loop's thread."""

from __future__ import annotations

from moonpool.kvcache.transfers import FetchEnded
from moonpool.messenger.gate import LayerGate
from moonpool.workers.actions import FetchBlocks, RunStep, WorkerEvent


class LayerGates:
    def __init__(self) -> None:
        self._gates: dict[str, LayerGate] = {}

    def begin(self, action: FetchBlocks) -> LayerGate:
        gate = self._gates[action.fetch_id] = LayerGate()
        return gate

    def note(self, event: WorkerEvent) -> None:
        """To be called with every event once it is handled."""
        if isinstance(event, FetchEnded):
            self._gates.pop(event.fetch_id, None)

    def of_step(self, step: RunStep) -> list[LayerGate | None]:
        """What each entry has to pass; nothing at all if none has."""
        arriving = [entry.arriving for entry in step.entries]
        if not any(arriving):
            return []
        return [None if one is None else self._gates[one.fetch_id] for one in arriving]
