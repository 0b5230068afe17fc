"""Tests GGUF files of DeepSeek's architecture: older layouts, quantised projections, and
refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.model import DecoderModel
from moonpool_engine.engine.quantized.matrix import Matrix, QuantizedMatrix
from moonpool_engine.engine.reference import ReferenceOps
from tests.differential.checkpoints import CASES, Case, save
from tests.differential.gguf_conversion import convert, in_q8_0
from tests.differential.test_families import check_plans
from tests.differential.test_gguf_families import logits
from tests.unit.engine.gguf_files import GgufDraft, Stored

WIDE = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
CASE = Case("DeepseekV3", CASES["deepseek-v3"].changes | WIDE | {"moe_intermediate_size": 64})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepseek")
    save(CASE, made)
    return made


def tensor_of(stored: Stored) -> Tensor:
    data = np.frombuffer(bytearray(stored.data), dtype=np.float32)
    return torch.from_numpy(data).view(stored.shape)


def join_up_projections(draft: GgufDraft, keep: bool) -> None:
    """Joins the two tensors into one, as in files from before April 2025."""
    for name in [name for name in draft.tensors if name.endswith("attn_k_b.weight")]:
        prefix = name.removesuffix("k_b.weight")
        keys, values = (tensor_of(draft.tensors[f"{prefix}{part}_b.weight"]) for part in "kv")
        if not keep:
            del draft.tensors[f"{prefix}k_b.weight"], draft.tensors[f"{prefix}v_b.weight"]
        rows = torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)
        draft.tensors[f"{prefix}kv_b.weight"] = Stored.of(rows.contiguous())


def test_files_of_before_april_2025_give_the_same_bits(folder: Path, tmp_path: Path) -> None:
    draft = convert(folder, "deepseek2")
    join_up_projections(draft, keep=False)
    own = draft.metadata
    own["deepseek2.attention.key_length"] = own.pop("deepseek2.attention.key_length_mla")
    own["deepseek2.attention.value_length"] = own.pop("deepseek2.attention.value_length_mla")
    own["deepseek2.attention.head_count_kv"] = 4
    # the gating follows from the correction that the file has
    del own["deepseek2.expert_gating_func"]
    assert torch.equal(logits(draft.write(tmp_path / "old.gguf")), logits(folder))


def test_up_projections_may_be_there_twice(folder: Path, tmp_path: Path) -> None:
    draft = convert(folder, "deepseek2")
    join_up_projections(draft, keep=True)
    assert torch.equal(logits(draft.write(tmp_path / "both.gguf")), logits(folder))


class CountingOps(ReferenceOps):
    """Counts the linears by whether their weights are quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {True: 0, False: 0}

    def linear(self, weight: Matrix, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        self.counts[isinstance(weight, QuantizedMatrix)] += 1
        return super().linear(weight, bias)


@pytest.mark.long
def test_only_up_projections_are_unpacked(folder: Path, tmp_path: Path) -> None:
    draft = convert(folder, "deepseek2")
    for name, stored in draft.tensors.items():
        if len(stored.shape) > 1 and "ffn_gate_inp" not in name and stored.shape[-1] % 32 == 0:
            draft.tensors[name] = in_q8_0(tensor_of(stored))
    model = open_model(str(draft.write(tmp_path / "q8.gguf")), "float32")
    # The same weights in a folder are the file's weights, dequantized.
    stored = load_file(folder / "model.safetensors")
    for name, tensor in stored.items():
        if tensor.ndim > 1 and ".mlp.gate." not in name:
            stored[name] = model.weights.load(name)
            assert stored[name].shape == tensor.shape
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(stored, tmp_path / "model.safetensors")
    exact, found = logits(tmp_path), logits(tmp_path / "q8.gguf")
    assert not torch.equal(found, logits(folder))
    assert (found - exact).abs().max() < 5e-3 * exact.abs().max()
    check_plans(model, "native", num_shards=1)
    check_plans(model, "native", num_shards=2)
    ops = CountingOps()
    DecoderModel(model.spec, model.weights, ops)
    spec = model.spec
    # 112 is not a multiple of 32, so the dense layer's down projection is plain.
    assert ops.counts[False] == spec.num_layers * 2 * spec.num_heads + 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_gating_func": 3}, "expert_gating_func is 3, not 1"),
        ({"expert_gating_func": 1}, "expert_weights_norm is not supported with softmax"),
        ({"nextn_predict_layers": 1}, "has nextn_predict_layers, which is not supported"),
        ({"attention.temperature_scale": 0.5}, "has attention.temperature_scale"),
        ({"rope.dimension_count": 48}, "keys of 48 elements cannot have 48 rotated"),
        ({"attention.kv_lora_rank": 80}, "by the metadata it must be"),
        ({"attention.kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"leading_dense_block_count": "1"}, "leading_dense_block_count is '1'"),
        ({"leading_dense_block_count": 0}, "lacks tensors: blk.0.ffn_gate_inp.weight"),
        ({"expert_group_count": 3}, "cannot use 3 of 8 experts"),
        ({"expert_count": 0}, "has no expert_count"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    draft = convert(folder, "deepseek2")
    draft.metadata |= {f"deepseek2.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelError, match=words) as found:
        open_model(str(draft.write(tmp_path / "wrong.gguf")), "float32")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("half", ["k", "v"])
def test_half_an_up_projection_is_refused(folder: Path, tmp_path: Path, half: str) -> None:
    draft = convert(folder, "deepseek2")
    del draft.tensors[f"blk.1.attn_{half}_b.weight"]
    with pytest.raises(ModelError, match=f"lacks tensors: blk.1.attn_{half}_b.weight"):
        open_model(str(draft.write(tmp_path / "half.gguf")), "float32")


def test_the_folder_has_what_files_must_tell(folder: Path) -> None:
    """Uses values that differ from the defaults, because a reader that ignored a field would pass
    with the default value."""
    config = json.loads((folder / "config.json").read_text())
    assert (config["n_group"], config["topk_group"]) == (2, 1)
    assert config["routed_scaling_factor"] == 2.5
    assert config["rope_parameters"]["mscale_all_dim"] == 1.0
