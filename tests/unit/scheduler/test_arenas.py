"""Tests an instance with blocks at attention workers, of which one is lost for a while."""

from __future__ import annotations

from test_instance import COST, EOS, LAYOUT, SIZE, Bench, attempt, of, reported

from moonpool.protocol.messages import (
    Abort,
    AttemptFailed,
    AttemptId,
    ReserveDecode,
    StartDecode,
    StopReceiving,
    TransferDone,
)
from moonpool.protocol.transfer_events import ReceiveEnded
from moonpool.scheduler.actions import ArenaBack, ArenaLost, CancelStream, ExpectStream
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig, InstanceMemory
from moonpool.types import Role, Token


def bench_of(arenas: tuple[int, ...], segment_blocks: int = 0) -> Bench:
    bench = Bench(Role.DECODE)
    bench.instance = Instance(
        InstanceConfig(),
        LAYOUT,
        sum(arenas),
        Role.DECODE,
        COST,
        (EOS,),
        InstanceMemory(arenas=arenas, segment_blocks=segment_blocks),
    )
    return bench


def test_a_patient_attempt_waits_for_the_lost_arena() -> None:
    bench = bench_of((16,))
    bench.handle(ReserveDecode(attempt=attempt("a")))
    (failed,) = reported(bench.handle(ArenaLost(0, "gone")), AttemptFailed)
    assert failed.reason == "blocks_lost"
    bench.handle(ReceiveEnded(stream_id="a", error="gone"))
    (failed,) = reported(bench.handle(ReserveDecode(attempt=attempt("b"))), AttemptFailed)
    assert failed.reason == "no_blocks", "another instance may have room"
    assert not bench.handle(ReserveDecode(attempt=attempt("b2"), patient=True))
    assert not bench.handle(ReserveDecode(attempt=attempt("c"), patient=True))
    bench.handle(Abort(attempt_id=AttemptId("c")))
    (expect,) = of(bench.handle(ArenaBack(0)), ExpectStream)
    assert expect.stream_id == "b2"
    assert len(expect.block_ids) == 3
    bench.handle(ReceiveEnded(stream_id="b2"))
    bench.handle(StartDecode(attempt_id=AttemptId("b2"), token=Token(7)))
    assert bench.step is not None


def test_an_attempt_whose_stream_ended_during_its_wait_is_computed_here() -> None:
    bench = bench_of((16,))
    bench.handle(ArenaLost(0, "gone"))
    bench.handle(ReserveDecode(attempt=attempt("a"), patient=True))
    bench.handle(StartDecode(attempt_id=AttemptId("a"), token=Token(7)))
    bench.handle(StopReceiving(attempt_id=AttemptId("a")))
    actions = bench.handle(ArenaBack(0))
    assert of(actions, CancelStream)
    ended = bench.handle(ReceiveEnded(stream_id="a", incomplete=(0, 1, 2), error="cancelled"))
    assert reported(ended, TransferDone)[0].corrupt_slices == 0
    assert bench.step is not None
    assert len(bench.step.entries[0].new_token_ids) == 11, "all of its tokens again"


def test_a_request_in_segments_uses_several_arenas() -> None:
    bench = bench_of((4, 4), segment_blocks=2)
    (expect,) = of(bench.handle(ReserveDecode(attempt=attempt(num_tokens=7 * SIZE))), ExpectStream)
    parts = [block // 4 for block in expect.block_ids]
    assert sorted(parts[:6:2]) in ([0, 0, 1], [0, 1, 1])
    assert parts[:6:2] == parts[1:6:2]
    actions = bench.handle(ArenaLost(1, "gone"))
    assert reported(actions, AttemptFailed)[0].reason == "blocks_lost"
