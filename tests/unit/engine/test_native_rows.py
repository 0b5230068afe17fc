"""Tests NativeOps' linears, norms and gate: they are correct up to rounding, and
batch-invariant."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moonpool_engine.engine.native import available
from moonpool_engine.engine.native.library import ISAS, NativeUnavailableError
from moonpool_engine.engine.native.ops import NativeOps
from moonpool_engine.engine.ops import Gate
from moonpool_engine.engine.reference import ReferenceOps

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(available() is not None, reason=str(available())),
]

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(32, 48), (48, 32), (64, 192), (63, 33), (1, 1), (256, 259), (896, 1152), (4096, 40)]


@pytest.fixture(params=ISAS, scope="module")
def ops(request: pytest.FixtureRequest) -> NativeOps:
    try:
        return NativeOps(request.param)
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(got: torch.Tensor, want: torch.Tensor, terms: int) -> None:
    """Asserts that `got` equals `want` (float64) up to the rounding of `terms` float32 sums and of
    the result."""
    step = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-23
    size = want.abs() + want.abs().mean() * terms**0.5 * 2.0**-18
    assert ((got.double() - want).abs() <= size * step + size * terms**0.5 * 2.0**-20).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_linear_is_right(
    ops: NativeOps, inner: int, outer: int, biased: bool, dtype: torch.dtype
) -> None:
    weight = randn(outer, inner, dtype=dtype, seed=1)
    bias = randn(outer, dtype=dtype, seed=2) if biased else None
    x = randn(37, inner, dtype=dtype)
    got = ops.linear(weight, bias)(x)
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert got.dtype is dtype
    # The sums can cancel, so the error is relative to the size of the summands.
    size = x.double().abs() @ weight.double().abs().T + 1
    step = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    assert ((got.double() - want).abs() <= step * want.abs() + 1e-6 * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_linear_gives_a_row_the_same_bits_among_any_number(
    ops: NativeOps, inner: int, outer: int, dtype: torch.dtype
) -> None:
    linear = ops.linear(randn(outer, inner, dtype=dtype, seed=1), randn(outer, dtype=dtype))
    x = randn(600, inner, dtype=dtype)
    whole = linear(x)
    counts = [*range(1, 34), 63, 64, 65, 127, 447, 448, 449, 599]
    assert [n for n in counts if not torch.equal(linear(x[:n]), whole[:n])] == []
    assert [n for n in counts if not torch.equal(linear(x[-n:]), whole[-n:])] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_does_not_depend_on_threads(ops: NativeOps, dtype: torch.dtype) -> None:
    linear = ops.linear(randn(259, 128, dtype=dtype, seed=1), None)
    x = randn(100, 128, dtype=dtype)
    one = linear(x)
    torch.set_num_threads(3)
    assert torch.equal(linear(x), one)


def test_linear_takes_views_and_no_rows_and_refuses_the_wrong_width(ops: NativeOps) -> None:
    weight = randn(40, 64, dtype=torch.float32)
    linear = ops.linear(weight, None)
    x = randn(5, 128, dtype=torch.float32)
    assert torch.equal(linear(x[:, ::2]), linear(x[:, ::2].contiguous()))
    assert linear(x[:0, :64]).shape == (0, 40)
    with pytest.raises(ValueError, match="linear takes"):
        linear(x)
    with pytest.raises(ValueError, match="linear takes"):
        linear(x[:, :64].bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 48, 63, 896, 1280])
def test_norms_are_right_and_row_by_row(ops: NativeOps, width: int, dtype: torch.dtype) -> None:
    x, residual = (randn(9, width, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = randn(width, dtype=torch.float32, seed=3)

    def exact(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.double()
        scale = (rows.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return rows * scale * weight.double()

    got = ops.rms_norm(x, weight, 1e-5)
    assert_rounded(got, exact(x), width)
    for row in (0, 8):
        assert torch.equal(ops.rms_norm(x[row : row + 1], weight, 1e-5)[0], got[row])
    summed = residual.clone()
    got = ops.add_rms_norm(x, summed, weight, 1e-5)
    assert torch.equal(summed, residual + x)
    assert_rounded(got, exact(summed), width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 63, 2816])
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_glu_is_right_from_end_to_end(
    ops: NativeOps, width: int, dtype: torch.dtype, gate: str
) -> None:
    both = randn(7, 2 * width, dtype=dtype) * 4
    both[0, :6] = torch.tensor([0.0, -0.0, 100.0, -100.0, -80.0, 1e-20], dtype=dtype)
    x, up = both.double().chunk(2, -1)
    active = F.silu(x) if gate == "silu" else F.gelu(x, approximate="tanh")
    got = ops.glu(both, Gate(gate))
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-19
    # Far below zero, the rounding of tanh in GELU hides the result.
    least = 1e-30 if gate == "silu" else 1e-7
    want = active * up
    assert ((got.double() - want).abs() <= want.abs() * step + least * up.abs() + 1e-30).all()
    assert torch.equal(ops.glu(both[3:4], Gate(gate))[0], got[3])


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_a_soft_cap_is_right_and_row_by_row(ops: NativeOps, cap: float) -> None:
    x = randn(3, 1001, dtype=torch.float32) * 100
    x[0, :3] = torch.tensor([0.0, 1e30, -1e30])
    got = ops.soft_cap(x, cap)
    assert ((got.double() - cap * torch.tanh(x.double() / cap)).abs() <= 1e-6 * cap).all()
    assert torch.equal(ops.soft_cap(x[1:2], cap)[0], got[1])
    assert (got - ReferenceOps().soft_cap(x, cap)).abs().max() <= 1e-6 * cap


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_reference_ops(ops: NativeOps, dtype: torch.dtype) -> None:
    reference = ReferenceOps()
    x, weight = randn(20, 128, dtype=dtype), randn(192, 128, dtype=dtype, seed=1) / 16
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    pairs = [(one.linear(weight, None)(x), one.glu(x)) for one in (ops, reference)]
    for ours, theirs in zip(*pairs, strict=True):
        assert (ours.float() - theirs.float()).abs().max() < bound * theirs.abs().max()
    norm = weight[0].float()
    ours = ops.rms_norm(x, norm, 1e-5)
    assert (ours.float() - reference.rms_norm(x, norm, 1e-5).float()).abs().max() < bound
