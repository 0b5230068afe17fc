"""Reads the rotary embedding and its scaling from `config.json`, in either spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moonpool.engine.families.family import Family
from moonpool.engine.families.values import mapping, number
from moonpool.engine.spec import ModelError, RopeSpec

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def full_rope(
    config: Mapping[str, Any], family: Family, head_dim: int, max_positions: int
) -> tuple[RopeSpec, int, tuple[str, ...]]:
    """The RoPE of layers that see the whole context, the context it serves, and notes.

    Raises ModelError.
    """
    rope = _parameters(config, "full_attention")
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = number(rope, "rope_theta", number(config, "rope_theta", _default_theta(family)))
    rotary_dim = _rotary_dim(config, rope, family, head_dim)
    if family.partial_rope and (kind in ("longrope", "su") or "short_factor" in rope):
        return _longrope(config, rope, theta, rotary_dim or head_dim, max_positions)
    if kind == "mrope":  # of images: the three positions of a text's token are equal
        kind = "default"
    if kind not in ROPE_KINDS:
        raise ModelError(f"rope scaling {kind!r} is not supported, only {', '.join(ROPE_KINDS)}")
    if kind == "default":
        return RopeSpec(theta, rotary_dim=rotary_dim), max_positions, ()
    original = rope.get("original_max_position_embeddings") or max_positions
    try:
        scaled = RopeSpec(
            theta=theta,
            kind=kind,
            factor=_factor(config, rope, kind, original),
            original_max_positions=int(original) if kind != "linear" else 0,
            low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
            high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            attention_factor=_optional_float(rope.get("attention_factor")),
            mscale=float(rope.get("mscale") or 0),
            mscale_all_dim=float(rope.get("mscale_all_dim") or 0),
            truncate=bool(rope.get("truncate", True)),
            rotary_dim=rotary_dim,
        )
    except ModelError:
        raise
    except (TypeError, ValueError) as error:
        raise ModelError(f"config.json: bad rope scaling {rope}: {error}") from error
    return scaled, max_positions, ()


def local_rope(config: Mapping[str, Any], family: Family) -> RopeSpec | None:
    """The RoPE of layers with a window, where the family gives them one of their own.

    Raises ModelError.
    """
    if not family.local_theta and not family.local_unscaled:
        return None
    rope = mapping(mapping(config, "rope_parameters"), "sliding_attention")
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise ModelError(f"rope scaling {kind!r} of sliding layers is not supported")
    if family.local_unscaled:
        theta = number(config, "rope_theta", _default_theta(family))
    else:
        theta = number(config, "rope_local_base_freq", family.local_theta)
    return RopeSpec(number(rope, "rope_theta", theta))


def _default_theta(family: Family) -> float:
    return 1e6 if family.local_theta else 1e4


def _parameters(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """The parameters of one kind of layer, or of all layers."""
    rope = {**mapping(config, "rope_scaling"), **mapping(config, "rope_parameters")}
    if kind in rope:
        rope = {**mapping(config, "rope_scaling"), **mapping(rope, kind)}
    elif any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError("config.json: rope parameters that differ by layer are not supported")
    return rope


def _rotary_dim(
    config: Mapping[str, Any], rope: Mapping[str, Any], family: Family, head_dim: int
) -> int:
    """The rotated elements of a head; 0 for all."""
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial in (None, 1, 1.0) or not family.partial_rope:
        return 0
    rotary_dim = int(head_dim * partial) if isinstance(partial, float) else 0
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelError(
            f"config.json: partial_rotary_factor {partial!r} gives no even number of elements"
            f" of head_dim {head_dim}"
        )
    return rotary_dim


def _longrope(
    config: Mapping[str, Any],
    rope: Mapping[str, Any],
    theta: float,
    rotary_dim: int,
    max_positions: int,
) -> tuple[RopeSpec, int, tuple[str, ...]]:
    """Phi's scaling. Its factors change where a prompt passes the original context, and with them
    all KVCache. So the context served ends there."""
    original = int(number(config, "original_max_position_embeddings", 4096))
    original = int(number(rope, "original_max_position_embeddings", original))
    factors = rope.get("short_factor")
    if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
        raise ModelError(f"config.json: short_factor must be a list of {rotary_dim // 2} numbers")
    if not all(isinstance(each, int | float) and each > 0 for each in factors):
        raise ModelError("config.json: short_factor must have numbers above 0")
    spec = RopeSpec(
        theta=theta,
        kind="longrope",
        factor=float(rope.get("factor") or max_positions / original),
        original_max_positions=original,
        attention_factor=_optional_float(rope.get("attention_factor")),
        rotary_dim=rotary_dim,
        factors=tuple(map(float, factors)),
    )
    if original >= max_positions:
        return spec, max_positions, ()
    note = (
        f"longrope's second set of factors is not supported: the context is limited to the "
        f"original {original} tokens of {max_positions}, within which the first set holds"
    )
    return spec, original, (note,)


def _factor(
    config: Mapping[str, Any], rope: Mapping[str, Any], kind: str, original: float
) -> float:
    factor = rope.get("factor")
    if factor is None and kind == "yarn":
        return float(config["max_position_embeddings"] / original)
    if factor is None:
        raise ModelError(f"config.json: rope scaling {kind!r} needs 'factor'")
    if not float(factor) > 0:
        raise ModelError(f"config.json: rope scaling's factor is {factor!r}; it must be above 0")
    return float(factor)


def _optional_float(value: object) -> float | None:
    return None if value is None else float(value)  # type: ignore[arg-type]
