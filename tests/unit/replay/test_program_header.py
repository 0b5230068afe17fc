"""Tests a program's name in a header: characters that no header can have are encoded, and different
names stay different."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.api.program_identity import program_of
from moonpool.trace.row import TraceRow
from moonpool.types import ProgramContext
from moonpool_lab.replay.player import MAX_NAME, program_headers


def header(session: str) -> bytes:
    return program_headers(TraceRow(0.0, 1, 1, session=session, call="c"))


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_names_stay_apart_in_one_line(one: str, other: str) -> None:
    for name in (one, other):
        field, value = header(name)[:-2].split(b": ", 1)
        assert header(name).endswith(b"\r\n") and field == b"X-Session-Id"
        assert 0 < len(value) <= MAX_NAME and all(32 < byte < 127 for byte in value)
    assert (header(one) == header(other)) == (one == other)


def test_plain_names_stay_as_they_are() -> None:
    assert header("run-7/a.b:c") == b"X-Session-Id: run-7/a.b:c\r\n"
    assert header("日本") != header("中国")
    assert program_headers(TraceRow(0.0, 1, 1)) == b""


def test_the_server_reads_the_program_and_its_parent() -> None:
    sent = program_headers(TraceRow(0.0, 1, 1, session="agent 2", parent="lead", call="c"))
    fields = dict(line.split(b": ", 1) for line in sent.splitlines())
    read = program_of({name.lower(): value for name, value in fields.items()})
    assert read == ProgramContext(program_id="agent%202", parent_id="lead")
