"""Measures the quality, the time and the bytes of products with quantized weights.

Quality: the perplexity of a text, beside float32 with the same weights dequantized. So the figure
measures the error of the kernels' arithmetic, not the loss of the quantization. Speed: CPU seconds
of this process for decode and prefill steps, compared with bfloat16 weights; all formats run in
turns. One thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.checkout import ROOT
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.text.model_error import ModelError
from moonpool.types import BlockId
from moonpool_engine.engine.builtin import LoadedModel, open_model, open_tokenizer
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.quantized.formats import FORMATS
from moonpool_engine.engine.quantized.matrix import Matrix, QuantizedMatrix, StoredRows, plain
from moonpool_engine.engine.quantized.rounding import rounded_to_int4
from moonpool_engine.engine.runner import choose_ops, make_layout
from moonpool_engine.engine.step import plan_rows

BLOCK_TOKENS = 64
CONTEXT, BATCHES, PREFILL = 256, (1, 8), 512
ROUNDS, STEPS = 7, 4
TEXT = ROOT / "docs" / "architecture.md"
Say = Callable[[str], None]
Convert = Callable[[Matrix], Matrix]


def _as_stored(weight: Matrix) -> Matrix:
    return weight


class _Converted:
    """The weights of a model with every matrix in another form."""

    def __init__(self, model: LoadedModel, convert: Convert) -> None:
        self._weights = model.weights
        self._convert = convert
        self.num_bytes = 0

    def load(self, name: str) -> Tensor:
        return self._weights.load(name)

    def matrix(self, name: str) -> Matrix:
        matrix = self._convert(self._weights.matrix(name))
        self.num_bytes += matrix.nbytes if isinstance(matrix, Tensor) else matrix.num_bytes
        return matrix


@dataclass
class ModelVariant:
    name: str
    model: DecoderModel
    num_bytes: int
    cache: Any
    layout: Any

    def entries(self, batch: int, start: int, tokens: list[int]) -> list[StepEntry]:
        each = (CONTEXT + PREFILL) // BLOCK_TOKENS + 2
        return [
            StepEntry(
                AttemptId(str(i)),
                tokens,
                start,
                [BlockId(i * each + b) for b in range(each)],
                None,
            )
            for i in range(batch)
        ]

    @torch.inference_mode()
    def run(self, entries: list[StepEntry], all_rows: bool = False) -> Tensor:
        rows = plan_rows(entries, self.model.spec, self.layout, self.cache.blocks.shape[0])
        last = torch.from_numpy(rows.last)
        wanted = torch.arange(rows.meta.num_rows) if all_rows else last
        logits = self.model.forward(rows.token_ids, self.cache, rows.meta, wanted)
        assert logits is not None
        return logits


def bench_formats(name: str, tokens: int, text: Path, say: Say) -> dict[str, Any]:
    """Perplexity, decode and prefill of one model in all forms. Raises ModelError."""
    torch.set_num_threads(1)
    stored = open_model(name, "float32")
    spec = stored.spec
    ids = open_tokenizer(stored.tokenizer, spec.vocab_size).encode(text.read_text())[:tokens]
    if len(ids) < tokens:
        raise ModelError(f"{text} has {len(ids)} tokens, fewer than {tokens}")
    quality = {}
    for kind, convert in _conversions().items():
        quantized = perplexity(make_variant(kind, stored, convert), ids)
        exact = perplexity(make_variant(kind, stored, _dequantizing(convert)), ids)
        quality[kind] = {
            "perplexity": quantized,
            "dequantized_float32": exact,
            "ratio": quantized / exact,
        }
        say(f"{kind}: perplexity {quantized:.4f}, dequantized {exact:.4f}")
    narrow = open_model(name, "bfloat16")
    variants = [make_variant("bfloat16", narrow, plain)]
    variants += [make_variant(kind, narrow, convert) for kind, convert in _conversions().items()]
    return {"model": name, "text": text.name, "tokens": tokens, "quality": quality} | {
        "speed": _speed(variants, ids, say)
    }


def _conversions() -> dict[str, Convert]:
    return {
        "as stored": _as_stored,
        "Q4_1": lambda weight: rounded_to_int4(plain(weight)),
        "Q4_0": lambda weight: _symmetric(plain(weight), "Q4_0"),
        "Q8_0": lambda weight: _symmetric(plain(weight), "Q8_0"),
    }


def _symmetric(weight: Tensor, kind: str) -> Matrix:
    """Rounds to a format with a scale per 32 and no minimum."""
    format = FORMATS[kind]
    groups = weight.float().reshape(-1, format.group)
    scale = (groups.abs().amax(1, keepdim=True) / (format.offset - 1)).half()
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    numbers = (groups * inverse).round_().clamp_(-format.offset, format.offset - 1)
    if kind == "Q8_0":
        stored = numbers.to(torch.int8).view(torch.uint8)
    else:
        low, high = (numbers + format.offset).to(torch.uint8).chunk(2, dim=1)
        stored = low | (high << 4)
    data = torch.cat((scale.view(torch.uint8), stored), dim=1)
    rows = StoredRows(format, data.view(weight.shape[0], -1))
    return QuantizedMatrix((rows,), weight.dtype)


def _dequantizing(convert: Convert) -> Convert:
    def converted(weight: Matrix) -> Matrix:
        return plain(convert(weight))

    return converted


def make_variant(name: str, model: LoadedModel, convert: Convert = _as_stored) -> ModelVariant:
    ops = choose_ops(model.dtype)
    layout = make_layout(model, BLOCK_TOKENS, ops)
    weights = _Converted(model, convert)
    with torch.inference_mode():
        decoder = DecoderModel(model.spec, weights, ops)
    return ModelVariant(name, decoder, weights.num_bytes, empty_cache(layout, 128), layout)


def perplexity(variant: ModelVariant, ids: list[int]) -> float:
    blocks = [BlockId(b) for b in range(-(-len(ids) // BLOCK_TOKENS))]
    entry = StepEntry(AttemptId("text"), ids, 0, blocks, None)
    logs = variant.run([entry], all_rows=True).double().log_softmax(-1)
    chosen = logs[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1))
    return math.exp(-float(chosen.mean()))


def _speed(variants: list[ModelVariant], ids: list[int], say: Say) -> dict[str, Any]:
    """CPU seconds of one step, the median of rounds in which all variants run in turns."""
    jobs = {f"decode_batch_{batch}": batch for batch in BATCHES}
    seen: dict[str, dict[str, list[float]]] = {v.name: {} for v in variants}
    for variant in variants:
        variant.run(variant.entries(max(BATCHES), 0, ids[:CONTEXT]))
    for _ in range(ROUNDS):
        for variant in variants:
            own = seen[variant.name]
            for job, batch in jobs.items():
                entries = variant.entries(batch, CONTEXT, ids[:1])
                own.setdefault(job, []).append(_cpu_s(variant, entries, STEPS))
            entries = variant.entries(1, 0, ids[:PREFILL])
            own.setdefault(f"prefill_{PREFILL}", []).append(_cpu_s(variant, entries, 1))
    found: dict[str, Any] = {}
    for variant in variants:
        own_s = {job: median(times) for job, times in seen[variant.name].items()}
        base = seen[variants[0].name]
        gain = {job: median(base[job]) / seconds for job, seconds in own_s.items()}
        found[variant.name] = {
            "matrix_bytes": variant.num_bytes,
            "cpu_s_per_step": own_s,
            "times_bfloat16": gain,
        }
        listed = ", ".join(f"{job} {value:.2f} x" for job, value in gain.items())
        say(f"{variant.name}: {variant.num_bytes / 1e6:.1f} MB, {listed}")
    return found


def _cpu_s(variant: ModelVariant, entries: list[StepEntry], steps: int) -> float:
    began_s = time.process_time()
    for _ in range(steps):
        variant.run(entries)
    return (time.process_time() - began_s) / steps
