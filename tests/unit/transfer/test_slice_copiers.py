"""Tests that the native slice copier computes the checksums of xxhash, and copies like the plain
one."""

from __future__ import annotations

import os
import random

import pytest

from moonpool.protocol.block_layout import BlockLayout
from moonpool.types import BlockId
from moonpool_engine.engine.native.library import ISAS
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.transfer import arena as arena_module
from moonpool_engine.transfer import slice_copier as copiers
from moonpool_engine.transfer.arena import (
    Arena,
    DeferredChecksums,
    PeerArena,
    PeerArenas,
    checksum_slice,
)
from moonpool_engine.transfer.counters import Counters
from moonpool_engine.transfer.errors import ProtocolError
from moonpool_engine.transfer.slice_copier import (
    NativeSliceCopier,
    PlainSliceCopier,
    SliceCopier,
    supports_native,
)
from moonpool_engine.transfer.slice_receiver import CORRUPT, VERIFIED, SliceReceiver
from moonpool_engine.transfer.wire import OFFER, pack_offers, unpack_offers

NUM_BLOCKS = 6


@pytest.fixture(autouse=True)
def none_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copiers, "FEW_SLICES", 0)


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
def native(request: pytest.FixtureRequest) -> NativeSliceCopier:
    best = open_slices()
    if best is None:
        pytest.skip("the kernels are not built here")
    from moonpool_engine.engine.native.library import NativeUnavailableError, open_kernels

    try:
        open_kernels(request.param)
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    calls = open_slices(request.param)
    assert calls is not None
    return NativeSliceCopier(calls)


def offers_of(arena: Arena, slice_copier: SliceCopier, cells: list[tuple[int, int, int]]) -> bytes:
    offers = bytearray(pack_offers((index, layer, block, 0) for index, block, layer in cells))
    assert slice_copier.fill_checksums(arena, offers, 0, len(cells), 1 << 40) == len(cells)
    return bytes(offers)


CELLS = [(7, 4, 0), (7, 4, 1), (8, 1, 2), (9, 0, 0), (7, 4, 2)]


# The sizes are exactly one key block of the hash, a stripe less, a stripe more, and many key
# blocks.
@pytest.mark.parametrize("head_dim", [8, 10, 28, 30, 32, 34, 62, 64, 66, 130, 2048, 8190])
def test_checksums_are_those_of_xxhash_and_the_copy_is_complete(
    native: NativeSliceCopier, head_dim: int
) -> None:
    source, target = make_arena(head_dim, 1), make_arena(head_dim, 2)
    assert supports_native(source)
    offers = offers_of(source, native, CELLS)
    assert offers == offers_of(make_arena(head_dim, 1), PlainSliceCopier(), CELLS)
    receiver = SliceReceiver(target, [BlockId(5), BlockId(0), BlockId(2)], 7, Counters())
    plain, mirror = make_arena(head_dim, 2), None
    mirror = SliceReceiver(plain, [BlockId(5), BlockId(0), BlockId(2)], 7, Counters())
    assert native.copy(adopt(source), offers, receiver) == 0
    assert PlainSliceCopier().copy(adopt(source), offers, mirror) == 0
    assert target.buffer == plain.buffer
    assert receiver.states == mirror.states
    for block in range(NUM_BLOCKS):
        for layer in range(3):
            known = target.checksums.get(BlockId(block), layer)
            assert known == plain.checksums.get(BlockId(block), layer)
            assert known in (0, checksum_slice(target.slice(block, layer)))


def test_a_slice_that_differs_from_its_checksum_is_corrupt_and_its_checksum_is_not_stored(
    native: NativeSliceCopier,
) -> None:
    source, target = make_arena(8, 1), make_arena(8, 2)
    offers = offers_of(source, native, CELLS)
    source.slice(1, 2)[100] ^= 1
    receiver = SliceReceiver(target, [BlockId(5), BlockId(0), BlockId(2)], 7, Counters())
    assert native.copy(adopt(source), offers, receiver) == 1
    assert list(receiver.states) == [VERIFIED] * 3 + [0, 0, CORRUPT] + [VERIFIED, 0, 0]
    assert target.checksums.get(BlockId(0), 2) == 0
    assert target.checksums.get(BlockId(5), 1) == checksum_slice(target.slice(5, 1))


