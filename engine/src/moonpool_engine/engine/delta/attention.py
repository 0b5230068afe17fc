"""Layers of linear attention by the gated delta rule (Gated DeltaNet, arXiv:2412.06464).

A layer of linear attention has a state of one size per sequence in place of K and V of each token.
A state lies in the layer's slice of the block of its newest token, in float32. The state is
overwritten until the block is full. So a full block holds the state after its last token, beside
the K and V of the other layers. So blocks are cached, moved and stored like blocks of any other
model, and a cached prefix continues from the state of its last block.

A state's slice has, in this order:

    the number of its tokens (int32), and unused floats up to STATE_HEAD
    the state              [value_heads][key_dim][value_dim]
    the newest taps - 1 rows of q, k and v before the convolution, oldest first [taps - 1][channels]

A state knows how many tokens it is of. If the number differs from the step's start, the block does
not hold what the scheduler believes, so the step fails and draws no token.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.engine.ops import AttendArgs, DeltaArgs, DeltaWeights, Ops, RopeTable
from moonpool_engine.engine.packing import PlacedWeights, packed
from moonpool_engine.engine.spec import ModelSpec

BLOCK_MULTIPLE = 16


class DeltaAttention:
    """The projections of a layer and the rule between them."""

    def __init__(self, spec: ModelSpec, weights: PlacedWeights, ops: Ops, prefix: str) -> None:
        assert spec.delta is not None
        self._ops, self._spec = ops, spec.delta
        # Apart, because a file may have quantized only the first two.
        self._input, self._gates = (
            packed(weights, ops, [f"{prefix}.in_proj_{part}" for part in parts], False)
            for parts in (("qkv", "z"), ("b", "a"))
        )
        self._output = packed(weights, ops, [f"{prefix}.out_proj"], False)
        self._weights = DeltaWeights(
            taps=weights.load(f"{prefix}.conv1d.weight").float().t().contiguous(),
            decay=weights.load(f"{prefix}.A_log").double().exp().float(),
            step_bias=weights.load(f"{prefix}.dt_bias").float(),
            norm=weights.load(f"{prefix}.norm.weight").float(),
            eps=spec.rms_eps,
        )

    def qkv(self, normed: Tensor) -> Tensor:
        """Returns the projections: [T, hidden] -> [T, delta.width]."""
        return torch.cat((self._input(normed), self._gates(normed)), dim=1)

    def store(self, qkv: Tensor, rope: RopeTable, args: AttendArgs) -> Tensor:
        """Brings the states of the rows' sequences up to their last rows. Returns what the rule and
        its gated norm make of each row: [T, delta.values]."""
        where = DeltaArgs(self._spec, args.cache, args.layer, args.meta)
        return self._ops.delta_rule(qkv, self._weights, where)

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        """Takes what `store` returned, and returns the outputs."""
        return q

    def project(self, attention: Tensor) -> Tensor:
        """[T, delta.values] -> [T, hidden]."""
        return self._output(attention)


def with_room(spec: ModelSpec, layout: BlockLayout) -> BlockLayout:
    """The layout with blocks large enough that a layer's slice holds a state.

    Raises ValueError for a KVCache in fp8."""
    if spec.delta is None:
        return layout
    if layout.is_fp8:
        raise ValueError(
            "a model with linear attention keeps its states in float32: use --kv-cache-dtype auto"
        )
    token_bytes = layout.slice_bytes // layout.block_tokens
    least = -(-spec.delta.state_bytes // token_bytes)
    least = -(-least // BLOCK_MULTIPLE) * BLOCK_MULTIPLE
    return msgspec.structs.replace(layout, block_tokens=max(layout.block_tokens, least))
