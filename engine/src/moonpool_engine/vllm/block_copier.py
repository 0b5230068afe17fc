"""Copies blocks between vLLM's KVCache tensors and the pool's memory, with checksums.

`HostCopier` is for tensors in host memory: one pass copies and computes checksums. `DeviceCopier`
is for other devices: bytes pass through a staging buffer in host memory, and the checksums are
those of the buffer. So the device gets exactly the verified bytes, even if the pool's memory
changes meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from moonpool_engine.vllm.block_kinds import BlockKind, Places
from moonpool_engine.vllm.cache_layout import Addresses, CacheLayout, LayerPart
from moonpool_engine.vllm.slice_mover import SliceMover, Sums


class BlockCopier(Protocol):
    """Copies blocks of one kind of KVCache. `places` are addresses in the pool's memory, one for
    each block id."""

    def mark(self) -> None:
        """Called by vLLM's thread when a step begins: blocks that were computed before this call
        may be stored."""
        ...

    def load(self, layer: str, block_ids: Places, places: Places) -> Sums:
        """Copies one layer of blocks into vLLM. Returns the checksums of the copied bytes, one row
        for each block."""
        ...

    def wait(self, layer: str) -> None:
        """Called by vLLM's thread after `load` has returned: attention may read the layer."""
        ...

    def store(self, block_ids: Sequence[Places], places: Places) -> Sums:
        """Copies whole blocks out of vLLM; `block_ids` are given for each group of the kind.
        Returns the checksums of all their slices."""
        ...


class HostCopier:
    """Copies tensors in this process's memory."""

    def __init__(self, layout: CacheLayout, kind: BlockKind, mover: SliceMover) -> None:
        self._layout = layout
        self._kind = kind
        self._mover = mover
        self._within = np.arange(kind.num_slices, dtype=np.int64) * layout.slice_bytes
        self._slices_of = kind.slices_by_layer(layout)

    def mark(self) -> None:
        """Does nothing, because a step is computed when vLLM's thread continues."""

    def wait(self, layer: str) -> None:
        """Does nothing, because the blocks of a load are already in place."""

    def load(self, layer: str, block_ids: Places, places: Places) -> Sums:
        slices = self._slices_of[layer]
        source = (places[:, None] + self._within[slices]).ravel().astype(np.uint64)
        to = self._layout.addresses(layer, block_ids)
        return self._mover.copy(source, to, self._layout.slice_bytes).reshape(-1, len(slices))

    def store(self, block_ids: Sequence[Places], places: Places) -> Sums:
        parts = [
            self._layout.addresses(group.index, ids).reshape(len(places), -1)
            for group, ids in zip(self._kind.groups, block_ids, strict=True)
            if group.layers
        ]
        source = np.hstack(parts).ravel()
        to = (places[:, None] + self._within).ravel().astype(np.uint64)
        return self._mover.copy(source, to, self._layout.slice_bytes)


class DeviceCopier:
    """Copies tensors on a device. Loads and stores have a CUDA stream each, beside the model's
    stream."""

    def __init__(
        self,
        layout: CacheLayout,
        kind: BlockKind,
        mover: SliceMover,
        kv_caches: Mapping[str, torch.Tensor],
    ) -> None:
        self._layout = layout
        self._kind = kind
        self._mover = mover
        self._within = np.arange(kind.num_slices, dtype=np.int64) * layout.slice_bytes
        self._slices_of = kind.slices_by_layer(layout)
        self._device = next(iter(kv_caches.values())).device
        self._views = {
            name: [_view(kv_caches[name], part, layout) for part in layout.layer_parts[name]]
            for name in self._slices_of
        }
        self._streams = _Streams(self._device)

    def mark(self) -> None:
        self._streams.mark_computed()

    def wait(self, layer: str) -> None:
        self._streams.wait_loaded(layer)

    def load(self, layer: str, block_ids: Places, places: Places) -> Sums:
        size, slices = self._layout.slice_bytes, self._slices_of[layer]
        count = len(block_ids)
        staging = self._staging(count * len(slices) * size)
        source = (places[:, None] + self._within[slices]).ravel().astype(np.uint64)
        to = staging.data_ptr() + np.arange(count * len(slices), dtype=np.int64) * size
        sums = self._mover.copy(source, to.astype(np.uint64), size).reshape(count, len(slices))
        rows = staging.view(count, len(slices) * size)
        with self._streams.loading(layer):
            ids = torch.from_numpy(block_ids).to(self._device)
            start = 0
            for view in self._views[layer]:
                width = view.shape[1]
                piece = rows[:, start : start + width].to(self._device, non_blocking=True)
                view.index_copy_(0, ids, piece)
                start += width
        self._streams.keep(staging)
        return sums

    def store(self, block_ids: Sequence[Places], places: Places) -> Sums:
        size, num_slices = self._layout.slice_bytes, self._kind.num_slices
        count = len(places)
        staging = self._staging(count * num_slices * size)
        rows = staging.view(count, num_slices * size)
        with self._streams.storing():
            start = 0
            for group, group_ids in zip(self._kind.groups, block_ids, strict=True):
                ids = torch.from_numpy(group_ids).to(self._device)
                for view in (view for name in group.layers for view in self._views[name]):
                    end = start + view.shape[1]
                    rows[:, start:end].copy_(view.index_select(0, ids), non_blocking=True)
                    start = end
        source = staging.data_ptr() + np.arange(count * num_slices, dtype=np.int64) * size
        to = (places[:, None] + self._within).ravel().astype(np.uint64)
        return self._mover.copy(source.astype(np.uint64), to, size)

    def _staging(self, num_bytes: int) -> torch.Tensor:
        pinned = self._device.type == "cuda"
        raw = torch.empty(num_bytes + 64, dtype=torch.uint8, pin_memory=pinned)
        start = -raw.data_ptr() % 64  # slices are copied to multiples of 64 bytes
        return raw[start : start + num_bytes]


