"""Tests how tokenizers of GGUF files split text into words, by the names that files give."""

from __future__ import annotations

import json
import random

import pytest
import tokenizers

from moonpool.text.tokenizer import TokenizerError
from moonpool_engine.engine.gguf.splits import SPLITS, WordSplit, pre_tokenizer, split_of
from tests.unit.engine.gguf_files import byte_vocabulary

ALPHABET = {word: byte for byte, word in enumerate(byte_vocabulary()[:256])}
# These texts have the parts that tokenizers split differently: cases, digits, marks, Han, kana,
# Hangul, combining marks, ends.
PIECES = [
    "a", "Bc", "dE", "it's", "'LL", "é", "e\u0301", "ß", "Ж", "ж", "ⅷ", "²", "0", "12", "3456",
    " ", "  ", "\t", "\n", "\r\n", "\n\n", ".", "!?", "#x", "->", "_", "$", "€", "，", "。", "「",
    "“", "…", "漢", "字字", "々", "ひら", "カナ", "ー", "한글", "אב", "ع", "😀", "\u00a0", "\u3000",
    "K", "ﬁ", "Ａ", "😀️", "\u0660", "ª", "ǅ", "中a", "a中", "𠀀",
]  # fmt: skip


def words(name: str, text: str) -> list[str]:
    """Returns the words as the tokenizers library splits them."""
    source = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "post_processor": None, "decoder": None,
        "pre_tokenizer": pre_tokenizer(split_of(name)),
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
    }  # fmt: skip
    step = tokenizers.Tokenizer.from_str(json.dumps(source)).pre_tokenizer
    spelt = [word for word, _ in step.pre_tokenize_str(text)]
    return [bytes(ALPHABET[char] for char in word).decode() for word in spelt]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("deepseek-v3", "x1234 y", ["x", "123", "4", " y"]),
        ("deepseek-v3", "a漢字ひらカナb", ["a", "漢字ひらカナ", "b"]),
        ("deepseek-v3", "#include <x.h>", ["#include", " <", "x", ".h", ">"]),
        ("deepseek-v3", "it's $9!!\n\n z", ["it", "'s", " $", "9", "!!\n\n", " z"]),
        ("deepseek-v3", "e\u0301t 한글", ["e\u0301t", " 한글"]),
        ("deepseek-llm", "x1234 y", ["x", "1", "2", "3", "4", " y"]),
        ("deepseek-llm", "a\n\n b", ["a", "\n", "\n", " b"]),
        ("deepseek-llm", "it's (ok).", ["it", "'", "s", " (", "ok", ")."]),
        ("deepseek-llm", "a漢字ひら한글b", ["a", "漢字ひら한글", "b"]),
        ("deepseek-llm", "Жаé K", ["Жаé", " K"]),
        ("deepseek-llm", "a ，。b  ", ["a", " ，", "。", "b", "  "]),
        ("deepseek-coder", "it's漢1", ["it", "'", "s", "漢", "1"]),
        ("deepseek-coder", "f(x) = 12", ["f", "(", "x", ")", " = ", "1", "2"]),
        ("kimi-k2", "getUserName", ["get", "User", "Name"]),
        ("kimi-k2", "漢字abc漢", ["漢字", "abc", "漢"]),
        ("kimi-k2", "ひら漢字カナ", ["ひら", "漢字", "カナ"]),
        ("kimi-k2", "I'LL 12345", ["I'LL", " ", "123", "45"]),
        ("kimi-k2", "a 漢", ["a", " ", "漢"]),
        ("gpt-4o", "a 漢b", ["a", " 漢b"]),
        ("llama-bpe", "x1234 y", ["x", "123", "4", " y"]),
        ("qwen2", "x12 y", ["x", "1", "2", " y"]),
        ("smollm", "x12 y", ["x", "1", "2", " y"]),
        ("gpt-2", "x12 y's", ["x", "12", " y", "'s"]),
    ],
)
def test_words_of_a_text(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected


def split_by_regex(split: WordSplit, text: str) -> list[str]:
    """Splits by the same patterns in another library, one after the other."""
    regex = pytest.importorskip("regex")
    pieces = [text]
    for pattern in split.patterns:
        compiled = regex.compile(pattern, regex.VERSION1)
        found: list[str] = []
        for piece in pieces:
            at = 0
            for match in compiled.finditer(piece):
                found += [piece[at : match.start()], match.group()]
                at = match.end()
            found.append(piece[at:])
        pieces = [piece for piece in found if piece]
    return pieces


@pytest.mark.parametrize("name", [name for name, split in SPLITS.items() if not split.gpt2])
def test_another_library_reads_the_patterns_alike(name: str) -> None:
    rng = random.Random(5)
    for _ in range(300):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 12)))
        assert words(name, text) == split_by_regex(SPLITS[name], text), text


def test_an_unknown_way_is_one_line() -> None:
    with pytest.raises(TokenizerError, match="'other' does, which is not known; known: ") as found:
        split_of("other")
    assert "\n" not in str(found.value)
