"""Tests the log of a request that is arriving: a successor must read the log wherever it was cut
off."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shelf import Shelf

from moonpool.api.connection.call_log import CallLog
from moonpool.api.connection.kept_stream import MAX_FRUITLESS, HalfRead

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


_FILES: dict[CallLog, int] = {}
"""Maps each log to the descriptor of its memory file."""


def read(log: bytes) -> CallLog:
    fd = os.memfd_create("log")
    os.write(fd, log)
    found = CallLog(Shelf(), 7, fd)
    _FILES[found] = fd
    found.read()
    return found


def taken_over(log: bytes) -> tuple[HalfRead, CallLog]:
    found = read(log)
    assert HalfRead.is_in(found)
    return HalfRead.take_over(found), found


def bytes_of(call_log: CallLog) -> bytes:
    return os.pread(_FILES[call_log], 1 << 20, 0)


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
    successor, its_log = taken_over(log[:cut])
    known = first[: sum(end <= cut for end in ends)]
    assert (successor.base, successor.received) == (25, known)
    for piece in second:
        successor.note(piece)
    later = bytes_of(its_log)
    successor.drop()
    third, _ = taken_over(later)
    assert third.received == known + second
    third.drop()
    shelf.close()


def test_a_request_of_which_heads_die_is_given_up() -> None:
    shelf = Shelf()
    half_read = begun(shelf)
    half_read.note(b"GET ")
    log = shelf.log()
    half_read.drop()
    for _ in range(MAX_FRUITLESS):
        successor, its_log = taken_over(log)
        log = bytes_of(its_log)
        successor.drop()
    with pytest.raises(ValueError, match=f"{MAX_FRUITLESS + 1} heads ended while they read"):
        taken_over(log)
    shelf.close()


@given(st.binary(max_size=60))
def test_another_log_is_none_of_a_request(data: bytes) -> None:
    for log in (b"", data, (1 + len(data)).to_bytes(4, "little") + b"\x80" + data):
        found = read(log)
        assert not HalfRead.is_in(found)
        found.drop()


def test_without_memory_nothing_is_kept() -> None:
    shelf = Shelf(limit_bytes=27)
    half_read = begun(shelf)
    half_read.note(b"0123456789")
    half_read.note(b"0")
    assert shelf.dropped == [7]
    assert shelf.taken_bytes == 0
    shelf.close()
