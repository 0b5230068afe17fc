"""The tokenizer of a checkpoint in a Hugging Face folder.

It reads `tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and the chat template,
and gives the results of transformers without its import time. As in transformers, `tokenizer.json`
alone decides which special tokens `encode` adds, regardless of `add_bos_token`.

The bytes of each token follow from the decoder in `tokenizer.json`. Two families cover the
supported models: byte-level BPE (GPT-2's alphabet of 256 printable characters) and SentencePiece
("▁" for a space, `<0x0A>` for a byte).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from moonpool.engine.tokenizer import (
    ByteTextStream,
    ChatTemplateError,
    DiffTextStream,
    TextStream,
    TokenizerError,
)
from moonpool.engine.tokenizers.chat_template import ROLES_TEMPLATE, ChatTemplate

_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_RELEASE_GIL_ABOVE_CHARS = 4096
_OF_FILES = frozenset({"auto_map", "name_or_path", "vocab_file", "merges_file", "tokenizer_file"})
"""What `tokenizer_config.json` says of places and code, which clients do not need."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a tokenizer is made from. `source` is the text of a `tokenizer.json`.

    `special_tokens` are by the names that templates use, such as `bos_token`.
    """

    where: str
    source: str
    special_tokens: Mapping[str, str]
    eos_token_ids: tuple[int, ...]
    template: str | None = None
    tool_template: str | None = None
    described: Mapping[str, Any] = field(default_factory=dict)
    """`tokenizer_config.json`, if there is one."""


class _Source(msgspec.Struct):
    """What is read of a `tokenizer.json` beside the tokenizers library. The rest is skipped."""

    decoder: dict[str, Any] | None = None


class HfTokenizer:
    """The `tokenizers` library with the checkpoint's special tokens and chat template."""

    def __init__(self, source: Path | TokenizerParts):
        """`source` is a folder, or what another file holds. Raises `TokenizerError`."""
        parts = _folder_parts(source) if isinstance(source, Path) else source
        self._special_tokens = dict(parts.special_tokens)
        self._described = dict(parts.described)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(parts.source)
        except Exception as error:
            raise TokenizerError(
                f"the tokenizer of {parts.where} cannot be read: {error}"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = 1 + max(self._tokenizer.get_vocab(True).values(), default=-1)
        self.eos_token_ids = self._end_tokens(parts)
        self._bytes_of = bytes_function(msgspec.json.decode(parts.source, type=_Source).decoder)
        self._bytes: dict[int, bytes] = {}
        default = self._template = parts.template or ROLES_TEMPLATE
        self.tool_template = parts.tool_template or default
        try:
            self._chat = ChatTemplate(default, parts.tool_template, parts.special_tokens)
        except ChatTemplateError as error:
            raise TokenizerError(f"{parts.where}: {error}") from None

    def _end_tokens(self, parts: TokenizerParts) -> tuple[int, ...]:
        """All end tokens: chat models often end a turn and a text with different tokens."""
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

    @property
    def knows_tools(self) -> bool:
        return self._chat.knows_tools

    def use_chat_template(self, source: str) -> None:
        self._chat = ChatTemplate(source, special_tokens=self._special_tokens)
        self.tool_template = self._template = source

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        /,  # so that a template argument may have any name
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        **template_arguments: Any,
    ) -> str:
        return self._chat.render(messages, add_generation_prompt, tools, template_arguments)


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        hint = "a model folder needs one"
        if (path.parent / "tokenizer.model").exists():
            hint = "convert tokenizer.model by saving it with transformers' AutoTokenizer"
        raise TokenizerError(f"{path.parent} has no tokenizer.json; {hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object of the file; empty if the file is missing."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return value


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by the names that templates use, such as `bos_token`."""
    merged = {**_read_json(folder / "special_tokens_map.json"), **config}
    found = {}
    for name in (f"{short}_token" for short in _SPECIAL_NAMES):
        value = merged.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _folder_parts(folder: Path) -> TokenizerParts:
    config = _read_json(folder / "tokenizer_config.json")
    default, for_tools = _chat_templates(folder, config)
    return TokenizerParts(
        where=str(folder),
        source=_read_source(folder / "tokenizer.json"),
        special_tokens=_special_tokens(folder, config),
        eos_token_ids=_listed_ends(folder),
        template=default,
        tool_template=for_tools,
        described=config,
    )


def _listed_ends(folder: Path) -> tuple[int, ...]:
    listed = _read_json(folder / "generation_config.json").get("eos_token_id")
    if listed is None:
        listed = _read_json(folder / "config.json").get("eos_token_id")
    ids = list(listed) if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise TokenizerError(f"eos_token_id in {folder} must be a token id or a list of them")
    return tuple(ids)


def _chat_templates(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The default template, and the separate one for requests with tools, if any."""
    alone = folder / "chat_template.jinja"
    if alone.exists():
        for_tools = folder / "additional_chat_templates" / "tool_use.jinja"
        return _read_template(alone), _read_template(for_tools) if for_tools.exists() else None
    value = config.get("chat_template") or _read_json(folder / "chat_template.json").get(
        "chat_template"
    )
    if value is None or isinstance(value, str):
        return value, None
    try:
        named = {entry["name"]: entry["template"] for entry in value}
        return named.get("default"), named.get("tool_use")
    except (TypeError, KeyError):
        pass
    raise TokenizerError(f"the chat_template in {folder} must be text or a list of named texts")


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None


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
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
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
    **dict.fromkeys(range(0x100), "\u0100"),  # no byte: it cannot be encoded, like all above it
    **{ord(character): byte for character, byte in _ALPHABET.items()},
}
"""For `str.translate`, which takes a tenth of a loop's time."""
