"""The log of a request that is arriving: what a successor reads of it, wherever it was cut off."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shelf import Shelf

from moonpool.api.connection.half_read import HalfRead
from moonpool.api.connection.kept_stream import MAX_FRUITLESS, append_record

pieces = st.lists(st.binary(min_size=1, max_size=50), max_size=8)


def begun(shelf: Shelf) -> HalfRead:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        accepted, _ = listener.accept()
        with accepted:
            half_read = HalfRead.begin(shelf, accepted.fileno(), 25)
    assert half_read is not None
    return half_read


def taken_over(shelf: Shelf, log: bytes) -> HalfRead | None:
    fd = os.memfd_create("log")
    os.write(fd, log)
    try:
        found = HalfRead.take_over(shelf, 7, fd)
    except ValueError:
        os.close(fd)
        raise
    if found is None:
        os.close(fd)
    return found


@given(pieces, pieces, st.data())
def test_a_successor_reads_all_complete_pieces_and_adds_its_own(
    first: list[bytes], second: list[bytes], data: st.DataObject
) -> None:
    shelf = Shelf()
    half_read = begun(shelf)
    start = len(shelf.log())
    ends = []
    for piece in first:
        half_read.note(piece)
        ends.append(len(shelf.log()))
    log = shelf.log()
    half_read.drop()
    half_read.note(b"nothing is logged after its end")
    assert shelf.taken_bytes == 0
    assert shelf.log() == log
    cut = data.draw(st.integers(start, len(log)))
    successor = taken_over(Shelf(), log[:cut])
    assert successor is not None
    known = first[: sum(end <= cut for end in ends)]
    assert (successor.base, successor.pieces) == (25, known)
    for piece in second:
        successor.note(piece)
    later = os.pread(successor._fd, 1 << 20, 0)
    successor.drop()
    third = taken_over(Shelf(), later)
    assert third is not None
    assert third.pieces == known + second
    third.drop()
    shelf.close()


def test_a_request_of_which_heads_die_is_given_up() -> None:
    shelf = Shelf()
    half_read = begun(shelf)
    half_read.note(b"GET ")
    log = shelf.log()
    half_read.drop()
    for _ in range(MAX_FRUITLESS):
        successor = taken_over(shelf, log)
        assert successor is not None
        log = os.pread(successor._fd, 1 << 20, 0)
        successor.drop()
    with pytest.raises(ValueError, match=f"{MAX_FRUITLESS + 1} heads ended while they read"):
        taken_over(shelf, log)
    shelf.close()


@given(st.binary(max_size=60))
def test_another_log_is_none_of_a_request(data: bytes) -> None:
    fd = os.memfd_create("log")
    append_record(fd, b"\x80" + data)
    assert HalfRead.take_over(Shelf(), 7, fd) is None
    os.close(fd)


def test_without_memory_nothing_is_kept() -> None:
    shelf = Shelf(limit_bytes=10)
    half_read = begun(shelf)
    half_read.note(b"0123456789")
    half_read.note(b"0")
    assert shelf.dropped == [7]
    assert shelf.taken_bytes == 0
    shelf.close()
