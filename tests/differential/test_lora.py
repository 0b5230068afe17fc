"""Compares LoRA adapters with merged weights in `transformers`, and their results alone with those
in batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.text.model_error import ModelError
from moonpool_engine.engine.builtin import LoadedModel, open_model
from tests.differential.adapters import ALL, linears_of, merge, write_adapter
from tests.differential.checkpoints import CASES, save
from tests.differential.plans import Lab, make_ops

transformers = pytest.importorskip("transformers")

PROMPT = [(7 * i * i + 3 * i + 11) % 300 for i in range(70)]
RANDOM = "random:hidden=64,layers=3,heads=4,kv_heads=2,inter=128,vocab=300"
RANDOM_LINEARS = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(3)
    for name, shape in {
        "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128),
    }.items()
}  # fmt: skip


def logits(lab: Lab, prompt: list[int], adapter: str, cuts: tuple[int, ...] = ()) -> Tensor:
    """Returns the logits after the prompt, by an adapter given by its fingerprint, in chunks."""
    blocks, start = lab.take_blocks(len(prompt)), 0
    for end in (*cuts, len(prompt)):
        step = StepEntry(AttemptId("a"), prompt[start:end], start, blocks, None, adapter=adapter)
        found, start = lab.engine.logits([step])[0], end
    return found


@pytest.mark.parametrize(
    ("family", "kinds", "rank", "rslora"),
    [
        ("llama", ALL, 4, False),
        ("llama", ("q_proj", "v_proj"), 1, True),
        ("qwen3-moe", ("q_proj", "v_proj", "o_proj"), 8, False),
        ("qwen3", ("k_proj", "o_proj", "down_proj"), 11, False),
        ("phi3", ("qkv_proj", "gate_up_proj"), 8, False),
        ("gemma3", ALL, 8, True),
    ],
)
def test_logits_are_those_of_merged_weights(
    family: str, kinds: tuple[str, ...], rank: int, rslora: bool, ops_name: str, tmp_path: Path
) -> None:
    (tmp_path / "base").mkdir()
    theirs: Any = save(CASES[family], tmp_path / "base")
    factors = write_adapter(
        tmp_path / "lora", linears_of(theirs, kinds), rank, 5, use_rslora=rslora
    )
    model = open_model(str(tmp_path / "base"), "float32", (f"mine={tmp_path / 'lora'}",))
    lab = Lab(model, make_ops(ops_name), 16, 1000)
    ours = logits(lab, PROMPT, model.adapters[0].fingerprint, cuts=(1, 33))
    plain = logits(lab, PROMPT, "")
    with torch.no_grad():
        base = theirs(torch.tensor([PROMPT])).logits[0, -1].float()
        merge(theirs, factors, 8 / (rank**0.5 if rslora else rank))
        merged = theirs(torch.tensor([PROMPT])).logits[0, -1].float()
    assert (plain - base).abs().max() <= 1e-4 * base.abs().max()
    assert (ours - merged).abs().max() <= 1e-4 * merged.abs().max()
    # proves that the adapter changes the logits much
    assert (merged - base).abs().max() > 1e-2 * base.abs().max()


@pytest.mark.parametrize(
    ("family", "num_shards"),
    [("llama", 2), ("qwen3", 2), ("llama-mha-wide-heads", 4), ("phi3-window", 2),
     ("olmo2-two-kv-heads", 2)],
)  # fmt: skip
def test_shards_add_the_whole_product_once(
    family: str, num_shards: int, ops_name: str, tmp_path: Path
) -> None:
    """Shards cut rows of q, k, v, gate and up, and columns of o and down. Rows without an adapter
    share the step."""
    (tmp_path / "base").mkdir()
    theirs: Any = save(CASES[family], tmp_path / "base")
    kinds = ("qkv_proj", "o_proj", "down_proj") if family == "phi3-window" else ALL
    write_adapter(tmp_path / "lora", linears_of(theirs, kinds), 5, 5)
    model = open_model(str(tmp_path / "base"), "float32", (f"mine={tmp_path / 'lora'}",))
    own = model.adapters[0].fingerprint
    whole = Lab(model, make_ops(ops_name), 16, 1000)
    lab = Lab(model, make_ops(ops_name), 16, 1000, num_shards=num_shards)
    for adapter in (own, ""):
        expected = logits(whole, PROMPT, adapter)
        ours = logits(lab, PROMPT, adapter, cuts=(1, 33))
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert torch.equal(ours, logits(lab, PROMPT, adapter, cuts=(50,)))
    assert (logits(lab, PROMPT, own) - logits(lab, PROMPT, "")).abs().max() > 0.01


def adapted(tmp_path: Path, name: str, dtype: str, linears: dict[str, Any]) -> LoadedModel:
    modules = []
    for number, rank in enumerate((3, 16)):
        write_adapter(tmp_path / f"{number}", linears, rank, seed=number)
        modules.append(f"lora{number}={tmp_path / str(number)}")
    return open_model(name, dtype, tuple(modules))


def mixed_batches_change_no_bit(model: LoadedModel, ops_name: str, longest: int) -> None:
    """Runs prompts of two adapters and of the base, in random chunks that share steps."""
    rng = random.Random(3)
    names = ["", *model.adapter_numbers]
    prompts = [rng.choices(range(290), k=rng.randint(1, longest)) for _ in range(6)]
    chosen = [names[i % 3] for i in range(6)]
    alone = Lab(model, make_ops(ops_name), 16, 4000)
    want = [logits(alone, p, name) for p, name in zip(prompts, chosen, strict=True)]
    lab = Lab(model, make_ops(ops_name), 16, 4000, seed=2)
    blocks, done = [lab.take_blocks(len(prompt)) for prompt in prompts], [0] * 6
    while any(done[i] < len(prompts[i]) for i in range(6)):
        left = [i for i in range(6) if done[i] < len(prompts[i])]
        batch = rng.sample(left, rng.randint(1, len(left)))
        ends = {i: min(len(prompts[i]), done[i] + rng.choice((1, 2, 16, 40))) for i in batch}
        entries = [
            StepEntry(
                AttemptId(str(i)), prompts[i][done[i] : ends[i]], done[i], blocks[i], None,
                adapter=chosen[i],
            )
            for i in batch
        ]  # fmt: skip
        found = lab.engine.logits(entries)
        for row, i in enumerate(batch):
            done[i] = ends[i]
            if ends[i] == len(prompts[i]):
                assert torch.equal(found[row], want[i]), (i, chosen[i])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_the_adapters_beside_it(
    dtype: str, tmp_path: Path, each_ops_name: str
) -> None:
    model = adapted(tmp_path, RANDOM, dtype, RANDOM_LINEARS)
    mixed_batches_change_no_bit(model, each_ops_name, 90)
    base = Lab(open_model(RANDOM, dtype), make_ops(each_ops_name), 16, 1000)
    lab = Lab(model, make_ops(each_ops_name), 16, 1000)
    assert torch.equal(logits(lab, PROMPT, ""), base.whole(PROMPT))


@pytest.mark.long
def test_over_gguf_weights(tmp_path: Path) -> None:
    try:
        spec = open_model("smollm2", "float32").spec
    except ModelError as error:
        pytest.skip(str(error))
    hidden, kv = spec.hidden_size, spec.num_kv_heads * spec.head_dim
    linears = {
        f"model.layers.{layer}.self_attn.{part}_proj": (width, hidden)
        for layer in (0, spec.num_layers - 1)
        for part, width in (("q", hidden), ("v", kv))
    }
    model = adapted(tmp_path, "smollm2", "float32", linears)
    mixed_batches_change_no_bit(model, "native", 40)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(RANDOM, "float32", (f"bad={folder}",))
    text = str(caught.value)
    assert text.startswith("LoRA adapter bad: ") and "\n" not in text
    return text


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"r": 0},
        {"rank_pattern": {"q_proj": 2}}, {"peft_type": "IA3"}, {"init_lora_weights": "pissa"},
        {"lora_alpha": "8"}, {"r": True},
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    write_adapter(tmp_path, RANDOM_LINEARS, 4, 1, **settings)
    assert str(next(iter(settings))) in refusal(tmp_path)


def test_damaged_adapters_are_refused(tmp_path: Path) -> None:
    assert "no adapter_config.json" in refusal(tmp_path)
    write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": (64, 63)}, 4, 1)
    assert "another model" in refusal(tmp_path)
    write_adapter(tmp_path, {"model.layers.9.self_attn.q_proj": (64, 64)}, 4, 1)
    assert "layers.9" in refusal(tmp_path)
    write_adapter(tmp_path, {"model.embed_tokens": (300, 64)}, 4, 1)
    assert "embed_tokens" in refusal(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:60])
    assert "readable" in refusal(tmp_path)
    weights.unlink()
    assert "no adapter_model.safetensors" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[1]")
    assert "JSON object" in refusal(tmp_path)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    def fingerprint(seed: int, **settings: Any) -> str:
        write_adapter(tmp_path, RANDOM_LINEARS, 4, seed, **settings)
        return open_model(RANDOM, "float32", (f"x={tmp_path}",)).adapters[0].fingerprint

    first = fingerprint(1)
    assert first == fingerprint(1, task_type="OTHER")
    assert len({first, fingerprint(2), fingerprint(1, lora_alpha=9)}) == 3
