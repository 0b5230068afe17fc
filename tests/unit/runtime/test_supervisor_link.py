"""Tests that a head inherits each call once, and which clients' calls outlive a head."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import Callable

import msgspec
import pytest
from log_keeper import LogKeeper

from moonpool.api.connection.kept_stream import HalfRead, KeptStream, Opening, draw_facts
from moonpool.config.tables import Config
from moonpool.head import supervisor_link
from moonpool.head.supervisor_link import SupervisorLink
from moonpool.link.packets import PacketSocket, packet_pair
from moonpool.protocol.supervision import AdoptStream, AllStreamsSent, FromHead, HeadBegin, ToHead


def opening() -> Opening:
    return Opening(
        request=b"GET / HTTP/1.1\r\n\r\n",
        default_headers=(),
        base=0,
        arrived_s=time.monotonic(),
        tenant="",
        is_operator=True,
        facts=draw_facts("r", 10),
    )


async def inherited(logs: LogKeeper) -> list[KeptStream | HalfRead]:
    ours, theirs = packet_pair()
    packets: PacketSocket[FromHead, ToHead] = PacketSocket(
        ours, msgspec.msgpack.Decoder(FromHead), lambda packet, fds: None, lambda: None
    )
    link = SupervisorLink(theirs)
    with socket.socket() as http, socket.socket() as control:
        begin = HeadBegin(config=Config(), secret=b"", launch=False, num_restarts=1, expected={})
        packets.send(begin, (http.fileno(), control.fileno()))
    for number, fds in enumerate(logs.fds):
        packets.send(AdoptStream(number=number), fds)
    packets.send(AllStreamsSent(next_number=len(logs.fds)))
    found = await asyncio.wait_for(link.inherit(), 60)
    for sock in (found.http, found.control, *(sock for _, sock in found.answers)):
        sock.close()
    link.close()
    packets.close()
    return [received for received, _ in found.answers]


def test_of_two_logs_of_one_connection_the_kept_call_goes_on() -> None:
    logs = LogKeeper()
    with socket.socket() as first, socket.socket() as second:
        for sock, piece in ((first, b"GET "), (second, b"POST ")):
            half_read = HalfRead.begin(logs, sock.fileno(), 0)
            assert half_read is not None
            half_read.note(piece)
        assert KeptStream.begin(logs, first.fileno(), opening()) is not None
    answers = asyncio.run(inherited(logs))
    assert [type(received) for received in answers] == [HalfRead, KeptStream]
    assert answers[0].received == [b"POST "]
    logs.close()


def with_link(work: Callable[[SupervisorLink], None]) -> None:
    async def run() -> None:
        ours, theirs = packet_pair()
        link = SupervisorLink(theirs)
        work(link)
        link.close()
        ours.close()

    asyncio.run(run())


def test_one_tenant_leaves_room_for_the_logs_of_another_and_the_limit_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))

    def work(link: SupervisorLink) -> None:
        log = os.memfd_create("log")
        numbers = [link.keep_cut(log, "ann") for _ in range(12)]
        assert [number is not None for number in numbers] == [True] * 10 + [False] * 2
        assert all(link.keep_cut(log, "bob") is not None for _ in range(2))
        assert numbers[0] is not None
        link.drop(numbers[0])
        assert link.keep_cut(log, "ann") is None, "half of 18 is 9"
        half = supervisor_link.MAX_LOG_BYTES // 2
        assert link.take_memory(half, "ann") and not link.take_memory(1, "ann")
        assert link.take_memory(half // 2, "bob") and not link.take_memory(half // 2, "bob")
        link.release_memory(half, "ann")
        os.close(log)

    with_link(work)
    [line, *_] = caplog.messages
    assert "of at most 20 (a 5th of the 100 file descriptors" in line


def test_without_other_tenants_one_has_all_places(caplog: pytest.LogCaptureFixture) -> None:
    def work(link: SupervisorLink) -> None:
        log = os.memfd_create("log")
        most = link._places.capacity
        assert all(link.keep_cut(log, "") is not None for _ in range(min(most, 50)))
        os.close(log)

    with_link(work)
    assert caplog.messages == []
