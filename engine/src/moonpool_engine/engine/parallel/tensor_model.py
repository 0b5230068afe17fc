"""A model in shards: how weights are divided, and a step through the shards of one process.

A shard has, of every layer, some KV heads with their queries and some columns of the FFN. A cluster
has one number of shards. Every instance computes all of them, in one process or divided between its
ranks, and a shard gives the same bits wherever it is computed (docs/decisions/parallelism.md).

Each layer uses the same two dense halves as `DecoderModel`. The residual stream has the same bits
on all ranks. Only the first rank embeds tokens and computes logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.lora.adapter import Adapter, Factors
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.ops import KvCache, Ops, StepMeta, compute_dtype
from moonpool_engine.engine.packing import Weights
from moonpool_engine.engine.parallel.tensor_group import Group, RankLostError
from moonpool_engine.engine.quantized.matrix import Matrix, QuantizedMatrix
from moonpool_engine.engine.slices import shard_cache
from moonpool_engine.engine.spec import ModelSpec
from moonpool_engine.engine.step import BeforeAttend, LayerDone


def check_shards(spec: ModelSpec, num_shards: int) -> None:
    """Raises ModelError if the KV heads do not divide evenly into `num_shards`."""
    if spec.delta is not None and num_shards > 1:
        raise ModelError("a model with linear attention has no ranks: use stages, or one process")
    # A latent is one KV head, which all ranks have; they share out the heads that read it.
    heads = spec.num_kv_heads if spec.latent is None else spec.num_heads
    if heads % num_shards:
        kind = "KV heads" if spec.latent is None else "heads"
        most = max(n for n in (1, 2, 4, 8, 16, 32, 64) if heads % n == 0)
        raise ModelError(
            f"the model has {heads} {kind}, which {num_shards} ranks cannot share out evenly; "
            f"use --tensor-parallel-size {most} or less"
        )


def load_shards(
    spec: ModelSpec,
    weights: Weights,
    ops: Ops,
    own: Sequence[int],
    num_shards: int,
    adapters: Sequence[Adapter] = (),
) -> list[DecoderModel]:
    """Loads the shards `own`, in that order. Only shard 0 has the embedding and the LM head.
    `adapters` are the adapters of the whole model. Raises ModelError."""
    check_shards(spec, num_shards)
    shards: list[DecoderModel] = []
    for shard in own:
        cut = _ShardWeights(spec, weights, shard, num_shards)
        ropes = shards[0].ropes if shards else None
        adapted = [cut.adapter(adapter) for adapter in adapters]
        shards.append(
            DecoderModel(cut.spec, cut, ops, edges=shard == 0, ropes=ropes, adapters=adapted)
        )
    return shards


class _ShardWeights:
    """The weights of one shard: its rows of q, k, v, gate and up, its columns of o and down, and
    its experts whole. If q and k are normed over all heads, each shard computes both for all heads.

    Shard 0 alone has the biases of o and down, which a sum over shards must contain once.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, shard: int, num_shards: int) -> None:
        self._weights = weights
        self._shard = shard
        self._num_shards = num_shards
        ffn = _share(spec.intermediate_size, shard, num_shards)
        self._shared = range(0)
        experts = spec.experts
        if experts is not None:
            self._shared = _share(experts.shared_size, shard, num_shards)
            own = _share(experts.count, shard, num_shards)
            experts = replace(experts, shared_size=len(self._shared), own=(own.start, own.stop))
        self.spec = replace(
            spec,
            num_heads=spec.num_heads // num_shards,
            num_kv_heads=spec.num_kv_heads // (num_shards if spec.latent is None else 1),
            intermediate_size=len(ffn),
            head_share=(shard, num_shards),
            experts=experts,
        )
        self._ffn = ffn

    def load(self, name: str) -> Tensor:
        whole = self._weights.load(name)
        if name.endswith(".bias") and _module(name) in COLUMN_MODULES and not _is_expert(name):
            return whole if self._shard == 0 else whole.zero_()
        rows, columns = self._mine(name, tuple(whole.shape))
        if rows is not None:
            return whole[rows.start : rows.stop].clone()
        if columns is not None:
            return whole[:, columns.start : columns.stop].contiguous()
        return whole

    def matrix(self, name: str) -> Matrix:
        """A part of quantized rows. Columns that are cut within a group become a plain tensor."""
        whole = self._weights.matrix(name)
        if not isinstance(whole, QuantizedMatrix):
            return self.load(name)
        rows, columns = self._mine(name, whole.shape)
        if rows is not None:
            return whole.rows(rows.start, rows.stop)
        if columns is not None:
            cut = whole.columns(columns.start, columns.stop)
            return self.load(name) if cut is None else cut
        return whole

    def adapter(self, whole: Adapter) -> Adapter:
        """Returns the shard's part of an adapter. Each product is counted once in a sum over
        shards."""
        modules: dict[str, Factors] = {}
        for name, (down, up) in ((n, (f.down, f.up)) for n, f in whole.modules.items()):
            rows, columns = self._mine(f"{name}.weight", (up.shape[0], down.shape[1]))
            if rows is not None:
                up = up[rows.start : rows.stop].contiguous()
            if columns is not None:
                down = down[:, columns.start : columns.stop].contiguous()
            modules[name] = Factors(down, up)
        return replace(whole, modules=modules)

    def _mine(self, name: str, shape: tuple[int, ...]) -> tuple[range | None, range | None]:
        """Returns the shard's rows or columns of a tensor, or None for all of them."""
        module = _module(name)
        if _is_expert(name) or (self.spec.qk_norm == "all" and module in ("q_proj", "k_proj")):
            return None, None
        ffn = self._shared if ".mlp.shared_experts." in name else self._ffn
        if module in HEAD_MODULES or name.endswith(".sinks"):
            return _share(shape[0], self._shard, self._num_shards), None
        if module in ("gate_proj", "up_proj"):
            return ffn, None
        if module == "o_proj":
            return None, _share(shape[1], self._shard, self._num_shards)
        return (None, ffn) if module == "down_proj" else (None, None)


