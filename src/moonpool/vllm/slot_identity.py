"""Identifies what a server computes with, for the names of its saved slots: the content of its
weights, and its arithmetic.

The weights do not tell all: a base of the rotary embedding, a scale or an adapter that is always on
are flags of the server. So the server is asked for the next token of a fixed prompt, and servers
with different answers count as two models.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from moonpool.types import MALFORMED
from moonpool.vllm.slot_folder import write_new

PROMPT = tuple(3 + 7 * number % 200 for number in range(64))
"""Every model has these token ids; their meaning does not matter."""
TOP = 16
MOST_APART = 0.03
"""Greatest difference between the log-probabilities of one model in two batches or at two numbers
of threads."""
MAX_MARKS_BYTES = 1 << 20
MAX_MARKS = 64
_PIECE_BYTES = 8 << 20
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

Logprobs = dict[int, float]
"""Log-probabilities of the most likely next tokens, by id."""


class _Mark(msgspec.Struct, array_like=True):
    nonce: bytes
    logprobs: Logprobs


_MARKS = msgspec.msgpack.Decoder(list[_Mark])


def weights_digest(path: Path) -> bytes:
    """A digest of all bytes of the file, and of all its parts. Computing the digest takes a second
    or two for each GB. Raises OSError."""
    made = hashlib.blake2b(digest_size=32)
    for part in _parts(path):
        with open(part, "rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                made.update(piece)
    return made.digest()


def _parts(path: Path) -> Sequence[Path]:
    found = _PART.search(path.name)
    if found is None:
        return [path]
    begin, count = path.name[: found.start()], int(found[2])
    names = (f"{begin}-{number:05}-of-{found[2]}.gguf" for number in range(1, count + 1))
    return [path.with_name(name) for name in names]


def identity_of(folder: Path, weights: bytes, logprobs: Logprobs) -> bytes:
    """Returns the identity, which is equal for all servers that compute the same with these
    weights. The folder remembers what earlier ones computed. Raises OSError."""
    place = folder / f"moonpool-{weights.hex()[:40]}.model"
    marks = _read(place)
    found = next((mark for mark in marks if _is_like(mark.logprobs, logprobs)), None)
    if found is None:
        found = _Mark(secrets.token_bytes(16), logprobs)
        new = place.with_name(f"{place.name}.{os.getpid()}.new")
        write_new(new, msgspec.msgpack.encode([*marks, found][-MAX_MARKS:]))
        new.rename(place)
    return hashlib.blake2b(weights + found.nonce, digest_size=32).digest()


def with_adapter(identity: bytes, adapter: bytes) -> bytes:
    """The identity of the model with an adapter whose weights have this digest."""
    return hashlib.blake2b(identity + adapter, digest_size=32, person=b"moonpool lora").digest()


def _read(place: Path) -> list[_Mark]:
    try:
        with open(place, "rb") as file:
            return _MARKS.decode(file.read(MAX_MARKS_BYTES))
    except (OSError, *MALFORMED):
        return []


def _is_like(one: Logprobs, other: Logprobs) -> bool:
    """Whether both lists are of one model. The least likely of the list may be another token."""
    shared = one.keys() & other.keys()
    if 2 * len(shared) < max(len(one), len(other), 1):
        return False
    return all(abs(one[token] - other[token]) <= MOST_APART for token in shared)
