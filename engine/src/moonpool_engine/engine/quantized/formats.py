"""Formats of quantized weights: how stored bytes decode into whole numbers and scales.

A row is stored in groups of 32 to 256 neighbouring weights. A group has small whole numbers, a
scale and possibly a minimum, and more of these for each sub-group of 16 or 32. Every format decodes
into the same parts:

    weight = (number - offset) * scale + minimum

`engine.quantized.linear` multiplies with these parts in plain torch, and the native kernels with
the same parts in packed form. The layouts of the bytes are those of ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool_engine.engine.quantized.sizes import SIZES


@dataclass(frozen=True, slots=True)
class Decoded:
    """A number of stored groups (n) of g weights each, decoded into parts. A scale is `scale` times
    `sub_scales`, where given.

    numbers: [n, g] uint8. scale, minimum: [n] float32. sub_scales, sub_minimums: [n, g / sub]
    whole numbers.
    """

    numbers: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    sub_scales: Tensor | None = None
    sub_minimums: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format: `bytes` store `group` weights; `sub` weights share a scale.

    A stored number has `bits`, and means itself minus `offset`. Scales are float16 in memory, or
    float32 with `wide`.
    """

    name: str
    group: int
    bytes: int
    bits: int
    decode: Callable[[Tensor], Decoded]
    offset: int = 0
    sub: int = 32
    has_minimum: bool = False
    wide: bool = False

    @property
    def is_super(self) -> bool:
        """Whether sub-groups have whole scales beside the group's scale."""
        return self.group == 256


def _half(data: Tensor, at: int) -> Tensor:
    """Returns the float16 at byte `at` of each group, [n] float32."""
    return data[:, at : at + 2].contiguous().view(torch.float16).float().flatten()


def _nibbles(data: Tensor) -> Tensor:
    """[n, b] bytes -> [n, 2 * b]: all low halves, then all high halves."""
    return torch.cat((data & 15, data >> 4), dim=1)


def _bits(data: Tensor) -> Tensor:
    """[n, 4] bytes -> [n, 32]: the bits of a little-endian word."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((data.unsqueeze(2) >> shifts) & 1).flatten(1)


def _q4_0(data: Tensor) -> Decoded:
    return Decoded(_nibbles(data[:, 2:]), _half(data, 0))


def _q4_1(data: Tensor) -> Decoded:
    return Decoded(_nibbles(data[:, 4:]), _half(data, 0), _half(data, 2))


def _q5_0(data: Tensor) -> Decoded:
    return Decoded(_nibbles(data[:, 6:]) | (_bits(data[:, 2:6]) << 4), _half(data, 0))


def _q5_1(data: Tensor) -> Decoded:
    numbers = _nibbles(data[:, 8:]) | (_bits(data[:, 4:8]) << 4)
    return Decoded(numbers, _half(data, 0), _half(data, 2))


def _q8_0(data: Tensor) -> Decoded:
    return Decoded(data[:, 2:] ^ 128, _half(data, 0))


def _six_bit_scales(data: Tensor) -> tuple[Tensor, Tensor]:
    """The 12 bytes of Q4_K and Q5_K -> 8 scales and 8 minimums of 6 bits, each [n, 8] int32."""
    low, middle, high = data.int().split(4, dim=1)
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=1)
    minimums = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=1)
    return scales, minimums


def _pairs_of_32(data: Tensor) -> Tensor:
    """[n, 128] bytes -> [n, 256]: each 32 bytes hold two runs of 32, low halves first."""
    chunks = data.unflatten(1, (4, 32))
    return torch.stack((chunks & 15, chunks >> 4), dim=2).flatten(1)


def _q4_k(data: Tensor) -> Decoded:
    scales, minimums = _six_bit_scales(data[:, 4:16])
    return Decoded(_pairs_of_32(data[:, 16:]), _half(data, 0), -_half(data, 2), scales, minimums)


def _q5_k(data: Tensor) -> Decoded:
    scales, minimums = _six_bit_scales(data[:, 4:16])
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(1)
    # bit j of each byte belongs to sub-group j
    fifth = ((data[:, 16:48].unsqueeze(1) >> shifts) & 1).flatten(1)
    numbers = _pairs_of_32(data[:, 48:]) | (fifth << 4)
    return Decoded(numbers, _half(data, 0), -_half(data, 2), scales, minimums)


def _q6_k(data: Tensor) -> Decoded:
    low = data[:, :128].unflatten(1, (2, 64))
    low = torch.cat((low & 15, low >> 4), dim=2)  # [n, 2, 128]
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(1)
    high = (data[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3
    numbers = (low | (high.flatten(2) << 4)).flatten(1)
    scales = data[:, 192:208].contiguous().view(torch.int8).int()
    return Decoded(numbers, _half(data, 208), sub_scales=scales)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of E2M1


def _looked_up(table: tuple[int, ...], nibbles: Tensor, offset: int) -> Tensor:
    """The table's values plus the offset."""
    values = torch.tensor([value + offset for value in table], dtype=torch.uint8)
    return values[nibbles.int()]


