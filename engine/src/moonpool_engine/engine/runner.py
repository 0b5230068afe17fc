"""The engine of one process: a step's entries become rows, logits and tokens.

The runner owns the packed model. The blocks belong to the arena's owner: the engine writes only the
blocks that a step's entries name. The runner does not decide which requests run, and keeps nothing
but weights between steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate

import msgspec
import numpy as np
import torch
from torch import Tensor

from moonpool.config.tables import Quantization
from moonpool.protocol.block_layout import BlockLayout
from moonpool.scheduler.actions import StepEntry
from moonpool.text.grammar import Grammars
from moonpool.types import Token, TokenLogprobs
from moonpool_engine.engine import native
from moonpool_engine.engine.builtin import LoadedModel
from moonpool_engine.engine.cuda.host_sync import HostGpuSync
from moonpool_engine.engine.delta.attention import with_room
from moonpool_engine.engine.device import Model, choose_device_ops, with_graphs
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.ops import KvCache, Ops, SplitOps
from moonpool_engine.engine.parallel.tensor_model import ShardedModel
from moonpool_engine.engine.reference import ReferenceOps, ReferenceSplitOps
from moonpool_engine.engine.sampler import draw_of, sample, score
from moonpool_engine.engine.slices import INNER, LATENT_INNER, check_layout, sharded_inner
from moonpool_engine.engine.spec import ModelSpec
from moonpool_engine.engine.staggered import StaggeredModel
from moonpool_engine.engine.step import (
    BeforeAttend,
    LayerDone,
    StepResult,
    drawing_rows,
    first_positions,
    plan_rows,
    pool,
    pooled_rows,
)
from moonpool_engine.engine.tokenizers import open_vocabulary

logger = logging.getLogger(__name__)


class Engine:
    """One model, its operations and its KVCache blocks. Steps run one at a time."""

    def __init__(
        self,
        model: LoadedModel,
        ops: Ops,
        cache: KvCache,
        host_sync: HostGpuSync | None = None,
        staggered: bool = False,
        sharded: ShardedModel | None = None,
        decoder: DecoderModel | None = None,
    ) -> None:
        """`host_sync` copies between GPU blocks and the arena. `staggered`: whether decodes run as
        two alternating half batches (`engine.staggered`). `sharded` replaces the model if it is
        computed in shards (`engine.parallel.tensor_model`). `decoder`: the same model, packed by
        the same kind of `ops`.

        Raises `ValueError` if the cache's layout does not fit the model.
        """
        self.spec: ModelSpec = model.spec
        self.layout: BlockLayout = cache.layout
        self.ops_name = ops.name
        self.num_blocks = cache.blocks.shape[0]
        num_shards = 1 if sharded is None else sharded.num_shards
        if model.adapters and (staggered or ops.device.type != "cpu"):
            raise ValueError(
                "LoRA adapters need a CPU engine without staggered decodes: "
                "use --device cpu and engine.staggered_decodes = false"
            )
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
        self.cache = cache
        self._device = ops.device
        self._adapters = model.adapter_numbers
        self.host_sync = host_sync
        self.model: Model
        # the model that gives hidden states, and the logits that follow from them
        self._states: DecoderModel | ShardedModel
        if sharded is not None:
            self.model = self._states = sharded
            return
        with torch.inference_mode():
            if decoder is None:
                decoder = DecoderModel(model.spec, model.weights, ops, adapters=model.adapters)
                model.release()
            self._states = decoder
            self.model = StaggeredModel(decoder) if staggered else with_graphs(decoder, ops)

    def step(
        self,
        entries: Sequence[StepEntry],
        on_layer: LayerDone | None = None,
        before_attend: BeforeAttend | None = None,
    ) -> StepResult:
        """Computes the KVCache of all new tokens and draws the tokens that entries ask for.

        `on_layer(i)` is called, in this thread, once layer i of the whole step is in its blocks,
        and with `host_sync` also in the arena. `before_attend(i)` is called before layer i of the
        blocks is read. Raises `StepError` for a step that cannot run, `NonFiniteLogitsError` or
        `ArithmeticError` for results that are no numbers, and what `ops` raise.
        """
        began_s = time.perf_counter()
        drawing = [i for i, e in enumerate(entries) if e.draw is not None and e.pooling == "none"]
        tokens: list[Token | None] = [None] * len(entries)
        further: dict[int, tuple[Token, ...]] = {}
        void: set[int] = set()

        def wait(layer: int) -> Collection[int]:
            assert before_attend is not None
            void.update(before_attend(layer))
            return void

        waits = None if before_attend is None else wait
        other = _OtherRows(entries)
        if other.rows:
            logits = self._forward_other(entries, drawing, other, on_layer, waits)
        else:
            logits = self._forward(entries, drawing, on_layer, waits)
        if logits is not None and void:
            of_row = [i for i in drawing for _ in range(1 + entries[i].num_drafts)]
            logits = logits[[row for row, i in enumerate(of_row) if i not in void]]
            drawing = [i for i in drawing if i not in void]
        if logits is not None and drawing:
            draws = [draw_of(entries[i], self.spec.eos_token_ids) for i in drawing]
            drawn = sample(logits, draws, first_positions(entries, drawing), self.grammars)
            for i, found in zip(drawing, drawn, strict=True):
                tokens[i] = found[0]
                if len(found) > 1:
                    further[i] = found[1:]
        pooled: dict[int, bytes] = {}
        for i, states in other.states.items():
            embedding = None if i in void else pool(entries[i], states)
            if isinstance(embedding, Token):
                tokens[i] = embedding
            elif embedding is not None:
                pooled[i] = embedding
        sound = {i: each for i, each in other.scored.items() if i not in void}
        return StepResult(tokens, time.perf_counter() - began_s, sound, pooled, further)

    def logits(self, entries: Sequence[StepEntry]) -> Tensor:
        """Runs the step. Returns the logits after each sequence's last row: [S, vocab] float32."""
        logits = self._forward(entries, list(range(len(entries))), None)
        assert logits is not None
        return logits

    def _forward_other(
        self,
        entries: Sequence[StepEntry],
        drawing: list[int],
        other: _OtherRows,
        on_layer: LayerDone | None,
        before_attend: BeforeAttend | None,
    ) -> Tensor | None:
        """Returns the logits of the rows to draw from, and fills `other`."""
        ends = np.array(other.begins[1:], dtype=np.int64) - 1
        last = [int(row) for row in drawing_rows(entries, drawing, ends)]
        scoring = [row for rows in other.scoring.values() for row in rows]
        # The order is rising, because a model that is asked for all rows returns them in their
        # order.
        wanted = sorted({*other.rows, *last})
        place = {row: number for number, row in enumerate(wanted)}

        def at(rows: Iterable[int]) -> list[int]:
            return [place[row] for row in rows]

        if other.pooling:
            states = self._forward(entries, drawing, on_layer, before_attend, wanted, True)
            assert states is not None
            other.states = {i: states[at(rows)] for i, rows in other.pooling.items()}
            if not (scoring or last):
                return None
            with torch.inference_mode():
                logits = self._states.logits(states[at([*scoring, *last])])
            scores, drawn = logits[: len(scoring)], logits[len(scoring) :]
        else:
            found = self._forward(entries, drawing, on_layer, before_attend, wanted)
            assert found is not None
            scores, drawn = found[at(scoring)], found[at(last)]
        other.score(entries, scores)
        return drawn if last else None

    def _forward(
        self,
        entries: Sequence[StepEntry],
        drawing: list[int],
        on_layer: LayerDone | None,
        before_attend: BeforeAttend | None = None,
        wanted_rows: list[int] | None = None,
        hidden: bool = False,
    ) -> Tensor | None:
        """Returns the logits of `wanted_rows`, or else of the rows from which the entries draw.
        With `hidden`, returns the states from which the logits follow."""
        rows = plan_rows(entries, self.spec, self.layout, self.num_blocks, self._adapters)
        wanted = None
        if wanted_rows is not None:
            wanted = torch.tensor(wanted_rows, dtype=torch.int64, device=self._device)
        elif drawing:
            wanted = torch.from_numpy(drawing_rows(entries, drawing, rows.last)).to(self._device)
        layer_done = on_layer
        if self.host_sync is not None:
            layer_done = self.host_sync.begin(rows.meta, announced=on_layer is not None)
        with torch.inference_mode():
            token_ids = rows.token_ids.to(self._device)
            forward = self._states.hidden if hidden else self.model.forward
            logits = forward(token_ids, self.cache, rows.meta, wanted, layer_done, before_attend)
        if self.host_sync is not None:
            self.host_sync.end(on_layer)
        return logits