class _Streams:
    """The order between the model's CUDA stream and the streams of the copies. Without streams, as
    on a CPU, everything is already in order."""

    def __init__(self, device: torch.device) -> None:
        self._has_streams = device.type == "cuda"
        self._loaded: dict[str, Any] = {}
        self._kept: list[torch.Tensor] = []
        self._computed: Any = None
        if self._has_streams:
            self._load = torch.cuda.Stream(device)
            self._store = torch.cuda.Stream(device)

    def mark_computed(self) -> None:
        if self._has_streams:
            self._computed = torch.cuda.current_stream().record_event()
            self._kept.clear()  # buffers of the previous step, which has ended

    def keep(self, staging: torch.Tensor) -> None:
        if self._has_streams:
            self._kept.append(staging)

    @contextlib.contextmanager
    def loading(self, layer: str) -> Iterator[None]:
        if not self._has_streams:
            yield
            return
        with torch.cuda.stream(self._load):
            if self._computed is not None:  # the blocks may have belonged to another request
                self._load.wait_event(self._computed)
            yield
            self._loaded[layer] = self._load.record_event()

    def wait_loaded(self, layer: str) -> None:
        event = self._loaded.pop(layer, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    @contextlib.contextmanager
    def storing(self) -> Iterator[None]:
        """Ends when the bytes are in the host's memory."""
        if not self._has_streams:
            yield
            return
        with torch.cuda.stream(self._store):
            if self._computed is not None:
                self._store.wait_event(self._computed)
            yield
        self._store.synchronize()


class DeviceSliceMover:
    """Copies slices one by one between the host's memory and tensors on a device, for the proof of
    a layout. This mover is slow, and takes addresses as the layout states them."""

    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._memory = {
            storage.data_ptr(): torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
                storage
            )
            for tensor in kv_caches.values()
            for storage in (tensor.untyped_storage(),)
        }

    def copy(self, from_addresses: Addresses, to_addresses: Addresses, slice_bytes: int) -> Sums:
        import xxhash  # imported here for the same reason as in `PlainSliceMover`

        sums = np.empty(len(from_addresses), np.uint64)
        pairs = zip(from_addresses.tolist(), to_addresses.tolist(), strict=True)
        for number, (source, target) in enumerate(pairs):
            data = self._at(source, slice_bytes).cpu()
            self._at(target, slice_bytes).copy_(data)
            sums[number] = xxhash.xxh3_64_intdigest(data.numpy().tobytes())
        return sums

    def _at(self, address: int, num_bytes: int) -> torch.Tensor:
        for start, memory in self._memory.items():
            if start <= address and address + num_bytes <= start + len(memory):
                return memory[address - start : address - start + num_bytes]
        host = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(host, dtype=torch.uint8)


def open_copier(
    layout: CacheLayout,
    kind: BlockKind,
    mover: SliceMover,
    kv_caches: Mapping[str, torch.Tensor],
) -> BlockCopier:
    """The copier for these tensors."""
    if layout.device_type == "cpu":
        return HostCopier(layout, kind, mover)
    return DeviceCopier(layout, kind, mover, kv_caches)


def _view(tensor: torch.Tensor, part: LayerPart, layout: CacheLayout) -> torch.Tensor:
    """The bytes of a part, one row for each of vLLM's blocks."""
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    offset = part.address - storage.data_ptr()
    width = part.num_slices * layout.slice_bytes
    return whole.as_strided((layout.num_blocks, width), (part.block_stride_bytes, 1), offset)