def _iq4_nl(data: Tensor) -> Decoded:
    return Decoded(_looked_up(_IQ4, _nibbles(data[:, 2:]), 128), _half(data, 0))


def _iq4_xs(data: Tensor) -> Decoded:
    high = data[:, 2:4].contiguous().view(torch.int16).int()
    low = data[:, 4:8].int()
    shifts = torch.arange(0, 16, 2)
    low = torch.stack((low & 15, low >> 4), dim=2).flatten(1)
    scales = (low | (((high >> shifts) & 3) << 4)) - 32
    numbers = _nibbles(data[:, 8:].reshape(-1, 16)).reshape(-1, 256)
    return Decoded(_looked_up(_IQ4, numbers, 128), _half(data, 0), sub_scales=scales)


def _mxfp4(data: Tensor) -> Decoded:
    exponent = data[:, 0].float() - 128.0  # half of 2 ** (e - 127), as the table is doubled
    return Decoded(_looked_up(_MXFP4, _nibbles(data[:, 1:]), 12), torch.exp2(exponent))


def _wide4(data: Tensor) -> Decoded:
    parts = data[:, :8].contiguous().view(torch.float32)
    return Decoded(_nibbles(data[:, 8:]), parts[:, 0], parts[:, 1])


_ALL = (
    Format("Q4_0", *SIZES["Q4_0"], 4, _q4_0, offset=8),
    Format("Q4_1", *SIZES["Q4_1"], 4, _q4_1, has_minimum=True),
    Format("Q5_0", *SIZES["Q5_0"], 5, _q5_0, offset=16),
    Format("Q5_1", *SIZES["Q5_1"], 5, _q5_1, has_minimum=True),
    Format("Q8_0", *SIZES["Q8_0"], 8, _q8_0, offset=128),
    Format("Q4_K", *SIZES["Q4_K"], 4, _q4_k, has_minimum=True),
    Format("Q5_K", *SIZES["Q5_K"], 5, _q5_k, has_minimum=True),
    Format("Q6_K", *SIZES["Q6_K"], 6, _q6_k, offset=32, sub=16),
    Format("IQ4_NL", *SIZES["IQ4_NL"], 8, _iq4_nl, offset=128),
    Format("IQ4_XS", *SIZES["IQ4_XS"], 8, _iq4_xs, offset=128),
    Format("MXFP4", *SIZES["MXFP4"], 5, _mxfp4, offset=12, wide=True),
    # Not a format of ggml: scale and minimum are float32, for checkpoints whose scales do not fit
    # float16.
    Format("W4", *SIZES["W4"], 4, _wide4, has_minimum=True, wide=True),
)
FORMATS = {format.name: format for format in _ALL}


def scales_and_minimums(format: Format, decoded: Decoded) -> tuple[Tensor, Tensor | None]:
    """Returns the scale and the minimum of each sub-group: [n, g / sub] float32."""
    count = format.group // format.sub
    scale = decoded.scale.unsqueeze(1).expand(-1, count)
    if decoded.sub_scales is not None:
        scale = scale * decoded.sub_scales.float()
    if decoded.minimum is None:
        return scale, None
    minimum = decoded.minimum.unsqueeze(1).expand(-1, count)
    if decoded.sub_minimums is not None:
        minimum = minimum * decoded.sub_minimums.float()
    return scale, minimum


def dequantize(format: Format, data: Tensor) -> Tensor:
    """Stored groups [n, bytes] uint8 -> weights [n, group] float32."""
    decoded = format.decode(data)
    scale, minimum = scales_and_minimums(format, decoded)
    numbers = decoded.numbers.float().unflatten(1, (-1, format.sub)) - format.offset
    weights = numbers * scale.unsqueeze(2)
    if minimum is not None:
        weights += minimum.unsqueeze(2)
    flat: Tensor = weights.flatten(1)
    return flat
