"""Compares a model in shards with `transformers`, with one process, and with itself in every batch.

Ranks give the bits of one process that computes all shards (tests/unit/engine/test_tensor.py), so
the results for shards hold for every degree.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moonpool_engine.engine.builtin import open_model
from tests.differential.checkpoints import CASES, save
from tests.differential.plans import Lab, make_ops, random_prompts
from tests.differential.test_transformers import (
    LENGTHS,
    PROMPT,
    greedy_tokens,
    our_logits,
    their_greedy_tokens,
    their_logits,
)

transformers = pytest.importorskip("transformers")

# The model has every part that has a sharding of its own: biases, norms per head, heads wider than
# hidden / heads, norms over all heads.
SHARDED = {
    "llama-biases": 2,
    "llama-tied": 2,
    "llama-mha-wide-heads": 4,
    "qwen2": 2,
    "qwen3-biases": 2,
    "olmo2-two-kv-heads": 2,
}
TINY = "random:hidden=96,layers=3,heads=8,kv_heads=4,head_dim=16,inter=114,vocab=300,context=400"


@pytest.mark.parametrize("name", SHARDED)
def test_float32_agrees_with_transformers(name: str, ops_name: str, tmp_path: Path) -> None:
    model = save(CASES[name], tmp_path)
    theirs = their_logits(model)
    lab, ours = our_logits(tmp_path, "float32", ops_name, SHARDED[name])
    _, whole = our_logits(tmp_path, "float32", ops_name)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert (ours - whole).abs().max() <= 1e-4 * whole.abs().max()
    assert greedy_tokens(lab, PROMPT[:40], 20) == their_greedy_tokens(model, PROMPT[:40], 20)


@pytest.mark.parametrize("name", SHARDED)
def test_bfloat16_rounds_a_little_more_than_one_process(
    name: str, ops_name: str, tmp_path: Path
) -> None:
    """A sum of shards is rounded at each `+`, where one process rounds once. If the logits of two
    tokens differ by more than that, the same token stays the likelier one."""
    exact = their_logits(save(CASES[name], tmp_path))
    one = our_logits(tmp_path, "bfloat16", ops_name)[1]
    several = our_logits(tmp_path, "bfloat16", ops_name, SHARDED[name])[1]
    one_error, error = ((x - exact).square().mean() for x in (one, several))
    assert error <= 2.0**2 * one_error
    assert (several - one).abs().max() <= 0.05 * exact.abs().max()
    best = one.topk(2).values
    apart = best[:, 0] - best[:, 1] > 2 * (several - one).abs().max()
    assert apart.any() and len(apart) == len(LENGTHS)
    assert torch.equal(several.argmax(-1)[apart], one.argmax(-1)[apart])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_shards", [2, 4])
def test_any_plan_gives_the_bits_of_the_whole_prompt_alone(
    ops_name: str, dtype: str, num_shards: int
) -> None:
    model = open_model(TINY, dtype)
    texts = random_prompts(random.Random(f"{dtype}{num_shards}"), 6, 300, 120)
    marks = [{n for n in range(len(t) - 3, len(t) + 1) if n > 0} for t in texts]
    total = sum(map(len, texts))
    alone = Lab(model, make_ops(ops_name), 16, total, num_shards=num_shards)
    expected = [[alone.whole(t[:n]) for n in sorted(m)] for t, m in zip(texts, marks, strict=True)]
    assert all(torch.isfinite(x).all() for row in expected for x in row)
    for plan in range(6):
        size = (16, 32, 64)[plan % 3]
        lab = Lab(model, make_ops(ops_name), size, total + 500, plan, num_shards)
        for i, row in enumerate(lab.planned(texts, marks)):
            for got, want in zip(row, expected[i], strict=True):
                assert torch.equal(got, want), f"plan {plan}, prompt {i}"
