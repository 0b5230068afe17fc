"""Tests packets between supervisor and head: order, file descriptors, damage."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Sequence

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.link.packets import PacketSocket, packet_pair
from moonpool.protocol.supervision import FromHead, HeadBeat, HeadFailed, StreamClosed, StreamOpened

DECODER: msgspec.msgpack.Decoder[FromHead] = msgspec.msgpack.Decoder(FromHead)


class Receiver:
    def __init__(self, sock: socket.socket) -> None:
        self.got: list[FromHead] = []
        self.texts: list[bytes] = []  # the targets of the file descriptors
        self.num_ends = 0
        self.packets: PacketSocket[FromHead, FromHead] = PacketSocket(
            sock, DECODER, self._on_packet, self._on_end
        )

    def _on_packet(self, packet: FromHead, fds: Sequence[int]) -> None:
        self.got.append(packet)
        for fd in fds:
            self.texts.append(os.pread(fd, 100, 0))
            os.close(fd)

    def _on_end(self) -> None:
        self.num_ends += 1


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def file_of(text: bytes) -> int:
    fd = os.memfd_create("text")
    os.write(fd, text)
    return fd


def open_files() -> int:
    """Returns descriptors of the passed files; threads of other tests may open other files."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += "memfd:text" in os.readlink(f"/proc/self/fd/{name}")
    return found


def test_packets_that_wait_keep_their_order_and_their_descriptors() -> None:
    async def run() -> None:
        before = open_files()
        ours, theirs = packet_pair()
        sender = Receiver(ours)
        sent: list[FromHead] = []
        for number in range(600):
            fds = (file_of(b"a%d" % number), file_of(b"b%d" % number))
            packet = StreamOpened(number=number) if number % 2 else HeadFailed(message="x" * 2000)
            assert sender.packets.send(packet, fds if number % 2 else ())
            sent.append(packet)
            for fd in fds:
                os.close(fd)  # like an answer that ends before its packet was sent
        receiver = Receiver(theirs)
        await until(lambda: len(receiver.got) == 600)
        assert receiver.got == sent
        assert receiver.texts == [b"%b%d" % (c, n) for n in range(1, 600, 2) for c in (b"a", b"b")]
        sender.packets.close()
        await until(lambda: receiver.num_ends == 1)
        assert not receiver.packets.send(HeadBeat())
        assert open_files() == before

    asyncio.run(run())


@settings(deadline=None, max_examples=50)
@given(
    st.binary(min_size=1, max_size=100) | st.builds(StreamClosed, number=st.integers(0, 1 << 60))
)
def test_a_damaged_packet_ends_the_connection(damage: bytes | StreamClosed) -> None:
    """Damage includes a packet with a file descriptor too many, or one too few."""

    async def run() -> None:
        before = open_files()
        ours, theirs = packet_pair()
        receiver = Receiver(theirs)
        fd = file_of(b"")
        body = damage if isinstance(damage, bytes) else msgspec.msgpack.encode(damage)
        socket.send_fds(ours, [msgspec.msgpack.encode(HeadBeat())], [])
        socket.send_fds(ours, [body], [fd])
        await until(lambda: receiver.num_ends == 1)
        assert receiver.got == [HeadBeat()]
        for sock in (ours, theirs):
            sock.close()
        os.close(fd)
        assert open_files() == before

    asyncio.run(run())


def test_an_answer_without_its_descriptors_ends_the_connection() -> None:
    async def run() -> None:
        ours, theirs = packet_pair()
        receiver = Receiver(theirs)
        ours.send(msgspec.msgpack.encode(StreamOpened(number=1)))
        await until(lambda: receiver.num_ends == 1)
        assert receiver.got == []
        ours.close()

    asyncio.run(run())
