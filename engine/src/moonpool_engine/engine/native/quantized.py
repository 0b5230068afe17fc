"""Linear layers with quantized weights on the C++ kernels, and the packing of these weights.

The stored bytes are arranged for the kernels once, at load, a few rows at a time: in panels of 32
outputs, as linear_quantized.cpp describes them. The arranged bytes take about as much memory as in
the file, within a few percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.cores import usable_cores
from moonpool_engine.engine.native.library import Call, Kernels
from moonpool_engine.engine.native.linear import PANEL, PackedMemory
from moonpool_engine.engine.quantized.formats import Decoded, Format
from moonpool_engine.engine.quantized.matrix import QuantizedMatrix, StoredRows

BLOCK = 32
"""Weights in a record, as in linear_quantized.cpp."""
BLOCKS = 8
"""Records per group of 256."""
_FORMS = (
    (4, "half", False),
    (4, "half", True),
    (4, "wide", True),
    (4, "whole", True),
    (5, "half", False),
    (5, "half", True),
    (5, "whole", True),
    (6, "whole", False),
    (8, "half", False),
    (5, "wide", False),
    (8, "whole", False),
)
"""Bits, scales and minimums of the kernels' forms, in the order of linear_quantized.cpp."""
REPACKED = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""The formats that repack.cpp arranges, in its order."""
_FIRST = tuple(4 * (lane // 2) + lane % 2 for lane in range(16))
"""The first of the two weights that lane i of a row meets; the second is 2 later."""


@dataclass(frozen=True, slots=True)
class _Packed:
    form: int
    weight: Tensor  # [bytes] uint8
    out: int
    offset: int


class NativeQuantizedLinear:
    """The product that `engine.quantized.linear` defines, for x [T, in], with the same bits."""

    __slots__ = ("_bias", "_call", "_parts", "dtype", "in_features", "out_features")

    def __init__(
        self, kernels: Kernels, weight: QuantizedMatrix, bias: Tensor | None, memory: PackedMemory
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._call = kernels.linear_quantized
        self._parts = [_pack(part, memory, kernels.repack) for part in _joined(weight.parts)]
        self._bias: list[Tensor | None] = [None] * len(self._parts)
        if bias is not None:
            pieces = bias.float().split([part.out for part in self._parts])
            self._bias = [_padded(piece) for piece in pieces]

    def __call__(self, x: Tensor) -> Tensor:
        rows, width = x.shape
        if width != self.in_features or x.dtype is not self.dtype:
            raise ValueError(
                f"linear takes [T, {self.in_features}] {self.dtype}, got {list(x.shape)} {x.dtype}"
            )
        x = x.contiguous()
        y = torch.empty(rows, self.out_features, dtype=self.dtype)
        address = y.data_ptr()
        for part, bias in zip(self._parts, self._bias, strict=True):
            wrong = self._call(
                part.form,
                x.data_ptr(),
                part.weight.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                address,
                rows,
                width,
                part.out,
                self.out_features,
                part.offset,
                torch.get_num_threads(),
            )
            if wrong:
                raise ValueError(f"the kernels do not know the form {part.form}")
            address += part.out * y.element_size()
        return y


def _padded(bias: Tensor) -> Tensor:
    padded = torch.zeros(-(-len(bias) // PANEL) * PANEL)
    padded[: len(bias)] = bias
    return padded


def _joined(parts: Sequence[StoredRows]) -> list[StoredRows]:
    """Adjacent parts of one format as one part. Joining copies the parts."""
    joined: list[StoredRows] = []
    for part in parts:
        if joined and joined[-1].format is part.format:
            joined[-1] = StoredRows(part.format, torch.cat((joined[-1].data, part.data)))
        else:
            joined.append(part)
    return joined


def _form(format: Format) -> int:
    scales = "whole" if format.is_super else "wide" if format.wide else "half"
    return _FORMS.index((format.bits, scales, format.has_minimum))


def _pack(rows: StoredRows, memory: PackedMemory, repack: Call) -> _Packed:
    format, out = rows.format, len(rows.data)
    if format.name in REPACKED:
        weight = repacked(rows, memory, repack)
    else:
        weight = packed_rows(rows, memory)
    return _Packed(_form(format), weight, out, format.offset)


def repacked(rows: StoredRows, memory: PackedMemory, repack: Call) -> Tensor:
    """Returns the result of `packed_rows`, computed by the kernels."""
    out, format = len(rows.data), rows.format
    panel_bytes = _panels(StoredRows(format, rows.data[:1]), rows.width // BLOCK).shape[1]
    panels = -(-out // PANEL)
    weight = memory.take(panels * panel_bytes).view(panels, panel_bytes)
    data = rows.data.contiguous()
    wrong = repack(
        REPACKED.index(format.name),
        data.data_ptr(),
        weight.data_ptr(),
        out,
        rows.width // format.group,
        panel_bytes,
        usable_cores(),
    )
    if wrong:
        raise ValueError(f"the kernels do not arrange {format.name}")
    return weight


def packed_rows(rows: StoredRows, memory: PackedMemory) -> Tensor:
    """Stored rows in panels: [panels, bytes of a panel] uint8. Slow."""
    blocks = rows.width // BLOCK
    panels = -(-len(rows.data) // PANEL)
    weight: Tensor | None = None
    at = 0
    for piece in rows.chunks(PANEL):
        packed = _panels(piece, blocks)
        if weight is None:
            panel_bytes = packed.shape[1]
            weight = memory.take(panels * panel_bytes).view(panels, panel_bytes)
        weight[at : at + len(packed)] = packed
        at += len(packed)
    assert weight is not None and at == panels
    return weight


def _panels(rows: StoredRows, blocks: int) -> Tensor:
    """Rows of one format -> [panels, bytes of a panel] uint8. Missing rows become zeros."""
    format = rows.format
    missing = -len(rows.data) % PANEL
    if missing:
        data = torch.cat((rows.data, rows.data.new_zeros(missing, rows.data.shape[1])))
        rows = StoredRows(format, data)
    decoded = format.decode(rows.groups())
    panels = len(rows.data) // PANEL
    numbers = _words(decoded.numbers.view(-1, BLOCK), format.bits)
    parts = [_by_panel(numbers.view(panels, PANEL, blocks, -1))]
    subs = BLOCK // format.sub
    for part in _sub_scales(format, decoded):
        parts.append(_by_panel(part.view(panels, PANEL, blocks, subs)))
    records = torch.cat(parts, dim=2)  # [panels, blocks, bytes]
    if not format.is_super:
        return records.flatten(1)
    heads = [decoded.scale] if decoded.minimum is None else [decoded.scale, decoded.minimum]
    head = torch.cat(
        [_by_panel(_half(part).view(panels, PANEL, blocks // BLOCKS, 1)) for part in heads], dim=2
    )
    grouped = records.view(panels, blocks // BLOCKS, -1)
    return torch.cat((head, grouped), dim=2).flatten(1)


def _sub_scales(format: Format, decoded: Decoded) -> list[Tensor]:
    """Returns the bytes of each record after its numbers: scales and minimums."""
    if format.is_super:
        assert decoded.sub_scales is not None
        found = [decoded.sub_scales.to(torch.int8)]
        if decoded.sub_minimums is not None:
            found.append(decoded.sub_minimums.to(torch.int8))
        return found
    plain = [decoded.scale] if decoded.minimum is None else [decoded.scale, decoded.minimum]
    return [part.float() for part in plain] if format.wide else [_half(part) for part in plain]


def _half(values: Tensor) -> Tensor:
    """Values that were float16 in the file, as float16 again."""
    return values.to(torch.float16)


def _by_panel(values: Tensor) -> Tensor:
    """[panels, PANEL, blocks, n] of any type -> bytes [panels, blocks, n * PANEL * size]."""
    moved = values.permute(0, 2, 3, 1).contiguous()
    return moved.view(torch.uint8).flatten(2)


def _words(numbers: Tensor, bits: int) -> Tensor:
    """Numbers [n, 32] uint8 of `bits` bits -> words [n, bits] int32."""
    if bits == 8:
        return numbers.contiguous().view(torch.int32)
    low, high = numbers.chunk(2, dim=1)
    words = [((low & 15) | (high << 4)).contiguous().view(torch.int32)]
    if bits == 4:
        return words[0]
    first = (numbers >> 4)[:, _FIRST].int()
    second = (numbers >> 4)[:, [number + 2 for number in _FIRST]].int()
    pairs = first | (second << 16)  # [n, 16]
    if bits == 5:
        words.append(_ored(pairs, range(16)))
    elif bits == 6:
        halves = (pairs[:, :8], pairs[:, 8:])
        words += [_ored(half, range(0, 16, 2)) for half in halves]
    return torch.cat(words, dim=1)


def _ored(values: Tensor, shifts: Sequence[int]) -> Tensor:
    """[n, len(shifts)] int32 -> [n, 1]: the values moved left and joined."""
    moved = values << torch.tensor(shifts, dtype=torch.int32)
    # no bits overlap, so the sum joins them
    joined: Tensor = moved.sum(dim=1, keepdim=True, dtype=torch.int32)
    return joined
