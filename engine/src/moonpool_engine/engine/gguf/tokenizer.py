"""The tokenizer of a GGUF file, as a `tokenizer.json` made from its metadata.

Two kinds are read: byte-level BPE ("gpt2"), whose split of the text `tokenizer.ggml.pre` names, and
SentencePiece BPE ("llama"), whose merges follow from the tokens' scores. `GgufVocabulary` has the
bytes of all tokens in a fifth of the time that the whole tokenizer takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from moonpool.text.model_error import ModelError
from moonpool.text.shown import shown
from moonpool.text.tokenizer import TokenizerError, TokenizerParts
from moonpool.text.tokenizers.huggingface import HfTokenizer, bytes_function
from moonpool_engine.engine.gguf.config import end_token_ids
from moonpool_engine.engine.gguf.reader import GgufFile, read_gguf
from moonpool_engine.engine.gguf.splits import pre_tokenizer, split_of
from moonpool_engine.engine.gguf.values import MetadataValues

LONGEST_TOKEN = 256
"""Longer tokens get no merges of their own: the number of possible merges grows with the length."""
MOST_CHARS = 1 << 24
"""Most characters of all tokens whose merges follow from scores. A vocabulary of 256,000 has two
million."""
CONTROL, USER_DEFINED = 3, 4


def gguf_tokenizer(path: Path) -> HfTokenizer:
    """Returns the tokenizer of a GGUF file. Raises `TokenizerError`."""
    return HfTokenizer(gguf_parts(path))


def gguf_parts(path: Path) -> TokenizerParts:
    """Returns the tokenizer's data in a GGUF file. Raises `TokenizerError`."""
    with _as_tokenizer_errors():
        return tokenizer_parts(read_gguf(path))


@contextmanager
def _as_tokenizer_errors() -> Iterator[None]:
    """Turns an error of the file's values into a TokenizerError."""
    try:
        yield
    except ModelError as error:
        raise TokenizerError(str(error)) from None


class GgufVocabulary:
    """The tokens of a GGUF file, as its tokenizer has them. The vocabulary reads no merges before
    `encode`."""

    def __init__(self, path: Path) -> None:
        """Raises `TokenizerError`."""
        with _as_tokenizer_errors():
            file = read_gguf(path)
            words = _Words(file)
            is_bytes = _is_byte_level(file)
            decoder = _byte_level_decoder() if is_bytes else _sentencepiece_decoder(words)
            self.special_token_ids = frozenset(o["id"] for o in words.added() if o["special"])
        bytes_of = bytes_function(decoder)
        assert bytes_of is not None  # both decoders map each token to fixed bytes
        first = words.vocabulary
        self._tokens = [
            bytes_of(token) if first[token] == number else b""
            for number, token in enumerate(words.tokens)
        ]
        self._path = path

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        return gguf_tokenizer(self._path)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)


def _is_byte_level(file: GgufFile) -> bool:
    kind = MetadataValues(file, "tokenizer.ggml.").text("model")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(
            f"{file.path} has a tokenizer of kind {shown(kind)}, not gpt2 or llama"
        )
    return kind == "gpt2"


def tokenizer_parts(file: GgufFile) -> TokenizerParts:
    """Everything of the tokenizer that the file holds. Raises `TokenizerError` and `ModelError`."""
    words = _Words(file)
    source = _byte_level(words) if _is_byte_level(file) else _sentencepiece(words)
    ends = end_token_ids(file)
    if any(end >= len(words.tokens) for end in ends):
        raise TokenizerError(f"{file.path}: the end tokens {ends} are not in its vocabulary")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{short}_token": words.token(long) for short, long in names.items()}
    values = MetadataValues(file, "tokenizer.")
    return TokenizerParts(
        where=str(file.path),
        source=msgspec.json.encode(source).decode(),  # takes a tenth of json's time
        special_tokens={name: token for name, token in special.items() if token is not None},
        eos_token_ids=tuple(ends),
        template=values.text("chat_template") or None,
        tool_template=values.text("chat_template.tool_use") or None,
    )