@pytest.mark.parametrize("use_native", [True, False])
def test_slices_without_checksum_are_hashed_by_the_receiver(
    native: NativeSliceCopier, use_native: bool
) -> None:
    slice_copier: SliceCopier = native if use_native else PlainSliceCopier()
    source, target = make_arena(8, 1), make_arena(8, 2)
    source.checksums.set(BlockId(1), 2, 77)  # stores a wrong checksum
    offers = bytearray(pack_offers((index, layer, block, 0) for index, block, layer in CELLS))
    assert slice_copier.fill_checksums(source, offers, 0, 5, 0) == 5
    assert [checksum for *_, checksum in unpack_offers(bytes(offers))] == [0, 0, 77, 0, 0]
    receiver = SliceReceiver(target, [BlockId(5), BlockId(0), BlockId(2)], 7, Counters())
    assert slice_copier.copy(adopt(source), bytes(offers), receiver) == 1
    assert list(receiver.states) == [VERIFIED] * 3 + [0, 0, CORRUPT] + [VERIFIED, 0, 0]
    there, here = DeferredChecksums(target.checksums), DeferredChecksums(source.checksums)
    there.note_received(bytes(offers), receiver.blocks, receiver.first_index)
    here.note_sent(bytes(offers))
    here.apply(there.encode())
    for _, block, layer in CELLS:
        expected = 77 if (block, layer) == (1, 2) else checksum_slice(source.slice(block, layer))
        assert source.checksums.get(BlockId(block), layer) == expected


def test_a_wrong_number_of_checksums_is_refused() -> None:
    here = DeferredChecksums(make_arena(8, 1).checksums)
    here.note_sent(pack_offers([(7, 0, 4, 0), (7, 1, 4, 5)]))
    for sums in (b"", bytes(16), bytes(7)):
        with pytest.raises(ProtocolError, match="of 1 slices"):
            here.apply(sums)


def test_no_more_checksums_are_returned_than_a_message_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_module, "MAX_DEFERRED_CHECKSUMS", 2)
    arena = make_arena(8, 1)
    here = DeferredChecksums(arena.checksums)
    for block in (1, 2, 3):
        here.note_sent(pack_offers([(0, 0, block, 0)]))
    here.apply(b"\x09" + bytes(7) + b"\x08" + bytes(7))
    assert [arena.checksums.get(BlockId(block), 0) for block in (1, 2, 3)] == [9, 8, 0]


def test_a_stored_checksum_is_sent_and_not_computed_again(native: NativeSliceCopier) -> None:
    arena = make_arena(8, 1)
    before = offers_of(arena, native, CELLS)
    arena.slice(4, 1)[0] ^= 1
    assert offers_of(arena, native, CELLS) == before
    arena.checksums.forget([BlockId(4)])
    assert offers_of(arena, native, CELLS) != before


@pytest.mark.parametrize("use_native", [True, False])
def test_fill_checksums_stops_when_enough_was_hashed(
    native: NativeSliceCopier, use_native: bool
) -> None:
    slice_copier: SliceCopier = native if use_native else PlainSliceCopier()
    arena = make_arena(8, 1)
    offers = bytearray(pack_offers((i, layer, block, 0) for i, block, layer in CELLS))
    assert slice_copier.fill_checksums(arena, offers, 0, 1, 1) == 1
    assert slice_copier.fill_checksums(arena, offers, 0, 5, 2 * arena.slice_bytes) == 3, (
        "the first was known"
    )
    assert [checksum != 0 for *_, checksum in unpack_offers(bytes(offers))] == [True] * 3 + [
        False
    ] * 2


@pytest.mark.parametrize(
    ("index", "layer", "block"),
    [(6, 0, 0), (10, 0, 0), (7, 3, 0), (7, -1, 0), (7, 0, -1), (7, 0, 6), (-(1 << 63), 0, 0)],
)
def test_an_invalid_offer_is_refused_before_a_byte_is_copied(
    native: NativeSliceCopier, index: int, layer: int, block: int
) -> None:
    source, target = make_arena(8, 1), make_arena(8, 2)
    before = bytes(target.buffer)
    receiver = SliceReceiver(target, [BlockId(5), BlockId(0), BlockId(2)], 7, Counters())
    offers = pack_offers([(7, 0, 0, 1), (index, layer, block, 1)])
    with pytest.raises(ProtocolError, match=r"outside what is expected|which it lacks"):
        native.copy(adopt(source), offers, receiver)
    assert target.buffer == before
    assert len(offers) == 2 * OFFER.size