class _OtherRows:
    """The rows that a step's entries need besides the rows to draw from, and the results for
    them."""

    def __init__(self, entries: Sequence[StepEntry]) -> None:
        self.begins = [0, *accumulate(len(entry.new_token_ids) for entry in entries)]
        self.scoring: dict[int, range] = {}  # by entry: the rows whose logits score its targets
        self.pooling: dict[int, range] = {}  # by entry: the rows that its embedding needs
        for i, entry in enumerate(entries):
            if entry.targets:
                begin = self.begins[i]
                self.scoring[i] = range(begin, begin + len(entry.targets))
            if num_rows := pooled_rows(entry):
                end = self.begins[i + 1]
                self.pooling[i] = range(end - num_rows, end)
        self.rows = {row for rows in self.scoring.values() for row in rows}
        self.rows.update(row for rows in self.pooling.values() for row in rows)
        self.scored: dict[int, list[TokenLogprobs]] = {}
        self.states: dict[int, Tensor] = {}

    def score(self, entries: Sequence[StepEntry], logits: Tensor) -> None:
        """Keeps the logprobs of all targets. logits: one row for each target."""
        if not self.scoring:
            return
        targets = [target for i in self.scoring for target in entries[i].targets]
        most = [entries[i].num_logprobs for i in self.scoring for _ in entries[i].targets]
        found = iter(score(logits, targets, most))
        self.scored = {i: [next(found) for _ in entries[i].targets] for i in self.scoring}


