"""How much of a transfer that comes by layer is still to come, as its progress tells."""

from __future__ import annotations

from typing import NamedTuple


class Rest(NamedTuple):
    """`part_s`: what came last took so long; as much again until the next word of it."""

    left_s: float = 0.0
    part_s: float = 0.0
    num_layers: int = 0

    def seen(self, num_layers: int, seconds: float, all_layers: int) -> Rest:
        """So many of all layers have come in so many seconds."""
        layer_s = seconds / num_layers
        part_s = layer_s * max(0, num_layers - self.num_layers)
        return Rest(layer_s * (all_layers - num_layers), part_s, num_layers)

    @property
    def due_s(self) -> float:
        """The rest, as who can act only on its word has to take it: between this word and the next
        the nearer one counts. Too early costs as much waiting as too late costs idling."""
        return self.left_s - self.part_s / 2
