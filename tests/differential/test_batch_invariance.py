"""Tests that equal tokens give equal bits, whatever the chunks, batches, blocks and threads."""

from __future__ import annotations

import random

import pytest
import torch

from moonpool_engine.engine.builtin import open_model
from tests.differential.plans import OPS_NAMES, Lab, make_ops, random_prompts, usable_ops

TINY = "random:hidden=96,layers=3,heads=6,kv_heads=2,head_dim=16,inter=112,vocab=300,context=400"
REAL = "random:m30,layers=2,vocab=512,context=600"  # has the shapes of the linears of a real model
PLANS = {"reference": 20, "native": 30, "native-int8": 15}
PROMPTS = 8


@pytest.fixture(params=OPS_NAMES)
def ops_name(request: pytest.FixtureRequest) -> str:
    return usable_ops(request)


def _check(ops_name: str, name: str, dtype: str, plans: int, prompts: int, longest: int) -> None:
    rng = random.Random(f"{name}{dtype}")
    model = open_model(name, dtype)
    texts = random_prompts(rng, prompts, model.spec.vocab_size, longest)
    # The logits are compared at the prompt's end, and after three tokens that are "decoded" after
    # it.
    marks = [{n for n in range(len(t) - 3, len(t) + 1) if n > 0} for t in texts]
    total = sum(map(len, texts))
    alone = Lab(model, make_ops(ops_name), 16, total)
    expected = [[alone.whole(t[:n]) for n in sorted(m)] for t, m in zip(texts, marks, strict=True)]
    assert all(torch.isfinite(x).all() for row in expected for x in row)
    for plan in range(plans):
        lab = Lab(model, make_ops(ops_name), (16, 32, 64)[plan % 3], total + 64 * prompts, plan)
        for i, row in enumerate(lab.planned(texts, marks)):
            for n, got, want in zip(sorted(marks[i]), row, expected[i], strict=True):
                assert torch.equal(got, want), f"plan {plan}, prompt {i}, after {n} tokens"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_plan_gives_the_bits_of_the_whole_prompt_alone(ops_name: str, dtype: str) -> None:
    _check(ops_name, TINY, dtype, PLANS[ops_name], PROMPTS, longest=150)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_real_shapes_too(ops_name: str, dtype: str) -> None:
    _check(ops_name, REAL, dtype, plans=3, prompts=4, longest=300)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_thread_count_does_not_change_bits(ops_name: str, dtype: str) -> None:
    model = open_model(REAL, dtype)
    prompt = random_prompts(random.Random(3), 1, 512, 1)[0] * 77 + list(range(200))
    one = Lab(model, make_ops(ops_name), 16, 600).whole(prompt)
    torch.set_num_threads(2)
    two = Lab(model, make_ops(ops_name), 16, 600).whole(prompt)
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copied_prefix_gives_the_bits_of_a_computed_one(ops_name: str, dtype: str) -> None:
    """Copies another engine's blocks byte by byte, like a remote cache hit, and computes the
    rest."""
    model = open_model(TINY, dtype)
    prompt = random_prompts(random.Random(5), 1, 300, 1)[0] * 3 + list(range(130))
    source = Lab(model, make_ops(ops_name), 32, 300, seed=1)
    expected = source.whole(prompt)
    held = source.take_blocks(len(prompt))
    source.prefill(prompt[:96], held)
    target = Lab(model, make_ops(ops_name), 32, 300, seed=2)
    blocks = target.take_blocks(len(prompt))
    target.cache.blocks[blocks[:3]] = source.cache.blocks[held[:3]]
    assert torch.equal(target.rest(prompt, 96, blocks), expected)
    damaged = target.cache.blocks[blocks[1], -1]
    damaged.copy_(damaged.flip(0))
    assert not torch.equal(target.rest(prompt, 96, blocks), expected)
