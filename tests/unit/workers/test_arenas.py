"""An instance whose blocks lie at attention workers, one of which is lost for a while."""

from __future__ import annotations

from test_instance import COST, EOS, LAYOUT, SIZE, Bench, of, told, work

from moonpool.config import InstanceConfig
from moonpool.kvcache.transfers import ReceiveEnded
from moonpool.types import Role, Token
from moonpool.workers.actions import ArenaBack, ArenaLost, CancelStream, ExpectStream
from moonpool.workers.instance import Instance
from moonpool.workers.messages import (
    Abort,
    ReserveDecode,
    StartDecode,
    StopReceiving,
    TransferDone,
    WorkFailed,
    WorkId,
)


def bench_of(arenas: tuple[int, ...], segment_blocks: int = 0) -> Bench:
    bench = Bench(Role.DECODE)
    bench.instance = Instance(
        InstanceConfig(),
        LAYOUT,
        sum(arenas),
        Role.DECODE,
        COST,
        (EOS,),
        arenas=arenas,
        segment_blocks=segment_blocks,
    )
    return bench


def test_a_work_that_nobody_else_can_take_waits_for_the_arena() -> None:
    bench = bench_of((16,))
    bench.handle(ReserveDecode(work=work("a")))
    (failed,) = told(bench.handle(ArenaLost(0, "gone")), WorkFailed)
    assert failed.reason == "blocks_lost"
    bench.handle(ReceiveEnded(stream_id="a", error="gone"))
    (failed,) = told(bench.handle(ReserveDecode(work=work("b"))), WorkFailed)
    assert failed.reason == "no_blocks", "another instance may have room"
    assert not bench.handle(ReserveDecode(work=work("b2"), patient=True))
    assert not bench.handle(ReserveDecode(work=work("c"), patient=True))
    bench.handle(Abort(work_id=WorkId("c")))
    (expect,) = of(bench.handle(ArenaBack(0)), ExpectStream)
    assert expect.stream_id == "b2"
    assert len(expect.block_ids) == 3
    bench.handle(ReceiveEnded(stream_id="b2"))
    bench.handle(StartDecode(work_id=WorkId("b2"), token=Token(7)))
    assert bench.step is not None


def test_a_work_whose_stream_ended_meanwhile_is_computed_where_it_waited() -> None:
    bench = bench_of((16,))
    bench.handle(ArenaLost(0, "gone"))
    bench.handle(ReserveDecode(work=work("a"), patient=True))
    bench.handle(StartDecode(work_id=WorkId("a"), token=Token(7)))
    bench.handle(StopReceiving(work_id=WorkId("a")))
    actions = bench.handle(ArenaBack(0))
    assert of(actions, CancelStream)
    ended = bench.handle(ReceiveEnded(stream_id="a", corrupt=(0, 1, 2), error="cancelled"))
    assert told(ended, TransferDone)[0].corrupt_blocks == 3
    assert bench.step is not None
    assert len(bench.step.entries[0].new_token_ids) == 11, "all of it once more"


def test_one_request_has_the_room_of_several_arenas_in_segments() -> None:
    bench = bench_of((4, 4), segment_blocks=2)
    (expect,) = of(bench.handle(ReserveDecode(work=work(num_tokens=7 * SIZE))), ExpectStream)
    parts = [block // 4 for block in expect.block_ids]
    assert sorted(parts[:6:2]) in ([0, 0, 1], [0, 1, 1])
    assert parts[:6:2] == parts[1:6:2]
    actions = bench.handle(ArenaLost(1, "gone"))
    assert told(actions, WorkFailed)[0].reason == "blocks_lost"
