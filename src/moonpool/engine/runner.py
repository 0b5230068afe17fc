"""Runs steps: turns what the sequences ask for into rows, through the model, into tokens.

Owns the packed model of one process. The blocks belong to whoever made the arena: the engine writes
the slots the sequences name, and nothing else. Never decides what runs, and keeps nothing between
steps but the weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from moonpool.config import Quantization
from moonpool.engine import native
from moonpool.engine.builtin import LoadedModel
from moonpool.engine.cuda.choice import Model, choose_device_ops, with_graphs
from moonpool.engine.cuda.mirror import Mirror
from moonpool.engine.grammar import Grammars
from moonpool.engine.model import DecoderModel
from moonpool.engine.ops import KvCache, Ops
from moonpool.engine.reference import ReferenceOps
from moonpool.engine.rows import plan_rows
from moonpool.engine.sampler import sample
from moonpool.engine.slices import INNER, check_layout, sharded_inner
from moonpool.engine.spec import ModelSpec
from moonpool.engine.staggered import StaggeredModel
from moonpool.engine.step import BeforeAttend, LayerDone, SequenceStep, StepResult
from moonpool.engine.tensor.model import ShardedModel
from moonpool.engine.tokenizers.registry import open_tokenizer
from moonpool.kvcache.layout import BlockLayout
from moonpool.types import Token

logger = logging.getLogger(__name__)


class Engine:
    """One model, its operations and the blocks it works in. Steps run one at a time."""

    def __init__(
        self,
        model: LoadedModel,
        ops: Ops,
        cache: KvCache,
        mirror: Mirror | None = None,
        staggered: bool = False,
        sharded: ShardedModel | None = None,
    ) -> None:
        """`staggered`: decodes run as two halves that take turns, see `engine.staggered`.
        `sharded`: the model, where it is computed in shards, see `engine.tensor`."""
        self.spec: ModelSpec = model.spec
        self.layout: BlockLayout = cache.layout
        self.ops_name = ops.name
        self.num_blocks = cache.blocks.shape[0]
        num_shards = 1 if sharded is None else sharded.num_shards
        if sharded is not None and sharded.group.num_ranks > 1:
            self.ops_name = f"{ops.name}, {sharded.group.num_ranks} ranks"
        expected = make_layout(model, cache.layout.block_tokens, ops, num_shards)
        arithmetic = cache.layout.arithmetic
        if cache.layout != msgspec.structs.replace(expected, arithmetic=arithmetic):
            raise ValueError(
                f"the KVCache is laid out as {cache.layout}, the model needs {expected}"
            )
        check_layout(cache.layout)
        self.grammars = grammars_of(model)
        self._cache = cache
        self._device = ops.device
        self.mirror = mirror
        self._model: Model
        if sharded is not None:
            self._model = sharded
            return
        with torch.inference_mode():
            decoder = DecoderModel(model.spec, model.weights, ops)
            self._model = StaggeredModel(decoder) if staggered else with_graphs(decoder, ops)

    def step(
        self,
        sequences: Sequence[SequenceStep],
        on_layer: LayerDone | None = None,
        before_attend: BeforeAttend | None = None,
    ) -> StepResult:
        """Computes all new tokens' KVCache, and draws where asked. Raises `StepError`.

        `on_layer(i)` is called, in this thread, once layer i of the whole step is in its blocks,
        and in those of the `mirror` if there is one. `before_attend(i)` is called before layer i of
        the blocks is read.
        """
        began_s = time.perf_counter()
        drawing = [i for i, sequence in enumerate(sequences) if sequence.draw is not None]
        tokens: list[Token | None] = [None] * len(sequences)
        void: set[int] = set()

        def wait(layer: int) -> Collection[int]:
            assert before_attend is not None
            void.update(before_attend(layer))
            return void

        waits = None if before_attend is None else wait
        logits = self._forward(sequences, drawing, on_layer, waits)
        if logits is not None and void:
            rows = [row for row, i in enumerate(drawing) if i not in void]
            logits, drawing = logits[rows], [drawing[row] for row in rows]
        if logits is not None and drawing:
            draws = [draw for i in drawing if (draw := sequences[i].draw) is not None]
            ends = [sequences[i].start + len(sequences[i].new_token_ids) for i in drawing]
            for i, token in zip(drawing, sample(logits, draws, ends, self.grammars), strict=True):
                tokens[i] = token
        return StepResult(tokens, time.perf_counter() - began_s)

    def logits(self, sequences: Sequence[SequenceStep]) -> Tensor:
        """Runs the step and returns the last row's logits of every sequence: [S, vocab] float32."""
        logits = self._forward(sequences, list(range(len(sequences))), None)
        assert logits is not None
        return logits

    def _forward(
        self,
        sequences: Sequence[SequenceStep],
        drawing: list[int],
        on_layer: LayerDone | None,
        before_attend: BeforeAttend | None = None,
    ) -> Tensor | None:
        rows = plan_rows(sequences, self.spec, self.layout, self.num_blocks)
        wanted = None
        if drawing:
            wanted = torch.from_numpy(rows.last[drawing]).to(self._device)
        layer_done = on_layer
        if self.mirror is not None:
            layer_done = self.mirror.begin(rows.meta, announced=on_layer is not None)
        with torch.inference_mode():
            token_ids = rows.token_ids.to(self._device)
            logits = self._model.forward(
                token_ids, self._cache, rows.meta, wanted, layer_done, before_attend
            )
        if self.mirror is not None:
            self.mirror.end(on_layer)
        return logits


def grammars_of(model: LoadedModel) -> Grammars:
    """For answers that must have a form; opens the model's tokenizer when that is first asked."""
    spec = model.spec
    reader = partial(open_tokenizer, model.tokenizer, spec.vocab_size)
    return Grammars(reader, spec.vocab_size, spec.eos_token_ids)


def make_layout(
    model: LoadedModel, block_tokens: int, ops: Ops | None = None, num_shards: int = 1
) -> BlockLayout:
    """The blocks this model fills, named after `ops` if they are to be shared with other engines,
    and after the shards in which it is computed: sums over them have other last bits.

    Raises `ValueError` where the engine cannot have them.
    """
    arithmetic = "" if ops is None else ops.arithmetic
    if arithmetic and num_shards > 1:
        arithmetic = f"{arithmetic} in {num_shards} shards"
    layout = BlockLayout(
        model_fingerprint=model.fingerprint,
        dtype=model.dtype,
        block_tokens=block_tokens,
        num_layers=model.spec.num_layers,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        inner=sharded_inner(INNER if ops is None else ops.inner, num_shards),
        arithmetic=arithmetic,
    )
    check_layout(layout)
    return layout


def choose_ops(dtype: str, device: str = "cpu", quantization: Quantization = "none") -> Ops:
    """The fastest operations this machine and installation have for `dtype`; logs which and why.

    Raises `ValueError` where the device does not take such weights."""
    if device != "cpu":
        if quantization != "none":
            raise ValueError(f"{quantization} weights are for --device cpu, not {device}")
        return choose_device_ops(torch.device(device))
    kind = dtype if quantization == "none" else f"{dtype} with {quantization} weights"
    missing = native.available()
    if missing is not None:
        logger.warning("%s runs on plain torch, slowly: %s", kind, missing)
        return ReferenceOps(quantization)
    from moonpool.engine.native.ops import NativeOps

    ops = NativeOps(quantization=quantization)
    logger.info("%s runs on native kernels (%s)", kind, ops.isa)
    return ops
