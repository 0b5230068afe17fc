"""Tests the kernels on emulated Arm CPUs: their results are right, independent of the batch, and
have the bits of AVX2.

Without the bfloat16 instruction, all results on Arm have the bits of AVX2; with it, all results but
products of bfloat16. If this machine has AVX2, the bits are compared with those of its own kernels,
else with those of the reference operations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import xxhash
from torch import Tensor

from moonpool_engine.engine.native import available
from moonpool_engine.engine.native import ops as native_ops
from moonpool_engine.engine.native.library import ISAS
from moonpool_engine.engine.native.linear import PackedMemory
from moonpool_engine.engine.native.ops import NativeOps
from moonpool_engine.engine.native.quantized import REPACKED, packed_rows, repacked
from moonpool_engine.engine.native.split import NativeSplitOps
from moonpool_engine.engine.ops import Gate, HeadShape
from moonpool_engine.engine.quantized.formats import FORMATS
from moonpool_engine.engine.quantized.int8 import Int8Linear
from moonpool_engine.engine.quantized.linear import QuantizedLinear
from moonpool_engine.engine.quantized.matrix import QuantizedMatrix, StoredRows
from moonpool_engine.engine.reference import ReferenceOps
from tests.arm.emulator import Buffers, EmulatedKernels, Emulator, missing_tool
from tests.unit.engine.gguf_files import random_groups
from tests.unit.engine.test_native_attention import TOLERANCE, Case, make_case

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool())),
]

CPUS = {"neon": "cortex-a72", "neonbf16": "max"}
"""Starts an emulated CPU for each instruction set, without instructions above that set if such a
CPU exists."""
DTYPES = [torch.float32, torch.bfloat16]
COUNTS = (1, 2, 3, 4, 5, 8, 13)


@pytest.fixture(params=CPUS, scope="module")
def emulator(request: pytest.FixtureRequest) -> Iterator[Emulator]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    emulator = Emulator(CPUS[request.param])
    assert emulator.isa == request.param
    yield emulator
    emulator.close()
    torch.set_num_threads(before)


class Arm:
    """Runs operations on the emulated CPU."""

    def __init__(self, emulator: Emulator) -> None:
        kernels = {dtype: EmulatedKernels(emulator, dtype, emulator.isa) for dtype in DTYPES}
        self.isa = emulator.isa
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native_ops, "open_kernels", lambda isa: (emulator.isa, kernels))
            self.plain = NativeOps()
            self.int8 = NativeOps(quantization="int8")
            self.split = NativeSplitOps()


@pytest.fixture(scope="module")
def arm(emulator: Emulator) -> Arm:
    return Arm(emulator)


def x86() -> NativeOps | None:
    """Returns the operations whose bits Arm must have, if this machine has them."""
    return NativeOps("avx2") if "avx2" in ISAS and available() is None else None


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.nan_to_num(7), want.nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), [(32, 48), (63, 33), (1, 1), (256, 259), (896, 40)])
def test_linear(arm: Arm, inner: int, outer: int, dtype: torch.dtype) -> None:
    weight, bias = randn(outer, inner, dtype=dtype, seed=1), randn(outer, dtype=dtype, seed=2)
    x = randn(13, inner, dtype=dtype)
    linear = arm.plain.linear(weight, bias)
    got = linear(x)
    want = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + 1
    step = 2.0**-8 if dtype is torch.bfloat16 else 0.0
    assert ((got.double() - want).abs() <= step * want.abs() + 1e-6 * size).all()
    assert [n for n in COUNTS if not torch.equal(linear(x[:n]), got[:n])] == []
    assert [n for n in COUNTS if not torch.equal(linear(x[-n:]), got[-n:])] == []
    host = x86()
    if host and (arm.isa == "neon" or dtype is torch.float32):
        assert torch.equal(host.linear(weight, bias)(x), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), [(63, 33), (1, 1), (257, 64), (768, 40), (514, 5)])
def test_int8_has_the_bits_of_the_reference(
    arm: Arm, inner: int, outer: int, dtype: torch.dtype
) -> None:
    weight, bias = randn(outer, inner, dtype=dtype, seed=1), randn(outer, dtype=dtype, seed=2)
    x = randn(13, inner, dtype=dtype)
    x[3] = 0.0
    x[4] *= 1e-38
    x[5] *= 1e20
    x[6, 0] = 3e4
    x[7] = x[7].abs() * 10  # makes the largest sums that this format can have
    want = Int8Linear(weight, bias)(x)
    linear = arm.int8.linear(weight, bias)
    assert [n for n in COUNTS if not torch.equal(linear(x[:n]), want[:n])] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_bits_of_the_reference(
    arm: Arm, name: str, dtype: torch.dtype
) -> None:
    format = FORMATS[name]
    groups = 3 if format.group == 256 else 19
    data = torch.from_numpy(random_groups(format, 75 * groups, 0)).view(75, -1)
    weight = QuantizedMatrix((StoredRows(format, data),), dtype)
    bias, x = randn(75, dtype=dtype, seed=2), randn(13, weight.shape[1], dtype=dtype)
    x[3, 5] = torch.nan
    x[4], x[5] = 30.0, -30.0  # makes the largest sums that this format can have
    want = QuantizedLinear(weight, bias)(x)
    linear = arm.plain.linear(weight, bias)
    assert [n for n in COUNTS if not same(linear(x[:n]), want[:n])] == []


@pytest.mark.parametrize("name", REPACKED)
def test_weights_are_packed_to_the_same_bytes(arm: Arm, name: str) -> None:
    format = FORMATS[name]
    groups = 3 if format.group == 256 else 24
    data = torch.from_numpy(random_groups(format, 45 * groups, seed=1)).view(45, -1)
    rows = StoredRows(format, data)
    repack = arm.plain._kernels[torch.float32].repack
    assert torch.equal(repacked(rows, PackedMemory(), repack), packed_rows(rows, PackedMemory()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 63, 896])
def test_norms_gates_and_caps(arm: Arm, width: int, dtype: torch.dtype) -> None:
    x, residual, both = (randn(5, n, dtype=dtype, seed=n) for n in (width, width, 2 * width))
    both = both * 4
    both[0, :6] = torch.tensor([0.0, -0.0, 100.0, -100.0, -80.0, 1e-20], dtype=dtype)
    weight = randn(width, seed=3)
    scores = randn(3, width) * 100
    scores[0, :3] = torch.tensor([torch.nan, 1e30, -1e30])

    def all_of(ops: NativeOps | ReferenceOps) -> list[Tensor]:
        summed = residual.clone()
        found = [ops.rms_norm(x, weight, 1e-5), ops.add_rms_norm(x, summed, weight, 1e-5), summed]
        gates = (Gate(), Gate("gelu_tanh"), Gate("clamped", 1.7, 7.0))
        return [*found, *(ops.glu(both, gate) for gate in gates), ops.soft_cap(scores, 30.0)]

    found = all_of(arm.plain)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for got, want in zip(found, all_of(ReferenceOps()), strict=True):
        error = (got.float() - want.float()).nan_to_num(0).abs().max()
        assert error <= bound * want.float().nan_to_num(0).abs().max()
    host = x86()
    if host:
        assert all(same(g, w) for g, w in zip(found, all_of(host), strict=True))
    assert torch.equal(arm.plain.rms_norm(x[2:3], weight, 1e-5)[0], found[0][2])


SEQUENCES = [(0, 1), (255, 2), (60, 9), (300, 1)]
HEADS = [(HeadShape(6, 2, 64), 16), (HeadShape(3, 3, 16), 256), (HeadShape(8, 1, 80), 32)]


def attended(case: Case, ops: NativeOps | ReferenceOps) -> Tensor:
    return case.attend(ops).view(case.meta.num_rows, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "block_tokens"), HEADS)
def test_attention(arm: Arm, heads: HeadShape, block_tokens: int, dtype: torch.dtype) -> None:
    case = make_case(heads, block_tokens, dtype, SEQUENCES)
    got = attended(case, arm.plain)
    want = attended(case, ReferenceOps())
    error = (got.float() - want.float()).abs().max()
    assert error <= TOLERANCE[dtype] * want.float().abs().max()
    host = x86()
    if host and (arm.isa == "neon" or dtype is torch.float32):
        assert torch.equal(attended(case, host), got)
    # Each row is computed alone, as in a decode.
    for sequence in range(len(SEQUENCES)):
        first, end = case.meta.row_starts[sequence : sequence + 2].tolist()
        for row in (first, end - 1):
            meta = replace(
                case.meta,
                positions=case.meta.positions[row : row + 1].contiguous(),
                row_starts=torch.tensor([0, 1], dtype=torch.int32),
                context_starts=case.meta.positions[row : row + 1].contiguous(),
                block_tables=case.meta.block_tables[sequence : sequence + 1].contiguous(),
                num_rows=1,
                num_sequences=1,
            )
            alone = replace(case, meta=meta, q=case.q[row : row + 1].contiguous())
            assert torch.equal(attended(alone, arm.plain)[0], got[row])


def test_rings_and_meetings_of_threads(emulator: Emulator) -> None:
    assert emulator.call("rings", [(0, 300)], Buffers()) == 0
    assert emulator.call("meetings", [(0, 100)], Buffers()) == 0


@pytest.mark.parametrize("size", [256, 1024, 1088, 4096 + 192])
def test_slices_are_summed_as_xxh3_and_copied(emulator: Emulator, size: int) -> None:
    layers, blocks = 2, 3
    source = torch.randint(0, 256, (blocks, layers, size), dtype=torch.uint8)
    # columns: index, layer, block, sum
    offers = torch.tensor([[7, 0, 2, 0], [7, 1, 2, 0], [8, 0, 0, 0]])
    sums, named = torch.zeros(blocks * layers, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    buffers = Buffers()
    sent = [buffers.add(t.data_ptr(), t.nbytes) for t in (offers, source, sums, named)]
    arguments = [(1, sent[0]), (0, 3), (1, sent[1]), (1, sent[2]), (0, blocks), (0, layers)]
    arguments += [(0, size), (0, 1 << 40), (1, sent[3])]
    assert emulator.call(f"moonpool_slices_name_{emulator.isa}", arguments, buffers) == 0
    assert named.item() == 3
    for offer in offers.tolist():
        wanted = xxhash.xxh3_64_intdigest(source[offer[2], offer[1]].numpy().tobytes())
        assert offer[3] & (2**64 - 1) == wanted

    target = torch.zeros(64 + source.numel(), dtype=torch.uint8)
    table = torch.zeros(8, dtype=torch.int64)
    rows, theirs = torch.tensor([1, 0]), torch.zeros(blocks * layers, dtype=torch.int64)
    cells, corrupt = torch.zeros(2 * layers, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    table[4:8] = torch.tensor([7, 2, layers, size])
    offers[1, 3] ^= 1  # The sum that the offer names differs from the sum of the memory.
    buffers = Buffers()
    pieces = (offers, table, source, corrupt, target, rows, theirs, cells)
    sent = [buffers.add(t.data_ptr(), t.nbytes) for t in pieces]
    buffers.pointers = [(sent[1], 8 * i, sent[4 + i]) for i in range(4)]
    arguments = [(1, sent[0]), (0, 3), (1, sent[1]), (1, sent[2]), (0, blocks), (1, sent[3])]
    assert emulator.call(f"moonpool_slices_copy_{emulator.isa}", arguments, buffers) == 0
    landed = target[: source.numel()].view(blocks, layers, size)
    assert torch.equal(landed[1], source[2]) and torch.equal(landed[0, 0], source[0, 0])
    assert corrupt.item() == 1 and cells.tolist() == [1, 2, 1, 0]
    assert ctypes.c_uint64(theirs[2].item()).value == ctypes.c_uint64(offers[0, 3].item()).value
