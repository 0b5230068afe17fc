"""Compares gpt-oss in the form that OpenAI publishes, with experts in MXFP4, with
`transformers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.quantized.matrix import QuantizedMatrix
from tests.differential.checkpoints import CASES, Case, save
from tests.differential.test_transformers import (
    PROMPT,
    greedy_tokens,
    our_logits,
    their_greedy_tokens,
    their_logits,
)

CASE = Case("GptOss", {**CASES["gpt-oss"].changes, "intermediate_size": 96})
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def write(folder: Path, num_kv_heads: int = 2) -> torch.nn.Module:
    """Rounds the experts to random MXFP4 blocks; returns transformers' model with their values."""
    # imported here, because the import takes seconds
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    model = save(Case(CASE.family, {**CASE.changes, "num_key_value_heads": num_kv_heads}), folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        count, width, out = tensors.pop(name).shape
        shape = (count, out, width // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, shape[:3], dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        model.get_parameter(name).data = exact
    save_file(tensors, folder / "model.safetensors")
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, "quantization_config": CONFIG}))
    return model


def test_logits_and_tokens_are_those_of_transformers(ops_name: str, tmp_path: Path) -> None:
    model = write(tmp_path)
    lab, ours = our_logits(tmp_path, "float32", ops_name)
    theirs = their_logits(model)
    assert (ours - theirs).abs().max() <= 2e-3 * theirs.abs().max()
    assert greedy_tokens(lab, PROMPT[:40], 20) == their_greedy_tokens(model, PROMPT[:40], 20)


def test_weights_are_exact_and_stay_quantized(tmp_path: Path) -> None:
    model = write(tmp_path)
    weights = open_model(str(tmp_path), "float32").weights
    stacked = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj").data
    down = model.get_parameter("model.layers.1.mlp.experts.down_proj").data
    for expert in (0, 5):
        prefix = f"model.layers.1.mlp.experts.{expert}"
        for turn, module in enumerate(("gate_proj", "up_proj")):
            assert isinstance(weights.matrix(f"{prefix}.{module}.weight"), QuantizedMatrix)
            own = weights.load(f"{prefix}.{module}.weight")
            assert torch.equal(own, stacked[expert][:, turn::2].t())
        assert torch.equal(weights.load(f"{prefix}.down_proj.weight"), down[expert].t())
    assert not isinstance(weights.matrix("model.layers.1.self_attn.q_proj.weight"), QuantizedMatrix)


def test_two_shards_agree(ops_name: str, tmp_path: Path) -> None:
    write(tmp_path)
    _, whole = our_logits(tmp_path, "float32", ops_name)
    _, shards = our_logits(tmp_path, "float32", ops_name, 2)
    assert (shards - whole).abs().max() <= 1e-4 * whole.abs().max()


@pytest.mark.parametrize("damage", ["lacking", "shape", "dtype"])
def test_a_checkpoint_that_is_wrong_is_one_line(damage: str, tmp_path: Path) -> None:
    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    whole = tensors.pop(name)
    if damage == "shape":
        tensors[name] = whole[:, :-1].contiguous()
    elif damage == "dtype":
        tensors[name] = whole.int()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="down_proj_scales") as caught:
        open_model(str(tmp_path), "float32")
    assert "\n" not in str(caught.value)
