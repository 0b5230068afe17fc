"""Compares each family's tiny checkpoints on the GPU with `transformers` on the CPU in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moonpool_engine.engine.builtin import open_model
from tests.differential.checkpoints import CASES, save
from tests.differential.test_transformers import LENGTHS, PROMPT
from tests.gpu.backends import BACKENDS, Bench, difference, make_ops

NAMES = (
    "llama",
    "llama-biases",
    "llama-rope3",
    "llama-mha-wide-heads",
    "mistral",
    "qwen2",
    "qwen3",
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens(backend: str, name: str, tmp_path: Path) -> None:
    ops = make_ops(backend)
    truth = save(CASES[name], tmp_path)
    lab = Bench.of(open_model(str(tmp_path), "float32"), ops, 400)
    with torch.no_grad():
        expected = truth(torch.tensor([PROMPT])).logits[0]
    for length in LENGTHS:
        logits = lab.whole(PROMPT[:length])
        assert difference(logits, expected[length - 1]) < 1e-4, length
        assert int(logits.argmax()) == int(expected[length - 1].argmax()), length
