"""The model in shards: every step through all shards of this process, summed up over all ranks.

Uses the decoder's own cut of a layer, so nothing of a model is written twice. The residual stream
is the same bits on all ranks; the first rank embeds, and has the logits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor

from moonpool.engine.model import DecoderModel
from moonpool.engine.ops import KvCache, StepMeta
from moonpool.engine.slices import shard_cache
from moonpool.engine.step import BeforeAttend, LayerDone
from moonpool.engine.tensor.group import Group, RankLostError

log = logging.getLogger("moonpool.engine")

Announce = Callable[[StepMeta, Tensor | None], None]
"""Tells the other ranks of a step that begins. Raises RankLostError."""
GiveUp = Callable[[str], None]
"""Ends the other ranks, with the reason."""


class ShardedModel:
    """Rank 0 calls `forward`, the others `follow`."""

    def __init__(
        self,
        shards: Sequence[DecoderModel],
        own: Sequence[int],
        num_shards: int,
        group: Group,
        announce: Announce | None = None,
        give_up: GiveUp | None = None,
    ) -> None:
        """`shards` are those that `own` numbers. The last two are rank 0's, if there are others."""
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
        """As `DecoderModel.forward`. Raises RankLostError, after which there are no other ranks."""
        try:
            normed = self._lead(token_ids, cache, meta, wanted, on_layer, before_attend)
        except RankLostError:
            raise
        except Exception as error:
            if self._give_up is None:
                raise
            # The others are in the middle of the step, and cannot be told to stop there.
            log.exception("a step of %d rows failed", meta.num_rows)
            message = f"a step failed: {type(error).__name__}: {error}"
            self._give_up(message)
            raise RankLostError(message) from None
        return None if normed is None else self._shards[0].logits(normed)

    def follow(self, cache: KvCache, meta: StepMeta, wanted: Tensor | None) -> None:
        """A step that rank 0 has announced. Raises RankLostError."""
        hidden = self._shards[0].spec.hidden_size
        residual = cache.blocks.new_empty(meta.num_rows, hidden)
        self.group.share(residual)
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
        self.group.share(residual)
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
        """The last layer's output of the `wanted` rows, None if there are none. What a layer waits
        for and announces holds for all ranks: none gets past a sum that another has not reached."""
        first, group = self._shards[0], self.group
        caches, last = self._parts(cache), first.spec.num_layers - 1
        for layer in range(last + 1):
            queries = [
                shard.store(layer, shard.qkv(layer, normed), part, meta)
                for shard, part in zip(self._shards, caches, strict=True)
            ]
            if layer == last and wanted is None:
                group.meet()
                if on_layer is not None:
                    on_layer(layer)
                return None
            attention = [
                shard.attend(layer, q, part, meta)
                for shard, q, part in zip(self._shards, queries, caches, strict=True)
            ]
            if layer == last and wanted is not None and len(wanted) < meta.num_rows:
                attention, residual = [part[wanted] for part in attention], residual[wanted]
            added = group.sum(
                [shard.project(layer, a) for shard, a in zip(self._shards, attention, strict=True)]
            )
            if on_layer is not None:
                on_layer(layer)
            normed = first.add_attention(layer, added, residual)
            parts = [shard.mlp(layer, normed) for shard in self._shards]
            if before_attend is not None and layer < last:
                before_attend(layer + 1)
            normed = first.add_mlp(layer, group.sum(parts), residual)
        return normed

    def _parts(self, cache: KvCache) -> list[KvCache]:
        if self._caches is None or self._caches[0] is not cache:
            parts = [shard_cache(cache, shard, self.num_shards) for shard in self._own]
            self._caches = (cache, parts)
        return self._caches[1]
