"""How the KVCache tensors of one vLLM worker lie in memory: which bytes belong to which block.

Bytes of a block are moved verbatim, so what they mean (K or V, which head, which token) does not
matter here. `layout_probe` proves that the bytes named here are those of the block.

This module imports neither torch nor vLLM, and only reads their objects.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Addresses = npt.NDArray[np.uint64]

LEAST_SLICE_BYTES = 256  # over fewer bytes, xxh3 is computed by another function
SLICE_STEP_BYTES = 64  # slices bypass the cache in whole cache lines

# From the most special class of vLLM's specs to the most general one; the first in a spec's classes
# says its kind.
_KINDS = (
    ("SlidingWindowMLASpec", "sliding window MLA"),
    ("HiddenStateCacheSpec", ""),
    ("MLAAttentionSpec", "MLA"),
    ("SinkFullAttentionSpec", ""),
    ("RSWASpec", ""),
    ("FullAttentionSpec", "full attention"),
    ("ChunkedLocalAttentionSpec", "chunked attention"),
    ("CircularBufferSpec", ""),
    ("SlidingWindowSpec", "sliding window"),
)


class LayoutRefused(Exception):  # noqa: N818 - an answer, not a fault
    """The pool cannot be used with these tensors; the message is one line that says why."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table: a block id of the group names a block of each of them."""

    index: int
    kind: str
    block_tokens: int
    window_tokens: int | None
    """Length of a sliding window or a chunk, or None if a token attends to all tokens before it."""
    layers: tuple[str, ...]
    first_slice: int
    num_slices: int


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Bytes of one layer that lie together in a block: `num_slices` slices, one behind another."""

    layer_name: str
    group: int
    slice_index: int
    num_slices: int
    address: int
    block_stride_bytes: int


@dataclass(frozen=True, slots=True)
class _LayerForm:
    """Where one layer's blocks lie in memory: the starts of the runs of bytes of block 0, and their
    length."""

    name: str
    group: int
    starts: tuple[int, ...]
    run_bytes: int
    block_stride_bytes: int
    description: tuple[Any, ...]


@dataclass(frozen=True)
class CacheLayout:
    """Tells where each slice of each block is.

    A *slice* is a run of `slice_bytes` bytes. A block has `num_slices` slices over all layers, in
    the order of groups, of their layers, and of addresses in a layer. In a model with several
    groups, each group has its own block ids, and holds slices `first_slice` to `first_slice +
    num_slices` of a block's tokens.
    """

    slice_bytes: int
    num_blocks: int
    """The number of vLLM's blocks; ids are below it."""
    device_type: str
    groups: tuple[CacheGroup, ...]
    parts: tuple[LayerPart, ...]
    description: str
    """JSON of all that must be equal between two workers, without what belongs to this process."""

    @classmethod
    def of(cls, kv_caches: Mapping[str, torch.Tensor], kv_cache_config: Any) -> CacheLayout:
        """Makes the layout from what vLLM gives a connector: the tensor of each layer by its name,
        and the `KVCacheConfig`. Raises LayoutRefused."""
        try:
            return _read(kv_caches, kv_cache_config)
        except (AttributeError, KeyError, TypeError, IndexError, RuntimeError) as error:
            said = " ".join(str(error).split())[:200]
            name = type(error).__name__
            raise LayoutRefused(
                f"this vLLM describes its KVCache otherwise: {name}: {said}"
            ) from error

    @property
    def num_slices(self) -> int:
        """Slices of one block over all layers of all groups."""
        return sum(group.num_slices for group in self.groups)

    @cached_property
    def layer_parts(self) -> dict[str, tuple[LayerPart, ...]]:
        """The parts of each layer."""
        found: dict[str, tuple[LayerPart, ...]] = {}
        for part in self.parts:
            found[part.layer_name] = (*found.get(part.layer_name, ()), part)
        return found

    @cached_property
    def group_parts(self) -> tuple[tuple[LayerPart, ...], ...]:
        """The parts of each group."""
        return tuple(
            tuple(part for part in self.parts if part.group == group.index) for group in self.groups
        )

    def addresses(self, what: str | int | LayerPart, block_ids: npt.ArrayLike) -> Addresses:
        """The address of each slice of blocks, block after block: of one part, of a layer (by its
        name) or of a group (by its index). Raises IndexError if vLLM has no such block."""
        parts = (
            (what,)
            if isinstance(what, LayerPart)
            else self.layer_parts[what]
            if isinstance(what, str)
            else self.group_parts[what]
        )
        return slice_addresses(parts, block_ids, self.slice_bytes, self.num_blocks)

    def fingerprint(
        self,
        tp_rank: int = 0,
        tp_size: int = 1,
        backends: Mapping[str, str] | None = None,
        vllm_version: str = "",
    ) -> bytes:
        """SHA-256 over all that must be equal between two workers that exchange blocks: layers,
        groups, specs, order of bytes in a block, slices; the part of the heads that this rank has;
        `backends`, the class names of attention by layer; vLLM's version."""
        about = [self.description, tp_rank, tp_size, sorted((backends or {}).items())]
        return hashlib.sha256(json.dumps([*about, vllm_version]).encode()).digest()


