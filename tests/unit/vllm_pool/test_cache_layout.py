"""Tests which bytes belong to which block: the content of a block moves with these bytes, and no
other block changes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moonpool_engine.vllm.cache_layout import CacheLayout, LayoutRefused
from moonpool_engine.vllm.slice_mover import open_mover
from tests.unit.vllm_pool.cache_forms import (
    FullAttentionSpec,
    MambaSpec,
    Worker,
    all_orders,
    key_and_value_apart,
    one_group,
    two_groups,
)


def read(worker: Worker) -> CacheLayout:
    return CacheLayout.of(worker.kv_caches, worker.config)


def blocks_of(worker: Worker, layer: str, axis: int = 0) -> torch.Tensor:
    """Returns the layer's bytes with manager blocks as the first axis."""
    tensor = worker.kv_caches[layer].movedim(axis, 0)
    found = tensor.unflatten(0, (worker.config.num_blocks, -1)).contiguous()
    return found.view(torch.uint8).clone()


def check_a_move(worker: Worker, group: int = 0, axis: int = 0) -> None:
    layout = read(worker)
    names = layout.groups[group].layers
    before = {name: blocks_of(worker, name, axis) for name in worker.kv_caches}
    sources, targets = [1, 0], [worker.config.num_blocks - 1, 2]
    where = (layout.addresses(group, ids) for ids in (sources, targets))
    open_mover().copy(*where, layout.slice_bytes)
    for name in names:
        wanted = before[name].clone()
        wanted[targets] = before[name][sources]
        assert blocks_of(worker, name, axis).equal(wanted), name


