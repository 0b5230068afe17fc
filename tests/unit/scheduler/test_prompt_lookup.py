"""Tests drafts from earlier places of the same text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.scheduler.speculation import prompt_lookup
from moonpool.scheduler.speculation.prompt_lookup import PromptLookup
from moonpool.types import Tokens


def text(*token_ids: int) -> Tokens:
    return Tokens(token_ids, len(token_ids))


def simple_draft(ids: list[int], least: int, most: int, count: int) -> tuple[int, ...]:
    """Finds the same drafts by a comparison with every earlier place."""
    best, best_length = -1, least - 1
    for end in range(len(ids) - 1, least - 1, -1):
        length = 0
        while length < min(most, end) and ids[end - length - 1] == ids[-length - 1]:
            length += 1
        if length > best_length:
            best, best_length = end, length
    if best < 0:
        return ()
    found = ids[best:]
    while len(found) < count:
        found.append(found[-(len(ids) - best)])
    return tuple(found[:count])


def test_what_followed_the_same_words_follows_again() -> None:
    tokens = text(5, 6, 7, 8, 9, 1, 5, 6, 7)
    assert PromptLookup(2, 4).draft(tokens, 3) == (8, 9, 1)
    assert PromptLookup(2, 4).draft(tokens, 2) == (8, 9)
    assert PromptLookup(4, 4).draft(tokens, 3) == ()


def test_the_longest_agreement_counts_and_then_the_newest() -> None:
    assert PromptLookup(1, 3).draft(text(1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3), 1) == (40,)
    assert PromptLookup(1, 2).draft(text(1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3), 1) == (50,)


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert PromptLookup(2, 4).draft(text(3, 4, 3, 4, 3), 6) == (4, 3, 4, 3, 4, 3)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(1, 6),
    st.data(),
)
def test_it_finds_what_a_plain_search_finds(
    ids: list[int], least: int, more: int, count: int, data: st.DataObject
) -> None:
    """The lookup is called at random places of a growing text."""
    lookup = PromptLookup(least, least + more)
    begin = data.draw(st.integers(1, len(ids)))
    tokens = Tokens(ids[:begin], begin)
    for token_id in ids[begin:]:
        if data.draw(st.booleans()):
            lookup.draft(tokens, count)
        tokens.append(token_id)
    places = sum(ids[i - least : i] == ids[-least:] for i in range(least, len(ids)))
    if len(ids) >= least and places <= prompt_lookup.MAX_PLACES:
        assert lookup.draft(tokens, count) == simple_draft(ids, least, least + more, count)


def test_a_long_text_is_read_in_parts_and_an_endless_one_not_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_lookup, "READ_TOKENS", 10)
    monkeypatch.setattr(prompt_lookup, "REMEMBERED_TOKENS", 25)
    ids = [1, 2, 3, *range(100, 140), 7, 8, 9, *range(200, 215), 7, 8]
    lookup, tokens = PromptLookup(2, 4), text(*ids)
    assert [lookup.draft(tokens, 1) for _ in range(4)] == [(), (), (9,), (9,)]
    forgotten = text(*ids[:-2], 1, 2)
    lookup = PromptLookup(2, 4)
    assert [lookup.draft(forgotten, 1) for _ in range(6)] == [()] * 6