def slice_addresses(
    parts: Sequence[LayerPart], block_ids: npt.ArrayLike, slice_bytes: int, num_blocks: int
) -> Addresses:
    """Returns the addresses of some parts, as `CacheLayout.addresses` does."""
    ids = np.asarray(block_ids, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= num_blocks):
        raise IndexError(f"block ids are 0 to {num_blocks - 1}, got {ids.min()} to {ids.max()}")
    if not parts:
        return np.zeros(0, dtype=np.uint64)
    counts = [part.num_slices for part in parts]
    first = np.repeat(np.array([part.address for part in parts], dtype=np.int64), counts)
    within = np.concatenate([np.arange(count, dtype=np.int64) for count in counts])
    strides = np.repeat(np.array([p.block_stride_bytes for p in parts], dtype=np.int64), counts)
    found: npt.NDArray[np.int64] = first + within * slice_bytes + ids[:, None] * strides
    return found.ravel().view(np.uint64)


def _read(kv_caches: Mapping[str, torch.Tensor], config: Any) -> CacheLayout:
    placed = _placed_layers(config)
    forms: list[_LayerForm] = []
    kinds: list[tuple[str, int, int | None, tuple[str, ...]]] = []
    for index, group in enumerate(config.kv_cache_groups):
        names = tuple(group.layer_names)
        kinds.append((*_kind_of(group, names), names))
        for name in names:
            if name not in kv_caches:
                raise LayoutRefused(f"layer {name} has no KVCache tensor")
            spec = _spec_of(group, name)
            forms.append(
                _form_of(name, index, kv_caches[name], spec, config.num_blocks, placed.get(name))
            )
    if not forms:
        raise LayoutRefused("vLLM has no KVCache layers")
    _refuse_unknown_layers(kv_caches, forms)
    slice_bytes = _slice_bytes(forms)
    parts, groups = _cut(forms, kinds, slice_bytes)
    layout = CacheLayout(
        slice_bytes=slice_bytes,
        num_blocks=config.num_blocks,
        device_type=_device_type(kv_caches, forms),
        groups=groups,
        parts=parts,
        description=json.dumps([slice_bytes, kinds, [form.description for form in forms]]),
    )
    _refuse_overlaps(layout)
    return layout


def _spec_of(group: Any, layer_name: str) -> Any:
    """Returns the spec of one layer: the spec of its group, or its own in a group of several."""
    own = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return group.kv_cache_spec if own is None else own[layer_name]


def _kind_of(group: Any, names: Sequence[str]) -> tuple[str, int, int | None]:
    """Kind, tokens of a block, and tokens of the window of a group. Raises LayoutRefused."""
    found = set()
    # A pipeline stage may have no layer of a group.
    specs = [(name, _spec_of(group, name)) for name in names] or [("", group.kv_cache_spec)]
    for name, spec in specs:
        classes = [c.__name__ for c in type(spec).__mro__]
        kind = next((kind for known, kind in _KINDS if known in classes), "")
        if not kind:
            raise LayoutRefused(f"layer {name} has a cache of the kind {classes[0]}: not supported")
        if getattr(spec, "tokens_per_state", 1) != 1:
            raise LayoutRefused(f"layer {name} stores no state for each token: not supported")
        window = getattr(spec, "sliding_window", None) if "sliding" in kind else None
        if kind == "chunked attention":
            window = spec.attention_chunk_size
        found.add((kind, int(spec.block_size), window))
    if len(found) > 1:
        listed = ", ".join(sorted(map(str, found)))
        raise LayoutRefused(f"layers of one group have different caches: {listed}")
    if getattr(group, "host_resident", False):
        name = next(iter(names), "")
        raise LayoutRefused(f"layer {name} has its cache in the host's memory: not supported")
    return found.pop()


