"""Rotary tables: the angles of every position, with the checkpoint's RoPE scaling.

The formulas are evaluated in float32 and in the order of `transformers`, because checkpoints are
trained and judged with that arithmetic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moonpool_engine.engine.families.rope import mscale
from moonpool_engine.engine.ops import RopeTable
from moonpool_engine.engine.spec import RopeSpec


def rope_table(rope: RopeSpec, head_dim: int, max_positions: int) -> RopeTable:
    """Returns cos and sin, each [max_positions, rotated pairs] float32, times the attention
    factor."""
    frequencies = _frequencies(rope, rope.rotary_dim or head_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
    scale = _attention_factor(rope)
    return RopeTable(angles.cos().mul_(scale), angles.sin().mul_(scale))


def no_rope(max_positions: int) -> RopeTable:
    """The table of a layer that rotates nothing: no pairs."""
    return RopeTable(torch.empty(max_positions, 0), torch.empty(max_positions, 0))


def _frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = rope.theta**exponents
    frequencies: Tensor = 1.0 / wavelengths
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, wavelengths, head_dim)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.factors) * wavelengths)
    return frequencies


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Stretches long waves by `factor`, keeps short ones, and interpolates between them.

    frequencies: [head_dim / 2] float32, like the result.
    """
    original = rope.original_max_positions
    longest = original / rope.low_freq_factor
    shortest = original / rope.high_freq_factor
    waves = 2 * math.pi / frequencies
    scaled = torch.where(waves > longest, frequencies / rope.factor, frequencies)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = (original / waves - rope.low_freq_factor) / span
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((waves >= shortest) & (waves <= longest), between, scaled)


def _yarn(rope: RopeSpec, wavelengths: Tensor, head_dim: int) -> Tensor:
    """Interpolates the pairs that rotate less than `beta_slow` times over the original context.

    Takes wavelengths [head_dim / 2]; returns frequencies of the same shape.
    """

    def pair_turning(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    keep = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def _attention_factor(rope: RopeSpec) -> float:
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        stretched = math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_positions)
        return math.sqrt(1 + stretched)
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
    return mscale(rope.factor, 1.0)
