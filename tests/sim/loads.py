"""Models a load from a fake disk or store: which slices have arrived, and the events that it sends.

Without `by_layer`, block after block arrives and only the end is reported. With `by_layer`, layer
after layer of all blocks arrives and the progress is reported.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from moonpool.protocol.transfer_events import LoadEnded, LoadProgress
from moonpool.scheduler.actions import LoadBlocks

if TYPE_CHECKING:
    from tests.sim.node import Life
    from tests.sim.truth import Content


class LoadOperation:
    """One load, which stays in `life.loads` after its end."""

    def __init__(self, life: Life, action: LoadBlocks) -> None:
        self.life = life
        self.action = action
        self._began_s = -1.0
        self._came: set[tuple[int, int]] = set()
        self._told_layers = 0
        self._ended = self._failed = False
        life.loads[action.load_id] = self

    def slices(self) -> deque[tuple[int, int]]:
        """Returns the slices as (index, layer), in the order of their arrival."""
        indices, layers = range(len(self.action.slots)), range(self.life.num_layers)
        if self.action.by_layer:
            return deque((index, layer) for layer in layers for index in indices)
        return deque((index, layer) for index in indices for layer in layers)

    def begin(self) -> None:
        self._began_s = self.life.clock.now
        self._tell(0)

    def land(self, index: int, layer: int, content: Content) -> None:
        self.life.write(self.action.block_ids[index], layer, content)
        self._came.add((index, layer))
        if self._whole(self._told_layers) and self._told_layers < self.life.num_layers - 1:
            self._told_layers += 1
            self._tell(self._told_layers)

    def brought(self, layer: int) -> bool | None:
        """Whether the layer of all blocks has arrived, or None if it may still arrive. The last
        layer counts as arrived only after the end of the load was posted."""
        last = self.life.num_layers - 1
        if self._ended:
            return not self._failed or (layer < last and self._whole(layer))
        return True if layer < last and self._whole(layer) else None

    def end(self, corrupt: int = 0, error: str = "", hung: bool = False) -> None:
        num_blocks = 0 if hung else self._num_leading()
        self._ended = True
        self._failed = num_blocks < len(self.action.slots)
        self.life.post(
            LoadEnded(
                load_id=self.action.load_id,
                num_blocks=num_blocks,
                corrupt_slices=corrupt,
                error=error,
                hung=hung,
            )
        )

    def _whole(self, layer: int) -> bool:
        return all((index, layer) in self._came for index in range(len(self.action.slots)))

    def _num_leading(self) -> int:
        layers = range(self.life.num_layers)
        for index in range(len(self.action.slots)):
            if any((index, layer) not in self._came for layer in layers):
                return index
        return len(self.action.slots)

    def _tell(self, num_layers: int) -> None:
        if self.action.by_layer:
            seconds = self.life.clock.now - self._began_s
            self.life.post(LoadProgress(self.action.load_id, num_layers, seconds))
