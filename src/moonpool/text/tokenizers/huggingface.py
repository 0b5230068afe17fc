"""The tokenizer of a checkpoint in a Hugging Face folder.

The tokenizer reads `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and the chat
template, and gives the results of transformers without its import time. As in transformers,
`tokenizer.json` alone decides which special tokens `encode` adds, regardless of `add_bos_token`.

The bytes of each token follow from the decoder in `tokenizer.json`. Two families cover the
supported models: byte-level BPE (GPT-2's alphabet of 256 printable characters) and SentencePiece
("▁" for a space, `<0x0A>` for a byte).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from moonpool.text.fields import Fields
from moonpool.text.model_error import LARGEST_SIZE, ModelError
from moonpool.text.model_folder import file_in, listed_ends, read_object, read_text
from moonpool.text.shown import shown_name
from moonpool.text.tokenizer import (
    ByteTextStream,
    DiffTextStream,
    TextStream,
    TokenizerError,
    TokenizerParts,
)
from moonpool.text.tokenizers.chat_template import ROLES_TEMPLATE, ChatTemplate, WithChatTemplate

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_RELEASE_GIL_ABOVE_CHARS = 4096
_OF_FILES = frozenset({"auto_map", "name_or_path", "vocab_file", "merges_file", "tokenizer_file"})
"""Keys of `tokenizer_config.json` about paths and code, which clients do not need."""
MAX_TOKEN_CHARS = 4096
"""Longest token that is read: a stream may send one for each step."""
MAX_GROWTH = 16
MAX_SOURCE_BYTES = 256 << 20
"""Largest `tokenizer.json` that is read. The `tokenizer.json` of Gemma 3 has 33 MB."""


class _Source(msgspec.Struct):
    """The parts of `tokenizer.json` that are read without the tokenizers library. The rest is
    skipped."""

    decoder: dict[str, Any] | None = None


class HfTokenizer(WithChatTemplate):
    """The `tokenizers` library with the checkpoint's special tokens and chat template."""

    def __init__(self, source: Path | TokenizerParts):
        """`source` is a folder, or what another file holds. Raises `TokenizerError`."""
        parts = _folder_parts(source) if isinstance(source, Path) else source
        self._special_tokens = dict(parts.special_tokens)
        self._described = dict(parts.described)
        self._tokenizer, decoder = _load(parts)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = _checked_size(parts, self._tokenizer.get_vocab(True))
        self.eos_token_ids = self._end_tokens(parts)
        self._bytes_of = bytes_function(decoder)
        self._bytes: dict[int, bytes] = {}
        default = self._template = parts.template or ROLES_TEMPLATE
        self.tool_template = parts.tool_template or default
        self._chat = ChatTemplate(default, parts.tool_template, parts.special_tokens)

    def _end_tokens(self, parts: TokenizerParts) -> tuple[int, ...]:
        """Returns all end tokens, because chat models often end a turn and a text with different
        tokens."""
        ids = list(parts.eos_token_ids)
        token = parts.special_tokens.get("eos_token")
        named = self._tokenizer.token_to_id(token) if token else None
        if named is not None:
            ids.append(named)
        return tuple(dict.fromkeys(ids))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > _RELEASE_GIL_ABOVE_CHARS:
            # The batched call releases the GIL; the single one does not.
            batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            long_ids: list[int] = batch[0].ids
            return long_ids
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:  # many models pad their vocabulary beyond the tokenizer's
                found = b""
            elif self._bytes_of is not None:
                found = self._bytes_of(token)
            else:
                found = self.decode([token_id], skip_special_tokens=False).encode()
            self._bytes[token_id] = found
        return found

    def token_name(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def describe(self) -> dict[str, Any]:
        told = {k: v for k, v in self._described.items() if k not in _OF_FILES}
        name = {"tokenizer_class": type(self).__name__}
        return name | told | self._special_tokens | {"chat_template": self._template}

    def stream(
        self, skip_special_tokens: bool = True, shown: Mapping[int, str] | None = None
    ) -> TextStream:
        if self._bytes_of is None:
            decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
            return DiffTextStream(decode, shown)
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        return ByteTextStream(self.token_bytes, skipped, shown)

    def use_chat_template(self, source: str) -> None:
        self._chat = ChatTemplate(source, special_tokens=self._special_tokens)
        self.tool_template = self._template = source


def _load(parts: TokenizerParts) -> tuple[tokenizers.Tokenizer, dict[str, Any] | None]:
    """The tokenizer and its description of a decoder. Raises `TokenizerError`."""
    try:
        loaded = tokenizers.Tokenizer.from_str(parts.source)
        loaded.no_truncation()
        loaded.no_padding()
        decoder = msgspec.json.decode(parts.source, type=_Source).decoder
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library is no Exception
        raise TokenizerError(
            f"the tokenizer in {parts.where} cannot be read: {shown_name(str(error))}"
        ) from None
    steps = _steps(decoder)
    if any(isinstance(s.get("pattern"), dict) and "Regex" in s["pattern"] for s in steps):
        raise TokenizerError(
            f"the tokenizer in {parts.where} decodes by a regular expression, which is not"
            " supported: it could take any time for a token"
        )
    if _growth(steps) > MAX_GROWTH:
        raise TokenizerError(
            f"the decoder in {parts.where} makes texts more than {MAX_GROWTH} times as long"
        )
    return loaded, decoder


def _checked_size(parts: TokenizerParts, vocabulary: Mapping[str, int]) -> int:
    """The number of tokens. Raises `TokenizerError` for more than any model has."""
    size = 1 + max(vocabulary.values(), default=-1)
    if size > LARGEST_SIZE:
        raise TokenizerError(
            f"the tokenizer in {parts.where} has token {size - 1}; at most {LARGEST_SIZE} tokens"
            " are supported"
        )
    longest = max(map(len, vocabulary), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise TokenizerError(
            f"the tokenizer in {parts.where} has a token of {longest} characters; at most"
            f" {MAX_TOKEN_CHARS} are supported"
        )
    return size


def _folder_parts(folder: Path) -> TokenizerParts:
    try:
        config = read_object(folder, "tokenizer_config.json")
        default, for_tools = _chat_templates(folder, config)
        return TokenizerParts(
            where=str(folder / "tokenizer.json"),
            source=_read_source(folder),
            special_tokens=_special_tokens(folder, config),
            eos_token_ids=_listed_ends(folder),
            template=default,
            tool_template=for_tools,
            described=config,
        )
    except ModelError as error:
        raise TokenizerError(str(error)) from None


def _read_source(folder: Path) -> str:
    try:
        return read_text(file_in(folder, "tokenizer.json"), MAX_SOURCE_BYTES)
    except FileNotFoundError:
        hint = "a model folder needs one"
        if (folder / "tokenizer.model").exists():
            hint = "convert tokenizer.model by saving it with transformers' AutoTokenizer"
        raise TokenizerError(f"{folder} has no tokenizer.json; {hint}") from None


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates use, such as `bos_token`."""
    merged = {**read_object(folder, "special_tokens_map.json"), **config}
    found = {}
    for name in (f"{short}_token" for short in _SPECIAL_NAMES):
        value = merged.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _listed_ends(folder: Path) -> tuple[int, ...]:
    """The end tokens of generation_config.json; if it names none, of config.json."""
    found = listed_ends(folder)
    if found:
        return found
    config = read_object(folder, "config.json")
    return Fields(config, str(folder / "config.json")).token_ids("eos_token_id")


def _chat_templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The default template, and the separate one for requests with tools, if any."""
    alone = _read_template(folder, "chat_template.jinja")
    if alone is not None:
        return alone, _read_template(folder, "additional_chat_templates/tool_use.jinja")
    for name in ("tokenizer_config.json", "chat_template.json"):
        fields = Fields(config, str(folder / name))
        if fields.is_list("chat_template"):
            return _named_templates(fields)
        if fields.has("chat_template"):
            return fields.text("chat_template"), None
        config = read_object(folder, "chat_template.json")
    return None, None


def _named_templates(fields: Fields) -> tuple[str | None, str | None]:
    named = {one.text("name"): one.text("template") for one in fields.objects("chat_template")}
    return named.get("default"), named.get("tool_use")


def _read_template(folder: Path, name: str) -> str | None:
    try:
        return read_text(file_in(folder, name))
    except FileNotFoundError:
        return None


BytesOf = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_IGNORED = frozenset({"ByteFallback", "Fuse", "Strip"})
"""Strip removes the space at the start of a whole text, but an answer follows a prompt. A Strip of
the end (`stop`) is not a fixed map of tokens."""


def bytes_function(decoder: dict[str, Any] | None) -> BytesOf | None:
    """The map from token to bytes in the `decoder` entry of `tokenizer.json`; None if there is no
    fixed one."""
    if decoder is None:
        return None
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_bytes
    replacements: list[tuple[str, str]] = []
    for step in steps:
        kind = step.get("type")
        if kind == "Replace" and "String" in step.get("pattern", {}):
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Metaspace":
            replacements.append((step.get("replacement", "▁"), " "))
        elif kind not in _IGNORED or step.get("stop", 0):
            return None
    return _sentencepiece_function(replacements, "ByteFallback" in kinds)


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the decoder's steps, including those of nested decoders."""
    if decoder is None or decoder.get("type") != "Sequence":
        return [] if decoder is None else [decoder]
    return [step for each in decoder["decoders"] for step in _steps(each)]


def _growth(steps: list[dict[str, Any]]) -> float:
    """Returns the largest factor by which the steps may lengthen a text."""
    found = 1.0
    for step in steps:
        if step.get("type") == "Replace":
            pattern, content = step["pattern"].get("String", ""), step["content"]
            found *= max(1.0, len(content) / len(pattern) if pattern else len(content) + 1)
    return found


def _sentencepiece_function(replacements: list[tuple[str, str]], byte_fallback: bool) -> BytesOf:
    def bytes_of(token: str) -> bytes:
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        return bytes((int(match[1], 16),)) if match else token.encode()

    return bytes_of


def _byte_level_bytes(token: str) -> bytes:
    """A token's bytes. An added token with characters outside the alphabet is plain UTF-8."""
    try:
        return token.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 maps to itself, other bytes to U+0100 and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return alphabet


_ALPHABET = _byte_level_alphabet()
_BYTES: dict[int, str | int] = {
    # such a character is not a byte, and cannot be encoded
    **dict.fromkeys(range(0x100), "\u0100"),
    **{ord(character): byte for character, byte in _ALPHABET.items()},
}
"""The map for `str.translate`, which takes a tenth of a loop's time."""
