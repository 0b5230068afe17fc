"""Tests that a trace of programs stays the same when it is written and read again."""

from __future__ import annotations

import ast
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moonpool.trace.jsonl import write_trace
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError, TraceRow

BLOCK_TOKENS = 512
SHORT = st.sampled_from(("", "search", "compile"))


@st.composite
def programs(draw: st.DrawFn) -> list[TraceRow]:
    """Draws rows of agents, whose calls wait for earlier calls of their program, and of requests
    without a program."""
    rows: list[TraceRow] = []
    for number in range(draw(st.integers(1, 4))):
        arrived_s = draw(st.integers(0, 5000)) / 1000
        num_calls = draw(st.integers(1, 5))
        calls: list[str] = []
        for turn in range(num_calls):
            before = draw(st.lists(st.sampled_from(calls), unique=True)) if calls else []
            is_plain = num_calls == 1 and draw(st.booleans())
            agent = draw(st.integers(0, 1)) if calls else 0
            input_tokens = draw(st.integers(1, 2000))
            rows.append(
                TraceRow(
                    arrived_s=arrived_s,
                    input_tokens=input_tokens,
                    output_tokens=draw(st.integers(1, 50)),
                    hash_ids=tuple(range(8 * number, 8 * number - (-input_tokens // BLOCK_TOKENS))),
                    session="" if is_plain else f"{number}.{agent}",
                    priority=draw(st.integers(-1, 1)),
                    call="" if is_plain else f"{number}/{turn}",
                    after=tuple(before),
                    delay_s=draw(st.integers(0, 9000)) / 1000 if before else 0.0,
                    parent=f"{number}.0" if agent else "",
                    tool=draw(SHORT),
                    slo_class=draw(SHORT),
                )
            )
            calls += [] if is_plain else [f"{number}/{turn}"]
    return sorted(rows, key=lambda row: row.arrived_s)


class OwnLines:
    block_tokens = BLOCK_TOKENS

    def parse(self, line: bytes) -> TraceRow:
        return msgspec.json.decode(line, type=TraceRow)


class WrongLines:
    """A format that makes a row with some fields from the line."""

    def parse(self, line: bytes) -> TraceRow:
        given_fields = ast.literal_eval(line.decode())
        return TraceRow(0.0, 1, 1, **{"call": "a", "after": ("b",), **given_fields})


def read(path: Path, trace_format: str = "auto") -> list[TraceRow]:
    return list(open_trace(path, format=trace_format, spread_ticks=False))


def read_own(path: Path, rows: list[TraceRow]) -> list[TraceRow]:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return read(path, f"{__name__}:OwnLines")


@given(programs())
@example([TraceRow(0.0, 1, 1, (0,), tool="search")])
def test_programs_are_the_same_after_writing_and_in_a_format_of_ones_own(
    rows: list[TraceRow],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_trace(rows, path)
        first = read(path)
        write_trace(first, path)
        assert read(path) == first
        assert read_own(path, first) == first
    given_rows = {(r.call, r.after, r.delay_s, r.tool, r.slo_class, r.priority) for r in rows}
    assert given_rows == {
        (r.call, r.after, r.delay_s, r.tool, r.slo_class, r.priority) for r in first
    }


@pytest.mark.parametrize(
    "wrong", [{"after": "ab"}, {"after": (1,)}, {"call": 1}, {"delay_s": -1.0}, {"tool": None}]
)
def test_a_row_with_wrong_waits_is_named(wrong: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{wrong!r}\n")
    with pytest.raises(TraceError, match=r"trace.jsonl:1: .* returned the (call|delay_s)"):
        read(path, f"{__name__}:WrongLines")
