"""What bytes each token of a Hugging Face vocabulary stands for.

Owns the reading of `tokenizer.json`'s decoder. Two families cover the supported models: byte-level
BPE (GPT-2's alphabet of 256 printable characters) and SentencePiece-like ("▁" for a space, `<0x0A>`
for a byte). A decoder that is not a fixed map from token to bytes yields no function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

BytesOf = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_IGNORED = frozenset({"ByteFallback", "Fuse", "Strip"})
"""Strip takes the space off the start of a whole text; an answer goes on after a prompt. (One that
strips the end, by its `stop`, is no fixed map.)"""


def bytes_function(decoder: dict[str, Any] | None) -> BytesOf | None:
    """From the `decoder` entry of `tokenizer.json`; None where no fixed map exists."""
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
    """An added token may hold characters outside the alphabet: it then stands for itself."""
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 stands for itself, the rest follows from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in printable)
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return alphabet


_ALPHABET = _byte_level_alphabet()
