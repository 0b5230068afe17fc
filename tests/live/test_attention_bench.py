"""`moonpool bench attention` with two workers measures every way to partition the KVCache."""

from __future__ import annotations

import pytest

from benchmarks.suite.offload.attention_capacity import bench_attention_capacity, capacity_lines
from benchmarks.suite.offload.attention_partitions import measure_partitions, partition_lines
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.ops import SEGMENT
from moonpool_engine.engine.runner import choose_split_ops, make_layout
from moonpool_engine.engine.staggered import MIN_SEQUENCES
from moonpool_lab.profiling.attention_group import Decodes

pytestmark = pytest.mark.long

BLOCK = 64
TINY = "random:hidden=64,layers=2,heads=4,inter=64,vocab=300"


def test_segments_alternate_between_workers_and_share_no_block() -> None:
    segment, each = SEGMENT // BLOCK, 200
    decodes = Decodes(2, 2 * SEGMENT, (each, each), BLOCK, segment)
    found = [[block // each for block in entry.block_ids] for entry in decodes.entries]
    # has the block of the new token at the end
    assert found[0] == [0] * segment + [1] * segment + [0]
    assert found[1] == [1] * segment + [0] * segment + [1]
    blocks = [block for entry in decodes.entries for block in entry.block_ids]
    assert len(set(blocks)) == len(blocks)
    with pytest.raises(AssertionError):
        Decodes(2, 2 * SEGMENT, (segment, segment), BLOCK, segment)


@pytest.mark.long
@pytest.mark.parametrize(("kv_heads", "ways"), [(2, "request tokens head"), (1, "request tokens")])
def test_each_partition_is_timed_beside_local_attention(kv_heads: int, ways: str) -> None:
    model = open_model(f"{TINY},kv_heads={kv_heads}", "float32")
    layout = make_layout(model, BLOCK, choose_split_ops())
    costs = measure_partitions(model, layout, 2, (1,), (SEGMENT + 64,), 1)
    assert [cost.partition for cost in costs] == ways.split()
    assert len({cost.local_s for cost in costs}) == 1
    for cost in costs:
        assert cost.way.attention_s > 0.0
        assert 0.0 < cost.bound_s == cost.way.model_s + cost.busiest_s
    busiest = {cost.partition: cost.busiest_s / (2 * cost.way.attention_s) for cost in costs}
    # Of 34 blocks, one worker has all blocks or a segment of 32; of two heads, each worker has one.
    expected = {"request": 1.0, "tokens": 32 / 34, "head": 0.5}
    assert busiest == pytest.approx({name: expected[name] for name in busiest})
    assert len(list(partition_lines(costs))) == 2 + len(costs)


@pytest.mark.long
def test_a_second_memory_holds_twice_the_requests() -> None:
    result = bench_attention_capacity(f"{TINY},kv_heads=2", (1, 2), 2, 200, 2, "float32")
    assert [curve.capacity for curve in result.curves] == [2, 2, 4, 4, 6]
    full = result.curves[3].points[-1]
    assert full.bound_s + full.rest_s >= full.tbt_s
    assert full.attention_s > 0.0
    text = "\n".join(capacity_lines(result))
    assert "2 attention workers and own memory: room for 3 times the requests" in text


def test_a_larger_memory_holds_more_in_one_batch_or_in_two() -> None:
    result = bench_attention_capacity(f"{TINY},kv_heads=2", (1,), 4, 200, 2, "float32", 3, 60.0)
    assert [p.requests for p in result.curves[0].points] == [1, 2, 3, 4]
    assert [p.requests for p in result.curves[1].points] == list(range(1, 13))
    full = result.curves[0].points[-1]
    assert full.requests == 4 and full.limit_s > 0.0, "beside itself"
    for point in result.curves[1].points:
        assert point.limit_s > 0.0, "beside the instance's own full memory"
        if point.requests < MIN_SEQUENCES:
            assert not point.in_turns and not point.other_s
        else:
            assert 0.0 < point.tbt_s <= point.other_s, "the faster way counts"
    assert [result.promised(curve) for curve in result.curves] == [4, 12, 16]
    assert "1 attention worker: room for 3 times the requests" in "\n".join(capacity_lines(result))
