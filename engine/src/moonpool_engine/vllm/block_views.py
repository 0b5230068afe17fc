"""The bytes of vLLM's blocks as vLLM's tensors show them, without a layout's addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moonpool_engine.vllm.cache_layout import Addresses, layer_block_axis

if TYPE_CHECKING:
    import torch

BlockBytes = dict[str, "torch.Tensor"]
"""The bytes of some blocks, for each layer."""


class BlockViews:
    """Reads and fills blocks of each layer."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], config: Any) -> None:
        # layers of each group, with blocks as axis 0
        self._layers: list[dict[str, torch.Tensor]] = []
        self._ranges: set[tuple[int, int]] = set()
        for group in config.kv_cache_groups:
            found = {}
            for name in group.layer_names:
                tensor = kv_caches[name]
                axis = layer_block_axis(name, tensor, config)
                found[name] = tensor.movedim(axis, 0).unflatten(0, (config.num_blocks, -1))
                storage = tensor.untyped_storage()
                self._ranges.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
            self._layers.append(found)

    def fill(self, places: Sequence[Sequence[int]], byte: int) -> None:
        """Writes `byte` into all bytes of the blocks, for each group."""
        import torch

        for layers, ids in zip(self._layers, places, strict=True):
            for tensor in layers.values():
                for block in ids:
                    shape = (*tensor.shape[1:-1], tensor.shape[-1] * tensor.element_size())
                    value = torch.full(shape, byte, dtype=torch.uint8, device=tensor.device)
                    tensor[block].copy_(value.view(tensor.dtype))

    def clear(self) -> None:
        """Zeroes all blocks, which is how vLLM allocates them."""
        for layers in self._layers:
            for tensor in layers.values():
                tensor.zero_()

    def read(self, places: Sequence[Sequence[int]]) -> BlockBytes:
        """Returns the bytes of the blocks of each group."""
        import torch

        return {
            name: torch.stack([tensor[b].contiguous().view(torch.uint8) for b in ids]).cpu()
            for layers, ids in zip(self._layers, places, strict=True)
            for name, tensor in layers.items()
        }

    def contain(self, addresses: Addresses, slice_bytes: int) -> bool:
        """Whether all slices lie in vLLM's tensors."""
        inside = np.zeros(len(addresses), dtype=bool)
        for start, end in self._ranges:
            inside |= (addresses >= start) & (addresses <= end - slice_bytes)
        return bool(inside.all())


def first_difference(one: BlockBytes, other: BlockBytes) -> str | None:
    """The first layer whose bytes differ."""
    return next((name for name in one if not one[name].equal(other[name])), None)
