"""Tests KVCache in fp8: the results are near those of a KVCache in the model's dtype, with the same
bits in every batch and chunk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import make_layout
from moonpool_engine.engine.slices import read_rows, to_fp8, write_rows
from tests.differential.checkpoints import CASES, save
from tests.differential.plans import Lab, make_ops, random_prompts

RANDOM = "random:hidden=64,layers=3,heads=4,kv_heads=2,inter=128,vocab=300"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_chunks_or_company(dtype: str, each_ops_name: str) -> None:
    model = open_model(RANDOM, dtype, kv_dtype="fp8")
    prompts = [*random_prompts(random.Random(1), 5, 300, 90), [7] * 300]
    alone = [Lab(model, make_ops(each_ops_name), 16, 400).whole(prompt) for prompt in prompts]
    lab = Lab(model, make_ops(each_ops_name), 32, 1200, seed=3)
    found = lab.planned(prompts, [{len(prompt)} for prompt in prompts])
    for (got,), want in zip(found, alone, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", ["qwen3", "gemma3", "deepseek-v2", "mistral-window", "gpt-oss"])
def test_kernels_agree_and_are_near_the_models_own(case: str, tmp_path: Path) -> None:
    save(CASES[case], tmp_path)
    prompt = [(7 * i * i + 3 * i + 11) % 300 for i in range(90)]
    found = {
        (ops, kv): Lab(
            open_model(str(tmp_path), "float32", kv_dtype=kv), make_ops(ops), 16, 300
        ).whole(prompt)
        for ops in ("reference", "native")
        for kv in ("auto", "fp8")
    }
    exact, ours = found["native", "auto"], found["native", "fp8"]
    size = exact.abs().max()
    assert 0 < (ours - exact).abs().max() < 0.15 * size
    # A few elements near the middle between two e4m3 values may be rounded differently by the two.
    assert (ours - found["reference", "fp8"]).abs().max() < 0.05 * size


def test_blocks_are_half_as_large_and_have_names_of_their_own() -> None:
    plain, small = (
        make_layout(open_model(RANDOM, "bfloat16", kv_dtype=kv), 64) for kv in ("auto", "fp8")
    )
    assert small.block_bytes < 0.54 * plain.block_bytes
    assert small.fingerprint != plain.fingerprint


def test_rounding_keeps_every_size() -> None:
    """Whether the error of an element is at most a sixteenth of it, or a 2^-18th of the row's
    largest."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(200, 2, 16, generator=generator)
    rows *= torch.exp2(torch.randint(-60, 60, (200, 2, 1), generator=generator).float())
    rows[0], rows[1, 0] = 0, 448.0
    layout = make_layout(open_model(RANDOM, "float32", kv_dtype="fp8"), 16)
    cache = empty_cache(layout, 13)
    ids = torch.arange(200)
    write_rows(cache, 1, ids // 16, ids % 16, rows, -rows)
    k, v = read_rows(cache, 1, torch.arange(13), 200)
    largest = rows.abs().amax(-1, keepdim=True)
    assert ((k - rows).abs() <= torch.maximum(rows.abs() / 16, largest * 2.0**-17)).all()
    assert torch.equal(v, -k)
    data, _ = to_fp8(rows)
    assert (data & 0x7F != 0x7F).all()  # no byte is the NaN of e4m3
