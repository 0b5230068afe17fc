"""The product with quantized weights in plain torch: it defines the results of the kernels.

A row of x is rounded to 16-bit whole numbers, with one scale per 256 features
(`engine.quantized.int8`). Sums within a sub-group of weights are whole numbers, which are exact in
any order. Sub-groups are added in rising order, then the groups of 256. So rows are independent,
and kernels can give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool_engine.engine.quantized.formats import scales_and_minimums
from moonpool_engine.engine.quantized.int8 import GROUP, rounded_rows
from moonpool_engine.engine.quantized.matrix import QuantizedMatrix, StoredRows

ROW_TILE = 32
"""Number of rows of x that are multiplied together; their products take some MB."""


class QuantizedLinear:
    """Computes `y = x @ weight.T + bias`: slow, portable, and the reference. x: [T, in]."""

    def __init__(self, weight: QuantizedMatrix, bias: Tensor | None) -> None:
        self._parts = [_Part(piece) for rows in weight.parts for piece in rows.chunks()]
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = rounded_rows(x)
        tiles = [*zip(numbers.split(ROW_TILE), scales.split(ROW_TILE), strict=True)]
        sums = torch.cat(
            [torch.cat([part.product(*tile) for tile in tiles]) for part in self._parts], dim=1
        )
        if self._bias is not None:
            sums += self._bias
        return sums.to(x.dtype)


class _Part:
    """Rows of one format: numbers [sub-groups, out, sub], scales and minimums [sub-groups, 1, out].

    The numbers of all formats have 8 bits. The numbers are widened for a product.
    """

    def __init__(self, rows: StoredRows) -> None:
        out, sub = len(rows.data), rows.format.sub
        decoded = rows.format.decode(rows.groups())
        scales, minimums = scales_and_minimums(rows.format, decoded)
        numbers = (decoded.numbers.to(torch.int16) - rows.format.offset).to(torch.int8)
        self._sub = sub
        self._numbers = numbers.view(out, -1, sub).transpose(0, 1).contiguous()
        self._scales = _by_sub_groups(scales, out)
        self._minimums = None if minimums is None else _by_sub_groups(minimums, out)

    def product(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """numbers [T, groups, GROUP] and scales [T, groups] of x -> [T, out] float32."""
        num_subs, step = len(self._numbers), GROUP // self._sub
        x = numbers.view(len(numbers), -1, self._sub)[:, :num_subs].transpose(0, 1).double()
        # Few large products: where other processes compute, each costs a wait for torch's threads.
        terms = torch.bmm(x, self._numbers.double().transpose(1, 2)).float()
        terms *= self._scales
        minimums = self._minimums
        added = None if minimums is None else x.sum(2).float().unsqueeze(2) * minimums
        sums = torch.zeros_like(terms[0])
        for first in range(0, num_subs, step):
            group = torch.zeros_like(sums)
            for each in range(first, min(first + step, num_subs)):
                group += terms[each]
                if added is not None:
                    group += added[each]
            sums += group * scales[:, first // step].unsqueeze(1)
        return sums


def _by_sub_groups(values: Tensor, out: int) -> Tensor:
    """Values of all sub-groups, row after row -> [sub-groups, 1, out]."""
    return values.reshape(out, -1).T.unsqueeze(1).contiguous()