HEAD_MODULES = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj")
COLUMN_MODULES = ("o_proj", "down_proj")


def _module(name: str) -> str:
    """Returns the last module in a tensor's name."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _is_expert(name: str) -> bool:
    """Experts are shared out whole."""
    return ".mlp.experts." in name


def _share(size: int, shard: int, num_shards: int) -> range:
    """The shard's even share of `size`; the first shards have one more if it does not divide."""
    share, more = divmod(size, num_shards)
    bounds = [share * k + min(k, more) for k in range(num_shards + 1)]
    return [range(*pair) for pair in pairwise(bounds)][shard]


log = logging.getLogger("moonpool_engine.engine")

Announce = Callable[[StepMeta, Tensor | None], None]
"""Sends a step to the other ranks before it is computed. Raises RankLostError."""
GiveUp = Callable[[str], None]
"""Ends the other ranks; the argument of the call is the reason."""


class ShardedModel:
    """The shards of one rank. Rank 0 calls `forward`; the other ranks call `follow`."""

    def __init__(
        self,
        shards: Sequence[DecoderModel],
        own: Sequence[int],
        num_shards: int,
        group: Group,
        announce: Announce | None = None,
        give_up: GiveUp | None = None,
    ) -> None:
        """`own`: the numbers of the `shards` that this rank computes. Only rank 0 passes `announce`
        and `give_up`, and only if there are other ranks."""
        self.num_shards = num_shards
        self.group = group
        self._shards = list(shards)
        self._own = list(own)
        self._announce = announce
        self._give_up = give_up
        self._caches: tuple[KvCache, list[KvCache]] | None = None

    def forward(
        self,
        token_ids: Tensor,
        cache: KvCache,
        meta: StepMeta,
        wanted: Tensor | None,
        on_layer: LayerDone | None = None,
        before_attend: BeforeAttend | None = None,
    ) -> Tensor | None:
        """Like `DecoderModel.forward`. Raises RankLostError, after which the other ranks have
        ended."""
        normed = self.hidden(token_ids, cache, meta, wanted, on_layer, before_attend)
        return None if normed is None else self.logits(normed)

    def logits(self, normed: Tensor) -> Tensor:
        """Like `DecoderModel.logits`; only rank 0 computes it."""
        return self._shards[0].logits(normed)

    def hidden(
        self,
        token_ids: Tensor,
        cache: KvCache,
        meta: StepMeta,
        wanted: Tensor | None,
        on_layer: LayerDone | None = None,
        before_attend: BeforeAttend | None = None,
    ) -> Tensor | None:
        """Like `DecoderModel.hidden`. Raises RankLostError, after which the other ranks have
        ended."""
        try:
            return self._lead(token_ids, cache, meta, wanted, on_layer, before_attend)
        except RankLostError:
            raise
        except Exception as error:
            if self._give_up is None:
                raise
            # The other ranks are in the middle of the step and cannot be stopped there.
            log.exception("a step of %d rows failed", meta.num_rows)
            message = f"a step failed: {type(error).__name__}: {error}"
            self._give_up(message)
            raise RankLostError(message) from None

    def follow(self, cache: KvCache, meta: StepMeta, wanted: Tensor | None) -> None:
        """Computes a step that rank 0 has announced. Raises RankLostError."""
        hidden = self._shards[0].spec.hidden_size
        residual = torch.empty(meta.num_rows, hidden, dtype=compute_dtype(cache.layout))
        self.group.broadcast(residual)
        normed = self._shards[0].enter(residual)
        self._advance(residual, normed, cache, meta, wanted, None, None)

    def _lead(
        self,
        token_ids: Tensor,
        cache: KvCache,
        meta: StepMeta,
        wanted: Tensor | None,
        on_layer: LayerDone | None,
        before_attend: BeforeAttend | None,
    ) -> Tensor | None:
        if self._announce is not None:
            self._announce(meta, wanted)
        residual, normed = self._shards[0].embed(token_ids)
        if before_attend is not None:
            before_attend(0)
        self.group.broadcast(residual)
        return self._advance(residual, normed, cache, meta, wanted, on_layer, before_attend)

    def _advance(
        self,
        residual: Tensor,
        normed: Tensor,
        cache: KvCache,
        meta: StepMeta,
        wanted: Tensor | None,
        on_layer: LayerDone | None,
        before_attend: BeforeAttend | None,
    ) -> Tensor | None:
        """Returns the last layer's output of the `wanted` rows, [len(wanted), hidden], or None
        without wanted rows.

        residual, normed: [T, hidden]. Rank 0 waits for and announces a layer on behalf of all
        ranks, because no rank passes a sum that another rank has not reached.
        """
        first, group = self._shards[0], self.group
        caches, last = self._parts(cache), first.spec.num_layers - 1
        for shard in self._shards:
            shard.adapter_rows.begin(meta)
        for layer in range(last + 1):
            queries = [
                shard.store(layer, shard.qkv(layer, normed), part, meta)
                for shard, part in zip(self._shards, caches, strict=True)
            ]
            if layer == last and wanted is None:
                group.barrier()
                if on_layer is not None:
                    on_layer(layer)
                return None
            attention = [
                shard.attend(layer, q, part, meta)
                for shard, q, part in zip(self._shards, queries, caches, strict=True)
            ]
            if layer == last and wanted is not None and len(wanted) < meta.num_rows:
                attention, residual = [part[wanted] for part in attention], residual[wanted]
                for shard in self._shards:
                    shard.adapter_rows.keep(wanted)
            added = group.all_reduce(
                [shard.project(layer, a) for shard, a in zip(self._shards, attention, strict=True)]
            )
            if on_layer is not None:
                on_layer(layer)
            normed = first.add_attention(layer, added, residual)
            parts = [shard.mlp(layer, normed) for shard in self._shards]
            if before_attend is not None and layer < last:
                before_attend(layer + 1)
            normed = first.add_mlp(layer, group.all_reduce(parts), residual)
        return normed

    def _parts(self, cache: KvCache) -> list[KvCache]:
        if self._caches is None or self._caches[0] is not cache:
            parts = [shard_cache(cache, shard, self.num_shards) for shard in self._own]
            self._caches = (cache, parts)
        return self._caches[1]
