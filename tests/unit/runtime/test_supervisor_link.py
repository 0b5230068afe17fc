"""What a head inherits of calls: each of them once."""

from __future__ import annotations

import asyncio
import os
import socket
import time

import msgspec

from moonpool.api.connection.half_read import HalfRead
from moonpool.api.connection.kept_stream import KeptStream, Opening, draw_facts
from moonpool.config import Config
from moonpool.protocol.supervision import FromHead, HeadBegin, TakeAnswer, TakeNoMore, ToHead
from moonpool.runtime.packets import PacketSocket, packet_pair
from moonpool.runtime.supervisor_link import SupervisorLink

OPENING = Opening(
    request=b"GET / HTTP/1.1\r\n\r\n",
    default_headers=(),
    base=0,
    arrived_s=time.monotonic(),
    tenant="",
    is_admin=True,
    facts=draw_facts("r", 10),
)


class Logs:
    """A keeper that holds duplicates, as the supervisor does."""

    def __init__(self) -> None:
        self.fds: list[tuple[int, int]] = []

    def keep(self, socket_fd: int, log_fd: int) -> int | None:
        self.fds.append((os.dup(socket_fd), os.dup(log_fd)))
        return len(self.fds) - 1

    def keep_cut(self, log_fd: int) -> int | None:
        return None

    def cut(self, number: int) -> None: ...

    def drop(self, number: int) -> None: ...

    def take_memory(self, num_bytes: int) -> bool:
        return True

    def release_memory(self, num_bytes: int) -> None: ...


async def inherited(logs: Logs) -> list[KeptStream | HalfRead]:
    ours, theirs = packet_pair()
    packets: PacketSocket[FromHead, ToHead] = PacketSocket(
        ours, msgspec.msgpack.Decoder(FromHead), lambda packet, fds: None, lambda: None
    )
    link = SupervisorLink(theirs)
    with socket.socket() as http, socket.socket() as control:
        begin = HeadBegin(config=Config(), secret=b"", launch=False, num_restarts=1, expected={})
        packets.send(begin, (http.fileno(), control.fileno()))
    for number, fds in enumerate(logs.fds):
        packets.send(TakeAnswer(number=number), fds)
    packets.send(TakeNoMore(next_number=len(logs.fds)))
    found = await asyncio.wait_for(link.inherit(), 60)
    for sock in (found.http, found.control, *(sock for _, sock in found.answers)):
        sock.close()
    link.close()
    packets.close()
    return [received for received, _ in found.answers]


def test_of_two_logs_of_one_connection_the_kept_call_goes_on() -> None:
    logs = Logs()
    with socket.socket() as first, socket.socket() as second:
        for sock, piece in ((first, b"GET "), (second, b"POST ")):
            half_read = HalfRead.begin(logs, sock.fileno(), 0)
            assert half_read is not None
            half_read.note(piece)
        assert KeptStream.begin(logs, first.fileno(), OPENING) is not None
    answers = asyncio.run(inherited(logs))
    assert [type(received) for received in answers] == [HalfRead, KeptStream]
    assert answers[0].received == [b"POST "]
    for fd in (fd for pair in logs.fds for fd in pair):
        os.close(fd)
