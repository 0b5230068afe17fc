"""What a step waits for before each layer's attention, and which of its works waited in vain."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from moonpool.messenger.gate import LayerGate
from moonpool.workers.actions import RunStep, StepEntry


class LayerWaits:
    """Of one step. `gates[i]` are those of its i-th entry. Used by the engine's thread."""

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
        """Entries for which a layer did not come: what follows it is void."""
        return tuple(sorted(self._missed))

    def before_attend(self, layer: int) -> Collection[int]:
        """Returns when the layer of all that is still arriving is there, or will not be; and the
        entries that have missed one."""
        began_s = time.monotonic()
        for index, gates in enumerate(self._gates):
            if index in self._missed:
                continue
            if not all(gate.wait(layer, self._deadlines_s[index]) for gate in gates):
                self._missed.add(index)
        self.waited_s += time.monotonic() - began_s
        return self._missed

    def sound(self) -> list[StepEntry]:
        """Entries of which a layer that has been computed may be sent."""
        return [entry for i, entry in enumerate(self._entries) if i not in self._missed]
