"""Tests quantized weights: decoding against ggml's own values, products, slices, and the
kernels."""

from __future__ import annotations

import hashlib

import pytest
import torch

from moonpool_engine.engine import native
from moonpool_engine.engine.native.library import ISAS
from moonpool_engine.engine.quantized.formats import FORMATS, dequantize
from moonpool_engine.engine.quantized.linear import QuantizedLinear
from moonpool_engine.engine.quantized.matrix import QuantizedMatrix, StoredRows, lookup, stacked
from tests.unit.engine.gguf_files import random_groups

# Each value is the SHA-256 of the weights that the Python package `gguf` 0.19.0 decodes from
# `random_groups(format, 8)`.
GGML = {
    "Q4_0": "338c8e0ff5d12c36",
    "Q4_1": "9db9f47c554bc61a",
    "Q5_0": "6d8a86cff7874ab1",
    "Q5_1": "3d061cec90dc828e",
    "Q8_0": "f72fbb87a4595c5c",
    "Q4_K": "c2227872bae5df34",
    "Q5_K": "526c18b3fde6fdf0",
    "Q6_K": "76a0da68158e2add",
    "IQ4_NL": "4421634c24cce097",
    "IQ4_XS": "9784f25fa200ecdd",
    "MXFP4": "418f4587beab62e0",
}


def matrix(name: str, out: int, dtype: torch.dtype, seed: int = 0) -> QuantizedMatrix:
    """Returns random weights, 608 or 768 per row."""
    format = FORMATS[name]
    groups = 3 if format.group == 256 else 19
    data = torch.from_numpy(random_groups(format, out * groups, seed)).view(out, -1)
    return QuantizedMatrix((StoredRows(format, data),), dtype)


@pytest.mark.parametrize("name", GGML)
def test_values_are_those_of_ggml(name: str) -> None:
    format = FORMATS[name]
    weights = dequantize(format, torch.from_numpy(random_groups(format, 8))) + 0.0
    assert hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16] == GGML[name]


@pytest.mark.parametrize("name", FORMATS)
def test_the_reference_multiplies_with_the_dequantized_weights(name: str) -> None:
    weight = matrix(name, 40, torch.float32)
    bias = torch.randn(40)
    x = torch.randn(7, weight.shape[1])
    exact = x.double() @ weight.dequantized().double().T + bias
    error = (QuantizedLinear(weight, bias)(x) - exact).abs().max()
    assert error < 1e-4 * exact.abs().max()


@pytest.mark.skipif(native.available() is not None, reason=str(native.available()))
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_give_the_bits_of_the_reference_for_any_number_of_rows(
    isa: str, dtype: torch.dtype
) -> None:
    from moonpool_engine.engine.native.library import NativeUnavailableError
    from moonpool_engine.engine.native.ops import NativeOps

    try:
        ops = NativeOps(isa)
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    for name in FORMATS:
        weight = matrix(name, 75, dtype)
        bias = torch.randn(75, dtype=dtype)
        x = torch.randn(33, weight.shape[1]).to(dtype)
        x[3, 5] = torch.nan
        expected = QuantizedLinear(weight, bias)(x)
        assert expected[3].isnan().all() and not expected[4].isnan().any()
        linear = ops.linear(weight, bias)
        for rows in (1, 2, 5, 14, 15, 33):
            assert torch.equal(linear(x[:rows]).nan_to_num(7), expected[:rows].nan_to_num(7)), name


@pytest.mark.skipif(native.available() is not None, reason=str(native.available()))
def test_kernels_stack_matrices_of_several_formats() -> None:
    from moonpool_engine.engine.native.ops import NativeOps

    parts = [matrix(name, 70, torch.float32) for name in ("Q4_K", "Q4_K", "Q6_K")]
    whole = stacked(parts)
    assert isinstance(whole, QuantizedMatrix) and whole.shape == (210, 768)
    bias, x = torch.randn(210), torch.randn(3, 768)
    ops = NativeOps()
    apart = [ops.linear(part, bias[70 * i : 70 * i + 70])(x) for i, part in enumerate(parts)]
    assert torch.equal(ops.linear(whole, bias)(x), torch.cat(apart, dim=1))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K"])
def test_a_matrix_is_cut_by_rows_and_at_the_borders_of_groups(name: str) -> None:
    weight = stacked([matrix(name, 10, torch.float32), matrix(name, 6, torch.float32, seed=1)])
    assert isinstance(weight, QuantizedMatrix)
    whole, group = weight.dequantized(), FORMATS[name].group
    assert torch.equal(weight.rows(7, 13).dequantized(), whole[7:13])
    cut = weight.columns(group, 3 * group)
    assert cut is not None
    assert torch.equal(cut.dequantized(), whole[:, group : 3 * group])
    assert weight.columns(group // 2, group) is None


def test_stacking_with_a_plain_matrix_makes_all_plain() -> None:
    weight = matrix("Q8_0", 4, torch.bfloat16)
    beside = torch.randn(2, 608).bfloat16()
    whole = stacked([weight, beside])
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole, torch.cat((weight.dequantized(), beside)))


def test_an_embedding_dequantizes_the_rows_asked_for() -> None:
    weight = matrix("Q4_K", 9, torch.bfloat16)
    ids = torch.tensor([8, 0, 8, 3])
    assert torch.equal(lookup(weight, ids), weight.dequantized()[ids])
