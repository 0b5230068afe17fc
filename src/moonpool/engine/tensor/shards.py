"""What a shard of a model is: of every layer some KV heads with their queries, and some of the FFN.

Owns the cutting of weights. A cluster has one number of shards, and each of its instances computes
all of them, in one process or shared out among several: what a shard computes is the same bits
wherever it is computed. Never computes, never adds shards up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from moonpool.engine.model import DecoderModel, Weights
from moonpool.engine.ops import Ops
from moonpool.engine.spec import ModelError, ModelSpec


def check_shards(spec: ModelSpec, num_shards: int) -> None:
    """Raises ModelError where the model cannot be cut so."""
    heads = spec.num_kv_heads
    if heads % num_shards:
        most = max(n for n in (1, 2, 4, 8, 16, 32, 64) if heads % n == 0)
        raise ModelError(
            f"the model has {heads} KV heads, which {num_shards} ranks cannot share out evenly; "
            f"use --tensor-parallel-size {most} or less"
        )


def load_shards(
    spec: ModelSpec, weights: Weights, ops: Ops, own: Sequence[int], num_shards: int
) -> list[DecoderModel]:
    """The shards `own`, in that order. The model's first shard is also the one that embeds, and
    that has the logits. Raises ModelError."""
    check_shards(spec, num_shards)
    shards: list[DecoderModel] = []
    for shard in own:
        cut = _ShardWeights(spec, weights, shard, num_shards)
        rope = shards[0].rope if shards else None
        shards.append(DecoderModel(cut.spec, cut, ops, edges=shard == 0, rope=rope))
    return shards


class _ShardWeights:
    """A shard's rows of q, k, v, gate and up, and its columns of o and down. What is added once to
    a sum of shards, the first shard adds."""

    def __init__(self, spec: ModelSpec, weights: Weights, shard: int, num_shards: int) -> None:
        self._weights = weights
        self._shard = shard
        self._num_shards = num_shards
        ffn = _share(spec.intermediate_size, shard, num_shards)
        self.spec = replace(
            spec,
            num_heads=spec.num_heads // num_shards,
            num_kv_heads=spec.num_kv_heads // num_shards,
            intermediate_size=len(ffn),
        )
        self._ffn = ffn

    def load(self, name: str) -> Tensor:
        whole = self._weights.load(name)
        part, _, kind = name.removeprefix("model.layers.").rpartition(".")
        module = part.rpartition(".")[2]
        if module in ("q_proj", "k_proj", "v_proj"):
            mine = _share(whole.shape[0], self._shard, self._num_shards)
            return whole[mine.start : mine.stop].clone()
        if module in ("gate_proj", "up_proj"):
            return whole[self._ffn.start : self._ffn.stop].clone()
        if module not in ("o_proj", "down_proj"):
            return whole
        if kind == "bias":
            return whole if self._shard == 0 else whole.zero_()
        mine = self._ffn
        if module == "o_proj":
            mine = _share(whole.shape[1], self._shard, self._num_shards)
        return whole[:, mine.start : mine.stop].contiguous()


def _share(size: int, shard: int, num_shards: int) -> range:
    """Evenly; the first shards have one more where it does not divide."""
    share, more = divmod(size, num_shards)
    bounds = [share * k + min(k, more) for k in range(num_shards + 1)]
    return [range(*pair) for pair in pairwise(bounds)][shard]
