"""The native mover computes the sums that xxhash does, and moves what the plain one moves."""

from __future__ import annotations

import os
import random

import pytest

from moonpool.engine.native.library import ISAS
from moonpool.engine.native.slices import open_slices
from moonpool.kvcache.layout import BlockLayout
from moonpool.messenger import native_mover, unnamed
from moonpool.messenger.arena import Arena
from moonpool.messenger.landing_table import CORRUPT, VERIFIED, LandingTable, checksum_slice
from moonpool.messenger.mover import Mover, PlainMover
from moonpool.messenger.native_mover import NativeMover, fits
from moonpool.messenger.peer_arena import PeerArena, PeerArenas
from moonpool.messenger.transport import ProtocolError
from moonpool.messenger.unnamed import Unnamed
from moonpool.messenger.wire import OFFER, pack_offers, unpack_offers
from moonpool.types import BlockId

NUM_BLOCKS = 6


@pytest.fixture(autouse=True)
def none_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_mover, "FEW_SLICES", 0)


def make_arena(head_dim: int, seed: int) -> Arena:
    layout = BlockLayout(
        model_fingerprint="test",
        dtype="float32",
        block_tokens=4,
        num_layers=3,
        num_kv_heads=1,
        head_dim=head_dim,
    )
    arena = Arena(layout, NUM_BLOCKS)
    arena.buffer[:] = random.Random(seed).randbytes(arena.num_bytes)
    return arena


def adopt(arena: Arena) -> PeerArena:
    return PeerArenas().adopt(os.dup(arena.fd), arena.layout)[0]


@pytest.fixture(params=ISAS)
def native(request: pytest.FixtureRequest) -> NativeMover:
    best = open_slices()
    if best is None:
        pytest.skip("the kernels are not built here")
    from moonpool.engine.native.library import NativeUnavailableError, open_kernels

    try:
        open_kernels(request.param)
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    calls = open_slices(request.param)
    assert calls is not None
    return NativeMover(calls)


def offers_of(arena: Arena, mover: Mover, cells: list[tuple[int, int, int]]) -> bytes:
    offers = bytearray(pack_offers((index, layer, block, 0) for index, block, layer in cells))
    assert mover.name(arena, offers, 0, len(cells), 1 << 40) == len(cells)
    return bytes(offers)


CELLS = [(7, 4, 0), (7, 4, 1), (8, 1, 2), (9, 0, 0), (7, 4, 2)]


# Of one key block of the hash exactly, a stripe less, a stripe more, and many.
@pytest.mark.parametrize("head_dim", [8, 10, 28, 30, 32, 34, 62, 64, 66, 130, 2048, 8190])
def test_sums_are_those_of_xxhash_and_the_copy_is_whole(native: NativeMover, head_dim: int) -> None:
    source, target = make_arena(head_dim, 1), make_arena(head_dim, 2)
    assert fits(source)
    offers = offers_of(source, native, CELLS)
    assert offers == offers_of(make_arena(head_dim, 1), PlainMover(), CELLS)
    table = LandingTable(target, [BlockId(5), BlockId(0), BlockId(2)], 7)
    plain, mirror = make_arena(head_dim, 2), None
    mirror = LandingTable(plain, [BlockId(5), BlockId(0), BlockId(2)], 7)
    assert native.copy(adopt(source), offers, table) == 0
    assert PlainMover().copy(adopt(source), offers, mirror) == 0
    assert target.buffer == plain.buffer
    assert table.cells == mirror.cells
    for block in range(NUM_BLOCKS):
        for layer in range(3):
            known = target.sums.get(BlockId(block), layer)
            assert known == plain.sums.get(BlockId(block), layer)
            assert known in (0, checksum_slice(target.slice(block, layer)))


def test_what_is_not_as_named_is_corrupt_and_not_remembered(native: NativeMover) -> None:
    source, target = make_arena(8, 1), make_arena(8, 2)
    offers = offers_of(source, native, CELLS)
    source.slice(1, 2)[100] ^= 1
    table = LandingTable(target, [BlockId(5), BlockId(0), BlockId(2)], 7)
    assert native.copy(adopt(source), offers, table) == 1
    assert list(table.cells) == [VERIFIED] * 3 + [0, 0, CORRUPT] + [VERIFIED, 0, 0]
    assert target.sums.get(BlockId(0), 2) == 0
    assert target.sums.get(BlockId(5), 1) == checksum_slice(target.slice(5, 1))


