"""Tests the end of a decode's stream: complete, with holes, or broken."""

from __future__ import annotations

import pytest
from test_instance import SIZE, Bench, keys_of, of, reported, reserved, start

from moonpool.protocol.messages import (
    Abort,
    AttemptId,
    BlocksChanged,
    DecodeAccepted,
    StopReceiving,
    TransferDone,
)
from moonpool.protocol.transfer_events import ReceiveEnded
from moonpool.scheduler.actions import CancelStream
from moonpool.types import Role


@pytest.mark.parametrize(
    ("incomplete", "error", "computed"),
    [((), "", 10), ((2,), "", 8), ((1,), "", 4), ((0, 2), "", 0), ((), "broken", 0)],
)
@pytest.mark.parametrize("corrupt", [0, 5])
def test_corrupt_and_missing_blocks_are_computed_here(
    incomplete: tuple[int, ...], error: str, computed: int, corrupt: int
) -> None:
    bench = Bench(Role.DECODE)
    reserved(bench)
    bench.handle(start())
    ended = ReceiveEnded(stream_id="w", incomplete=incomplete, corrupt_slices=corrupt, error=error)
    actions = bench.handle(ended)
    (done,) = reported(actions, TransferDone)
    assert (done.corrupt_slices, done.error) == (corrupt, error)
    assert bench.instance.counters.get("corrupt_slices", 0) == corrupt
    if error:
        assert bench.step is None, "the Conductor may have aborted the attempt"
        bench.handle(StopReceiving(attempt_id=AttemptId("w")))
    assert bench.step is not None
    assert bench.instance.counters.get("recomputed_tokens", 0) == 10 - computed
    (entry,) = bench.step.entries
    assert (entry.start, len(entry.new_token_ids)) == (computed, 11 - computed)
    assert entry.draw is not None and list(entry.generated) == [7]
    sealed = [k for c in reported(actions, BlocksChanged) for k in c.stored]
    assert sealed == keys_of(tuple(range(100, 110)))[: computed // SIZE]


def test_stop_receiving_cancels_the_stream() -> None:
    bench = Bench(Role.DECODE)
    reserved(bench)
    bench.handle(start())
    stop = StopReceiving(attempt_id=AttemptId("w"))
    assert of(bench.handle(stop), CancelStream) and bench.step is None
    bench.handle(ReceiveEnded(stream_id="w", incomplete=(0, 1, 2), error="cancelled"))
    assert bench.lengths() == {"w": 11}
    assert not of(bench.handle(stop), CancelStream), "it has ended already"


def test_an_aborted_attempt_computes_nothing_although_its_broken_stream_arrives_first() -> None:
    bench = Bench(Role.DECODE)
    reserved(bench)
    bench.handle(start())
    bench.handle(ReceiveEnded(stream_id="w", incomplete=(0, 1, 2), error="the sender aborted it"))
    assert not reported(bench.handle(Abort(attempt_id=AttemptId("w"))), DecodeAccepted)
    assert bench.step is None and not bench.instance.counters.get("recomputed_tokens")
    bench.assert_empty()
