"""The kinds of KVCache of a worker. Groups of layers that need the same blocks for a hit are one
kind, and the pool has a space for each kind.

A block of a kind holds the KVCache that all groups of the kind have for one block of tokens. vLLM
has a block id for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool_engine.vllm.cache_layout import CacheGroup, CacheLayout, LayoutRefused

Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BlockKind:
    """The last `window_blocks` blocks are what a prefix needs; 0 means all blocks. Layers' slices
    in a block of the kind are in the order of its groups, and within a group as in the layout."""

    index: int
    window_blocks: int
    groups: tuple[CacheGroup, ...]

    @property
    def num_slices(self) -> int:
        """Slices of one block."""
        return sum(group.num_slices for group in self.groups)

    def slices_by_layer(self, layout: CacheLayout) -> dict[str, Places]:
        """The numbers of each layer's slices in a block of the kind."""
        found: dict[str, Places] = {}
        first = 0
        for group in self.groups:
            for name in group.layers:
                parts = [
                    np.arange(part.slice_index, part.slice_index + part.num_slices)
                    for part in layout.layer_parts[name]
                ]
                found[name] = np.concatenate(parts) + (first - group.first_slice)
            first += group.num_slices
        return found


def kinds_of(layout: CacheLayout) -> tuple[BlockKind, ...]:
    """Returns the kinds of a layout, starting with those that need all blocks. Raises LayoutRefused
    for groups whose blocks have different numbers of tokens."""
    sizes = {group.block_tokens for group in layout.groups}
    if len(sizes) > 1:
        listed = " and ".join(map(str, sorted(sizes)))
        raise LayoutRefused(f"its kinds of KVCache have blocks of {listed} tokens: not supported")
    windows = sorted({window_blocks(group) for group in layout.groups})
    kinds = []
    for index, window in enumerate(windows):
        groups = tuple(group for group in layout.groups if window_blocks(group) == window)
        if not any(group.layers for group in groups):
            raise LayoutRefused(
                f"this process has no layers with a {groups[0].kind}, others have: not supported"
            )
        kinds.append(BlockKind(index, window, groups))
    return tuple(kinds)


def windows_of(groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """Returns, for each group, the blocks of its window, and 0 where it has none."""
    return tuple(map(window_blocks, groups))


def window_blocks(group: CacheGroup) -> int:
    """How many blocks before its end a prefix needs; 0 means all. A token sees itself and the
    `window_tokens - 1` before it."""
    if group.window_tokens is None:
        return 0
    return max(-(-(group.window_tokens - 1) // group.block_tokens), 1)
