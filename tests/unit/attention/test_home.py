"""Memory of the instance's own beside an attention worker: the same bits, and no waiting for it."""

from __future__ import annotations

import pytest
import torch
from tests.unit.attention.test_remote_ops import (
    BLOCKS_EACH,
    GREEDY,
    HEADS,
    Workers,
    local_engine,
    make_ops,
    run,
    workers,
)

from moonpool.attention.hand import Hand
from moonpool.attention.plan import Placement
from moonpool.attention.remote_ops import Home, RemoteOps
from moonpool.engine.ops import SEGMENT, KvCache, empty_cache
from moonpool.engine.runner import Engine
from moonpool.engine.step import SequenceStep
from moonpool.types import RequestId

HOME_BLOCKS = 36


def with_home(made: Workers, staggered: bool = False) -> tuple[Engine, set[int]]:
    """The workers' engine, with blocks of its own after theirs; and which of these were written."""
    written: set[int] = set()
    cache = empty_cache(made.layout, HOME_BLOCKS)
    hand = Hand(make_ops(), cache, HEADS, 16**-0.5, lambda blocks, _: written.update(blocks))
    sizes = (*(BLOCKS_EACH for _ in made.ports), HOME_BLOCKS)
    home = Home(len(made.ports), hand)
    ops = RemoteOps(make_ops(), made.ports, Placement(sizes), home=home)
    nothing = torch.empty(1, 1, 1, dtype=cache.blocks.dtype)
    shape = (sum(sizes), made.layout.num_layers, made.layout.slice_elements)
    whole = KvCache(nothing.expand(shape), made.layout)
    return Engine(made.model, ops, whole, staggered=staggered), written


@pytest.mark.parametrize("staggered", [False, True])
@pytest.mark.parametrize("transport", ["socket", "ring"])
def test_requests_at_home_and_elsewhere(transport: str, staggered: bool) -> None:
    with workers(1, transport) as made:
        engine, written = with_home(made, staggered)
        lengths = [30, 300, 64, 65, 20, 21, 22, 200, 10]  # enough for two batches
        bases = [0, 40, 2, 46, 4, 48, 5, 50, 10]
        tables = [
            [base + i for i in range(-(-(length + 8) // 64))]
            for base, length in zip(bases, lengths, strict=True)
        ]
        reference = Engine(made.model, make_ops(), empty_cache(made.layout, 76))
        assert run(engine, tables, lengths, 6) == run(reference, tables, lengths, 6)
        assert written == {b - BLOCKS_EACH for t in tables for b in t if b >= BLOCKS_EACH}


def test_segments_at_home_and_elsewhere() -> None:
    """The partials of both are merged in the order of their tokens, not of who answered first."""
    with workers(1) as made:
        engine, _ = with_home(made)
        size = SEGMENT // 64
        first = [*range(size), *(BLOCKS_EACH + i for i in range(2))]
        second = [*(BLOCKS_EACH + 4 + i for i in range(size)), 34, 35]
        for tables in ([first], [second]):
            lengths = [SEGMENT + 20]
            reference = Engine(made.model, make_ops(), empty_cache(made.layout, 76))
            assert run(engine, tables, lengths, 4) == run(reference, tables, lengths, 4)


def test_who_needs_home_only_needs_no_worker() -> None:
    with workers(1) as made:
        engine, _ = with_home(made)
        made.ports[0].close()
        near = SequenceStep(RequestId("0"), [1, 2], 0, [BLOCKS_EACH], GREEDY)
        assert engine.step([near]).tokens == local_engine(made).step([_at_zero(near)]).tokens


def _at_zero(step: SequenceStep) -> SequenceStep:
    return SequenceStep(step.request_id, step.new_token_ids, step.start, [0], step.draw)
