"""Tests that server-sent events are found however the stream is cut into pieces."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moonpool.server_events import ServerEventReader

WORDS = st.text("abc:{} ", max_size=8).map(lambda text: text.strip().encode())
LINES = st.lists(st.tuples(st.sampled_from([b"data: ", b"data:", b": ", b"id: "]), WORDS))


@given(LINES, st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(0, 300), max_size=9))
def test_pieces_do_not_matter(
    lines: list[tuple[bytes, bytes]], line_end: bytes, cuts: list[int]
) -> None:
    whole = b"".join(name + text + line_end + line_end for name, text in lines)
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    comments: list[bytes] = []
    reader = ServerEventReader(on_comment=comments.append)
    found = [data for start, end in pairwise(places) for data in reader.feed(whole[start:end])]
    assert found == [text for name, text in lines if name.startswith(b"data")]
    assert comments == [text for name, text in lines if name == b": "]
    assert not reader.num_left_out


@given(st.integers(1, 40))
def test_a_long_line_is_left_out_and_takes_no_memory(piece_bytes: int) -> None:
    reader = ServerEventReader(max_bytes=10)
    whole = b"data: a\ndata: " + bytes(100) + b"\ndata: b\n"
    pieces = [whole[at : at + piece_bytes] for at in range(0, len(whole), piece_bytes)]
    assert [data for piece in pieces for data in reader.feed(piece)] == [b"a", b"b"]
    assert reader.num_left_out == 1
