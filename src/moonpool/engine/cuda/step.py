"""A step's places as tensors of the device, made once per step and not once per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.engine.ops import StepMeta


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """`StepMeta` on the device, in one copy; what the host must know of it stays in lists."""

    meta: StepMeta
    positions: Tensor  # [T] int32
    sequences: Tensor  # [T] int32: whose row it is
    row_starts: Tensor  # [S + 1] int32
    context_starts: Tensor  # [S] int32
    block_tables: Tensor  # [S, max_blocks] int32
    counts: list[int]  # rows of each sequence
    contexts: list[int]  # tokens before them


def place_step(meta: StepMeta, device: torch.device) -> DeviceStep:
    counts = meta.row_starts.diff()
    sequences = torch.arange(meta.num_sequences, dtype=torch.int32).repeat_interleave(counts)
    parts = (meta.positions, sequences, meta.row_starts, meta.context_starts, meta.block_tables)
    packed = torch.cat([part.flatten() for part in parts]).to(device)
    there = packed.split([part.numel() for part in parts])
    return DeviceStep(
        meta=meta,
        positions=there[0],
        sequences=there[1],
        row_starts=there[2],
        context_starts=there[3],
        block_tables=there[4].view(meta.block_tables.shape),
        counts=counts.tolist(),
        contexts=meta.context_starts.tolist(),
    )


class StepPlacer:
    """Remembers the last step placed: all its layers ask for the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: DeviceStep | None = None

    def adopt(self, step: DeviceStep) -> None:
        self._last = step

    def __call__(self, meta: StepMeta) -> DeviceStep:
        last = self._last
        if last is None or last.meta is not meta:
            last = self._last = place_step(meta, self._device)
        return last
