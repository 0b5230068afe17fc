"""Logits and greedy tokens against `transformers`, for tiny random checkpoints of each family.

fp32: 1e-4 relative to the largest logit, and the same greedy tokens. bf16: both are compared with
the fp32 result on the same (bf16) weights; ours may be off by no more than transformers' own bf16
error with a quarter to spare, since both round every activation to 8 bits, in a different order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moonpool.engine.builtin import export_checkpoint, open_model
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import SamplingParams
from tests.differential.plans import Lab, make_ops

transformers = pytest.importorskip("transformers")

SIZE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
PROMPT = [(7 * i * i + 3 * i + 11) % 300 for i in range(90)]
LENGTHS = (1, 2, 17, 64, 65, 90)


@dataclass(frozen=True)
class Case:
    family: str  # as transformers' class names have it
    changes: dict[str, Any] = field(default_factory=dict)
    shard: str = "1GB"


CASES = {
    "llama": Case("Llama"),
    "llama-tied": Case("Llama", {"tie_word_embeddings": True}),
    "llama-biases": Case("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope3": Case("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": Case("Llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": Case(
        "Llama",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
    ),
    "llama-linear": Case(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "llama-mha-wide-heads": Case("Llama", {"num_key_value_heads": 4, "head_dim": 48}),
    "llama-sharded": Case("Llama", shard="60KB"),
    "mistral": Case("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-within-window": Case("Mistral", {"sliding_window": 128}),
    "qwen2": Case("Qwen2"),
    "qwen2-tied-yarn": Case("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": Case("Qwen3", {"head_dim": 32}),
    "qwen3-biases": Case("Qwen3", {"attention_bias": True, "head_dim": 16}),
}


def _save(case: Case, folder: Path) -> Any:
    """Writes a random checkpoint, biases and norms random too; returns transformers' model."""
    config = getattr(transformers, f"{case.family}Config")(**{**SIZE, **case.changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        # Both dtypes see the same weights. Not model.to(): that would round the RoPE buffers too.
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    model.save_pretrained(folder, max_shard_size=case.shard)
    return model


@torch.no_grad()
def _theirs(model: Any) -> Tensor:
    return model(torch.tensor([PROMPT])).logits[0, [n - 1 for n in LENGTHS]].float()


def _ours(folder: Path, dtype: str, ops_name: str, num_shards: int = 1) -> tuple[Lab, Tensor]:
    model = open_model(str(folder), dtype)
    lab = Lab(model, make_ops(ops_name), 16, 1000, num_shards=num_shards)
    steps = [StepEntry(AttemptId(str(n)), PROMPT[:n], 0, lab.take_blocks(n), None) for n in LENGTHS]
    return lab, lab.engine.logits(steps)


def _their_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    given = torch.tensor([prompt])
    generated = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


def _greedy(lab: Lab, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0.0)
    blocks = lab.take_blocks(len(prompt) + count)
    fresh, start, out = prompt, 0, []
    for _ in range(count):
        step = StepEntry(AttemptId("greedy"), fresh, start, blocks, params, out)
        token = lab.engine.step([step]).tokens[0]
        assert token is not None
        start += len(fresh)
        fresh = [token.token_id]
        out.append(token.token_id)
    return out


@pytest.mark.parametrize("name", CASES)
def test_float32_agrees(name: str, ops_name: str, tmp_path: Path) -> None:
    model = _save(CASES[name], tmp_path)
    theirs = _theirs(model)
    lab, ours = _ours(tmp_path, "float32", ops_name)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert _greedy(lab, PROMPT[:40], 20) == _their_greedy(model, PROMPT[:40], 20)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    name: str, ops_name: str, tmp_path: Path
) -> None:
    model = _save(CASES[name], tmp_path)
    exact = _theirs(model)
    rounded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    their_error = _theirs(rounded.eval()) - exact
    our_error = _ours(tmp_path, "bfloat16", ops_name)[1] - exact
    assert our_error.square().mean() <= 1.25**2 * their_error.square().mean()
    assert our_error.abs().max() <= 0.05 * exact.abs().max()


def test_an_exported_model_is_the_same_to_transformers(tmp_path: Path) -> None:
    """Benchmarks rely on it: other engines must serve the same weights."""
    name = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=96,vocab=300,context=256"
    built_in = open_model(name, "float32")
    export_checkpoint(built_in, tmp_path)
    theirs = _theirs(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    lab = Lab(built_in, make_ops("reference"), 16, 1000)
    ours = torch.stack([lab.whole(PROMPT[:n]) for n in LENGTHS])
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    assert open_model(str(tmp_path), "float32").fingerprint == (
        open_model(str(tmp_path), "bfloat16").fingerprint
    )
