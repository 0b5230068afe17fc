"""Makes seeded mutations of valid samples: bits, numbers, cuts, repeats, joins, and dictionary
words."""

from __future__ import annotations

import random
from collections.abc import Sequence

EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
WORDS = (
    *(
        b"[",
        b"]",
        b"{",
        b"}",
        b'"',
        b",",
        b":",
        b"\\",
        b"\n",
        b"\r\n",
        b"\t",
        b"\0",
        b"#",
        b"=",
        b" ",
    ),
    *(b"null", b"true", b"NaN", b"Infinity", b"-1", b"0", b"1e999", b"1" * 400, b"-0.0"),
    *(b"\xff\xfe", b"\xef\xbb\xbf", b"\xc3(", b"\xed\xa0\x80", "é".encode(), "𝔘".encode()),
    *(b"[" * 2000, b'{"a":' * 1500, b"\x91" * 2000, b"\x81\xa1a" * 1500, b"../../", b"%s" * 8),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"),
)


class Mutator:
    """Draws inputs that differ little from the samples. The same seed draws the same inputs."""

    def __init__(self, samples: Sequence[bytes], seed: int) -> None:
        assert samples
        self._samples = list(samples)
        self._rng = random.Random(seed)

    def draw(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.02:
            return rng.randbytes(rng.choice((0, 1, 7, 64, 1000)))
        data = bytearray(rng.choice(self._samples))
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            self._change(data)
        return bytes(data)

    def _change(self, data: bytearray) -> None:
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(9)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 2:
            size = rng.choice((1, 2, 4, 8))
            value = rng.choice(EDGES) & ((1 << 8 * size) - 1)
            data[at : at + size] = value.to_bytes(size, rng.choice(("little", "big")))
        elif kind == 3:
            del data[at : at + rng.choice((1, 2, 4, 16, 200))]
        elif kind == 4:
            del data[at:]
        elif kind == 5:
            data[at:at] = rng.choice(WORDS)
        elif kind == 6:
            part = data[at : at + rng.choice((1, 4, 16, 64))]
            data[at:at] = part * rng.choice((1, 2, 30))
        elif kind == 7:
            self._join(data, at)
        else:
            self._digits(data)

    def _join(self, data: bytearray, at: int) -> None:
        other = self._rng.choice(self._samples)
        start = self._rng.randrange(len(other) + 1)
        data[at : at + self._rng.choice((0, 16, len(data)))] = other[start : start + 64]

    def _digits(self, data: bytearray) -> None:
        """Replaces a number in a text by another number."""
        places = [i for i, byte in enumerate(data) if 0x30 <= byte <= 0x39]
        if places:
            at = self._rng.choice(places)
            value = self._rng.choice(EDGES) * self._rng.choice((1, -1))
            data[at : at + 1] = str(value).encode()