@pytest.mark.parametrize(("order", "ratio"), all_orders())
def test_a_moved_block_is_what_it_was(order: str, ratio: int) -> None:
    check_a_move(one_group(order, kernel_tokens=32 // ratio, content=128))


def test_key_and_value_may_be_the_outer_axis() -> None:
    worker = key_and_value_apart()
    assert [part.slice_index for part in read(worker).parts] == [0, 1, 2, 3]
    check_a_move(worker, axis=1)


@pytest.mark.parametrize("group", [0, 1])
def test_groups_lie_on_each_other(group: int) -> None:
    worker = two_groups()
    check_a_move(worker, group)
    full, window = read(worker).groups
    assert (full.kind, full.window_tokens) == ("full attention", None)
    assert (window.kind, window.window_tokens) == ("sliding window", 64)
    assert (window.first_slice, window.num_slices) == (full.num_slices, full.num_slices)
    assert read(worker).num_slices == 2 * full.num_slices


@given(
    order=st.sampled_from(["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]),
    layers=st.integers(1, 4),
    blocks=st.integers(4, 7),
    heads=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.uint8]),
    placed=st.booleans(),
)
def test_any_shape(
    order: str, layers: int, blocks: int, heads: int, dtype: torch.dtype, placed: bool
) -> None:
    check_a_move(one_group(order, layers, blocks, heads, 32, 256, None, dtype, placed))


def test_slices_are_as_long_for_each_layer() -> None:
    worker = one_group(content=128)
    other = one_group(content=64, layers=1)
    worker.kv_caches["small"] = other.kv_caches["layers.0"]
    worker.config.kv_cache_groups.append(
        SimpleNamespace(
            layer_names=["small"], kv_cache_spec=other.config.kv_cache_groups[0].kv_cache_spec
        )
    )
    layout = read(worker)
    assert [part.num_slices for part in layout.parts] == [2, 2, 2, 1]
    assert layout.slice_bytes == 2 * 32 * 64 * 2
    assert len(layout.addresses("layers.1", [3, 4])) == 4
    assert len(layout.addresses(layout.parts[-1], [3, 4, 5])) == 3


def test_addresses_are_block_after_block() -> None:
    worker = one_group("LHBNC")
    layout = read(worker)
    both = layout.addresses(0, [4, 1])
    assert both.dtype == np.uint64
    assert np.array_equal(both, np.concatenate([layout.addresses(0, [i]) for i in (4, 1)]))
    for ids in ([6], [-1], [0, 6]):
        with pytest.raises(IndexError, match="block ids are 0 to 5"):
            layout.addresses(0, ids)
    assert len(layout.addresses(0, [])) == 0


def test_fingerprints_tell_what_differs() -> None:
    first = read(one_group())
    same = read(one_group(blocks=9))  # has another number of blocks
    assert first.fingerprint(1, 2, {"a": "B"}, "0.32") == same.fingerprint(1, 2, {"a": "B"}, "0.32")
    found = {
        first.fingerprint(),
        first.fingerprint(tp_rank=1, tp_size=2),
        first.fingerprint(tp_size=2),
        first.fingerprint(backends={"layers.0": "CPU_ATTN"}),
        first.fingerprint(vllm_version="0.33"),
        *(
            read(one_group(**other)).fingerprint()
            for other in (
                {"order": "LBNHC"},
                {"order": "LHBNC"},
                {"tokens": 64},
                {"layers": 2},
                {"heads": 4},
                {"kernel_tokens": 16, "content": 64},
                {"dtype": torch.float16},
            )
        ),
    }
    assert len(found) == 12


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC", "LBHNC"])
def test_the_number_of_blocks_is_in_no_fingerprint(order: str) -> None:
    one, other = (read(one_group(order, blocks=n)) for n in (5, 8))
    assert one.fingerprint() == other.fingerprint()


def test_a_layer_may_use_the_blocks_of_another() -> None:
    worker = one_group()
    worker.kv_caches["sharing"] = worker.kv_caches["layers.0"]
    assert "sharing" not in read(worker).layer_parts


def refused(worker: Worker, words: str) -> None:
    with pytest.raises(LayoutRefused, match=words) as said:
        read(worker)
    assert "\n" not in str(said.value)


def test_what_is_not_understood_is_refused() -> None:
    spec = one_group().config.kv_cache_groups[0].kv_cache_spec

    def with_spec(other: object) -> Worker:
        worker = one_group()
        worker.config.kv_cache_groups[0].kv_cache_spec = other
        return worker

    refused(with_spec(MambaSpec()), "layers.0 has a cache of the kind MambaSpec")
    refused(with_spec(replace(spec, block_size=16)), "layers.0: a block has 8192 bytes, vLLM says")
    refused(with_spec(replace(spec, tokens_per_state=4)), "layers.0 stores no state for each token")
    refused(with_spec(SimpleNamespace()), "layers.0 has a cache of the kind SimpleNamespace")
    mixed = SimpleNamespace(
        kv_cache_specs={
            "layers.0": spec,
            "layers.1": spec,
            "layers.2": FullAttentionSpec(16, 2, 256),
        }
    )
    refused(with_spec(mixed), "layers of one group have different caches")
    refused(one_group(content=1, tokens=1, heads=1), "slices of 2 bytes")
    refused(one_group(content=3, tokens=50), "no multiple of 64")


def test_tensors_that_are_elsewhere_are_refused() -> None:
    worker = one_group()
    worker.config.kv_cache_tensors[0].offset = 64
    refused(worker, "layers.0: its tensor starts -64 bytes from where vLLM places it")
    worker = one_group()
    worker.config.kv_cache_tensors[0].block_stride += 64
    refused(worker, "no axis of .* counts the 6 blocks")
    worker = one_group(placed=False)
    worker.config.num_blocks = 7
    refused(worker, "layers.0: no axis of .* counts the 7 blocks")
    worker = one_group(placed=False)
    del worker.kv_caches["layers.1"]
    refused(worker, "layer layers.1 has no KVCache tensor")
    worker = one_group(placed=False)
    worker.kv_caches["layers.1"] = worker.kv_caches["layers.0"]
    refused(worker, "layers of group 0 share bytes")
    worker = one_group(placed=False)
    worker.kv_caches["unknown"] = torch.zeros(6, 2, 32, 64)
    refused(worker, "layer unknown has a KVCache tensor but is in no group")
    worker = one_group(placed=False)
    worker.kv_caches["layers.0"] = worker.kv_caches["layers.0"][:1].expand(6, -1, -1, -1)
    refused(worker, "layers.0: bytes of its blocks overlap")


def test_axes_that_could_both_count_blocks_are_refused() -> None:
    refused(one_group(blocks=3, heads=3, placed=False), "two axes of .* may count the 3 blocks")
    read(one_group(blocks=3, heads=3))  # found, because vLLM names the axis


def test_an_unknown_interface_is_one_line() -> None:
    worker = one_group()
    worker.config = SimpleNamespace(kv_cache_groups=[], blocks=4)
    refused(worker, "this vLLM describes its KVCache otherwise: AttributeError")
    worker = one_group()
    worker.kv_caches["layers.0"] = [1, 2]  # type: ignore[assignment]
    refused(worker, "layer layers.0 has list as its cache: no tensor")
