"""The tokenizer of a GGUF file, as a `tokenizer.json` made from its metadata.

Two kinds are read: byte-level BPE ("gpt2"), whose split of the text `tokenizer.ggml.pre` names, and
SentencePiece BPE ("llama"), whose merges follow from the tokens' scores. `GgufVocabulary` has the
bytes of all tokens in a fifth of the time that the whole tokenizer takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from moonpool.engine.gguf.config import end_token_ids
from moonpool.engine.gguf.reader import GgufFile, read_gguf
from moonpool.engine.gguf.splits import pre_tokenizer, split_of
from moonpool.engine.spec import ModelError
from moonpool.engine.tokenizer import TokenizerError
from moonpool.engine.tokenizers.huggingface import HfTokenizer, TokenizerParts, bytes_function

LONGEST_TOKEN = 256
"""Longer tokens get no merges of their own: the number of possible merges grows with the length."""
CONTROL, USER_DEFINED = 3, 4


def gguf_tokenizer(path: Path) -> HfTokenizer:
    """The tokenizer of a GGUF file. Raises `TokenizerError`."""
    return HfTokenizer(tokenizer_parts(_read(path)))


def _read(path: Path) -> GgufFile:
    try:
        return read_gguf(path)
    except ModelError as error:
        raise TokenizerError(str(error)) from None


class GgufVocabulary:
    """The tokens of a GGUF file, as its tokenizer has them. It reads no merges before `encode`."""

    def __init__(self, path: Path) -> None:
        """Raises `TokenizerError`."""
        file = _read(path)
        words = _Words(file)
        decoder = _byte_level_decoder() if _is_byte_level(file) else _sentencepiece_decoder(words)
        bytes_of = bytes_function(decoder)
        assert bytes_of is not None  # both decoders map each token to fixed bytes
        first = words.vocabulary
        self._tokens = [
            bytes_of(token) if first[token] == number else b""
            for number, token in enumerate(words.tokens)
        ]
        self.special_token_ids = frozenset(one["id"] for one in words.added() if one["special"])
        self._path = path

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        return gguf_tokenizer(self._path)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)


def _is_byte_level(file: GgufFile) -> bool:
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(f"{file.path} has a tokenizer of kind {kind!r}, not gpt2 or llama")
    return bool(kind == "gpt2")


def tokenizer_parts(file: GgufFile) -> TokenizerParts:
    """Everything of the tokenizer that the file holds. Raises `TokenizerError`."""
    words = _Words(file)
    source = _byte_level(words) if _is_byte_level(file) else _sentencepiece(words)
    ends = end_token_ids(file)
    if any(not isinstance(end, int) or not 0 <= end < len(words.tokens) for end in ends):
        raise TokenizerError(f"{file.path}: the end tokens {ends} are not in its vocabulary")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {f"{short}_token": words.token(long) for short, long in names.items()}
    template = file.metadata.get("tokenizer.chat_template")
    return TokenizerParts(
        where=str(file.path),
        source=msgspec.json.encode(source).decode(),  # a tenth of json's time
        special_tokens={name: token for name, token in special.items() if token is not None},
        eos_token_ids=tuple(ends),
        template=template if isinstance(template, str) else None,
        tool_template=words.text("tokenizer.chat_template.tool_use"),
    )


class _Words:
    """The vocabulary in the metadata, checked."""

    def __init__(self, file: GgufFile) -> None:
        self._path = file.path
        self._metadata: Mapping[str, Any] = file.metadata
        self.tokens: list[str] = self._texts("tokens")
        if not self.tokens:
            raise TokenizerError(f"{file.path} has no tokens in its metadata")
        self.kinds = self._numbers("token_type")
        self.scores = self._numbers("scores")

    def text(self, key: str) -> str | None:
        value = self._metadata.get(key)
        return value if isinstance(value, str) else None

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.ggml.{name}", default))

    def token(self, name: str) -> str | None:
        """The token whose id the file gives under `name`."""
        number = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not isinstance(number, int) or not 0 <= number < len(self.tokens):
            return None
        return self.tokens[number]

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The first number of each token."""
        count = len(self.tokens)
        return dict(zip(reversed(self.tokens), range(count - 1, -1, -1), strict=True))

    def added(self) -> list[dict[str, Any]]:
        """The tokens that are matched whole in a text, as in tokenizer.json."""
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
        for merge in self._texts("merges"):  # hundreds of thousands
            left, space, right = merge.partition(" ")
            is_pair = space and " " not in right and left + right in known
            if is_pair and left in known and right in known:
                found.append([left, right])
        return found

    def _texts(self, name: str) -> list[str]:
        value = self._metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(value, list):
            raise TokenizerError(f"{self._path}: tokenizer.ggml.{name} is no list of texts")
        return value

    def _numbers(self, name: str) -> list[Any]:
        value = self._metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return []
        if not hasattr(value, "tolist"):
            raise TokenizerError(f"{self._path}: tokenizer.ggml.{name} is no list of numbers")
        numbers: list[Any] = value.tolist()
        if numbers and len(numbers) != len(self.tokens):
            raise TokenizerError(
                f"{self._path}: tokenizer.ggml.{name} has {len(numbers)} numbers "
                f"for {len(self.tokens)} tokens"
            )
        return numbers


def _byte_level(words: _Words) -> dict[str, Any]:
    split = split_of(words.text("tokenizer.ggml.pre") or "default")
    model = _bpe(words.vocabulary, words.merges(), byte_fallback=False)
    model["ignore_merges"] = split.keeps_words
    return _tokenizer(
        words,
        model,
        words.added(),
        normalizer={"type": "NFC"} if split.composes else None,
        pre_tokenizer=pre_tokenizer(split),
        decoder=_byte_level_decoder(),
        adds_bos=words.flag("add_bos_token", default=False),
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
        adds_bos=words.flag("add_bos_token", default=True),
    )


def _adds_space(words: _Words) -> bool:
    return words.flag("add_space_prefix", default=True)


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
    """All ways to make a token of two others; those of better tokens come first."""
    if not words.scores:
        raise TokenizerError("the tokenizer has neither merges nor scores")
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
