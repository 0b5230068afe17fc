"""How many bytes the formats of quantized weights take. This module imports no torch, because
readers of headers need nothing else about a format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class GroupSize(NamedTuple):
    """`bytes` store a group of `group` weights."""

    group: int
    bytes: int


SIZES: Mapping[str, GroupSize] = {
    "Q4_0": GroupSize(32, 18),
    "Q4_1": GroupSize(32, 20),
    "Q5_0": GroupSize(32, 22),
    "Q5_1": GroupSize(32, 24),
    "Q8_0": GroupSize(32, 34),
    "Q4_K": GroupSize(256, 144),
    "Q5_K": GroupSize(256, 176),
    "Q6_K": GroupSize(256, 210),
    "IQ4_NL": GroupSize(32, 18),
    "IQ4_XS": GroupSize(256, 136),
    "MXFP4": GroupSize(32, 17),
    "W4": GroupSize(32, 24),
}
"""The formats of `quantized.formats`, by name."""
