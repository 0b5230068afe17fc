"""Linears to which each row's adapter adds its low-rank product.

The rows of an adapter are computed together, by the batch-invariant `Ops.exact_linear` in the
activations' dtype. The rest is one addition per element. So a row's bits depend on its own input
and adapter, never on neighbouring rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moonpool_engine.engine.lora.adapter import Adapter, Factors
from moonpool_engine.engine.ops import Linear, Ops, StepMeta


class AdapterRows:
    """Which rows of the step under way use which adapter. All linears of a model share one
    `AdapterRows`."""

    def __init__(self) -> None:
        self.groups: list[tuple[int, Tensor | None]] = []
        """(number of an adapter, from 1; rows that use it, or None for all rows)."""
        self._of_rows: Tensor | None = None  # [T] int64: the adapter of each row, 0 for none

    def begin(self, meta: StepMeta) -> None:
        """Notes which adapter each row of a new step uses."""
        if not any(meta.adapters):
            self.groups, self._of_rows = [], None
            return
        counts = meta.row_starts.diff().long()
        self._set(torch.tensor(meta.adapters).repeat_interleave(counts))

    def keep(self, wanted: Tensor) -> None:
        """Keeps only the `wanted` rows for the rest of the step."""
        if self._of_rows is not None:
            self._set(self._of_rows[wanted])

    def _set(self, of_rows: Tensor) -> None:
        self._of_rows = of_rows
        numbers = of_rows.unique().tolist()
        if len(numbers) == 1:
            self.groups = [(numbers[0], None)] if numbers[0] else []
            return
        self.groups = [(n, (of_rows == n).nonzero().flatten()) for n in numbers if n]


class LoraLinear:
    """A linear, plus what the adapters add to each row."""

    def __init__(
        self,
        base: Linear,
        rows: AdapterRows,
        parts: Mapping[int, Sequence[tuple[int, Linear, Linear]]],
    ) -> None:
        """`parts`: for each adapter by number, (first output, down, up) of the outputs that it
        adapts."""
        self._base = base
        self._rows = rows
        self._parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        y = self._base(x)
        for number, rows in self._rows.groups:
            parts = self._parts.get(number, ())
            if not parts:
                continue
            own = x if rows is None else x[rows]
            for first, down, up in parts:
                added = up(down(own))
                into = y[:, first : first + added.shape[1]]
                if rows is None:
                    into += added
                else:
                    into[rows] = into[rows] + added
        return y


class LoraPacker:
    """Packs the adapters of one model beside its linears. Adapters count from 1 in their order."""

    def __init__(self, adapters: Sequence[Adapter], ops: Ops) -> None:
        self.rows = AdapterRows()
        self._adapters = adapters
        self._ops = ops

    def adapted(self, base: Linear, modules: Sequence[tuple[str, int]]) -> Linear:
        """The linear of `modules`, given as (name, number of outputs), which follow each other."""
        parts: dict[int, list[tuple[int, Linear, Linear]]] = {}
        for number, adapter in enumerate(self._adapters, 1):
            first = 0
            for name, num_outputs in modules:
                factors = adapter.modules.get(name)
                if factors is not None:
                    parts.setdefault(number, []).append((first, *self._pack(factors)))
                first += num_outputs
        return LoraLinear(base, self.rows, parts) if parts else base

    def _pack(self, factors: Factors) -> tuple[Linear, Linear]:
        pack = self._ops.exact_linear
        return pack(factors.down, None), pack(factors.up, None)
