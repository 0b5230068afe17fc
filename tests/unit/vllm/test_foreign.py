"""Tests the names of another engine's blocks by moonpool's keys: from the engine's reports, or by
assumption."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.types import BlockKey
from moonpool.vllm.block_names import (
    AssumedBlocks,
    ExternalBlocks,
    ExternalBlocksCleared,
    ExternalBlocksRemoved,
    ExternalBlocksStored,
    ForeignEvent,
    salt_of,
)

FINGERPRINT = b"layout"
BLOCK = 4
TOKENS = tuple(range(100, 124))  # six blocks


def names() -> ExternalBlocks:
    return ExternalBlocks(FINGERPRINT, BLOCK)


def keys_of(tokens: tuple[int, ...], tenant: str = "") -> list[BlockKey]:
    return block_keys(tokens, BLOCK, root_key(FINGERPRINT, tenant))


def stored(
    first: int, last: int, salt: str | None = None, medium: str = "GPU"
) -> ExternalBlocksStored:
    """Returns blocks first ... last - 1 of TOKENS, named by their numbers."""
    return ExternalBlocksStored(
        hashes=tuple(range(first, last)),
        parent=first - 1 if first else None,
        token_ids=TOKENS[first * BLOCK : last * BLOCK],
        salt=salt,
        medium=medium,
    )


def test_blocks_get_the_names_that_prompts_look_for() -> None:
    held = names()
    held.hear(stored(0, 2))
    held.hear(stored(2, 3))
    assert held.take_changes() == (tuple(keys_of(TOKENS)[:3]), ())
    assert held.keys == tuple(keys_of(TOKENS)[:3])


def test_what_continues_an_unknown_block_has_no_name() -> None:
    held = names()
    held.hear(stored(2, 4))
    assert len(held) == 0
    held.hear(stored(0, 2))
    held.hear(stored(2, 4))  # reports the block again, because a prompt used it again
    assert held.keys == tuple(keys_of(TOKENS)[:4])


def test_a_tenants_blocks_are_named_by_the_salt_that_we_gave() -> None:
    held = names()
    held.hear(stored(0, 1, salt=salt_of(FINGERPRINT, "key0/x")))
    assert held.keys == (keys_of(TOKENS, "key0/x")[0],)
    assert salt_of(FINGERPRINT, "") is None


def test_the_salts_of_others_name_nothing() -> None:
    held = names()
    for salt in ("theirs", "ab", "", "ä" * 32):
        held.hear(stored(0, 1, salt=salt))
    assert len(held) == 0


def test_a_block_is_held_until_the_last_medium_lets_go() -> None:
    held = names()
    held.hear(stored(0, 1))
    held.hear(stored(0, 1, medium="CPU"))
    held.take_changes()
    held.hear(ExternalBlocksRemoved(hashes=(0,), medium="GPU"))
    assert held.take_changes() == ((), ())
    held.hear(ExternalBlocksRemoved(hashes=(0,), medium="CPU"))
    assert held.take_changes() == ((), (keys_of(TOKENS)[0],))


def test_blocks_of_another_size_are_left_out() -> None:
    held = names()
    held.hear(ExternalBlocksStored(hashes=(1,), parent=None, token_ids=TOKENS[:3], medium="GPU"))
    assert len(held) == 0


events = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 5), st.integers(1, 6), st.sampled_from(["GPU", "CPU"]))
        .filter(lambda e: e[0] < e[1])
        .map(lambda e: stored(e[0], e[1], medium=e[2])),
        st.tuples(st.integers(0, 6), st.sampled_from(["GPU", "CPU"])).map(
            lambda e: ExternalBlocksRemoved(hashes=(e[0],), medium=e[1])
        ),
        st.just(ExternalBlocksCleared()),
    ),
    max_size=30,
)


@given(events, st.integers(1, 5))
def test_changes_lead_from_what_was_told_to_what_is_held(
    heard: list[ForeignEvent], often: int
) -> None:
    held, told = names(), set[BlockKey]()
    for number, event in enumerate(heard):
        held.hear(event)
        if number % often == 0:
            gained, lost = held.take_changes()
            assert not told & set(gained)
            assert set(lost) <= told
            told = (told | set(gained)) - set(lost)
            assert told == set(held.keys)
    assert set(held.keys) <= set(keys_of(TOKENS))


def test_what_was_used_longest_ago_is_assumed_to_go_first_and_ends_before_beginnings() -> None:
    held = AssumedBlocks(num_blocks=4)
    first = keys_of(TOKENS)[:3]
    held.use(first)
    other = keys_of(tuple(range(8)))
    held.use(other)
    assert held.take_changes()[0] == (*reversed(first[:2]), *reversed(other))
    assert [held.holds(key) for key in first] == [True, True, False]
    held.use(first)
    assert held.holds(first[2])
    assert not held.holds(other[1])
    assert held.holds(other[0])


@given(st.lists(st.integers(1, 6), max_size=20), st.integers(1, 8))
def test_no_more_is_assumed_than_there_is_room_for(uses: list[int], room: int) -> None:
    held, told = AssumedBlocks(room), set[BlockKey]()
    for number in uses:
        held.use(keys_of(TOKENS)[:number])
        gained, lost = held.take_changes()
        assert set(lost) <= told
        told = (told | set(gained)) - set(lost)
        assert told == set(held.keys)
        assert len(held) <= room


def test_of_two_copies_of_a_block_one_may_go() -> None:
    held = names()
    held.hear(stored(0, 1))
    held.hear(stored(0, 1))  # two prompts were computed side by side
    held.hear(ExternalBlocksRemoved(hashes=(0,), medium="GPU"))
    held.hear(stored(1, 2))
    assert held.keys == tuple(keys_of(TOKENS)[:2])
    held.hear(ExternalBlocksRemoved(hashes=(0,), medium="GPU"))
    assert held.keys == (keys_of(TOKENS)[1],)
