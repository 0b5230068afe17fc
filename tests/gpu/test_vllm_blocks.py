"""Tests the copies of the pool inside vLLM, on tensors of a GPU: blocks arrive in the pool's memory
with their sums, and come back in other blocks, in the order of vLLM's stream."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash

from moonpool_engine.vllm.block_copier import DeviceCopier
from moonpool_engine.vllm.block_kinds import kinds_of
from moonpool_engine.vllm.cache_layout import CacheLayout
from moonpool_engine.vllm.slice_mover import open_mover
from tests.live.host_pool import FullAttentionSpec

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NUM_BLOCKS, NUM_LAYERS = 40, 3
SHAPE = (NUM_BLOCKS, 2, FullAttentionSpec.block_size, 128)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_leave_and_come_back(device: str) -> None:
    tensors = {
        f"layer.{number}": torch.randn(SHAPE, device=device).to(torch.bfloat16)
        for number in range(NUM_LAYERS)
    }
    group = SimpleNamespace(layer_names=list(tensors), kv_cache_spec=FullAttentionSpec())
    config = SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[group], kv_cache_tensors=[])
    layout = CacheLayout.of(tensors, config)
    kind = kinds_of(layout)[0]
    copier = DeviceCopier(layout, kind, open_mover(), tensors)
    block_bytes = kind.num_slices * layout.slice_bytes
    memory = np.zeros(NUM_BLOCKS * block_bytes + 64, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 64
    order = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int64)
    sources, targets = order[:15], order[15:30]
    places = start + order[:15] * block_bytes

    for tensor in tensors.values():  # changed while the store begins or is still under way
        tensor.mul_(2)
    expected = {name: tensor[sources.tolist()].cpu() for name, tensor in tensors.items()}
    copier.mark()
    sums = copier.store([sources], places).reshape(len(places), -1)
    for row, place in enumerate(places):
        for number in range(kind.num_slices):
            at = int(place) - memory.ctypes.data + number * layout.slice_bytes
            found = memory[at : at + layout.slice_bytes].tobytes()
            assert sums[row, number] == xxhash.xxh3_64_intdigest(found)

    untouched = np.setdiff1d(order, targets).tolist()
    before = {name: tensor[untouched].cpu() for name, tensor in tensors.items()}
    copier.mark()
    slices_of = kind.slices_by_layer(layout)
    for name, tensor in tensors.items():
        found_sums = copier.load(name, targets, places)
        copier.wait(name)
        assert torch.equal(tensor[targets.tolist()].cpu(), expected[name])
        assert torch.equal(tensor[untouched].cpu(), before[name])
        assert (found_sums == sums[:, slices_of[name]]).all()
