from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.text.tokenizers.byte import BOS_ID, EOS_ID, ByteTokenizer


@given(st.text())
def test_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.lists(st.integers(0, 299)))
def test_a_stream_says_what_decode_says(token_ids: list[int]) -> None:
    tokenizer = ByteTokenizer(300)
    stream = tokenizer.stream()
    parts = [stream.push(token_id) for token_id in token_ids]
    assert "".join(parts) + stream.flush() == tokenizer.decode(token_ids)


def test_half_a_character_is_held_until_it_is_whole() -> None:
    stream = ByteTokenizer().stream()
    assert [stream.push(byte) for byte in "a€".encode()] == ["a", "", "", "€"]


def test_what_is_left_of_a_character_becomes_a_replacement() -> None:
    stream = ByteTokenizer().stream()
    assert stream.push(0xE2) == ""
    assert stream.flush() == "\ufffd"


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = ByteTokenizer()
    token_ids = [BOS_ID, *b"hi", EOS_ID]
    assert tokenizer.decode(token_ids) == "hi"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<bos>hi<eos>"
    stream = tokenizer.stream(skip_special_tokens=False)
    assert "".join(map(stream.push, token_ids)) == "<bos>hi<eos>"


def test_ids_beyond_the_bytes_have_a_text() -> None:
    tokenizer = ByteTokenizer(1000)
    assert tokenizer.decode([104, 999]) == "h<999>"
    assert tokenizer.token_bytes(999) == b"<999>"


def test_a_vocabulary_without_room_for_the_specials_is_refused() -> None:
    with pytest.raises(ValueError, match="259 or more"):
        ByteTokenizer(256)


def test_the_next_turn_begins_with_this_turn() -> None:
    tokenizer = ByteTokenizer()
    turn = [{"role": "user", "content": "The quick brown fox. The"}]
    prompt = tokenizer.render_chat(turn)
    answer = " quick brown fox."
    turn += [{"role": "assistant", "content": answer}, {"role": "user", "content": " The"}]
    assert prompt == "The quick brown fox. The"
    assert tokenizer.render_chat(turn) == prompt + answer + " The"
