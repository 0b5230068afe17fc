"""The product with quantized weights in plain torch: it defines the results of the kernels.

A row of x is rounded to 16-bit whole numbers, with one scale per 256 features
(`engine.quantized.int8`). Sums within a sub-group of weights are whole numbers, and exact in any
order. Sub-groups are added in rising order, then the groups of 256. So rows are independent, and
kernels can give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moonpool_engine.engine.quantized.formats import scales_and_minimums
from moonpool_engine.engine.quantized.int8 import GROUP, rounded_rows
from moonpool_engine.engine.quantized.matrix import QuantizedMatrix, StoredRows


class QuantizedLinear:
    """`y = x @ weight.T + bias`: slow, portable, and the reference. x: [T, in]."""

    def __init__(self, weight: QuantizedMatrix, bias: Tensor | None) -> None:
        self._parts = [_Part(rows) for rows in weight.parts]
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        numbers, scales = rounded_rows(x)
        sums = torch.cat([part.product(numbers, scales) for part in self._parts], dim=1)
        if self._bias is not None:
            sums += self._bias
        return sums.to(x.dtype)


class _Part:
    """Rows of one format: numbers [out, sub-groups, sub] and scales [out, sub-groups]."""

    def __init__(self, rows: StoredRows) -> None:
        out = len(rows.data)
        decoded = rows.format.decode(rows.groups())
        scales, minimums = scales_and_minimums(rows.format, decoded)
        numbers = decoded.numbers.to(torch.int16) - rows.format.offset
        self._sub = rows.format.sub
        self._numbers = numbers.view(out, -1, self._sub)
        self._scales = scales.reshape(out, -1)
        self._minimums = None if minimums is None else minimums.reshape(out, -1)

    def product(self, numbers: Tensor, scales: Tensor) -> Tensor:
        """numbers [T, groups, GROUP] and scales [T, groups] of x -> [T, out] float32."""
        subs = numbers.view(len(numbers), -1, self._sub)
        sums = torch.zeros(len(numbers), len(self._numbers))
        for first in range(0, self._numbers.shape[1], GROUP // self._sub):
            group = torch.zeros_like(sums)
            for sub in range(first, min(first + GROUP // self._sub, self._numbers.shape[1])):
                x = subs[:, sub].double()
                whole = (x @ self._numbers[:, sub].double().T).float()
                group = group + whole * self._scales[:, sub]
                if self._minimums is not None:
                    group = group + x.sum(1).float().unsqueeze(1) * self._minimums[:, sub]
            sums = sums + group * scales[:, first * self._sub // GROUP].unsqueeze(1)
        return sums
