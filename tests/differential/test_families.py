"""Tests families with parts that Llama lacks: a sequence gives the same bits on every way of
computing it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import Role
from moonpool_engine.engine.builtin import LoadedModel, open_model
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.step import plan_rows
from tests.differential.checkpoints import CASES, save
from tests.differential.cluster import MiniCluster
from tests.differential.plans import Lab, make_ops, random_prompts
from tests.differential.test_paths import assert_same, work

# The cases cover each special part: norms, windows, caps, RoPE by layer, factors.
FAMILIES = (
    "mistral-window",
    "smollm3-window",
    "phi4-mini",
    "olmo2",
    "granite",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3-moe",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3",
    "kimi-k2",
    "qwen3.5",
    "qwen3-next",
)
LINEAR = ("qwen3.5", "qwen3-next")  # families with layers that keep one state per sequence
SHARDED = tuple(name for name in FAMILIES if name not in ("olmo2", *LINEAR))
VARIANTS = [
    ("native", "float32"),
    pytest.param("native", "bfloat16", marks=pytest.mark.long),
    pytest.param("reference", "float32", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in FAMILIES:
        made[name] = tmp_path_factory.mktemp(name)
        save(CASES[name], made[name])
    return made


def opened(folders: dict[str, Path], name: str, dtype: str = "float32") -> LoadedModel:
    return open_model(str(folders[name]), dtype)


def check_plans(model: LoadedModel, ops_name: str, num_shards: int) -> None:
    """Whether several prompts in random chunks and batches give the same bits as each prompt
    alone."""
    texts = random_prompts(random.Random(1), 5, model.spec.vocab_size, 110)
    marks = [{n for n in range(len(t) - 2, len(t) + 1) if n > 0} for t in texts]
    alone = Lab(model, make_ops(ops_name), 16, 600, num_shards=num_shards)
    expected = [[alone.whole(t[:n]) for n in sorted(m)] for t, m in zip(texts, marks, strict=True)]
    for plan in range(2 if ops_name == "reference" else 4):
        lab = Lab(model, make_ops(ops_name), (16, 32)[plan % 2], 900, plan, num_shards)
        for got, want in zip(lab.planned(texts, marks), expected, strict=True):
            assert all(torch.isfinite(row).all() for row in got)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), plan


@pytest.mark.parametrize(("ops_name", "dtype"), VARIANTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_chunks_and_batches_give_the_same_bits(
    folders: dict[str, Path], name: str, ops_name: str, dtype: str
) -> None:
    check_plans(opened(folders, name, dtype), ops_name, num_shards=1)


@pytest.mark.parametrize("name", ["mistral-window", "gpt-oss", "qwen3.5"])
def test_blocks_of_any_size_give_the_same_bits(folders: dict[str, Path], name: str) -> None:
    """Whether blocks of hundreds of tokens, whose sizes are not powers of two, give linear
    attention the same bits."""
    prompt = random_prompts(random.Random(5), 1, 300, 200)[0]
    model = opened(folders, name)
    small, *others = (
        Lab(model, make_ops("native"), size, 1200).whole(prompt) for size in (16, 48, 544)
    )
    assert all(torch.equal(small, other) for other in others)


@pytest.mark.long
@pytest.mark.parametrize("name", SHARDED)
def test_shards_too(folders: dict[str, Path], name: str) -> None:
    model = opened(folders, name)
    check_plans(model, "native", num_shards=2)
    prompt = random_prompts(random.Random(2), 1, model.spec.vocab_size, 100)[0]
    one, two = (Lab(model, make_ops("native"), 16, 200, num_shards=n).whole(prompt) for n in (1, 2))
    assert (one - two).abs().max() <= 1e-4 * one.abs().max()


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in LINEAR])
def test_kvcache_in_fp8_too(folders: dict[str, Path], name: str) -> None:
    check_plans(open_model(str(folders[name]), "float32", kv_dtype="fp8"), "native", num_shards=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_give_the_bits_of_the_whole_model(folders: dict[str, Path], name: str) -> None:
    model = opened(folders, name)
    lab = Lab(model, make_ops("native"), 16, 300)
    prompt = random_prompts(random.Random(3), 1, model.spec.vocab_size, 90)[0]
    whole = lab.whole(prompt)
    stages = [
        DecoderModel(model.spec, model.weights, make_ops("native"), layers)
        for layers in (range(2), range(2, model.spec.num_layers))
    ]
    entry = StepEntry(AttemptId("staged"), prompt, 0, lab.take_blocks(len(prompt)), None)
    rows = plan_rows([entry], model.spec, lab.cache.layout, lab.cache.blocks.shape[0])
    with torch.inference_mode():
        state: Any = stages[0].embed(rows.token_ids)
        for stage in stages:
            # the state is copied, as if it had been sent over a wire
            state = (state[0].clone(), state[1].clone())
            state = stage.advance(*state, lab.cache, rows.meta, torch.from_numpy(rows.last))
        assert torch.equal(stages[-1].logits(state[1])[0], whole)


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_and_split_into_prefill_and_decode(folders: dict[str, Path], name: str) -> None:
    prompts = random_prompts(random.Random(4), 4, 300, 120)
    prompts += [[*prompt, 7, 8, 9] for prompt in prompts]
    ops, model = make_ops("native"), str(folders[name])
    one = MiniCluster({"one": Role.MIXED}, "float32", ops, model=model, prefix_caching=False)
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    two = MiniCluster(roles, "float32", ops, model=model, chunk_tokens=50)
    try:
        for i, prompt in enumerate(prompts):
            one.submit(work(str(i), prompt), on="one")
            one.run()
            two.submit(work(str(i), prompt), on="p", decode="d")
            two.run()
        names = [str(i) for i in range(len(prompts))]
        assert_same([two.outcomes[n] for n in names], [one.outcomes[n] for n in names])
        assert any(two.outcomes[n].cached_tokens for n in names)
    finally:
        one.close()
        two.close()
