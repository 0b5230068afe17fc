"""Runs steps: turns what the sequences ask for into rows, through the model, into tokens.

Owns the packed model of one process. The blocks belong to whoever made the arena: the engine writes
the slots the sequences name, and nothing else. Never decides what runs, and keeps nothing between
steps but the weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
import torch
from torch import Tensor

from moonpool.config import Quantization
from moonpool.engine import native
from moonpool.engine.builtin import LoadedModel
from moonpool.engine.cuda.choice import Model, choose_device_ops, with_graphs
from moonpool.engine.cuda.mirror import Mirror
from moonpool.engine.model import DecoderModel
from moonpool.engine.ops import KvCache, Ops, StepMeta
from moonpool.engine.reference import ReferenceOps
from moonpool.engine.sampler import sample
from moonpool.engine.slices import INNER, check_layout
from moonpool.engine.spec import ModelSpec
from moonpool.engine.step import LayerDone, SequenceStep, StepResult
from moonpool.kvcache.layout import BlockLayout
from moonpool.types import Token

logger = logging.getLogger(__name__)


class StepError(ValueError):
    """A step the engine cannot run; nothing was computed or written."""


class Engine:
    """One model, its operations and the blocks it works in. Steps run one at a time."""

    def __init__(
        self, model: LoadedModel, ops: Ops, cache: KvCache, mirror: Mirror | None = None
    ) -> None:
        self.spec: ModelSpec = model.spec
        self.layout: BlockLayout = cache.layout
        self.ops_name = ops.name
        self.num_blocks = cache.blocks.shape[0]
        expected = make_layout(model, cache.layout.block_tokens, ops)
        arithmetic = cache.layout.arithmetic
        if cache.layout != msgspec.structs.replace(expected, arithmetic=arithmetic):
            raise ValueError(
                f"the KVCache is laid out as {cache.layout}, the model needs {expected}"
            )
        check_layout(cache.layout)
        self._cache = cache
        self._device = ops.device
        self.mirror = mirror
        with torch.inference_mode():
            self._model: Model = with_graphs(DecoderModel(model.spec, model.weights, ops), ops)

    def step(
        self, sequences: Sequence[SequenceStep], on_layer: LayerDone | None = None
    ) -> StepResult:
        """Computes all new tokens' KVCache, and draws where asked. Raises `StepError`.

        `on_layer(i)` is called, in this thread, once layer i of the whole step is in its blocks,
        and in those of the `mirror` if there is one.
        """
        began_s = time.perf_counter()
        drawing = [i for i, sequence in enumerate(sequences) if sequence.draw is not None]
        tokens: list[Token | None] = [None] * len(sequences)
        logits = self._forward(sequences, drawing, on_layer)
        if logits is not None:
            draws = [draw for s in sequences if (draw := s.draw) is not None]
            ends = [sequences[i].start + len(sequences[i].new_token_ids) for i in drawing]
            for i, token in zip(drawing, sample(logits, draws, ends), strict=True):
                tokens[i] = token
        return StepResult(tokens, time.perf_counter() - began_s)

    def logits(self, sequences: Sequence[SequenceStep]) -> Tensor:
        """Runs the step and returns the last row's logits of every sequence: [S, vocab] float32."""
        logits = self._forward(sequences, list(range(len(sequences))), None)
        assert logits is not None
        return logits

    def _forward(
        self, sequences: Sequence[SequenceStep], drawing: list[int], on_layer: LayerDone | None
    ) -> Tensor | None:
        token_ids, meta, row_ends = self._plan(sequences)
        wanted = None
        if drawing:
            wanted = torch.from_numpy(row_ends[drawing] - 1).to(self._device)
        layer_done = on_layer
        if self.mirror is not None:
            layer_done = self.mirror.begin(sequences, announced=on_layer is not None)
        with torch.inference_mode():
            token_ids = token_ids.to(self._device)
            logits = self._model.forward(token_ids, self._cache, meta, wanted, layer_done)
        if self.mirror is not None:
            self.mirror.end(on_layer)
        return logits

    def _plan(
        self, sequences: Sequence[SequenceStep]
    ) -> tuple[Tensor, StepMeta, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """Token ids [T] int64, the rows' places, and the row after each sequence's last [S]."""
        if not sequences:
            raise StepError("a step needs at least one sequence")
        counts = np.array([len(s.new_token_ids) for s in sequences])
        starts = np.array([s.start for s in sequences])
        self._check(sequences, counts, starts)
        bounds = np.zeros(len(sequences) + 1, dtype=np.int64)
        counts.cumsum(out=bounds[1:])
        num_rows = int(bounds[-1])
        if num_rows == len(sequences):
            positions = starts
            token_ids = np.array([s.new_token_ids[0] for s in sequences])
        else:
            positions = np.arange(num_rows) + np.repeat(starts - bounds[:-1], counts)
            everything = chain.from_iterable(s.new_token_ids for s in sequences)
            token_ids = np.fromiter(everything, np.int64, num_rows)
        if token_ids.min() < 0 or token_ids.max() >= self.spec.vocab_size:
            raise StepError(f"a token id lies outside the vocabulary of {self.spec.vocab_size}")
        meta = StepMeta(
            positions=torch.from_numpy(positions.astype(np.int32)),
            row_starts=torch.from_numpy(bounds.astype(np.int32)),
            context_starts=torch.from_numpy(starts.astype(np.int32)),
            block_tables=torch.from_numpy(self._block_tables(sequences, starts + counts)),
            num_rows=num_rows,
            num_sequences=len(sequences),
        )
        return torch.from_numpy(token_ids), meta, bounds[1:]

    def _check(
        self,
        sequences: Sequence[SequenceStep],
        counts: np.ndarray[tuple[int], np.dtype[np.int64]],
        starts: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> None:
        if counts.min() < 1:
            request = sequences[int(counts.argmin())].request_id
            raise StepError(f"request {request} has no new token in its step")
        ends = starts + counts
        if starts.min() < 0 or ends.max() > self.spec.max_positions:
            i = int(ends.argmax()) if starts.min() >= 0 else int(starts.argmin())
            raise StepError(
                f"request {sequences[i].request_id}: tokens {starts[i]}..{ends[i] - 1} do not fit "
                f"the model's context of {self.spec.max_positions}"
            )

    def _block_tables(
        self, sequences: Sequence[SequenceStep], ends: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        needed = (-(-ends // self.layout.block_tokens)).tolist()
        tables = np.zeros((len(sequences), max(needed)), dtype=np.int32)
        for i, sequence in enumerate(sequences):
            count = needed[i]
            if len(sequence.block_ids) < count:
                raise StepError(
                    f"request {sequence.request_id} holds {len(sequence.block_ids)} blocks, its "
                    f"step needs {count}"
                )
            tables[i, :count] = sequence.block_ids[:count]
        if tables.min() < 0 or tables.max() >= self.num_blocks:
            raise StepError(f"a block id lies outside 0..{self.num_blocks - 1}")
        return tables


def make_layout(model: LoadedModel, block_tokens: int, ops: Ops | None = None) -> BlockLayout:
    """The blocks this model fills, named after `ops` if they are to be shared with other engines.

    Raises `ValueError` where the engine cannot have them.
    """
    layout = BlockLayout(
        model_fingerprint=model.fingerprint,
        dtype=model.dtype,
        block_tokens=block_tokens,
        num_layers=model.spec.num_layers,
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        inner=INNER if ops is None else ops.inner,
        arithmetic="" if ops is None else ops.arithmetic,
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
