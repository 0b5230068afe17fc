"""Weight matrices as a checkpoint stores them: plain tensors, or quantized rows.

A linear multiplies with either (`Ops.linear`). The bytes of quantized rows stay where they are,
usually in a mapped file. Ranks cut a matrix by rows, or by columns at the borders of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool_engine.engine.quantized.formats import Format, dequantize

CHUNK_ELEMENTS = 1 << 20


class StoredRows(NamedTuple):
    """Rows in one format. data: [rows, groups * format.bytes] uint8."""

    format: Format
    data: Tensor

    @property
    def width(self) -> int:
        """Weights per row."""
        return self.data.shape[1] // self.format.bytes * self.format.group

    def groups(self) -> Tensor:
        """[rows * groups, format.bytes] uint8."""
        return self.data.reshape(-1, self.format.bytes)

    def chunks(self, multiple: int = 1) -> list[StoredRows]:
        """Returns the same rows in pieces that fit a cache. The size of each piece but the last is
        a multiple of `multiple` rows."""
        share = max(CHUNK_ELEMENTS // self.width // multiple, 1) * multiple
        return [StoredRows(self.format, piece) for piece in self.data.split(share)]


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [out, in] of quantized rows; parts follow each other and may differ in format.

    `dtype` is the model's dtype, in which the matrix is used if no kernel reads its format.
    """

    parts: tuple[StoredRows, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return sum(len(part.data) for part in self.parts), self.parts[0].width

    @property
    def num_bytes(self) -> int:
        """The size of the stored data."""
        return sum(part.data.numel() for part in self.parts)

    def dequantized(self) -> Tensor:
        """The weights [out, in] as a plain tensor."""
        out = torch.empty(self.shape, dtype=self.dtype)
        at = 0
        for part in self.parts:
            for piece in part.chunks():
                count = len(piece.data)
                weights = dequantize(piece.format, piece.groups())
                out[at : at + count] = weights.view(count, -1)
                at += count
        return out

    def rows(self, start: int, stop: int) -> QuantizedMatrix:
        """Rows `start` to `stop` (not included)."""
        kept: list[StoredRows] = []
        at = 0
        for part in self.parts:
            first, last = max(start - at, 0), min(stop - at, len(part.data))
            if first < last:
                kept.append(StoredRows(part.format, part.data[first:last]))
            at += len(part.data)
        return QuantizedMatrix(tuple(kept), self.dtype)

    def reordered(self, order: Tensor) -> QuantizedMatrix:
        """A copy with the rows in another order. This method only works for a matrix of one
        part."""
        (part,) = self.parts
        return QuantizedMatrix((StoredRows(part.format, part.data[order]),), self.dtype)

    def columns(self, start: int, stop: int) -> QuantizedMatrix | None:
        """Returns columns `start` to `stop` (exclusive), or None if these are not borders of
        groups."""
        kept: list[StoredRows] = []
        for part in self.parts:
            group, size = part.format.group, part.format.bytes
            if start % group or stop % group:
                return None
            kept.append(
                StoredRows(part.format, part.data[:, start // group * size : stop // group * size])
            )
        return QuantizedMatrix(tuple(kept), self.dtype)


Matrix = Tensor | QuantizedMatrix


def plain(matrix: Matrix) -> Tensor:
    """The matrix as a tensor in the model's dtype."""
    return matrix if isinstance(matrix, Tensor) else matrix.dequantized()


def reordered(matrix: Matrix, order: Tensor) -> Matrix:
    """A copy with the rows in another order; a quantized matrix must be of one part."""
    if isinstance(matrix, Tensor):
        return matrix[order.to(matrix.device)]
    return matrix.reordered(order)


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """Returns the rows of all matrices, one after the other. If one matrix is plain, all become
    plain."""
    if len(matrices) == 1:
        return matrices[0]
    quantized = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
    if len(quantized) < len(matrices):
        return torch.cat([plain(matrix) for matrix in matrices])
    parts = tuple(rows for matrix in quantized for rows in matrix.parts)
    return QuantizedMatrix(parts, quantized[0].dtype)


def lookup(matrix: Matrix, ids: Tensor) -> Tensor:
    """Rows `ids` [T] int64 of an embedding -> [T, width] in the model's dtype."""
    if isinstance(matrix, Tensor):
        return F.embedding(ids, matrix)
    (part,) = matrix.parts
    found = StoredRows(part.format, part.data[ids])
    return dequantize(found.format, found.groups()).view(len(ids), -1).to(matrix.dtype)
