"""Measures what KVCache in fp8 costs in quality: the perplexity of a text, and the logits compared
with bfloat16's.

All kinds compute with the same weights. The difference between float32 and bfloat16 shows the size
of rounding that users accept anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.checkout import ROOT
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.text.model_error import ModelError
from moonpool.types import BlockId
from moonpool_engine.engine.builtin import open_model, open_tokenizer
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import choose_ops, make_layout
from moonpool_engine.engine.step import plan_rows

BLOCK_TOKENS = 64
KINDS = (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8"), ("float32", "fp8"))


def bench_kv_formats(
    name: str, tokens: int, text: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Perplexity and logits of one text by each kind of KVCache. Raises ModelError."""
    source = text or ROOT / "docs" / "architecture.md"
    model = open_model(name, "float32")
    tokenizer = open_tokenizer(model.tokenizer, model.spec.vocab_size)
    ids = list(tokenizer.encode(source.read_text())[:tokens])
    if len(ids) < tokens:
        raise ModelError(f"{source} has {len(ids)} tokens, fewer than {tokens}")
    found: dict[str, Any] = {}
    exact: Tensor | None = None
    for dtype, kv_dtype in KINDS:
        logs, token_bytes = _log_probabilities(name, dtype, kv_dtype, ids)
        exact = logs if exact is None else exact
        chosen = logs[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1))
        kind = f"{dtype}, KVCache {'fp8' if kv_dtype == 'fp8' else dtype}"
        found[kind] = {
            "perplexity": math.exp(-float(chosen.mean())),
            "kl_divergence": float((exact.exp() * (exact - logs)).sum(-1).mean()),
            "same_top": float((exact.argmax(-1) == logs.argmax(-1)).float().mean()),
            "token_bytes": token_bytes,
        }
        own = found[kind]
        say(
            f"{kind}: perplexity {own['perplexity']:.4f}, KL {own['kl_divergence']:.5f}, same"
            f" likeliest token {own['same_top']:.1%}, {token_bytes} bytes per token"
        )
    return {"model": name, "text": source.name, "tokens": tokens, "kinds": found}


@torch.inference_mode()
def _log_probabilities(name: str, dtype: str, kv_dtype: str, ids: list[int]) -> tuple[Tensor, int]:
    """[tokens, vocab] float64, and the bytes of one token's KVCache."""
    model = open_model(name, dtype, kv_dtype=kv_dtype)
    ops = choose_ops(dtype)
    layout = make_layout(model, BLOCK_TOKENS, ops)
    num_blocks = layout.blocks_for(len(ids))
    decoder = DecoderModel(model.spec, model.weights, ops)
    entry = StepEntry(AttemptId("text"), ids, 0, [BlockId(b) for b in range(num_blocks)], None)
    rows = plan_rows([entry], model.spec, layout, num_blocks)
    cache = empty_cache(layout, num_blocks)
    logits = decoder.forward(rows.token_ids, cache, rows.meta, torch.arange(len(ids)))
    assert logits is not None
    logs: Tensor = logits.double().log_softmax(-1)
    return logs, layout.token_bytes
