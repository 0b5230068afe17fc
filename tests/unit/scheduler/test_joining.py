"""Tests decodes that wait for room in the batch (`AttemptSpec.max_step_s`)."""

from __future__ import annotations

from test_instance import Bench, reported, reserved, start

from moonpool.protocol.messages import Abort, AttemptId, DecodeAccepted
from moonpool.protocol.transfer_events import ReceiveEnded
from moonpool.types import Role, Slo


def test_a_decode_waits_until_the_step_is_short_enough() -> None:
    """A step takes 10 ms per decode, and by its SLO each decode may be in a batch of two."""
    bench = Bench(Role.DECODE)
    for name, first in (("a", 100), ("b", 500), ("c", 900)):
        reserved(bench, name, first=first, slo=Slo(ttft_s=1.0, tbt_s=0.015), max_step_s=0.02)
        bench.handle(ReceiveEnded(stream_id=name))
    assert reported(bench.handle(start("a")), DecodeAccepted), "an idle instance takes any"
    assert not bench.handle(start("b")), "it waits for the end of the step"
    assert not bench.handle(start("c"))
    (accepted,) = reported(bench.end_step(), DecodeAccepted)
    assert accepted.attempt_id == "b" and set(bench.lengths()) == {"a", "b"}
    assert not reported(bench.end_step(), DecodeAccepted), "three would take 30 ms"
    ended = bench.handle(Abort(attempt_id=AttemptId("a")))
    assert [report.attempt_id for report in reported(ended, DecodeAccepted)] == ["c"]
    bench.end_step()
    assert set(bench.lengths()) == {"b", "c"}


def test_a_waiting_decode_learns_of_a_higher_limit() -> None:
    bench = Bench(Role.DECODE)
    for name, first, limit_s in (("a", 100, 0.01), ("b", 500, 0.01), ("c", 900, 0.03)):
        reserved(bench, name, first=first, max_step_s=limit_s)
        bench.handle(ReceiveEnded(stream_id=name))
        bench.handle(start(name))
    accepted = reported(bench.end_step(), DecodeAccepted)
    assert [report.attempt_id for report in accepted] == ["b", "c"]


def test_a_waiting_decode_can_be_aborted() -> None:
    bench = Bench(Role.DECODE)
    for name, first in (("a", 100), ("b", 500)):
        reserved(bench, name, first=first, max_step_s=0.01)
        bench.handle(ReceiveEnded(stream_id=name))
        bench.handle(start(name))
    bench.handle(Abort(attempt_id=AttemptId("b")))
    bench.handle(Abort(attempt_id=AttemptId("a")))
    bench.end_step()
    bench.assert_empty()
