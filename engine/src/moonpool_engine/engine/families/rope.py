"""Reads the rotary embedding and its scaling from `config.json`, in either spelling."""

from __future__ import annotations

import math

from moonpool.text.fields import Fields
from moonpool.text.model_error import ModelError
from moonpool.text.shown import shown
from moonpool_engine.engine.families.family import Family
from moonpool_engine.engine.spec import RopeSpec

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def full_rope(
    fields: Fields, family: Family, head_dim: int, max_positions: int
) -> tuple[RopeSpec, int, tuple[str, ...]]:
    """Returns the RoPE of layers that see the whole context, the longest context for it, and notes
    for the user.

    Raises ModelError.
    """
    rope = _parameters(fields, "full_attention")
    kind = rope.text("rope_type", rope.text("type", "default"))
    theta = _theta(rope, _theta(fields, _default_theta(family)))
    rotary_dim = _rotary_dim(fields, rope, family, head_dim)
    if family.partial_rope and (kind in ("longrope", "su") or "short_factor" in rope):
        return _longrope(fields, rope, theta, rotary_dim or head_dim, max_positions)
    if kind == "mrope":  # positions of images; the three positions of a text token are equal
        kind = "default"
    if kind not in ROPE_KINDS:
        raise ModelError(
            f"rope scaling {shown(kind)} is not supported, only {', '.join(ROPE_KINDS)}"
        )
    if kind == "default":
        return RopeSpec(theta, rotary_dim=rotary_dim), max_positions, ()
    original = _original(rope, max_positions)
    scaled = RopeSpec(
        theta=theta,
        kind=kind,
        factor=_factor(rope, kind, max_positions / original),
        original_max_positions=original if kind != "linear" else 0,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=_optional(rope, "attention_factor"),
        mscale=rope.number("mscale", 0.0, or_zero=True),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, or_zero=True),
        truncate=rope.flag("truncate", True),
        rotary_dim=rotary_dim,
    )
    if kind == "llama3" and scaled.low_freq_factor >= scaled.high_freq_factor:
        raise rope.error("low_freq_factor is not below high_freq_factor")
    return scaled, max_positions, ()


def local_rope(fields: Fields, family: Family) -> RopeSpec | None:
    """Returns the RoPE of layers with a window, if the family gives them a separate one.

    Raises ModelError.
    """
    if not family.local_theta and not family.local_unscaled:
        return None
    rope = fields.within("rope_parameters").within("sliding_attention")
    kind = rope.text("rope_type", "default")
    if kind != "default":
        raise ModelError(f"rope scaling {shown(kind)} of sliding layers is not supported")
    if family.local_unscaled:
        theta = _theta(fields, _default_theta(family))
    else:
        theta = _theta(fields, family.local_theta, "rope_local_base_freq")
    return RopeSpec(_theta(rope, theta))


def _default_theta(family: Family) -> float:
    return 1e6 if family.local_theta else 1e4


def _theta(fields: Fields, default: float, name: str = "rope_theta") -> float:
    theta = fields.number(name, default)
    if theta <= 1:
        raise fields.error(f"{name} is {theta}, not a number above 1")
    return theta


def _parameters(fields: Fields, kind: str) -> Fields:
    """The parameters of one kind of layer, or of all layers."""
    scaling, parameters = fields.within("rope_scaling"), fields.within("rope_parameters")
    rope = parameters.over(scaling) if parameters.names else scaling
    if kind in rope:
        return rope.within(kind).over(scaling)
    if any(rope.is_object(name) for name in rope.names):
        raise fields.error("rope parameters that differ by layer are not supported")
    return rope


def _rotary_dim(fields: Fields, rope: Fields, family: Family, head_dim: int) -> int:
    """The rotated elements of a head; 0 for all."""
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if partial == 1 or not family.partial_rope:
        return 0
    rotary_dim = int(head_dim * partial)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise fields.error(
            f"partial_rotary_factor {partial!r} gives no even number of elements"
            f" of head_dim {head_dim}"
        )
    return rotary_dim


def _longrope(
    fields: Fields, rope: Fields, theta: float, rotary_dim: int, max_positions: int
) -> tuple[RopeSpec, int, tuple[str, ...]]:
    """Phi's scaling. The factors of longrope change where a prompt exceeds the original context,
    and all KVCache with them. So the served context ends at that length."""
    original = _original(rope, _original(fields, 4096))
    factors = rope.numbers("short_factor")
    if factors is None or len(factors) != rotary_dim // 2:
        raise rope.error(f"short_factor must be a list of {rotary_dim // 2} numbers")
    spec = RopeSpec(
        theta=theta,
        kind="longrope",
        factor=rope.number("factor", max_positions / original),
        original_max_positions=original,
        attention_factor=_optional(rope, "attention_factor"),
        rotary_dim=rotary_dim,
        factors=tuple(factors),
    )
    if original >= max_positions:
        return spec, max_positions, ()
    note = (
        f"longrope's second set of factors is not supported: the context is limited to the "
        f"original {original} tokens of {max_positions}, within which the first set holds"
    )
    return spec, original, (note,)


def _original(fields: Fields, default: int) -> int:
    """The context before it was stretched, which some configs write with a decimal point."""
    original = int(fields.number("original_max_position_embeddings", default))
    if original < 2:
        raise fields.error(f"original_max_position_embeddings is {original}; it must be above 1")
    return original


def _factor(rope: Fields, kind: str, stretched: float) -> float:
    """`stretched`: the factor by which the context is longer than the original one."""
    if not rope.has("factor") and kind != "yarn":
        raise rope.error(f"rope_type {kind!r} needs 'factor'")
    return rope.number("factor", stretched)


def _optional(fields: Fields, name: str) -> float | None:
    return fields.number(name) if fields.has(name) else None


def mscale(factor: float, weight: float) -> float:
    """YaRN's factor for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
