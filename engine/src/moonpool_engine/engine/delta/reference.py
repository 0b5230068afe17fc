"""The gated delta rule in plain torch, row after row; `engine.delta` says where a state lies."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moonpool_engine.engine.exponential import exp, sigmoid
from moonpool_engine.engine.ops import DeltaArgs, DeltaWeights, StateError
from moonpool_engine.engine.spec import STATE_HEAD, DeltaSpec

UNIT_EPS = 1e-6


class DeltaState(NamedTuple):
    """The parts of a state, as views of its slice."""

    num_tokens: Tensor  # [1] int32
    heads: Tensor  # [value_heads, key_dim, value_dim] float32
    rows: Tensor  # [taps - 1, channels] float32


def state_view(blocks: Tensor, layer: int, block: int, spec: DeltaSpec) -> DeltaState:
    """The state in a block of `KvCache.blocks`."""
    floats = blocks[block, layer].view(torch.float32)
    sizes = (STATE_HEAD, spec.values * spec.key_dim, spec.channels * (spec.taps - 1))
    head, heads, rows = floats[: sum(sizes)].split_with_sizes(sizes)
    return DeltaState(
        head[:1].view(torch.int32),
        heads.view(spec.value_heads, spec.key_dim, spec.value_dim),
        rows.view(spec.taps - 1, spec.channels),
    )


def delta_rows(x: Tensor, weights: DeltaWeights, args: DeltaArgs) -> Tensor:
    """Like `Ops.delta_rule`."""
    spec, cache, layer, meta = args
    size, tables = cache.layout.block_tokens, meta.block_tables
    out = x.new_empty(len(x), spec.values)
    bounds = meta.row_starts.tolist()
    for s, start in enumerate(meta.context_starts.tolist()):
        place = int(tables[s, max(start - 1, 0) // size])
        running = _Running(spec, weights)
        running.continue_from(
            state_view(cache.blocks, layer, place, spec), start, s in meta.unchecked
        )
        for row in range(bounds[s], bounds[s + 1]):
            out[row] = running.take(x[row].float()).to(x.dtype)
            num_tokens = start + row - bounds[s] + 1
            if num_tokens % size == 0 or row == bounds[s + 1] - 1:
                block = int(tables[s, (num_tokens - 1) // size])
                running.write(state_view(cache.blocks, layer, block, spec), num_tokens)
    return out


class _Running:
    """A state, as one sequence's rows change it. Each operation has the same shape, whatever the
    step contains."""

    def __init__(self, spec: DeltaSpec, weights: DeltaWeights) -> None:
        self._spec, self._weights = spec, weights
        self._heads = torch.zeros(spec.value_heads, spec.key_dim, spec.value_dim)
        self._rows = torch.zeros(spec.taps - 1, spec.channels)

    def continue_from(self, state: DeltaState, num_tokens: int, unchecked: bool) -> None:
        """Raises StateError."""
        if num_tokens == 0:
            return
        found = int(state.num_tokens)
        if found == num_tokens:
            self._heads, self._rows = state.heads.clone(), state.rows.clone()
        elif not unchecked:
            raise StateError(f"a block has the state of {found} tokens, not of {num_tokens}")

    def write(self, state: DeltaState, num_tokens: int) -> None:
        state.num_tokens.fill_(num_tokens)
        state.heads.copy_(self._heads)
        state.rows.copy_(self._rows)

    def take(self, x: Tensor) -> Tensor:
        """One row of projections [width] float32 -> [values] float32."""
        spec, weights = self._spec, self._weights
        sizes = (spec.channels, spec.values, spec.value_heads, spec.value_heads)
        mixed, z, b, a = x.split_with_sizes(sizes)
        q, k, v = self._convolved(mixed)
        steps = a + weights.step_bias
        steps = steps.clamp(min=0) + torch.log1p(exp(-steps.abs()))  # softplus
        heads = self._heads * exp(-weights.decay * steps)[:, None, None]
        known = (heads * k.unsqueeze(2)).sum(1)
        change = (v - known) * sigmoid(b).unsqueeze(1)
        self._heads = heads + k.unsqueeze(2) * change.unsqueeze(1)
        out = (self._heads * q.unsqueeze(2)).sum(1)  # [value_heads, value_dim]
        normed = out * torch.rsqrt(out.square().mean(1, keepdim=True) + weights.eps)
        z = z.view_as(out)
        return (normed * weights.norm * (z * sigmoid(z))).flatten()

    def _convolved(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[channels] -> q and k [value_heads, key_dim], v [value_heads, value_dim]."""
        spec = self._spec
        window = torch.cat((self._rows, mixed.unsqueeze(0)))
        self._rows = window[1:]
        summed = window[0] * self._weights.taps[0]
        for tap in range(1, spec.taps):
            summed = summed + window[tap] * self._weights.taps[tap]
        keys = spec.key_heads * spec.key_dim
        q, k, v = (summed * sigmoid(summed)).split_with_sizes((keys, keys, spec.values))
        q, k = (_unit(each.view(spec.key_heads, spec.key_dim)) for each in (q, k))
        group = spec.value_heads // spec.key_heads
        if spec.tiled:
            q, k = (each.repeat(group, 1) for each in (q, k))
        else:
            q, k = (each.repeat_interleave(group, dim=0) for each in (q, k))
        return q * spec.key_dim**-0.5, k, v.view(spec.value_heads, spec.value_dim)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(1, keepdim=True) + UNIT_EPS)
