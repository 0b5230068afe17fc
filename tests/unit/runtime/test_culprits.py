"""Tests which call is taken for the cause of a head's end, and how the next head treats that
call."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from log_keeper import LogKeeper

from moonpool.api.connection.kept_stream import (
    HalfRead,
    KeptStream,
    Opening,
    accepted_bytes,
    draw_facts,
)
from moonpool.api.connection.poison import (
    MAX_ENDED,
    MAX_REMEMBERED,
    REMEMBERED_S,
    Enders,
    MarkedWork,
    WorkMark,
)
from moonpool.api.serving_backend import Output
from moonpool.config.tables import Config
from moonpool.head.supervisor_link import SupervisorLink
from moonpool.head.watch.culprits import Culprits
from moonpool.link.packets import PacketSocket, packet_pair
from moonpool.protocol.supervision import (
    AdoptStream,
    AllStreamsSent,
    FromHead,
    HeadBegin,
    HeadsEnded,
    NoteWork,
    ToHead,
)
from moonpool.types import Token

KILL, CRASH = -signal.SIGKILL, -signal.SIGSEGV


@contextmanager
def head_at(culprits: Culprits, number: int | None) -> Iterator[WorkMark]:
    """A head that processes this call."""
    fd = WorkMark.make_memory()
    mark = WorkMark(os.dup(fd))
    culprits.watch(fd)
    if number is not None:
        mark.set(number)
    yield mark
    mark.close()


def ended(culprits: Culprits, status: int | None, number: int | None) -> int | None:
    with head_at(culprits, number):
        return culprits.judge(status, {3, 4})


def test_a_crash_and_a_kill_count_for_the_call_that_was_worked_on() -> None:
    culprits = Culprits()
    assert ended(culprits, CRASH, 3) == 3
    assert ended(culprits, KILL, 3) == 3
    assert ended(culprits, 1, 3) == 3
    assert culprits.of(3) == (2, 1) and culprits.of(4) == (0, 0)
    culprits.forget(3)
    assert culprits.of(3) == (0, 0)


@pytest.mark.parametrize("status", [0, -signal.SIGTERM, -signal.SIGINT])
def test_who_ends_in_order_ends_with_no_call(status: int) -> None:
    assert ended(Culprits(), status, 3) is None


def test_no_call_is_guilty_that_was_not_worked_on_or_is_not_kept() -> None:
    culprits = Culprits()
    assert ended(culprits, CRASH, None) is None
    assert ended(culprits, CRASH, 9) is None
    assert culprits.judge(CRASH, {3}) is None  # None, because the head has reported no call
    with head_at(culprits, 3):
        culprits.spare()
        assert culprits.judge(KILL, {3}) is None
    with head_at(culprits, 3) as mark:
        mark.clear()
        assert culprits.judge(CRASH, {3}) is None
    assert not culprits.ended


def test_a_head_hangs_with_the_call_that_it_works_on_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    culprits = Culprits()
    with head_at(culprits, 3):
        culprits.note_hang()  # the head went on from call to call
        assert culprits.judge(KILL, {3}) is None
    with head_at(culprits, 3):
        later_s = time.monotonic() + 100.0
        monkeypatch.setattr(time, "monotonic", lambda: later_s)
        culprits.note_hang()
        assert culprits.judge(KILL, {3}) == 3
    assert culprits.of(3) == (1, 0)


# The head's side:


def test_each_step_of_a_call_is_marked_and_nothing_between_them() -> None:
    fd = WorkMark.make_memory()
    mark = WorkMark(fd)
    os.close(fd)
    seen: list[int | None] = []

    class Call:
        number: int | None = 5

    call = Call()
    call.mark = mark  # type: ignore[attr-defined]

    async def work() -> str:
        seen.append(mark.number)
        await asyncio.sleep(0)
        seen.append(mark.number)
        call.number = 6
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            seen.append(mark.number)
        call.number = None
        await asyncio.sleep(0)
        seen.append(mark.number)
        return "done"

    async def run() -> None:
        async def marked() -> str:
            found: str = await MarkedWork(work(), call)  # type: ignore[arg-type]
            return found

        task = asyncio.create_task(marked())
        for _ in range(3):
            await asyncio.sleep(0)
            assert mark.number is None
        task.cancel()
        assert await task == "done"

    asyncio.run(run())
    assert seen == [5, 5, 6, None]
    with pytest.raises(ZeroDivisionError):
        asyncio.run(_failing(call))
    assert mark.number is None


async def _failing(call: object) -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        1 / 0  # noqa: B018

    await MarkedWork(work(), call)  # type: ignore[arg-type]


def opening(**changes: object) -> Opening:
    made = Opening(
        request=b"POST /v1/completions HTTP/1.1\r\n\r\n",
        default_headers=(),
        base=0,
        arrived_s=time.monotonic(),
        tenant="t",
        is_operator=False,
        facts=draw_facts("r", 100),
        digest=b"0123456789abcdef",
    )
    return msgspec.structs.replace(made, **changes)


class NextHead:
    """Takes over one answer; `answer` is what its client gets."""

    def __init__(self, num_ended: int, num_killed: int = 0) -> None:
        self.counts = num_ended, num_killed
        self.received: list[KeptStream | HalfRead] = []
        self.told: list[FromHead] = []
        self.enders = Enders()
        self.answer = b""

    async def take(self, keeper: LogKeeper) -> None:
        ours, theirs = packet_pair()
        packets: PacketSocket[FromHead, ToHead] = PacketSocket(
            ours, msgspec.msgpack.Decoder(FromHead), self._on_packet, lambda: None
        )
        link = SupervisorLink(theirs)
        with socket.socket() as http, socket.socket() as control:
            config = HeadBegin(
                config=Config(), secret=b"", launch=False, num_restarts=1, expected={}
            )
            packets.send(config, (http.fileno(), control.fileno()))
        num_ended, num_killed = self.counts
        take = AdoptStream(number=7, num_ended=num_ended, num_killed=num_killed)
        packets.send(take, keeper.fds[-1])
        packets.send(AllStreamsSent(next_number=8))
        found = await asyncio.wait_for(link.inherit(), 60)
        await asyncio.sleep(0.01)
        self.received = [received for received, _ in found.answers]
        self.enders = link.enders
        for sock in (found.http, found.control, *(sock for _, sock in found.answers)):
            sock.close()
        link.close()
        packets.close()

    def _on_packet(self, packet: FromHead, fds: object) -> None:
        self.told.append(packet)


Begin = Callable[[LogKeeper, socket.socket], KeptStream | HalfRead | None]


def taken_over(head: NextHead, begin: Begin, sent: bytes = b"") -> NextHead:
    """Returns the head after it has taken over a call that `begin` keeps, whose client has got some
    bytes."""
    keeper = LogKeeper()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        assert begin(keeper, accepted) is not None
        accepted.sendall(sent)
        accepted.close()
        asyncio.run(head.take(keeper))
        keeper.close()
        with client:
            client.settimeout(60)
            while not head.received and (data := client.recv(1 << 16)):
                head.answer += data
    return head


def kept(keeper: LogKeeper, sock: socket.socket) -> KeptStream | None:
    return KeptStream.begin(keeper, sock.fileno(), opening(base=accepted_bytes(sock.fileno())))


def half_read(keeper: LogKeeper, sock: socket.socket) -> HalfRead | None:
    return HalfRead.begin(keeper, sock.fileno(), accepted_bytes(sock.fileno()))


@pytest.mark.parametrize("begin", [kept, half_read])
def test_who_ended_two_heads_gets_an_error_and_no_third_head(begin: Begin) -> None:
    for counts in ((0, 0), (1, 0), (0, 1)):
        assert len(taken_over(NextHead(*counts), begin).received) == 1
    for counts in ((MAX_ENDED, 0), (1, 1), (0, MAX_ENDED)):
        refused = taken_over(NextHead(*counts), begin)
        assert not refused.received
        assert refused.answer.startswith(b"HTTP/1.1 500 Internal Server Error\r\n")
        assert b"x-should-retry: false\r\n" in refused.answer
        assert b'"code":"head_failed"' in refused.answer
        body = refused.answer.partition(b"\r\n\r\n")[2]
        assert b"content-length: %d\r\n" % len(body) in refused.answer


def test_a_response_that_has_begun_ends_with_its_connection() -> None:
    assert (
        taken_over(NextHead(2), kept, sent=b"HTTP/1.1 200 OK\r\n").answer == b"HTTP/1.1 200 OK\r\n"
    )


def test_a_call_whose_deadline_has_passed_goes_no_further() -> None:
    def late(keeper: LogKeeper, sock: socket.socket) -> KeptStream | None:
        base = accepted_bytes(sock.fileno())
        arrived_s = time.monotonic() - Config().api.request_timeout_s - 1
        return KeptStream.begin(keeper, sock.fileno(), opening(base=base, arrived_s=arrived_s))

    assert taken_over(NextHead(0), late).answer.startswith(b"HTTP/1.1 504 Gateway Timeout\r\n")


def test_an_increment_clears_a_call_of_kills_but_not_of_crashes() -> None:
    def grown(keeper: LogKeeper, sock: socket.socket) -> KeptStream | None:
        found = kept(keeper, sock)
        assert found is not None
        found.log.append(msgspec.msgpack.encode(["t", 1, 1]))
        found.note(0, Output(tokens=(Token(5),)))
        return found

    assert len(taken_over(NextHead(1, 1), grown).received) == 1  # no further call
    # refused after one crash and one kill
    assert len(taken_over(NextHead(1, 2), grown).received) == 0
    assert len(taken_over(NextHead(2, 1), grown).received) == 0


def test_calls_like_one_that_crashed_heads_begin_with_its_count() -> None:
    head = taken_over(NextHead(1, 0), kept)
    assert [type(packet) for packet in head.told] == [NoteWork, HeadsEnded]
    assert head.enders.count("t", b"0123456789abcdef") == 1
    assert head.enders.count("u", b"0123456789abcdef") == 0
    killed = taken_over(NextHead(0, 2), kept)  # two kills, which may be chance
    assert killed.enders.count("t", b"0123456789abcdef") == 0


def test_what_is_remembered_is_bounded_and_ends() -> None:
    now_s = 0.0
    enders = Enders(lambda: now_s)
    for number in range(MAX_REMEMBERED + 1):
        enders.note("t", b"%d" % number, 2, now_s)
    assert enders.count("t", b"0") == 0 and enders.count("t", b"1") == 2
    now_s = REMEMBERED_S
    assert enders.count("t", b"1") == 0