class _Words:
    """The vocabulary in the metadata, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.values = MetadataValues(file, "tokenizer.ggml.")
        self.tokens = self.values.texts("tokens")
        if not self.tokens:
            raise TokenizerError(f"{file.path} has no tokens in its metadata")
        self.kinds, self.scores = self._of_tokens("token_type"), self._of_tokens("scores")

    def token(self, name: str) -> str | None:
        """The token whose id the file gives under `name`."""
        number = self.values.token_id(f"{name}_token_id")
        return None if number is None or number >= len(self.tokens) else self.tokens[number]

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Returns the first number of each token."""
        count = len(self.tokens)
        return dict(zip(reversed(self.tokens), range(count - 1, -1, -1), strict=True))

    def added(self) -> list[dict[str, Any]]:
        """Returns the tokens that are matched whole in a text, in the form of tokenizer.json."""
        rules = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        vocabulary = self.vocabulary
        return [
            {"id": number, "content": token, "special": kind == CONTROL, **rules}
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=False))
            if kind in (CONTROL, USER_DEFINED) and token and vocabulary[token] == number
        ]

    def merges(self) -> list[list[str]]:
        """The merges that the file lists, of which all parts and results are tokens."""
        known = self.vocabulary
        found: list[list[str]] = []
        for merge in self.values.texts("merges"):  # a file has hundreds of thousands of merges
            left, space, right = merge.partition(" ")
            is_pair = space and " " not in right and left + right in known
            if is_pair and left in known and right in known:
                found.append([left, right])
        return found

    def _of_tokens(self, name: str) -> list[Any]:
        """A number for each token; none if the file has none."""
        numbers = self.values.numbers(name)
        if numbers and len(numbers) != len(self.tokens):
            raise TokenizerError(
                f"{self.values.path}: tokenizer.ggml.{name} has {len(numbers)} numbers "
                f"for {len(self.tokens)} tokens"
            )
        return numbers


def _byte_level(words: _Words) -> dict[str, Any]:
    split = split_of(words.values.text("pre") or "default")
    model = _bpe(words.vocabulary, words.merges(), byte_fallback=False)
    model["ignore_merges"] = split.keeps_words
    return _tokenizer(
        words,
        model,
        words.added(),
        normalizer={"type": "NFC"} if split.composes else None,
        pre_tokenizer=pre_tokenizer(split),
        decoder=_byte_level_decoder(),
        adds_bos=words.values.flag("add_bos_token", default=False),
    )


def _byte_level_decoder() -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}


def _sentencepiece(words: _Words) -> dict[str, Any]:
    merges = words.merges()
    if not merges:
        merges = _merges_by_score(words)
    model = _bpe(words.vocabulary, merges, byte_fallback=True)
    model["unk_token"] = words.token("unknown")
    space = _adds_space(words)
    return _tokenizer(
        words,
        model,
        words.added(),
        normalizer=None,
        pre_tokenizer={
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "first" if space else "never",
            "split": False,
        },
        decoder=_sentencepiece_decoder(words),
        adds_bos=words.values.flag("add_bos_token", default=True),
    )


def _adds_space(words: _Words) -> bool:
    return words.values.flag("add_space_prefix", default=True)


def _sentencepiece_decoder(words: _Words) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if _adds_space(words):
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _merges_by_score(words: _Words) -> list[list[str]]:
    """Returns all ways to make a token of two others, those of better tokens first."""
    if not words.scores:
        raise TokenizerError("the tokenizer has neither merges nor scores")
    if sum(map(len, words.tokens)) > MOST_CHARS:
        raise TokenizerError(
            f"the tokenizer has no merges, and its tokens more than {MOST_CHARS} characters"
        )
    vocabulary = words.vocabulary
    found: list[tuple[float, int, int, list[str]]] = []
    for token, number in vocabulary.items():
        score = words.scores[number]
        if len(token) > LONGEST_TOKEN or score != score:
            continue
        halves = [[token[:cut], token[cut:]] for cut in range(1, len(token))]
        known = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(score, len(pair[0]), len(pair[1]), pair) for pair in known]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [pair for *_, pair in found]


def _bpe(
    vocabulary: dict[str, int], merges: list[list[str]], byte_fallback: bool
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_fallback,
        "byte_fallback": byte_fallback,
        "vocab": vocabulary,
        "merges": merges,
    }


def _tokenizer(
    words: _Words,
    model: dict[str, Any],
    added: list[dict[str, Any]],
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any],
    decoder: dict[str, Any],
    adds_bos: bool,
) -> dict[str, Any]:
    bos = words.token("bos") if adds_bos else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None if bos is None else _begins_with(bos, words.tokens.index(bos)),
        "decoder": decoder,
        "model": model,
    }


def _begins_with(token: str, number: int) -> dict[str, Any]:
    """The post-processor that puts the token before a text."""
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    middle = {"SpecialToken": {"id": token, "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, _sequence("A", 0)],
        "pair": [begin, _sequence("A", 0), middle, _sequence("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _sequence(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}