def _placed_layers(config: Any) -> dict[str, tuple[int, int]]:
    """Returns what vLLM 0.32 and later tell about a layer's place: the offset of block 0 in the
    allocation, and the bytes from block to block. Earlier versions report nothing here."""
    found = {}
    for tensor in config.kv_cache_tensors:
        stride = getattr(tensor, "block_stride", None)
        for position, name in enumerate(getattr(tensor, "layers", ())):
            if stride is not None:
                found[name] = (tensor.offset + position * tensor.layer_stride, stride)
    return found


def _form_of(
    name: str,
    group: int,
    tensor: torch.Tensor,
    spec: Any,
    num_blocks: int,
    placed: tuple[int, int] | None,
) -> _LayerForm:
    """Raises LayoutRefused."""
    if not hasattr(tensor, "data_ptr"):
        raise LayoutRefused(f"layer {name} has {type(tensor).__name__} as its cache: no tensor")
    item = tensor.element_size()
    axes = _axes_of(tensor)
    axis = _block_axis(name, axes, num_blocks, placed)
    size, step = axes.pop(axis)
    ratio = size // num_blocks  # consecutive kernel blocks in each block
    inner = [*axes[:axis], (ratio, step), *axes[axis:]]
    stride = ratio * step
    held = math.prod(size for size, _ in inner) * item
    said = getattr(spec, "unpadded_page_size_bytes", None) or spec.page_size_bytes
    if held != said:
        raise LayoutRefused(f"layer {name}: a block has {held} bytes, vLLM says {said}")
    run, outer = _runs(inner, item)
    if run == 0 or not _disjoint([*outer, (num_blocks, stride)], run):
        raise LayoutRefused(f"layer {name}: bytes of its blocks overlap")
    base = tensor.data_ptr()
    if placed is not None:
        start = tensor.untyped_storage().data_ptr() + placed[0]
        if (base, stride) != (start, placed[1]):
            raise LayoutRefused(
                f"layer {name}: its tensor starts {base - start} bytes from where vLLM places it,"
                f" with {stride} bytes from block to block instead of {placed[1]}"
            )
    offsets = (sum(o) for o in itertools.product(*(range(0, n * s, s) for n, s in outer)))
    # The stride of an axis of length one has no meaning, and may differ.
    order = sorted((i for i, (n, _) in enumerate(inner) if n > 1), key=lambda i: -inner[i][1])
    sizes = [size for size, _ in inner]
    described = (name, group, str(tensor.dtype), axis, sizes, order, run, len(outer), repr(spec))
    return _LayerForm(name, group, tuple(base + o for o in sorted(offsets)), run, stride, described)


def layer_block_axis(name: str, tensor: torch.Tensor, config: Any) -> int:
    """Which axis of a layer's tensor counts blocks. Raises LayoutRefused."""
    place = _placed_layers(config).get(name)
    return _block_axis(name, _axes_of(tensor), config.num_blocks, place)