@pytest.mark.parametrize("use_native", [True, False])
def test_slices_without_a_sum_are_summed_by_who_copies_them(
    native: NativeMover, use_native: bool
) -> None:
    mover: Mover = native if use_native else PlainMover()
    source, target = make_arena(8, 1), make_arena(8, 2)
    source.sums.set(BlockId(1), 2, 77)  # remembered, and wrong
    offers = bytearray(pack_offers((index, layer, block, 0) for index, block, layer in CELLS))
    assert mover.name(source, offers, 0, 5, 0) == 5
    assert [checksum for *_, checksum in unpack_offers(bytes(offers))] == [0, 0, 77, 0, 0]
    table = LandingTable(target, [BlockId(5), BlockId(0), BlockId(2)], 7)
    assert mover.copy(adopt(source), bytes(offers), table) == 1
    assert list(table.cells) == [VERIFIED] * 3 + [0, 0, CORRUPT] + [VERIFIED, 0, 0]
    there, here = Unnamed(target), Unnamed(source)
    there.landed(bytes(offers), table)
    here.sent(bytes(offers))
    here.told(there.sums())
    for _, block, layer in CELLS:
        expected = 77 if (block, layer) == (1, 2) else checksum_slice(source.slice(block, layer))
        assert source.sums.get(BlockId(block), layer) == expected


def test_sums_of_other_slices_than_were_sent_are_refused() -> None:
    here = Unnamed(make_arena(8, 1))
    here.sent(pack_offers([(7, 0, 4, 0), (7, 1, 4, 5)]))
    for sums in (b"", bytes(16), bytes(7)):
        with pytest.raises(ProtocolError, match="of 1 slices"):
            here.told(sums)


def test_no_more_sums_are_told_than_a_message_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unnamed, "MAX_TOLD_SUMS", 2)
    arena = make_arena(8, 1)
    here = Unnamed(arena)
    for block in (1, 2, 3):
        here.sent(pack_offers([(0, 0, block, 0)]))
    here.told(b"\x09" + bytes(7) + b"\x08" + bytes(7))
    assert [arena.sums.get(BlockId(block), 0) for block in (1, 2, 3)] == [9, 8, 0]


def test_a_remembered_sum_is_told_and_not_computed_anew(native: NativeMover) -> None:
    arena = make_arena(8, 1)
    before = offers_of(arena, native, CELLS)
    arena.slice(4, 1)[0] ^= 1
    assert offers_of(arena, native, CELLS) == before
    arena.sums.forget([BlockId(4)])
    assert offers_of(arena, native, CELLS) != before


@pytest.mark.parametrize("use_native", [True, False])
def test_naming_stops_when_enough_has_been_hashed(native: NativeMover, use_native: bool) -> None:
    mover: Mover = native if use_native else PlainMover()
    arena = make_arena(8, 1)
    offers = bytearray(pack_offers((i, layer, block, 0) for i, block, layer in CELLS))
    assert mover.name(arena, offers, 0, 1, 1) == 1
    assert mover.name(arena, offers, 0, 5, 2 * arena.slice_bytes) == 3, "the first was known"
    assert [checksum != 0 for *_, checksum in unpack_offers(bytes(offers))] == [True] * 3 + [
        False
    ] * 2


@pytest.mark.parametrize(
    ("index", "layer", "block"),
    [(6, 0, 0), (10, 0, 0), (7, 3, 0), (7, -1, 0), (7, 0, -1), (7, 0, 6), (-(1 << 63), 0, 0)],
)
def test_what_cannot_be_offered_is_refused_before_a_byte_moves(
    native: NativeMover, index: int, layer: int, block: int
) -> None:
    source, target = make_arena(8, 1), make_arena(8, 2)
    before = bytes(target.buffer)
    table = LandingTable(target, [BlockId(5), BlockId(0), BlockId(2)], 7)
    offers = pack_offers([(7, 0, 0, 1), (index, layer, block, 1)])
    with pytest.raises(ProtocolError, match=r"outside what is expected|which it lacks"):
        native.copy(adopt(source), offers, table)
    assert target.buffer == before
    assert len(offers) == 2 * OFFER.size
