"""Tests quantized Hugging Face checkpoints. Plain code of this module packs them by the rules of
each format, one number at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moonpool.text.model_error import ModelError
from moonpool_engine.engine.builtin import export_checkpoint, open_model
from moonpool_engine.engine.ops import Linear
from moonpool_engine.engine.quantized.matrix import QuantizedMatrix
from moonpool_engine.engine.quantized.rounding import rounded_to_int4
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.engine.tensors import tensor_shapes
from tests.differential.checkpoints import Case, save

NAME = "random:hidden=64,layers=1,heads=4,kv_heads=2,inter=96,vocab=300"
GROUP = 32
Parts = dict[str, Tensor]


def words(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[n, 8 * m] -> [n, m] int32: nibble i of a word has column order[i] of its eight."""
    eights = numbers.long().unflatten(1, (-1, 8))
    joined = torch.zeros(eights.shape[:2], dtype=torch.long)
    for nibble, column in enumerate(order):
        joined |= eights[:, :, column] << (4 * nibble)
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).int()


def drawn(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Makes numbers [out, in], scales and zero points [out, groups] for a weight [out, in]."""
    generator = torch.Generator().manual_seed(weight.numel())
    out, width = weight.shape
    numbers = torch.randint(0, 16, (out, width), generator=generator)
    scales = (torch.rand(out, width // GROUP, generator=generator) * 0.02 + 0.01).half()
    zeros = torch.randint(1, 16, (out, width // GROUP), generator=generator)
    return numbers, scales, zeros


def exact(numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    wide = [part.float().repeat_interleave(GROUP, 1) for part in (scales, zeros)]
    return (numbers - wide[1]) * wide[0]


def awq(name: str, weight: Tensor) -> tuple[Parts, Tensor]:
    numbers, scales, zeros = drawn(weight)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(numbers.T, order), "qzeros": words(zeros.T, order)}
    return parts | {"scales": scales.T.contiguous()}, exact(numbers, scales, zeros)


def gptq(name: str, weight: Tensor) -> tuple[Parts, Tensor]:
    numbers, scales, zeros = drawn(weight)
    parts = {"qweight": words(numbers).T.contiguous(), "qzeros": words((zeros - 1).T)}
    order = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
    parts |= {"scales": scales.T.contiguous(), "g_idx": order}
    return parts, exact(numbers, scales, zeros)


def packed(name: str, weight: Tensor) -> tuple[Parts, Tensor]:
    numbers, scales, _ = drawn(weight)
    parts = {"weight_packed": words(numbers), "weight_scale": scales.bfloat16()}
    parts["weight_shape"] = torch.tensor(weight.shape)
    return parts, exact(numbers, scales.bfloat16(), torch.full(scales.shape, 8))


def packed_with_zeros(name: str, weight: Tensor) -> tuple[Parts, Tensor]:
    numbers, scales, zeros = drawn(weight)
    parts = {"weight_packed": words(numbers), "weight_scale": scales}
    parts["weight_zero_point"] = words(zeros.T).T.contiguous()
    return parts, exact(numbers, scales, zeros)


def float8_rows(name: str, weight: Tensor) -> tuple[Parts, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": stored, "weight_scale": scale}
    return parts | {"input_scale": torch.ones(1)}, stored.float() * scale


def float8_blocks(name: str, weight: Tensor) -> tuple[Parts, Tensor]:
    blocks = [-(-size // 128) for size in weight.shape]
    scale = torch.rand(blocks, generator=torch.Generator().manual_seed(1)) + 0.5
    stored = weight.to(torch.float8_e4m3fn)
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    return {"weight": stored, "weight_scale_inv": scale}, stored.float() * wide


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


FOUR = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
CASES: dict[str, tuple[Callable[[str, Tensor], tuple[Parts, Tensor]], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "packed": (packed, compressed("pack-quantized", **FOUR, symmetric=True)),
    "zeros": (packed_with_zeros, compressed("pack-quantized", **FOUR, symmetric=False)),
    "fp8 rows": (float8_rows, compressed("float-quantized", num_bits=8, type="float")),
    "fp8 blocks": (float8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}


def write(folder: Path, case: str) -> dict[str, Tensor]:
    """Writes the checkpoint; returns the exact weights of its linears."""
    pack, config = CASES[case]
    name = NAME.replace("inter=96", "inter=288") if case == "fp8 blocks" else NAME
    export_checkpoint(open_model(name, "float32"), folder)
    tensors = load_file(folder / "model.safetensors")
    expected: dict[str, Tensor] = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        parts, expected[name] = pack(name, tensors.pop(name))
        tensors |= {name.removesuffix("weight") + key: part for key, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, "quantization_config": config}))
    return expected


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_format(tmp_path: Path, case: str) -> None:
    expected = write(tmp_path, case)
    weights = open_model(str(tmp_path), "float32").weights
    for name, weight in expected.items():
        assert torch.allclose(weights.load(name), weight, rtol=1e-5, atol=1e-6), name
        assert isinstance(weights.matrix(name), QuantizedMatrix) == ("fp8" not in case)
    assert isinstance(weights.matrix("lm_head.weight"), Tensor)


FUSED = {
    "phi3": Case("Phi3", {"pad_token_id": 0, "intermediate_size": 96}),
    "glm4": Case("Glm4", {"pad_token_id": 0, "intermediate_size": 96, "head_dim": 32}),
    "ernie4.5": Case("Ernie4_5", {"intermediate_size": 96, "head_dim": 32}),
}


@pytest.mark.parametrize("case", ["awq", "packed", "fp8 rows"])
@pytest.mark.parametrize("family", FUSED)
def test_parts_of_stored_tensors_are_those_of_plain_weights(
    tmp_path: Path, family: str, case: str
) -> None:
    """Families that store several linears in one tensor, or rows in another order, must be loaded,
    too."""
    pack, config = CASES[case]
    plain_folder, folder = tmp_path / "plain", tmp_path / "packed"
    save(FUSED[family], plain_folder)
    save(FUSED[family], folder)
    exact_tensors = load_file(plain_folder / "model.safetensors")
    tensors = dict(exact_tensors)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        parts, exact_tensors[name] = pack(name, tensors.pop(name))
        tensors |= {name.removesuffix("weight") + key: part for key, part in parts.items()}
    save_file(exact_tensors, plain_folder / "model.safetensors")
    save_file(tensors, folder / "model.safetensors")
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, "quantization_config": config}))
    expected, found = (open_model(str(f), "float32") for f in (plain_folder, folder))
    for name in tensor_shapes(expected.spec):
        weight = expected.weights.load(name)
        assert torch.allclose(found.weights.load(name), weight, rtol=1e-5, atol=1e-6), name
        is_packed = isinstance(found.weights.matrix(name), QuantizedMatrix)
        assert is_packed == (name.endswith("_proj.weight") and "fp8" not in case)


def test_the_fingerprint_sees_the_packed_weights(tmp_path: Path) -> None:
    write(tmp_path, "awq")
    before = open_model(str(tmp_path), "float32").fingerprint
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qweight"][0, 0] ^= 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert open_model(str(tmp_path), "float32").fingerprint != before


def test_scattered_groups_and_lacking_tensors_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "gptq")
    name = "model.layers.0.mlp.up_proj"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"].flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="desc_act"):
        open_model(str(tmp_path), "float32").weights.matrix(f"{name}.weight")
    del tensors[f"{name}.qzeros"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks tensors: .*up_proj\.qzeros"):
        open_model(str(tmp_path), "float32")


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "bitsandbytes"},
        {"quant_method": "awq", "bits": 8},
        {"quant_method": "mxfp6"},
        {"quant_method": "gptq", "bits": 4, "group_size": 20},
        compressed("pack-quantized", num_bits=2),
        compressed("pack-quantized", **FOUR, actorder="group"),
        {"quant_method": "compressed-tensors", "format": "x", "config_groups": None},
        "awq",
    ],
)
def test_other_schemes_are_refused(tmp_path: Path, config: Any) -> None:
    export_checkpoint(open_model(NAME, "float32"), tmp_path)
    own = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**own, "quantization_config": config}))
    with pytest.raises(ModelError, match=r"quanti[sz]|group_size") as caught:
        open_model(str(tmp_path), "float32")
    assert "\n" not in str(caught.value)


def test_int4_rounds_each_group_between_its_least_and_largest() -> None:
    weight = torch.randn(5, 96)
    rounded = rounded_to_int4(weight)
    assert isinstance(rounded, QuantizedMatrix)
    groups = weight.unflatten(1, (-1, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = (rounded.dequantized() - weight).unflatten(1, (-1, 32)).abs().amax(-1)
    assert (error <= step * 0.51 + 2e-3).all()
    assert rounded_to_int4(torch.randn(5, 90)).shape == (5, 90)


def test_int4_is_an_arithmetic_of_its_own() -> None:
    weight = torch.randn(40, 64)
    ops = ReferenceOps("int4")
    linear: Linear = ops.linear(weight, None)
    x = torch.randn(3, 64)
    assert (linear(x) - x @ weight.T).abs().max() > 1e-3
    assert (linear(x) - x @ weight.T).abs().mean() < 1
    assert ops.arithmetic != ReferenceOps().arithmetic
