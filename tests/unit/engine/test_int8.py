"""Tests 8-bit weights: they are close to the full weights, and give the same bits on every kernel,
in any batch."""

from __future__ import annotations

import pytest
import torch

from moonpool_engine.engine.native import available
from moonpool_engine.engine.native.library import ISAS, NativeUnavailableError
from moonpool_engine.engine.native.ops import NativeOps
from moonpool_engine.engine.quantized.int8 import GROUP, Int8Linear, quantize
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.engine.runner import choose_ops

pytestmark = pytest.mark.usefixtures("one_thread")

needs_kernels = pytest.mark.skipif(available() is not None, reason=str(available()))
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(32, 48), (63, 33), (1, 1), (256, 259), (257, 64), (896, 1152), (2816, 40)]


def native(isa: str) -> NativeOps:
    try:
        return NativeOps(isa, "int8")
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_weights_are_rounded_to_half_a_step_of_their_group() -> None:
    weight = randn(5, 2 * GROUP + 7, dtype=torch.float32)
    weight[1] *= 100.0
    weight[2] = 0.0
    rounded, scales = quantize(weight)
    assert rounded.shape == weight.shape and scales.shape == (5, 3)
    steps = scales.repeat_interleave(GROUP, dim=1)[:, : weight.shape[1]]
    assert ((rounded * steps - weight).abs() <= 0.5001 * steps).all()
    assert not rounded[2].any() and not scales[2].any()
    assert rounded.abs().max() == 127


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_the_product_is_that_of_the_rounded_weights(inner: int, outer: int) -> None:
    weight, x = randn(outer, inner, dtype=torch.float32, seed=1), randn(9, inner, dtype=DTYPES[1])
    rounded, scales = quantize(weight)
    steps = scales.repeat_interleave(GROUP, dim=1)[:, :inner].double()
    want = x.double() @ (rounded.double() * steps).T
    got = Int8Linear(weight, None)(x.float())
    size = x.double().abs() @ (rounded.double() * steps).abs().T
    # The 16 bits of a row are relative to the largest row of its group.
    assert ((got.double() - want).abs() <= 2e-4 * size + 1e-30).all()


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_every_kernel_gives_the_reference_its_bits(
    isa: str, inner: int, outer: int, biased: bool, dtype: torch.dtype
) -> None:
    weight = randn(outer, inner, dtype=dtype, seed=1)
    bias = randn(outer, dtype=dtype, seed=2) if biased else None
    x = randn(37, inner, dtype=dtype)
    x[3] = 0.0
    x[4] *= 1e-38
    x[5] *= 1e20
    x[6, 0] = 3e4  # an outlier
    want = ReferenceOps("int8").linear(weight, bias)(x)
    assert torch.equal(native(isa).linear(weight, bias)(x), want)


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_has_the_same_bits_among_any_number_and_on_any_threads(isa: str) -> None:
    linear = native(isa).linear(randn(259, 600, dtype=torch.bfloat16, seed=1), None)
    x = randn(600, 600, dtype=torch.bfloat16)
    whole = linear(x)
    counts = [*range(1, 34), 63, 127, 447, 448, 449, 599]
    assert [n for n in counts if not torch.equal(linear(x[:n]), whole[:n])] == []
    assert [n for n in counts if not torch.equal(linear(x[-n:]), whole[-n:])] == []
    torch.set_num_threads(3)
    assert torch.equal(linear(x), whole)


@pytest.mark.parametrize("kind", ["reference", "native"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows_in_its_row_and_in_no_other(kind: str, wrong: float) -> None:
    if kind == "native" and available() is not None:
        pytest.skip(str(available()))
    ops = ReferenceOps("int8") if kind == "reference" else NativeOps(quantization="int8")
    linear = ops.linear(randn(40, 300, dtype=torch.bfloat16), None)
    x = randn(4, 300, dtype=torch.bfloat16)
    x[2, 270] = wrong
    y = linear(x)
    assert not y[2].isfinite().any()
    assert y[[0, 1, 3]].isfinite().all()


def test_the_arithmetic_is_named_and_a_gpu_refuses_it() -> None:
    plain, rounded = choose_ops("bfloat16"), choose_ops("bfloat16", quantization="int8")
    assert plain.arithmetic != rounded.arithmetic
    assert ReferenceOps("int8").arithmetic == f"{ReferenceOps().arithmetic} int8"
    with pytest.raises(ValueError, match="int8 weights need --device cpu"):
        choose_ops("bfloat16", "cuda", "int8")
