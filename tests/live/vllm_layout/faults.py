"""Plants faults: layouts and movers that are wrong in one way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from moonpool_engine.vllm.cache_layout import Addresses, CacheLayout
from moonpool_engine.vllm.slice_mover import SliceMover, Sums, open_mover

Change = Callable[[Any, Any], Any]


class ChangedImport:
    """A mover that changes the bytes of every second copy, the copy into vLLM's blocks: `change`
    gets the bytes as (slices, slice_bytes), and the layout's form."""

    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(self, change: Change, form: dict[str, int]) -> None:
        self._mover = open_mover()
        self._change, self._form = change, form
        self._imports = False

    def copy(self, from_addresses: Addresses, to_addresses: Addresses, slice_bytes: int) -> Sums:
        if self._imports:
            data = np.zeros(len(from_addresses) * slice_bytes + 64, np.uint8)
            start = -data.ctypes.data % 64
            places = np.arange(len(from_addresses)) * slice_bytes + data.ctypes.data + start
            sums = self._mover.copy(from_addresses, places.astype(np.uint64), slice_bytes)
            held = data[start:][: len(from_addresses) * slice_bytes]
            slices = held.reshape(-1, slice_bytes)
            slices[:] = self._change(slices.copy(), self._form)
            self._mover.copy(places.astype(np.uint64), to_addresses, slice_bytes)
        else:
            sums = self._mover.copy(from_addresses, to_addresses, slice_bytes)
        self._imports = not self._imports
        return sums


def cells(slices: Any, form: dict[str, int]) -> Any:
    """Returns a view of the slices as (slices, heads, tokens, bytes of K and V of a token), which
    is vLLM's form on a CPU."""
    return slices.reshape(len(slices), form["heads"], form["tokens"], -1)


def swap_k_and_v(slices: Any, form: dict[str, int]) -> Any:
    found = cells(slices, form)
    return np.roll(found, found.shape[-1] // 2, axis=3).reshape(slices.shape)


def swap_heads(slices: Any, form: dict[str, int]) -> Any:
    return cells(slices, form)[:, ::-1].reshape(slices.shape)


def shift_tokens(slices: Any, form: dict[str, int]) -> Any:
    return np.roll(cells(slices, form), 1, axis=2).reshape(slices.shape)


def swap_layers(slices: Any, form: dict[str, int]) -> Any:
    """Swaps two layers of each block."""
    blocks = slices.reshape(-1, form["slices"], slices.shape[1]).copy()
    blocks[:, [0, 1]] = blocks[:, [1, 0]]
    return blocks.reshape(slices.shape)


def lose_last_slice(slices: Any, form: dict[str, int]) -> Any:
    """Changes a slice of the last layer of each block."""
    blocks = slices.reshape(-1, form["slices"], slices.shape[1]).copy()
    blocks[:, -1] = 0
    return blocks.reshape(slices.shape)


def flip_a_bit(slices: Any, form: dict[str, int]) -> Any:
    """Flips the highest bit of an exponent in one slice."""
    slices[0, 1] ^= 0x40
    return slices


def wrong_stride(layout: CacheLayout) -> CacheLayout:
    """Places blocks closer together than they are."""
    parts = (
        replace(part, block_stride_bytes=part.block_stride_bytes - 64) for part in layout.parts
    )
    return replace(layout, parts=tuple(parts))


def far_stride(layout: CacheLayout) -> CacheLayout:
    """Places blocks further apart than they are, so that the last blocks lie outside the allocated
    memory."""
    parts = (replace(part, block_stride_bytes=2 * part.block_stride_bytes) for part in layout.parts)
    return replace(layout, parts=tuple(parts))


def next_block(layout: CacheLayout) -> CacheLayout:
    """Names the next block by each id."""
    parts = (replace(p, address=p.address + p.block_stride_bytes) for p in layout.parts)
    return replace(layout, parts=tuple(parts))


def forget_a_layer(layout: CacheLayout) -> CacheLayout:
    """Leaves out the last layer."""
    last = layout.parts[-1].layer_name
    return replace(layout, parts=tuple(p for p in layout.parts if p.layer_name != last))


MOVERS: dict[str, Change] = {
    "K and V swapped": swap_k_and_v,
    "two heads swapped": swap_heads,
    "one token off": shift_tokens,
    "two layers swapped": swap_layers,
    "a slice lost": lose_last_slice,
    "a bit flipped": flip_a_bit,
}
LAYOUTS: dict[str, Callable[[CacheLayout], CacheLayout]] = {
    "blocks too close": wrong_stride,
    "blocks too far apart": far_stride,
    "ids shifted by one": next_block,
    "a layer forgotten": forget_a_layer,
}


class Deaf:
    """Copies nothing, but reports success."""

    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def copy(self, from_addresses: Addresses, to_addresses: Addresses, slice_bytes: int) -> Sums:
        return np.zeros(len(from_addresses), np.uint64)


def mover_of(fault: str, form: dict[str, int]) -> SliceMover:
    if fault == "nothing copied":
        return Deaf()
    return ChangedImport(MOVERS[fault], form) if fault in MOVERS else open_mover()
