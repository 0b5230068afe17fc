"""Tests frames of a length and a body: a reader gets the written bodies, however the bytes are cut
into pieces."""

from __future__ import annotations

import asyncio
import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.framing import FrameTooLongError, Framing

LITTLE, BIG = Framing("<", 100), Framing(">", 100)
FRAMINGS = st.sampled_from([LITTLE, BIG])
BODIES = st.lists(st.binary(max_size=100), max_size=6)


def test_formats_on_disk_and_between_releases_stay() -> None:
    assert LITTLE.framed(b"abc") == b"\x03\0\0\0abc"
    assert BIG.framed(b"abc") == b"\0\0\0\x03abc"


@given(FRAMINGS, BODIES, st.lists(st.integers(0, 700), max_size=8))
def test_pieces(framing: Framing, bodies: list[bytes], cuts: list[int]) -> None:
    """Wherever a stream is cut, each body comes exactly once, as soon as it is complete."""
    whole = b"".join(map(framing.framed, bodies))
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    received = bytearray()
    found: list[bytes] = []
    for start, end in pairwise(places):
        received += whole[start:end]
        found += framing.pop_all(received)
        assert framing.pop(received) is None
    assert found == bodies and not received


@given(FRAMINGS, BODIES, st.binary(max_size=3))
def test_blocking(framing: Framing, bodies: list[bytes], rest: bytes) -> None:
    pending = bytearray()
    for body in bodies:
        begun = framing.begin(pending)
        pending += body
        framing.finish(pending, begun)
    source = io.BytesIO(bytes(pending) + rest)
    assert [framing.read(source.read) for _ in bodies] == bodies
    with pytest.raises(EOFError):
        framing.read(source.read)
    with pytest.raises(EOFError):
        framing.read(io.BytesIO(framing.framed(b"cut off")[:-1]).read)


def test_asyncio() -> None:
    async def run() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(BIG.framed(b"one") + BIG.framed(b"")[:2])
        reader.feed_eof()
        assert await BIG.read_from(reader) == b"one"
        with pytest.raises(asyncio.IncompleteReadError):
            await BIG.read_from(reader)

    asyncio.run(run())


@pytest.mark.parametrize("framing", [LITTLE, BIG])
def test_too_long(framing: Framing) -> None:
    """The reader must refuse the length itself, before it waits for any byte of the body."""
    start = framing.framed(bytes(101))[:4]
    with pytest.raises(FrameTooLongError, match="101 bytes exceeds 100"):
        framing.pop(bytearray(start))
    with pytest.raises(FrameTooLongError):
        list(framing.pop_all(bytearray(framing.framed(b"whole") + start)))
    with pytest.raises(FrameTooLongError):
        framing.read(io.BytesIO(start).read)

    async def run() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(start)
        with pytest.raises(FrameTooLongError):
            await framing.read_from(reader)

    asyncio.run(run())
