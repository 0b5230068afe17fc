"""Tests that the compiled mover and the plain mover do the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moonpool_engine.engine.native.library import ISAS, why_unavailable
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.vllm.block_copier import DeviceSliceMover
from moonpool_engine.vllm.slice_mover import NativeSliceMover, PlainSliceMover, SliceMover

MOVERS: dict[str, SliceMover] = {"plain": PlainSliceMover()}
if why_unavailable() is None:
    calls = open_slices()
    assert calls is not None
    MOVERS["native"] = NativeSliceMover(calls)


def memory(size: int, seed: int | None) -> np.ndarray:
    """Allocates memory at a multiple of 64."""
    raw = np.zeros(size + 64, np.uint8)
    if seed is not None:
        raw[:] = np.random.default_rng(seed).integers(0, 256, size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


@pytest.mark.parametrize("name", MOVERS)
@given(
    lines=st.integers(4, 80),
    count=st.integers(0, 9),
    shift=st.integers(0, 63),
    seed=st.integers(0, 1000),
)
def test_slices_arrive_with_their_sums(
    name: str, lines: int, count: int, shift: int, seed: int
) -> None:
    size = 64 * lines
    source, target = memory(count * size + 128, seed), memory(count * size + 64, None)
    order = np.random.default_rng(seed).permutation(count)
    sources = (source.ctypes.data + shift + size * np.arange(count)).astype(np.uint64)
    targets = (target.ctypes.data + size * order).astype(np.uint64)
    sums = MOVERS[name].copy(sources, targets, size)
    assert sums.dtype == np.uint64
    for i in range(count):
        wanted = source[shift + i * size : shift + (i + 1) * size].tobytes()
        assert target[order[i] * size :][:size].tobytes() == wanted
        assert sums[i] == xxhash.xxh3_64_intdigest(wanted)
    assert not target[count * size :].any()


@pytest.mark.skipif("native" not in MOVERS, reason="the kernels are not built")
@pytest.mark.parametrize("isa", ISAS)
def test_each_instruction_set_moves(isa: str) -> None:
    best = MOVERS["native"]
    found = open_slices(isa)
    if found is None or ISAS.index(isa) > ISAS.index(best_isa()):
        pytest.skip(f"no {isa} here")
    source, target = memory(3 * 1088, 1), memory(3 * 1088, None)
    places = [(m.ctypes.data + 1088 * np.arange(3)).astype(np.uint64) for m in (source, target)]
    sums = NativeSliceMover(found).copy(places[0], places[1], 1088)
    assert np.array_equal(source, target)
    assert np.array_equal(sums, best.copy(places[0], places[1], 1088))


def best_isa() -> str:
    from moonpool_engine.engine.native.library import open_kernels

    return open_kernels()[0]


@pytest.mark.parametrize("name", MOVERS)
def test_what_cannot_be_moved_is_an_error(name: str) -> None:
    mover, held = MOVERS[name], memory(4096, 0)
    here = np.array([held.ctypes.data], np.uint64)
    for where, size, words in (
        ((here, here + np.uint64(1024)), 192, "at least 256"),
        ((here, here + np.uint64(1024)), 300, "a multiple of 64"),
        ((here, here + np.uint64(1)), 256, "multiples of 64"),
        ((here, np.array([], np.uint64)), 256, "1 slices for 0 places"),
        ((here.astype(np.int64), here), 256, "uint64"),
    ):
        with pytest.raises(ValueError, match=words):
            mover.copy(*where, size)


def test_slices_on_a_device_are_copied_by_address() -> None:
    """The test uses tensors in the host's memory, because torch makes the copies of a device."""
    tensor = torch.arange(4096, dtype=torch.int32)
    mover = DeviceSliceMover({"layer": tensor})
    host = np.zeros(1024 + 64, np.uint8)
    start = -(-host.ctypes.data // 64) * 64
    between = np.array([start, start + 512], np.uint64)
    inside = (tensor.data_ptr() + np.array([1024, 4096])).astype(np.uint64)
    there = (tensor.data_ptr() + np.array([8192, 2048])).astype(np.uint64)
    expected = [tensor[256:384].clone(), tensor[1024:1152].clone()]
    sums = mover.copy(inside, between, 512)
    assert np.array_equal(sums, mover.copy(between, there, 512))
    assert torch.equal(tensor[2048:2176], expected[0])
    assert torch.equal(tensor[512:640], expected[1])
    assert sums[0] == xxhash.xxh3_64_intdigest(expected[0].numpy().tobytes())