def grammars_of(model: LoadedModel) -> Grammars:
    """The matchers for structured output. The grammars read the model's vocabulary at first use."""
    spec = model.spec
    reader = partial(open_vocabulary, model.tokenizer, spec.vocab_size)
    return Grammars(reader, spec.vocab_size, spec.eos_token_ids)


def make_layout(
    model: LoadedModel, block_tokens: int, ops: Ops | None = None, num_shards: int = 1
) -> BlockLayout:
    """The layout of the blocks that this model fills. Blocks of a model with linear attention are
    larger than `block_tokens` where a state needs the room.

    With `ops`, the layout includes the name of their arithmetic, which all instances that share
    blocks must have in common. The layout includes the number of shards, because sums over shards
    differ in their last bits. Raises `ValueError` for a layout that the engine does not support.
    """
    arithmetic = "" if ops is None else ops.arithmetic
    if arithmetic and num_shards > 1:
        arithmetic = f"{arithmetic} in {num_shards} shards"
    inner = INNER if ops is None else ops.inner
    if model.spec.latent is not None:
        inner = LATENT_INNER
    layout = BlockLayout(
        model_fingerprint=model.fingerprint,
        dtype=model.dtype,
        block_tokens=block_tokens,
        num_layers=model.spec.num_layers,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        inner=sharded_inner(inner, num_shards),
        arithmetic=arithmetic,
        kv_dtype=model.kv_dtype,
    )
    check_layout(layout)
    return with_room(model.spec, layout)


def choose_ops(dtype: str, device: str = "cpu", quantization: Quantization = "none") -> Ops:
    """The fastest operations for `dtype` on this machine; logs the choice and its reason.

    Raises `ValueError` if the device does not support the quantization.
    """
    if device != "cpu":
        if quantization != "none":
            raise ValueError(f"{quantization} weights need --device cpu, not {device}")
        return choose_device_ops(torch.device(device))
    kind = dtype if quantization == "none" else f"{dtype} with {quantization} weights"
    missing = native.available()
    if missing is not None:
        logger.warning("%s runs on plain torch, slowly: %s", kind, missing)
        return ReferenceOps(quantization)
    from moonpool_engine.engine.native.ops import NativeOps

    ops = NativeOps(quantization=quantization)
    logger.info("%s runs on native kernels (%s)", kind, ops.isa)
    return ops


def choose_split_ops(quantization: Quantization = "none") -> SplitOps:
    """The operations that `choose_ops` chooses on the CPU, with an attention that can be split.

    The arithmetic is that of `choose_ops`, so both can share blocks.
    """
    if native.available() is not None:
        return ReferenceSplitOps(quantization)
    from moonpool_engine.engine.native.split import NativeSplitOps

    return NativeSplitOps(quantization=quantization)
