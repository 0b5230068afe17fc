"""Quantized Hugging Face checkpoints: which tensors hold a linear, and how they become a matrix.

The module reads 4-bit weights of compressed-tensors ("pack-quantized"), AWQ and GPTQ, which stay 4
bits in memory, MXFP4 experts (gpt-oss), and FP8 weights with a scale per tensor, row or block,
which are dequantized at load. Activations are never rounded to 8 bits, whatever the checkpoint
suggests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from moonpool.text.fields import Fields
from moonpool.text.model_error import ModelError
from moonpool.text.shown import shown, shown_name
from moonpool_engine.engine.quantized.formats import FORMATS
from moonpool_engine.engine.quantized.matrix import Matrix, QuantizedMatrix, StoredRows

BLOCK = 32
Kind = Literal["awq", "gptq", "packed", "float8", "mxfp4"]
Shape = tuple[int, ...]
Reader = Callable[[str], Tensor]
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word where AWQ stores column i of eight."""
STORED_TYPES = frozenset({"F32", "BF16", "F16"})
"""The types of tensors that are not packed."""
INTEGERS = (".qweight", ".qzeros", ".weight_packed", ".weight_zero_point")
NIBBLES = 8
"""Numbers of 4 bits in a word."""
FLOAT8_SCALES = ("weight_scale_inv", "weight_scale")
FLOAT8_BLOCK = 128
EXPERTS = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")
"""The tensors of gpt-oss that hold all experts of a layer."""
FURTHER = (".input_scale", ".weight_shape", ".g_idx", ".k_scale", ".v_scale", ".weight_g_idx")
"""Tensors that hold nothing the weights need."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's linears are quantized. `group` inputs share a scale; 0 means that all
    inputs share one."""

    kind: Kind
    group: int = 0
    symmetric: bool = True
    zero_offset: int = 0  # offset of stored zero points

    def stored_types(self, name: str, shape: Shape | None) -> frozenset[str]:
        """Returns the types in which a tensor of `parts` may be stored, by safetensors' names."""
        if name.endswith(INTEGERS):
            return frozenset({"I32"})
        if self.kind == "mxfp4" and name.endswith(("_blocks", "_scales")):
            return frozenset({"U8"})
        if self.kind == "float8" and shape is not None and len(shape) == 2:
            return STORED_TYPES | {"F8_E4M3"}
        return STORED_TYPES

    def packs(self, name: str, shape: Shape) -> bool:
        """Whether it may pack the stored tensor `name`."""
        return bool(EXPERTS.search(name)) if self.kind == "mxfp4" else len(shape) == 2

    def parts(self, name: str, shape: Shape, has: Callable[[str], bool]) -> dict[str, Shape | None]:
        """Returns the tensors that hold the weight `name` [out, in], with their shapes; None means
        any. Raises `ModelError`."""
        if self.kind == "mxfp4":
            return _mxfp4_parts(name, shape)
        module = name.removesuffix(".weight")
        out, width = shape
        if self.kind == "float8":
            scale = next((s for s in FLOAT8_SCALES if has(f"{module}.{s}")), FLOAT8_SCALES[1])
            return {name: shape, f"{module}.{scale}": None}
        group = self.group or width
        if width % BLOCK or width % group or out % NIBBLES:
            raise ModelError(
                f"{name} has {out} outputs and {width} inputs: packed linears need multiples of"
                f" {NIBBLES} and of {max(group, BLOCK)}"
            )
        groups = width // group
        if self.kind == "packed":
            found: dict[str, Shape | None] = {
                f"{module}.weight_packed": (out, width // 8),
                f"{module}.weight_scale": (out, groups),
            }
            if not self.symmetric:
                found[f"{module}.weight_zero_point"] = (out // 8, groups)
            return found
        packed = (width, out // 8) if self.kind == "awq" else (width // 8, out)
        return {
            f"{module}.qweight": packed,
            f"{module}.qzeros": (groups, out // 8),
            f"{module}.scales": (groups, out),
        }

    def matrix(self, name: str, shape: Shape, read: Reader, dtype: torch.dtype) -> Matrix:
        """Returns the weight `name` [out, in]. Raises `ModelError`."""
        module = name.removesuffix(".weight")
        if self.kind == "float8":
            return _dequantized_float8(read(name), _float8_scale(module, read), name, dtype)
        if self.kind == "packed":
            numbers = _unpacked(read(f"{module}.weight_packed"))
            scales = read(f"{module}.weight_scale").float()
            zeros = torch.full_like(scales, 8.0)
            if not self.symmetric:
                zeros = _unpacked(read(f"{module}.weight_zero_point").T.contiguous()).T.float()
            return _four_bits(numbers, scales, zeros, dtype)
        words, zero_words = read(f"{module}.qweight"), read(f"{module}.qzeros")
        scales = read(f"{module}.scales").float().T.contiguous()
        order = AWQ_ORDER if self.kind == "awq" else range(8)
        zeros = _unpacked(zero_words, order).T.float() + self.zero_offset
        if self.kind == "awq":
            return _four_bits(_unpacked(words, order).T.contiguous(), scales, zeros, dtype)
        numbers = _unpacked(words.T.contiguous())
        self._check_order(module, numbers.shape[1], read)
        return _four_bits(numbers, scales, zeros, dtype)

    def _check_order(self, module: str, width: int, read: Reader) -> None:
        """Raises `ModelError` if the inputs of a GPTQ group are not neighbours (`desc_act`)."""
        try:
            order = read(f"{module}.g_idx")
        except KeyError:
            return
        if not torch.equal(order.long(), torch.arange(width) // (self.group or width)):
            raise ModelError(
                f"{module} has groups of scattered inputs (desc_act), which is not supported"
            )


def _mxfp4_parts(name: str, shape: Shape) -> dict[str, Shape | None]:
    """gpt-oss: `shape` is [experts, in, out]. Raises `ModelError`."""
    count, width, out = shape
    if width % BLOCK:
        raise ModelError(f"{name} has {width} inputs, no multiple of {BLOCK}, which MXFP4 needs")
    groups = (count, out, width // BLOCK)
    return {f"{name}_blocks": (*groups, BLOCK // 2), f"{name}_scales": groups}


def expert_matrix(name: str, stored: str, read: Reader, dtype: torch.dtype) -> QuantizedMatrix:
    """The weight `name` of one expert, of the MXFP4 tensors of all experts, `stored`."""
    expert, module = name.split(".")[-3:-1]
    blocks = read(f"{stored}_blocks")[int(expert)]  # [out, groups, 16]: neighbours in a byte
    scales = read(f"{stored}_scales")[int(expert)]  # [out, groups]: exponents plus 127
    if stored.endswith("gate_up_proj"):  # in turns
        first = 0 if module == "gate_proj" else 1
        blocks, scales = blocks[first::2], scales[first::2]
    numbers = torch.stack((blocks & 15, blocks >> 4), dim=3).flatten(2)
    low, high = numbers.chunk(2, dim=2)  # ggml's order of nibbles
    data = torch.cat((scales.unsqueeze(2), low | (high << 4)), dim=2).flatten(1)
    return QuantizedMatrix((StoredRows(FORMATS["MXFP4"], data),), dtype)


def read_scheme(config: Mapping[str, Any], where: str = "config.json") -> Scheme | None:
    """Returns the scheme of a parsed `config.json`, or None if it has none. Raises `ModelError`."""
    own = Fields(config, where).within("quantization_config")
    if not own.names:
        return None
    method = own.text("quant_method", "unknown")
    if method == "awq" and own.count("bits", 0) == 4 and own.text("version", "gemm") == "gemm":
        return Scheme("awq", _group(own))
    if method == "gptq" and own.count("bits", 0) == 4:
        offset = 0 if own.text("checkpoint_format") == "gptq_v2" else 1
        return Scheme("gptq", _group(own), zero_offset=offset)
    blocks = own.whole_numbers("weight_block_size") or [FLOAT8_BLOCK, FLOAT8_BLOCK]
    is_e4m3 = own.text("fmt", "e4m3") == "e4m3"
    if method == "fp8" and is_e4m3 and blocks == [FLOAT8_BLOCK, FLOAT8_BLOCK]:
        return Scheme("float8")
    if method == "mxfp4":
        return Scheme("mxfp4")
    if method == "compressed-tensors":
        return _compressed(own)
    bits = f"{own.count('bits')} bits" if own.has("bits") else own.text("fmt", "unknown")
    raise ModelError(
        f"the checkpoint is quantised ({shown_name(method)}, {shown_name(bits)}); "
        "served are awq and gptq of 4 bits, mxfp4, fp8 (e4m3), compressed-tensors of 4 bits or "
        "fp8, and GGUF"
    )


def _compressed(own: Fields) -> Scheme:
    groups = own.within("config_groups")
    if len(groups.names) != 1:
        raise own.error("config_groups must quantise all linears alike, as one group")
    weight = groups.within(groups.names[0]).within("weights")
    layout, bits = own.text("format", "unknown"), weight.count("num_bits", 0)
    if layout == "float-quantized" and bits == 8:
        return Scheme("float8")
    order = weight.text("actorder") if weight.is_text("actorder") else weight.flag("actorder")
    if layout == "pack-quantized" and bits == 4 and not order:
        size = _group(weight) if weight.text("strategy") == "group" else 0
        return Scheme("packed", size, weight.flag("symmetric", True))
    raise ModelError(
        f"the checkpoint is quantised (compressed-tensors, {shown_name(layout)}, {bits} bits,"
        f" actorder {shown(order)}); served are pack-quantized of 4 bits and float-quantized of 8"
    )


def _group(fields: Fields) -> int:
    size = fields.count("group_size", -1, least=-1)
    if size == -1:
        return 0
    if size < BLOCK or size % BLOCK:
        raise fields.error(f"group_size is {size}, no multiple of {BLOCK}")
    return size


def _unpacked(words: Tensor, order: Any = range(8)) -> Tensor:
    """[n, m] int32 -> [n, 8 * m] uint8: column i of eight at nibble `order[i]`."""
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32)
    return ((words.unsqueeze(2) >> shifts) & 15).to(torch.uint8).flatten(1)


def _four_bits(
    numbers: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype
) -> QuantizedMatrix:
    """(number - zero) * scale: numbers [out, in] of 4 bits; scales, zeros [out, groups]."""
    out, width = numbers.shape
    if width % BLOCK:
        raise ModelError(f"a linear has {width} inputs, no multiple of {BLOCK}")
    repeats = width // BLOCK // scales.shape[1]
    parts = torch.stack((scales, -(scales * zeros)), dim=2).repeat_interleave(repeats, dim=1)
    low, high = numbers.view(out, -1, BLOCK).chunk(2, dim=2)
    data = torch.cat((parts.contiguous().view(torch.uint8), low | (high << 4)), dim=2)
    return QuantizedMatrix((StoredRows(FORMATS["W4"], data.flatten(1)),), dtype)


def _float8_scale(module: str, read: Reader) -> Tensor:
    for scale in FLOAT8_SCALES:
        try:
            return read(f"{module}.{scale}").float()
        except KeyError:
            continue
    raise ModelError(f"{module} is stored as FP8, but has no scale")


def _dequantized_float8(weight: Tensor, scale: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """weight [out, in] FP8; scale of all [1], per row [out, 1], or per block of 128 x 128."""
    out, width = weight.shape
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif tuple(scale.shape) == (-(-out // FLOAT8_BLOCK), -(-width // FLOAT8_BLOCK)):
        scale = scale.repeat_interleave(FLOAT8_BLOCK, 0)[:out]
        scale = scale.repeat_interleave(FLOAT8_BLOCK, 1)[:, :width]
    elif tuple(scale.shape) != (out, 1):
        raise ModelError(f"tensor {name}: its scale has shape {list(scale.shape)}")
    return (weight.float() * scale).to(dtype)