def _axes_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Size and stride in bytes of each axis."""
    item = tensor.element_size()
    return [(size, step * item) for size, step in zip(tensor.shape, tensor.stride(), strict=True)]


def _block_axis(
    name: str, axes: Sequence[tuple[int, int]], num_blocks: int, placed: tuple[int, int] | None
) -> int:
    """Which axis counts blocks (or kernel blocks): the first, or the second behind one for K and V.
    Raises LayoutRefused."""
    fitting = [i for i, (size, _) in enumerate(axes[:2]) if size and size % num_blocks == 0]
    if placed is not None:  # vLLM tells the bytes from block to block
        fitting = [i for i in fitting if axes[i][0] // num_blocks * axes[i][1] == placed[1]]
    shape = tuple(size for size, _ in axes)
    if not fitting:
        raise LayoutRefused(f"layer {name}: no axis of {shape} counts the {num_blocks} blocks")
    if len(fitting) > 1:
        raise LayoutRefused(f"layer {name}: two axes of {shape} may count the {num_blocks} blocks")
    return fitting[0]


def _runs(axes: Sequence[tuple[int, int]], item: int) -> tuple[int, list[tuple[int, int]]]:
    """Returns the length of contiguous bytes, and the axes (size, stride in bytes) over such
    runs."""
    left = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[1])
    run = item if all(size for size, _ in axes) else 0
    while left and left[-1][1] == run:
        run *= left.pop()[0]
    return run, left


def _disjoint(axes: Sequence[tuple[int, int]], run: int) -> bool:
    """Whether runs of `run` bytes over `axes` share no byte: each stride is past all within it."""
    reach = run
    for size, step in sorted(axes, key=lambda axis: axis[1]):
        if size > 1 and step < reach:
            return False
        reach += (size - 1) * step
    return True


def _refuse_unknown_layers(
    kv_caches: Mapping[str, torch.Tensor], forms: Sequence[_LayerForm]
) -> None:
    """Raises LayoutRefused for an unknown layer: one that is in no group, and does not use the
    blocks (and so the tensor) of another layer."""
    known = {form.name for form in forms}
    pointers = {kv_caches[name].data_ptr() for name in known}
    for name, tensor in kv_caches.items():
        if name not in known and tensor.data_ptr() not in pointers:
            raise LayoutRefused(f"layer {name} has a KVCache tensor but is in no group")


def _device_type(kv_caches: Mapping[str, torch.Tensor], forms: Sequence[_LayerForm]) -> str:
    found = {str(kv_caches[form.name].device.type) for form in forms}
    if len(found) > 1:
        raise LayoutRefused(f"KVCache tensors are on several devices: {', '.join(sorted(found))}")
    return found.pop()


def _slice_bytes(forms: Sequence[_LayerForm]) -> int:
    """The longest slice of which all runs consist. Raises LayoutRefused."""
    found = math.gcd(*(form.run_bytes for form in forms))
    if found < LEAST_SLICE_BYTES or found % SLICE_STEP_BYTES:
        shortest = min(forms, key=lambda form: form.run_bytes)
        raise LayoutRefused(
            f"blocks consist of slices of {found} bytes (layer {shortest.name} has"
            f" {shortest.run_bytes} together): fewer than {LEAST_SLICE_BYTES} or no multiple of"
            f" {SLICE_STEP_BYTES}"
        )
    for form in forms:
        if any(place % SLICE_STEP_BYTES for place in (*form.starts, form.block_stride_bytes)):
            raise LayoutRefused(
                f"layer {form.name}: blocks do not start at a multiple of {SLICE_STEP_BYTES} bytes"
            )
    return found


def _cut(
    forms: Sequence[_LayerForm],
    kinds: Sequence[tuple[str, int, int | None, tuple[str, ...]]],
    slice_bytes: int,
) -> tuple[tuple[LayerPart, ...], tuple[CacheGroup, ...]]:
    """Numbers the slices. `forms` must be in the order of groups."""
    parts: list[LayerPart] = []
    groups: list[CacheGroup] = []
    number = 0
    for index, (kind, block_tokens, window, names) in enumerate(kinds):
        first = number
        for form in (form for form in forms if form.group == index):
            count = form.run_bytes // slice_bytes
            for start in form.starts:
                stride = form.block_stride_bytes
                parts.append(LayerPart(form.name, index, number, count, start, stride))
                number += count
        groups.append(CacheGroup(index, kind, block_tokens, window, names, first, number - first))
    return tuple(parts), tuple(groups)


def _refuse_overlaps(layout: CacheLayout) -> None:
    """Layers of one group must not share bytes. Groups may: a block id belongs to one at a time."""
    last = layout.num_blocks - 1
    ids = np.unique(np.clip([0, 1, 2, last - 1, last], 0, last))
    for group in layout.groups:
        found = np.sort(layout.addresses(group.index, ids))
        if len(found) > 1 and np.diff(found).min() < layout.slice_bytes:
            raise LayoutRefused(f"layers of group {group.index} share bytes of their blocks")
