"""Tests the log of an answer: a successor must read the log wherever it was cut off."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from shelf import Shelf

from moonpool.api.connection import call_log
from moonpool.api.connection.call_log import CallLog
from moonpool.api.connection.kept_stream import (
    MAX_FRUITLESS,
    KeptStream,
    Opening,
    TakenOver,
    draw_facts,
)
from moonpool.api.serving_backend import Output, RequestRefused
from moonpool.types import FinishReason, Token, TokenLogprobs

OPENING = Opening(
    request=b"POST /v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}",
    default_headers=((b"date", b"x"),),
    base=3,
    arrived_s=1.5,
    tenant="t",
    is_operator=False,
    facts=draw_facts("r", 100),
)
floats = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.builds(
    TokenLogprobs, floats, st.lists(st.tuples(st.integers(0, 1 << 20), floats)).map(tuple)
)
tokens = st.builds(Token, st.integers(0, 1 << 20), st.none() | logprobs)
outputs = st.builds(
    Output,
    tokens=st.lists(tokens, max_size=4).map(tuple),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    cached_tokens=st.integers(0, 1 << 20),
    timings_s=st.none() | st.dictionaries(st.text(), floats, max_size=3),
)
increments = st.lists(st.tuples(st.integers(0, 4), outputs), max_size=12)


@contextmanager
def begun(limit_bytes: int = 1 << 20) -> Iterator[tuple[Shelf, KeptStream]]:
    """Yields the log of an answer that was begun over a connection."""
    shelf = Shelf(limit_bytes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = socket.create_connection(listener.getsockname())
        link.close()
        accepted, _ = listener.accept()
        with accepted:
            kept = KeptStream.begin(shelf, accepted.fileno(), OPENING)
            assert kept is not None
            try:
                yield shelf, kept
            finally:
                kept.drop()
                shelf.close()


@contextmanager
def taken_over(log: bytes) -> Iterator[tuple[Shelf, KeptStream]]:
    shelf = Shelf()
    shelf.log_fd = os.memfd_create("log")
    os.write(shelf.log_fd, log)
    found = CallLog(shelf, 7, os.dup(shelf.log_fd))
    try:
        found.read()
        kept = KeptStream.take_over(found)
    except ValueError:
        found.drop()
        shelf.close()
        raise
    try:
        yield shelf, kept
    finally:
        kept.drop()
        shelf.close()


@pytest.mark.long
@given(increments, increments, st.data())
def test_a_successor_reads_all_complete_entries_and_adds_its_own(
    first: list[tuple[int, Output]], second: list[tuple[int, Output]], data: st.DataObject
) -> None:
    ends = []
    with begun() as (shelf, kept):
        begin = len(shelf.log())
        for index, output in first:
            kept.note(index, output)
            ends.append(len(shelf.log()))
        log = shelf.log()
        assert shelf.taken_bytes > 0
    assert shelf.dropped == [7]
    assert shelf.taken_bytes == 0
    cut = data.draw(st.integers(0, len(log)))
    if cut < begin:
        with (
            pytest.raises(ValueError, match="the log of an answer is empty"),
            taken_over(log[:cut]),
        ):
            pass
        return
    known = first[: sum(end <= cut for end in ends)]
    with taken_over(log[:cut]) as (shelf, kept):
        assert kept.opening == OPENING
        assert [(entry.index, entry.output()) for entry in kept.deliveries()] == known
        for index, output in second:
            kept.note(index, output)
        log = shelf.log()
    with taken_over(log) as (_, kept):
        found = [(entry.index, entry.output()) for entry in kept.deliveries()]
        assert found == known + second
        assert sum(isinstance(entry, TakenOver) for entry in kept.entries) == 1


@given(st.binary(max_size=200), st.booleans())
@example(b"\x81\xa2\x00\x80", True)  # an object with a key that is not UTF-8
def test_a_damaged_log_is_refused(damage: bytes, with_length: bool) -> None:
    record = len(damage).to_bytes(4, "little") + damage if with_length else damage
    with pytest.raises(ValueError, match="the log of an answer"), taken_over(record):
        pass


def test_a_refusal_and_a_name_reach_the_successor() -> None:
    with begun() as (shelf, kept):
        kept.note_name("r-2")
        kept.note_read_ahead()
        kept.note_refused(RequestRefused(503, "why", "text", 2.0, {"ttft_s": 1.0}))
        log = shelf.log()
    with taken_over(log) as (_, kept):
        refused = kept.refusal()
        assert refused is not None
        why = refused.refusal
        assert (why.status, why.reason, why.retry_after_s) == (503, "why", 2.0)
        assert why.projection == {"ttft_s": 1.0} and refused.is_counted
        assert kept.name == "r-2"
        assert kept.has_lost_bytes


def test_an_answer_that_ends_its_heads_is_refused_and_one_that_grows_is_not() -> None:
    with begun() as (shelf, _):
        log = shelf.log()
    for number in range(2 * MAX_FRUITLESS):
        with taken_over(log) as (shelf, kept):
            if number < MAX_FRUITLESS:
                assert kept.refusal() is None
                kept.note(0, Output(tokens=(Token(number),)))
            else:
                refused = kept.refusal()
                assert (refused is not None) == (number - MAX_FRUITLESS >= MAX_FRUITLESS)
            log = shelf.log()


def test_a_full_memory_ends_the_keeping_and_not_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with begun() as (shelf, kept):
        shelf.limit_bytes = shelf.taken_bytes
        kept.note(0, Output(tokens=(Token(1),)))
        assert shelf.dropped == [7]
        assert shelf.taken_bytes == 0
        kept.note(0, Output(tokens=(Token(1),)))
    monkeypatch.setattr(call_log.os, "write", lambda *_: 1)
    small = Shelf()
    assert KeptStream.begin(small, 0, OPENING) is None
    assert small.taken_bytes == 0
    assert KeptStream.begin(Shelf(limit_bytes=10), 0, OPENING) is None


def test_ids_follow_from_the_facts_and_differ() -> None:
    facts = draw_facts("r", 100)
    drawn = []
    for _ in range(2):
        sources = [facts.id_source(index) for index in range(3)]
        drawn.append([source() for source in sources for _ in range(4)])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 12
    assert facts.ids != draw_facts("r", 100).ids
